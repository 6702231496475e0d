"""`bcctl reserve` and what follows it, against a real server whose nodes sign."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING

from controlplane.cli import waiting

if TYPE_CHECKING:
    import pytest

    from tests.support.command_line import CommandLine, CommandServer

ASK = ("reserve", "--pool", "h100", "--gpus", "4", "--for", "1h")


def reserve(bcctl: CommandLine, *more: str, query: str = "id") -> str:
    return bcctl(*ASK, *more, "--query", query).value


def state_of(bcctl: CommandLine, reservation: str) -> str:
    return bcctl("reservations", "get", reservation, "--query", "state").value


def test_reserve_waits_until_it_is_active_and_says_what_is_held(server: CommandServer, bcctl: CommandLine) -> None:
    ran = bcctl(*ASK, "--name", "llama")
    lines = dict(line.split(maxsplit=1) for line in ran.value.splitlines() if not line.startswith(" "))
    rsv = lines["reservation"]
    cdi = f"bettercompute.dev/reservation={rsv}"
    assert (lines["name"], lines["state"], lines["pool"]) == ("llama", "active", "h100")
    assert lines["window"].endswith("(1h)")
    assert lines["node"].startswith("node-0 (node_")
    assert [line.split()[-1] for line in ran.out.splitlines() if "GPU-" in line] == [f"GPU-0000-{n}" for n in range(4)]
    assert lines["cdi"] == f"device   {cdi}"
    assert lines["use"] == f"it       podman run --rm --device {cdi} IMAGE"
    assert lines["let"] == f"it go    bcctl reservations release {rsv}"
    # progress is on stderr, one line a change, and there is no escape in a pipe
    assert ran.err == f"{rsv} binding: waiting for the node to bind it\n"
    assert state_of(bcctl, rsv) == "active"


def test_release_waits_for_the_nodes_word(server: CommandServer, bcctl: CommandLine) -> None:
    rsv = reserve(bcctl)
    ran = bcctl("reservations", "release", rsv)
    assert "state        released" in ran.value
    assert "ended        released_by_holder" in ran.out
    # asking again is the same wish
    assert bcctl("reservations", "release", rsv, "--query", "state").value == "released"


def test_a_release_that_nobody_signs_is_reported(server: CommandServer, bcctl: CommandLine) -> None:
    rsv = reserve(bcctl)
    server.answering.clear()
    ran = bcctl("reservations", "release", rsv, "--timeout", "1s")
    assert ran.status == 1
    assert "state        releasing" in ran.out
    assert f"TIMEOUT: {rsv} is releasing: its nodes have not signed yet that they have let go\n" in ran.err
    assert bcctl("reservations", "release", rsv, "--no-wait", "--query", "state").value == "releasing"


def test_json_is_the_apis_data(server: CommandServer, bcctl: CommandLine) -> None:
    found = json.loads(bcctl(*ASK, "--output", "json").value)
    assert found["state"] == "active"
    assert found["parts"][0]["gpu_uuids"] == [f"GPU-0000-{n}" for n in range(4)]
    assert reserve(bcctl, query="parts[0].gpu_uuids[0]") == "GPU-0000-4"


def test_a_later_start_is_placed_and_not_waited_for(server: CommandServer, bcctl: CommandLine) -> None:
    server.answering.clear()
    assert reserve(bcctl, "--at", "+2h", query="state") == "placed"


def test_no_wait_prints_what_is(server: CommandServer, bcctl: CommandLine) -> None:
    server.answering.clear()
    ran = bcctl(*ASK, "--no-wait")
    assert "state        binding" in ran.value
    assert "bcctl reservations release rsv_" in ran.out
    assert "podman" not in ran.out


def test_sold_out_queued_and_impossible_are_three_answers(server: CommandServer, bcctl: CommandLine) -> None:
    for _ in range(2):
        bcctl("reserve", "--pool", "h100", "--gpus", "8", "--for", "1h", "--query", "id")
    ran = bcctl(*ASK, "--no-queue")
    assert ran.status == 1
    assert re.match(r"SOLD_OUT: .*; could start at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n", ran.err)
    assert "hint: without --no-queue it waits for room\n" in ran.err
    ran = bcctl(*ASK, "--timeout", "1s", "--queue-for", "1h")
    assert ran.status == 1
    assert ran.err.splitlines()[0].endswith(")")
    assert "queued: waiting for room (" in ran.err
    assert "TIMEOUT: rsv_" in ran.err
    assert "hint: wait again: bcctl reservations wait rsv_" in ran.err
    # queued and kept
    assert bcctl("reservations", "list", "--state", "queued", "--query", "items[0].gpus").value == "4"
    ran = bcctl("reserve", "--pool", "h100", "--gpus", "9", "--for", "1h")
    assert (ran.status, ran.err.partition(":")[0]) == (1, "INVALID")
    assert "ask for 8, or a multiple of 8" in ran.err


def test_bad_input_names_the_field_the_fix_and_the_option(server: CommandServer, bcctl: CommandLine) -> None:
    ran = bcctl("reserve", "--pool", "h10", "--gpus", "1", "--for", "1h")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == "NOT_FOUND: pool: no pool h10; did you mean h100?\n"
    ran = bcctl(*ASK, "--at", "2020-01-01T00:00Z")
    assert ran.err.startswith("INVALID: start: ")
    assert ran.err.endswith("hint: start is --at here\n")
    ran = bcctl("reserve", "--pool", "h100", "--gpus", "1", "--for", "5000d")
    assert "hint: duration_s is --for here\n" in ran.err
    assert bcctl("reservations", "get", "rsv_nothing").err == "NOT_FOUND: id: no reservation rsv_nothing\n"
    ran = bcctl("reservations", "get", "llama")
    assert ran.err == "NOT_FOUND: id: no reservation llama; it goes by its id, rsv_…\n"


def test_two_wishes_that_exclude_each_other_are_named(bcctl: CommandLine) -> None:
    ran = bcctl(*ASK, "--open-ended")
    assert (ran.status, ran.err.splitlines()[0]) == (2, "USAGE: --for and --open-ended say two things")
    ran = bcctl("reservations", "extend", "rsv_x", "--by", "1h", "--until", "+2h")
    assert (ran.status, ran.err.splitlines()[0]) == (2, "USAGE: --until and --by say two things")
    assert "say how long" in bcctl(*ASK[:-2]).err
    assert "say the new end" in bcctl("reservations", "shrink", "rsv_x").err


def test_an_operator_puts_one_behind(server: CommandServer, bcctl: CommandLine) -> None:
    for _ in range(2):
        bcctl("reserve", "--pool", "h100", "--gpus", "8", "--for", "1h", "--query", "id")
    waits = reserve(bcctl, "--no-wait")
    assert bcctl("reservations", "prioritize", waits, "-5", "--query", "priority").value == "-5"
    assert bcctl("reservations", "prioritize", waits, "7", "--query", "priority").value == "7"
    ran = bcctl("reservations", "prioritize", waits, "--priority", "5")
    assert (ran.status, ran.err.startswith("USAGE: ")) == (2, True)


def test_a_plan_books_nothing(server: CommandServer, bcctl: CommandLine) -> None:
    ran = bcctl(*ASK, "--plan")
    assert [line.split()[0] for line in ran.value.splitlines()] == [
        "fits",
        "start",
        "end",
        "nodes",
        "reason",
        "waiting",
    ]
    assert bcctl("reservations", "preview", *ASK[1:], "--query", "fits").value == "true"
    assert bcctl("reservations", "list").err == "no reservations\n"


def test_a_key_of_ones_own_returns_the_first_outcome(server: CommandServer, bcctl: CommandLine) -> None:
    first = reserve(bcctl, "--idempotency-key", "job-1")
    assert reserve(bcctl, "--idempotency-key", "job-1") == first
    assert reserve(bcctl) != first
    ran = bcctl(*ASK, "--gpus", "2", "--idempotency-key", "job-1")
    assert ran.err.startswith("CONFLICT: idempotency_key: was used with another input")


def test_extend_and_shrink_move_the_end(server: CommandServer, bcctl: CommandLine) -> None:
    rsv = reserve(bcctl)
    end = bcctl("reservations", "get", rsv, "--query", "end").value
    later = bcctl("reservations", "extend", rsv, "--by", "30m", "--query", "end").value
    assert later > end
    assert bcctl("reservations", "shrink", rsv, "--by", "30m", "--query", "end").value == end
    ran = bcctl("reservations", "extend", rsv, "--until", "+10m")
    assert ran.err.startswith("INVALID: end: ")
    open_ended = bcctl("reserve", "--pool", "h100", "--gpus", "1", "--open-ended", "--query", "id").value
    assert "until released" in bcctl("reservations", "get", open_ended).value
    assert "say --until" in bcctl("reservations", "shrink", open_ended, "--by", "1h").err


def test_evict_asks_first(server: CommandServer, bcctl: CommandLine) -> None:
    rsv = reserve(bcctl)
    ran = bcctl("reservations", "evict", rsv, "--reason", "fan is loud")
    assert (ran.status, ran.err.partition(":")[0]) == (1, "CONFIRM")
    assert state_of(bcctl, rsv) == "active"
    ran = bcctl("reservations", "evict", rsv, "--reason", "fan is loud", "--yes")
    assert "evicted_by_operator: fan is loud" in ran.value


def test_the_list_has_a_line_each(server: CommandServer, bcctl: CommandLine) -> None:
    mine = [reserve(bcctl), reserve(bcctl, "--at", "+1d")]
    bcctl("reservations", "release", mine[0])
    lines = bcctl("reservations", "list").value.splitlines()
    assert [line.split()[:2] for line in lines] == [["ID", "STATE"], [mine[1], "placed"], [mine[0], "released"]]
    assert len(bcctl("reservations", "list", "--open").value.splitlines()) == 2
    ran = bcctl("reservations", "list", "--limit", "1")
    assert len(ran.value.splitlines()) == 2
    assert ran.err == "there are more reservations than these 1; ask with --limit N or --all\n"


# --- waiting that is cut short -----------------------------------------------------------------------


def test_ctrl_c_leaves_the_reservation_and_says_how_to_release_it(
    server: CommandServer, bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answering.clear()
    shown = waiting.describe

    def interrupt(found: dict[str, object]) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return shown(found)

    with monkeypatch.context() as patch:
        patch.setattr(waiting, "describe", interrupt)
        ran = bcctl(*ASK)
    assert (ran.status, ran.out) == (1, "")
    rsv = bcctl("reservations", "list", "--query", "items[0].id").value
    assert ran.err.splitlines()[1:] == [
        f"INTERRUPTED: {rsv} stays as it is: binding",
        f"hint: wait again: bcctl reservations wait {rsv}",
        f"hint: let it go:  bcctl reservations release {rsv}",
    ]


def test_a_reservation_that_ends_instead_is_a_failure_with_its_reason(
    server: CommandServer, bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answering.clear()
    shown = waiting.describe

    def evict(found: dict[str, object]) -> str:
        server.execute(
            """
            update reservation set state = 'releasing', end_cause = 'evicted_by_operator', end_detail = 'fan',
              releasing_at = compute_now() where state = 'binding'
            """
        )
        return shown(found)

    with monkeypatch.context() as patch:
        patch.setattr(waiting, "describe", evict)
        ran = bcctl(*ASK)
    assert (ran.status, ran.out) == (1, "")
    assert "RESERVATION_RELEASING: rsv_" in ran.err
    assert "ended before it could be used: evicted_by_operator: fan" in ran.err
