"""The command line: its help is what it was, its words name the fix, its exit codes are the documented ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from click.testing import CliRunner

from agent.app import agent_version
from agent.main import main
from agent.membership import Machine
from agent.snapshot import STATUS_FILE, BoundView, DiagnosisView, SessionView, Snapshot, read_snapshot, write_snapshot
from agent.status import format_snapshot
from shared.joining import make_token
from shared.status import Condition
from tests.support.clock import START
from tests.support.stub_plane import StubPlane

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from tests.support.golden import Golden

PIN = "sha256:" + "0" * 64
NOWHERE = "https://127.0.0.1:1"


def bcd(*arguments: str, **options: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"BCD_STATE_DIR": "", "BCD_JOIN_TOKEN": ""}, **options)  # pyright: ignore[reportArgumentType]


def test_help(golden: Golden):
    texts = [bcd("--help").output, *(bcd(name, "--help").output for name in sorted(main.commands))]
    golden.check("help.txt", "\n".join(text.replace("Usage: main", "Usage: bcd") for text in texts))


def test_version():
    assert bcd("--version").output == f"bcd, version {agent_version()}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["join", "http://x", "--pin", PIN], "write https://host or https://host:port"),
        (["join", "https://x"], "--pin"),
        (["join", NOWHERE, "--pin", PIN], "no join token"),
        (["join", NOWHERE, "--pin", PIN, "--token", "bcjt_x"], "a join token looks like"),
        (["run", "--driver", "amd"], "'amd' is not one of"),
        (["run", "--config", "/nonexistent/bcd.toml"], "no such file"),
        (["frobnicate"], "No such command"),
    ],
)
def test_usage_is_exit_code_2(tmp_path: Path, arguments: list[str], message: str):
    where = ["--state-dir", str(tmp_path / "state"), "--simulate", "cpu"] if arguments[0] == "join" else []
    result = bcd(*arguments, *where)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_a_token_on_the_command_line_works_and_warns(tmp_path: Path):
    arguments = ["--pin", PIN, "--token", make_token().text, "--state-dir", str(tmp_path), "--simulate", "cpu"]
    result = bcd("join", NOWHERE, *arguments)
    assert result.exit_code == 5
    assert "warning: --token is readable by every user" in result.output
    assert "hint: check the address" in result.output


def test_joined_already_is_told_apart_from_joined_elsewhere(tmp_path: Path):
    plane = StubPlane()
    membership = plane.enrol(tmp_path)
    where = ["--state-dir", str(tmp_path), "--simulate", "cpu"]
    same = bcd("join", plane.url, "--pin", plane.pin, *where)
    assert same.exit_code == 0
    assert f"already joined as {membership.node_id}" in same.output
    other = bcd("join", plane.url, "--pin", PIN, *where)
    assert other.exit_code == 7
    assert "bcd leave" in other.output


def test_what_differs_from_the_join_is_not_ignored_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plane = StubPlane()
    plane.enrol(tmp_path / "state", Machine(driver="simulated", variant="h100", name="n", cdi_dir="/srv/cdi"))
    config = tmp_path / "bcd.toml"
    monkeypatch.setattr("agent.config.DEFAULT_CONFIG", config)
    join = ("join", plane.url, "--pin", plane.pin, "--state-dir", str(tmp_path / "state"))
    assert "warning" not in bcd(*join, "--simulate", "h100", "--cdi-dir", "/srv/cdi").output
    said = bcd(*join, "--simulate", "cpu", "--cdi-dir", str(tmp_path / "cdi"))
    assert said.exit_code == 0
    assert "warning: --simulate cpu is ignored: it joined with h100; give it to `bcd run`" in said.output
    assert f"warning: --cdi-dir {tmp_path / 'cdi'} is ignored: it joined with /srv/cdi; " in said.output
    # what the settings say the service will know
    config.write_text('simulate = "cpu"\n')
    assert "warning" not in bcd(*join, "--simulate", "cpu").output


def test_what_comes_next_names_the_state_directory_unless_the_service_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plane = StubPlane()
    state = tmp_path / "the state"
    plane.enrol(state)
    join = ("join", plane.url, "--pin", plane.pin, "--simulate", "cpu")
    config = tmp_path / "bcd.toml"
    monkeypatch.setattr("agent.config.DEFAULT_CONFIG", config)
    assert bcd(*join, "--state-dir", str(state)).output.endswith(f"next: bcd run --state-dir '{state}'\n")
    assert f"bcd run --state-dir '{state}'" in bcd("status", "--state-dir", str(state)).output
    config.write_text(f'state_dir = "{state}"\n')
    assert bcd(*join).output.endswith("next: systemctl enable --now bcd (or: bcd run)\n")


@pytest.mark.parametrize("command", ["run", "status", "leave"])
def test_a_machine_that_has_not_joined_is_told_how(tmp_path: Path, command: str):
    result = bcd(command, "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "has not joined" in result.output
    assert "bcd join" in result.output


def test_a_damaged_state_directory_is_named(tmp_path: Path):
    StubPlane().enrol(tmp_path)
    (tmp_path / "membership.json").write_text("{")
    result = bcd("run", "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert str(tmp_path) in result.output
    assert "bcd join --force" in result.output


def test_leaving_takes_everything_away_and_says_what_is_left_to_do(tmp_path: Path):
    membership = StubPlane().enrol(tmp_path / "state")
    where = ["--state-dir", str(tmp_path / "state"), "--cdi-dir", str(tmp_path / "cdi"), "--simulate", "h100"]
    file = tmp_path / "cdi" / "bettercompute.dev-reservation_rsv_1.json"
    file.parent.mkdir()
    file.write_text("{}")
    held = bcd("leave", *where)
    assert held.exit_code == 1
    assert "rsv_1" in held.output
    assert f"hint: drain it first (bcctl nodes drain {membership.node_id})" in held.output
    assert file.exists()
    # one that the control plane has shut out is nothing that could be drained
    refused = Condition(name="session.refused", severity="critical", text="REVOKED: it may not connect")
    said = msgspec.structs.replace(
        SNAPSHOT, node_id=membership.node_id, conditions=[refused], written_at=membership.joined_at
    )
    write_snapshot(tmp_path / "state" / STATUS_FILE, said)
    assert "decommissioned, and nothing can be drained from it: bcd leave --force" in bcd("leave", *where).output
    left = bcd("leave", "--force", *where)
    assert left.exit_code == 0
    assert f"bcctl nodes decommission {membership.node_id}" in left.output
    assert not file.exists()
    assert not (tmp_path / "state" / "identity.pem").exists()
    assert bcd("leave", *where).exit_code == 1


SNAPSHOT = Snapshot(
    written_at=START,
    pid=4711,
    agent_version="1.2.3",
    node_id="node_01jd000000000000000000000a",
    server="https://gw.test:7443",
    journal_id="jrn_01jd000000000000000000000a",
    machine="8x NVIDIA H100 80GB HBM3, 192 vCPUs, 2048 GiB",
    cdi_dir="/var/run/cdi",
    certificate_ends_at=START,
    session=SessionView(connected=True, gateway="https://gw.test:7443", epoch=7, since=START, ended=""),
    incarnation=1,
    generation=12,
    bound=[
        BoundView(
            reservation_id="rsv_1",
            cdi_name="bettercompute.dev/reservation=rsv_1",
            gpu_uuids=["GPU-1", "GPU-2"],
            ends_at=START,
        )
    ],
    conditions=[Condition(name="gpu.fault", severity="critical", text="GPU is lost", subject="index 3")],
    diagnosis=DiagnosisView(passed=True, detail="14/14 checks passed"),
)


def test_status_in_words(golden: Golden):
    stopped = SessionView(
        connected=False, gateway="https://gw.test:7443", epoch=7, since=START, ended="unreachable: refused"
    )
    texts = [
        format_snapshot(SNAPSHOT, running=True),
        format_snapshot(
            Snapshot(
                written_at=START,
                pid=1,
                agent_version="1.2.3",
                node_id=SNAPSHOT.node_id,
                server=SNAPSHOT.server,
                journal_id=SNAPSHOT.journal_id,
                machine="32 vCPUs, 128 GiB",
                cdi_dir="/var/run/cdi",
                certificate_ends_at=START,
                session=stopped,
                incarnation=0,
                generation=0,
                bound=[],
                conditions=[],
            ),
            running=False,
        ),
    ]
    golden.check("status.txt", "\n\n".join(texts) + "\n")


def test_status_of_an_agent_that_has_stopped(tmp_path: Path):
    write_snapshot(tmp_path / STATUS_FILE, SNAPSHOT)
    assert read_snapshot(tmp_path / STATUS_FILE) == SNAPSHOT
    result = bcd("status", "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "agent        stopped; this is from 2030-01-01" in result.output
    (tmp_path / STATUS_FILE).write_text("{")
    assert read_snapshot(tmp_path / STATUS_FILE) is None


def test_doctor_ends_with_1_when_something_is_wrong(tmp_path: Path):
    result = bcd("doctor", "--state-dir", str(tmp_path / "state"), "--simulate", "h100")
    assert result.exit_code == 1
    assert "FAILED   identity: this machine has not joined" in result.output
    assert "fix: run `bcd join`" in result.output
