"""Every noun and verb against a real server: what is asked for is done, and shown."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from typing import TYPE_CHECKING

from controlplane.cli.commands import events as events_command
from controlplane.cli.profiles import write_profile

if TYPE_CHECKING:
    import pytest

    from tests.support.command_line import CommandLine, CommandServer
    from tests.support.golden import Golden


def rows(text: str) -> list[list[str]]:
    """A table's cells, without its header."""
    return [line.split() for line in text.splitlines()[1:]]


def fields(text: str) -> dict[str, str]:
    """A record by its labels."""
    return {line[:25].split("  ")[0]: line.split("  ")[-1].strip() for line in text.splitlines()}


def test_places(server: CommandServer, bcctl: CommandLine) -> None:
    assert fields(bcctl("sites", "create", "paris", "--name", "The cellar").value)["name"] == "The cellar"
    assert bcctl("sites", "update", "paris", "--name", "Paris", "--query", "name").value == "Paris"
    assert [row[0] for row in rows(bcctl("sites", "list").value)] == ["lab", "paris"]
    made = fields(bcctl("pools", "create", "cpu", "--site", "paris", "--cpu").value)
    assert (made["kind"], made["gpu model"]) == ("cpu", "-")
    bcctl("pools", "create", "a100", "--site", "paris", "--gpu-model", "NVIDIA A100", "--acceptance", "diag.nvml")
    assert bcctl("pools", "get", "a100", "--query", "acceptance").value == "diag.nvml"
    listed = rows(bcctl("pools", "list").value)
    assert [row[:2] for row in listed] == [["h100", "lab"], ["cpu", "paris"], ["a100", "paris"]]
    assert "0/16" in listed[0]
    assert [row[0] for row in rows(bcctl("pools", "list", "--site", "paris").value)] == ["cpu", "a100"]
    assert bcctl("pools", "update", "a100", "--name", "Old", "--query", "name").value == "Old"
    ran = bcctl("sites", "delete", "paris")
    assert (ran.status, ran.err.partition("\n")[0]) == (1, "CONFIRM: Remove site paris for good?")
    ran = bcctl("sites", "delete", "paris", "--yes")
    assert (ran.status, ran.err) == (1, "CONFLICT: site paris still has 2 pools; remove these first\n")
    for pool in ("cpu", "a100"):
        bcctl("pools", "delete", pool, "-y")
    assert bcctl("sites", "delete", "paris", "--yes", "--query", "slug").value == "paris"
    assert bcctl("sites", "get", "paris").err == "NOT_FOUND: site: no site paris; there are: lab\n"


def test_tenants_projects_quotas_and_offerings(server: CommandServer, bcctl: CommandLine) -> None:
    bcctl("tenants", "create", "acme", "--name", "Acme")
    bcctl("tenants", "create", "labs", "--parent", "acme")
    assert [row[0] for row in rows(bcctl("tenants", "list").value)] == ["root", "acme", "labs"]
    assert bcctl("tenants", "get", "--query", "slug").value == "root"
    assert bcctl("tenants", "update", "acme", "--name", "Acme Inc", "--query", "name").value == "Acme Inc"
    assert bcctl("projects", "create", "vision", "--tenant", "acme", "--query", "tenant").value == "acme"
    assert bcctl("projects", "update", "vision", "--name", "V", "--query", "name").value == "V"
    assert bcctl("projects", "list", "--tenant", "acme", "--query", "items[0].slug").value == "vision"
    quota = bcctl(
        *("quotas", "create", "--tenant", "acme", "--pool", "h100"),
        *("--gpus", "4", "--memory", "1TiB", "--query", "id"),
    ).value
    (shown,) = rows(bcctl("quotas", "list").value)
    assert shown == ["acme", "all", "h100", "0/4", "-", "-", "0", "0/1TiB", quota]
    bcctl("quotas", "update", quota, "--gpus", "2", "--unlimited", "memory")
    changed = fields(bcctl("quotas", "get", quota).value)
    assert (changed["gpus max"], changed["memory max"]) == ("2", "-")
    place = ("--tenant", "acme", "--pool", "h100")
    assert bcctl("quotas", "get", *place, "--query", "id").value == quota
    assert bcctl("quotas", "update", *place, "--vcpus", "9", "--query", "vcpus_max").value == "9"
    bcctl("quotas", "update", quota, "--unlimited", "vcpus")
    for wrong in ((), (quota, *place)):
        ran = bcctl("quotas", "get", *wrong)
        assert (ran.status, "name the quota by its id, or by --tenant, " in ran.err) == (2, True)
    ran = bcctl("quotas", "delete", *place)
    assert ran.err.startswith("CONFIRM: Remove the quota of acme, h100, and so its limits?\n")
    key = bcctl("keys", "create", "ann", "--tenant", "acme", "--role", "member", "--query", "key").value
    ran = bcctl("reserve", "--pool", "h100", "--gpus", "3", "--for", "1h", BCCTL_KEY=key)
    assert ran.err.startswith("QUOTA_EXCEEDED: ")
    assert "hint: `bcctl quotas list` shows the limits and what is used\n" in ran.err
    bcctl("offerings", "create", "duo", "--pool", "h100", "--gpus", "2", "--tenant", "acme")
    assert bcctl("offerings", "list", "--query", "items[0].slug").value == "duo"
    assert bcctl("offerings", "update", "duo", "--name", "Two", "--query", "name").value == "Two"
    taken = bcctl(
        "reserve", "--offering", "duo", "--for", "1h", "--project", "vision", "--output", "json", BCCTL_KEY=key
    )
    found = json.loads(taken.value)
    assert (found["offering"], found["project"], found["gpus"], found["state"]) == ("duo", "vision", 2, "active")
    assert rows(bcctl("quotas", "list").value)[0][3] == "2/2"
    # what is not theirs is not there
    assert bcctl("tenants", "list", "--query", "items", BCCTL_KEY=key).value.count("slug") == 1
    ran = bcctl("status", BCCTL_KEY=key)
    assert ran.err.startswith("DENIED: ")
    assert "hint: the board is for operators; `bcctl pools capacity` shows what is free\n" in ran.err
    bcctl("reservations", "release", found["id"])
    assert bcctl("offerings", "delete", "duo", "--yes", "--query", "slug").value == "duo"
    assert bcctl("quotas", "delete", quota, "--yes", "--query", "id").value == quota
    assert bcctl("projects", "delete", "vision", "--yes", "--query", "slug").value == "vision"


def test_keys_are_shown_once_and_end_at_once(server: CommandServer, bcctl: CommandLine) -> None:
    ran = bcctl("keys", "create", "ci", "--role", "operator", "--service", "--expires-in", "30d")
    shown = fields(ran.value)
    assert shown["key"].startswith("bck_")
    assert "It is shown only now." in ran.err
    assert bcctl("nodes", "list", "--query", "items[0].name", BCCTL_KEY=shown["key"]).value == "node-0"
    listed = bcctl("keys", "list").value
    assert shown["key"].partition(".")[2] not in listed
    assert shown["id"] in listed
    assert "key " not in bcctl("keys", "get", shown["id"]).value
    ran = bcctl("keys", "revoke", shown["id"])
    asked = f"CONFIRM: Revoke {shown['id']}? Whoever uses it is refused from then on."
    assert (ran.status, ran.err.splitlines()[0]) == (1, asked)
    assert bcctl("keys", "get", shown["id"], "--query", "revoked_at").value == "null"
    own = server.key.partition(".")[0].replace("bck_", "key_")
    ran = bcctl("keys", "revoke", own)
    asked = f"CONFIRM: Revoke {own}, the key in use, from BCCTL_KEY? This bcctl is refused from then on."
    assert (ran.status, ran.err.splitlines()[0]) == (1, asked)
    assert bcctl("keys", "revoke", shown["id"], "--yes").status == 0
    ran = bcctl("nodes", "list", BCCTL_KEY=shown["key"])
    assert ran.err.startswith("UNAUTHENTICATED: ")
    assert ran.err.endswith("hint: the key comes from BCCTL_KEY\n")


def test_nodes_and_what_they_have(server: CommandServer, bcctl: CommandLine) -> None:
    listed = rows(bcctl("nodes", "list", "--pool", "h100").value)
    assert [row[:6] for row in listed] == [
        [name, "h100", "adopted", "connected", "0/8", "0/64"] for name in ("node-0", "node-1")
    ]
    node = fields(bcctl("nodes", "cordon", "node-0", "--reason", "fan").value)
    assert (node["cordoned"], node["cordon reason"], node["placeable"]) == ("yes", "fan", "no")
    assert "cordoned, fan" in bcctl("nodes", "list").value
    assert bcctl("nodes", "uncordon", "node-0", "--query", "placeable").value == "true"
    assert bcctl("nodes", "drain", "node-0", "--query", "draining").value == "true"
    assert bcctl("nodes", "undrain", "node-0", "--query", "draining").value == "false"
    assert (
        bcctl("nodes", "quarantine", "node-1", "--reason", "Xid 79", "--query", "provision_state").value
        == "quarantined"
    )
    assert bcctl("nodes", "list", "--state", "quarantined", "--query", "items[0].name").value == "node-1"
    assert bcctl("nodes", "unquarantine", "node-1", "--query", "provision_state").value == "adopting"
    server.execute(
        """
        insert into node_condition (node_id, slot, kind, severity, reason)
        values (1, 3, 'xid_79', 'critical', 'fell off')
        """
    )
    assert bcctl("nodes", "get", "node-0").value.splitlines()[-1].split()[:3] == ["xid_79", "3", "critical"]
    assert "xid_79" in bcctl("nodes", "list").value
    assert bcctl("nodes", "update", "node-1", "--name", "spare", "--query", "name").value == "spare"
    assert "say what to change: --name or --pool" in bcctl("nodes", "update", "spare").err
    ran = bcctl("nodes", "update", "spare", "--pool", "h10")
    assert ran.err == "NOT_FOUND: pool: no pool h10; did you mean h100?\n"
    assert bcctl("nodes", "update", "spare", "--name", "node-1", "--pool", "h100", "--query", "pool").value == "h100"
    devices = rows(bcctl("devices", "list", "--node", "node-0").value)
    assert [row[:4] for row in devices] == [["node-0", str(n), f"GPU-0000-{n}", "H100"] for n in range(8)]
    assert bcctl("devices", "get", "GPU-0000-5", "--query", "slot").value == "5"
    for verb in ("decommission", "revoke"):
        ran = bcctl("nodes", verb, "node-1")
        assert ran.err.endswith("hint: there is no terminal to ask on; add --yes if you mean it\n")
    revoked = bcctl("nodes", "revoke", "node-0", "--reason", "disk left", "--yes", "--query", "authorized")
    assert revoked.value == "false"
    assert "revoked: disk left" in bcctl("nodes", "list").value
    assert "revoked: disk left" in bcctl("status").value


def test_labels_and_selectors(server: CommandServer, bcctl: CommandLine) -> None:
    assert fields(bcctl("nodes", "label", "node-1", "zone=a", "disk=nvme").value)["labels"] == "disk=nvme, zone=a"
    assert bcctl("nodes", "label", "node-1", "disk-", "--query", "labels.zone").value == "a"
    assert fields(bcctl("nodes", "get", "node-1").value)["labels"] == "zone=a"
    ran = bcctl("nodes", "label", "node-1", "disk")
    assert (ran.status, "write KEY=VALUE to put a label on, KEY- to take it off" in ran.err) == (2, True)
    assert bcctl("nodes", "label", "node-1", "Zone=a").err.startswith("INVALID: put: 'Zone' is not a key; a key is ")
    assert [row[0] for row in rows(bcctl("nodes", "list", "-l", "zone=a", "--selector", "!disk").value)] == ["node-1"]
    assert [row[0] for row in rows(bcctl("nodes", "list", "--selector", "!zone").value)] == ["node-0"]
    what = ("reserve", "--pool", "h100", "--gpus", "1", "--for", "1h")
    taken = bcctl(*what, "-l", "zone=a", "-l", "!disk", "--output", "json")
    found = json.loads(taken.value)
    assert (found["selector"], found["parts"][0]["node_name"]) == (["!disk", "zone=a"], "node-1")
    assert fields(bcctl("reservations", "get", found["id"]).value)["selector"] == "!disk, zone=a"
    assert bcctl(*what, "--selector", "zone!=a", "--plan", "--query", "nodes").value == "node-0"
    ran = bcctl(*what, "--selector", "zone=b")
    assert ran.err.startswith("IMPOSSIBLE: selector: no node of this pool matches zone=b\n")
    ran = bcctl(*what, "--selector", "zone in (a,b)")
    assert ran.err.startswith("INVALID: selector: 'zone in (a,b)' is not a term: ")


def test_a_gpu_is_shared_in_time_slots(server: CommandServer, bcctl: CommandLine) -> None:
    what = ("reserve", "--pool", "h100", "--for", "1h")
    ran = bcctl(*what, "--device", "slot.1/4=1")
    assert "the most on one of this pool: 0; no GPU of it is shared like that\n" in ran.err
    assert fields(bcctl("devices", "share", "GPU-0001-7", "--slots", "4").value)["time slots"] == "4"
    assert rows(bcctl("devices", "list", "--node", "node-1").value)[7][5] == "1/4"
    quarter = json.loads(bcctl(*what, "--device", "slot.1/4=1", "--output", "json").value)
    assert quarter["devices"] == [{"class": "slot.1/4", "count": 1}]
    assert (quarter["gpus"], quarter["state"], quarter["parts"][0]["gpu_uuids"]) == (0, "active", ["GPU-0001-7"])
    mixed = bcctl(*what, "--device", "slot.1/4=1", "--device", "gpu=2", "--vcpus", "4")
    assert fields(mixed.value)["asked for"] == "2 GPUs, 1 x slot.1/4, 4 vCPUs"
    both = [quarter["id"], fields(mixed.value)["reservation"]]
    assert fields(bcctl("devices", "get", "GPU-0001-7").value)["held by"] == ", ".join(both)
    assert "2 reservations" in bcctl("devices", "list", "--node", "node-1").value.splitlines()[-1]
    ran = bcctl("devices", "unshare", "GPU-0001-7")
    assert ran.err.startswith(f"CONFLICT: device: GPU-0001-7 is booked or held ({quarter['id']}, ")
    assert "; cordon its node, and make it whole when they have ended\n" in ran.err
    for text, message in (
        ("slot.1/5=1", "INVALID: devices: 'slot.1/5' is no class of devices; use gpu, mig.PROFILE as in mig.3g.40gb, "),
        ("mig.3g=1", "INVALID: devices: 'mig.3g' is no class of devices; "),
        ("mig.3g.40gb=1", "IMPOSSIBLE: devices: no GPU of this pool has a MIG instance mig.3g.40gb; no GPU of it is"),
    ):
        assert bcctl(*what, "--device", text).err.startswith(message)
    assert "write CLASS=N, as in mig.3g.40gb=1 or slot.1/4=1" in bcctl(*what, "--device", "slot.1/4").err
    ran = bcctl(*what, "--gpus", "1", "--device", "gpu=1")
    assert ran.err.startswith("INVALID: devices: gpus says the number of whole GPUs; leave one of the two out\n")
    ran = bcctl("devices", "share", "GPU-0000-0", "--slots", "5")
    assert ran.err.startswith("INVALID: time_slots: a GPU cannot be shared in 5; use 2, 3, 4, 6, 8, 12, 16, 24, 48\n")
    bcctl("devices", "share", "GPU-0000-0", "--slots", "2")
    assert bcctl("devices", "unshare", "GPU-0000-0", "--query", "time_slots").value == "1"


def test_mig_instances_are_seen_reserved_and_counted(server: CommandServer, bcctl: CommandLine, golden: Golden) -> None:
    server.execute("update device set mig = true where node_id = 2 and slot = 7")
    server.execute(
        """
        insert into mig_instance (device_id, node_id, uuid, gpu_instance, compute_instance, profile, start_slice,
                                  slices, span, why_not, memory_mib)
        select device_id, node_id, 'MIG-' || gi, gi, 0, profile, start, size, span::int4range, why_not, memory
        from device cross join (values
          (1, '3g.40gb', 0, 4, '[336,360)', '', 40320), (7, '1g.10gb', 4, 1, '[360,366)', '', 9856),
          (8, '2g.20gb', 6, 2, null, 'its compute instance is a part of it', 19968)
        ) as t (gi, profile, start, size, span, why_not, memory)
        where node_id = 2 and slot = 7
        """
    )
    what = ("reserve", "--pool", "h100", "--for", "1h")
    part = json.loads(bcctl(*what, "--device", "mig.3g.40gb=1", "--vcpus", "4", "--output", "json").value)
    assert part["devices"] == [{"class": "mig.3g.40gb", "count": 1}]
    assert (part["gpus"], part["state"], part["parts"][0]["gpu_uuids"]) == (0, "active", ["MIG-1"])
    assert fields(bcctl("reservations", "get", part["id"]).value)["asked for"] == "1 x mig.3g.40gb, 4 vCPUs"
    ran = bcctl(*what, "--device", "mig.2g.20gb=1")
    assert ran.err.startswith(
        "IMPOSSIBLE: devices: no GPU of this pool has a MIG instance mig.2g.20gb; ask for mig.1g.10gb or mig.3g.40gb\n"
    )
    ran = bcctl(*what, "--device", "mig.1g.10gb=2")
    assert ran.err.startswith("IMPOSSIBLE: devices: needs 2 x mig.1g.10gb on one node; the most on one of this pool: 1")
    ran = bcctl(*what, "--device", "mig.3g.40gb=1", "--no-queue")
    assert ran.err.startswith("SOLD_OUT: needs 1 x mig.3g.40gb on one node; most free on one node: 0")
    ran = bcctl("devices", "share", "GPU-0001-7", "--slots", "4")
    assert ran.err.startswith("CONFLICT: device: GPU-0001-7 is in MIG mode and given out as its instances;")
    assert rows(bcctl("devices", "list", "--node", "node-1").value)[7][5:7] == ["MIG", "3"]
    _, instances = bcctl("devices", "get", "GPU-0001-7").value.split("\n\n")
    _, parts = bcctl("nodes", "get", "node-1").value.split("\n\n")
    golden.check(
        "mig.txt", f"{instances}\n{parts}\n{bcctl('pools', 'capacity', 'h100').value}".replace(part["id"], "rsv_x")
    )
    capacity = json.loads(bcctl("pools", "capacity", "h100", "--output", "json").value)
    assert (capacity["gpus"], capacity["gpus_parted"], capacity["gpus_free"], capacity["gpus_held"]) == (16, 1, 15, 0)
    assert capacity["parts"][1] == {
        "class": "mig.3g.40gb",
        "total": 1,
        "placeable": 1,
        "held": 1,
        "free": 0,
        "free_max": 0,
    }
    board = json.loads(bcctl("status", "-o", "json").value)
    assert [node["gpus_free"] for node in board["items"]] == [8, 7]


def test_offerings_name_shapes_and_tell_what_they_count_as(
    server: CommandServer, bcctl: CommandLine, golden: Golden
) -> None:
    bcctl("devices", "share", "GPU-0001-7", "--slots", "4")
    shapes = (
        ("notebook", "--device", "slot.1/4=1", "--device", "gpu=1", "--vcpus", "8", "--memory", "64GiB"),
        ("set", "--gpus", "8", "--nodes", "2", "--topology", "nvlink-all", "--strategy", "spread"),
        ("node", "--whole-node", "-l", "!zone"),
    )
    for slug, *shape in shapes:
        bcctl("offerings", "create", slug, "--pool", "h100", *shape)
    items = json.loads(bcctl("offerings", "list", "--output", "json").value)["items"]
    shown = "\n\n".join(
        (bcctl("offerings", "list").value, *(bcctl("offerings", "get", slug).value for slug, *_ in shapes))
    )
    for item in items:
        shown = shown.replace(item["id"], f"off_{item['slug']}".ljust(len(item["id"]), "x"))
    golden.check("offerings.txt", re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", "2030-01-01 00:00:00Z", shown))
    held = bcctl("reserve", "--offering", "notebook", "--for", "1h").value
    assert fields(held)["asked for"] == "1 GPU, 1 x slot.1/4, 8 vCPUs, 64GiB"
    assert "GPU-0001-7" in held
    ran = bcctl("reserve", "--offering", "set", "--topology", "any", "--for", "1h")
    assert ran.err.startswith("INVALID: topology: the offering set says that; leave it out\n")
    ran = bcctl("offerings", "create", "x", "--pool", "h100", "--device", "mig.3g.40gb=1")
    assert ran.err.startswith("IMPOSSIBLE: devices: no GPU of this pool has a MIG instance mig.3g.40gb; ")
    # it is metered as the offering told
    bcctl("reservations", "release", fields(held)["reservation"])
    assert dict(server.execute("select meter, quantity from usage_window")) == items[0]["meters"]


def test_a_node_that_will_not_come_back(server: CommandServer, bcctl: CommandLine) -> None:
    rsv = bcctl("reserve", "--pool", "h100", "--gpus", "8", "--for", "1h", "--query", "id").value
    hold = bcctl("allocations", "list", "--reservation", rsv, "--held", "--query", "items[0].id").value
    assert bcctl("allocations", "get", hold, "--query", "state").value == "bound"
    server.answering.clear()
    ran = bcctl("nodes", "decommission", "node-0", "--yes")
    assert ran.err.startswith("CONFLICT: ")
    server.execute("update node set connectivity = 'unreachable' where name = 'node-0'")
    assert bcctl("nodes", "decommission", "node-0", "--yes").status == 1
    assert "--reason: with --force, say why" in bcctl("nodes", "decommission", "node-0", "--force", "--yes").err
    gone = bcctl("nodes", "decommission", "node-0", "--force", "--reason", "burnt", "--yes", "--query", "released")
    assert gone.value == rsv
    assert bcctl("reservations", "get", rsv, "--query", "parts[0].release_evidence").value == "forced"
    assert "node_decommissioned: burnt" in bcctl("reservations", "get", rsv).value
    assert rows(bcctl("audit", "list", "--action", "node.force_decommission").value)[0][-1] == "burnt"
    assert rows(bcctl("allocations", "list", "--released").value)[0][:2] == [hold, "released"]


def test_a_hold_is_let_go_by_force(server: CommandServer, bcctl: CommandLine) -> None:
    rsv = bcctl("reserve", "--pool", "h100", "--gpus", "8", "--for", "1h", "--query", "id").value
    hold = bcctl("allocations", "list", "--query", "items[0].id").value
    server.answering.clear()
    server.execute("update node set connectivity = 'unreachable' where name = 'node-0'")
    bcctl("reservations", "release", rsv, "--no-wait")
    assert bcctl("allocations", "force-release", hold, "--reason", "off").err.startswith("CONFIRM: ")
    forced = bcctl("allocations", "force-release", hold, "--reason", "off", "--yes", "--query", "release_evidence")
    assert forced.value == "forced"
    assert bcctl("reservations", "get", rsv, "--query", "state").value == "released"


def test_join_tokens_print_the_line_to_paste(server: CommandServer, bcctl: CommandLine) -> None:
    ran = bcctl("join-tokens", "create", "--pool", "h100", "--name", "gpu-7", "--expires-in", "2h")
    (line,) = ran.value.splitlines()
    assert "| bcd join https://gateway.test:7443 --pin sha256:" in line
    token_id, secret = re.findall(r"bcjt_([^. ]+)\.(\S+)", line)[0]
    assert ran.err.startswith("Paste this as root on one server, until ")
    (token,) = rows(bcctl("join-tokens", "list").value)
    assert token[1:4] == ["h100", "ok", "1/1"]
    assert token_id in token[0]
    assert "gpu-7" in token
    assert secret not in bcctl("join-tokens", "get", token[0]).value
    ran = bcctl("join-tokens", "revoke", token[0])
    assert ran.err.startswith(f"CONFIRM: Revoke {token[0]}? No server can join with it from then on.\n")
    assert bcctl("join-tokens", "revoke", token[0], "--yes", "--query", "id").value == token[0]
    assert rows(bcctl("join-tokens", "list", "--pool", "h100").value)[0][2] == "revoked"


def test_commands_are_queued_and_cancelled(server: CommandServer, bcctl: CommandLine) -> None:
    made = bcctl(
        *("commands", "create", "node-0", "diag.nvml", "--arguments", '{"level": 1}', "--deadline", "1m"),
        "--query",
        "id",
    ).value
    shown = fields(bcctl("commands", "get", made).value)
    assert (shown["kind"], shown["state"]) == ("diag.nvml", "queued")
    assert bcctl("commands", "get", made, "--query", "arguments.level").value == "1"
    assert bcctl("commands", "cancel", made, "--query", "state").value == "cancelled"
    assert rows(bcctl("commands", "list", "--node", "node-0", "--state", "cancelled").value)[0][0] == made
    assert bcctl("commands", "list", "--state", "running").err == "no commands\n"


def test_audit_says_who_asked_for_what(server: CommandServer, bcctl: CommandLine) -> None:
    key = bcctl("keys", "create", "ann", "--role", "member", "--query", "key").value
    assert bcctl("sites", "create", "x", BCCTL_KEY=key).err.startswith("DENIED: ")
    (denied,) = rows(bcctl("audit", "list", "--decision", "deny").value)
    assert denied[2:4] == ["deny", "site.create"]
    assert bcctl("audit", "list", "--action", "api_key.create", "--query", "items[0].decision").value == "allow"


# --- events ----------------------------------------------------------------------------------------


def test_events_are_listed_and_followed(
    server: CommandServer, bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bcctl("sites", "create", "one")
    listed = bcctl("events", "list", "--kind", "site").value
    assert [row[2] for row in rows(listed)] == ["site.created", "site.created"]
    assert bcctl("events", "--kind", "pool", "--query", "items[0].data.slug").value == "h100"
    for follow in ((), ("--follow",)):
        ran = bcctl("events", "--kind", "sites", *follow)
        assert (ran.status, ran.err) == (1, "INVALID: kind: no event is of kind sites; did you mean site?\n")
    seen: list[str] = []
    show = events_command._show_one

    def show_and_go_on(session: object, event: dict[str, object]) -> None:
        show(session, event)  # type: ignore[arg-type] # handed through
        seen.append(str(event["kind"]))
        if len(seen) == 2:
            # the past has been shown; now something happens, in the server's own thread
            threading.Thread(target=server.call, args=("sites/create",), kwargs={"slug": "two"}).start()
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(events_command, "_show_one", show_and_go_on)
        ran = bcctl("events", "--follow", "--kind", "site")
    assert (ran.status, ran.err) == (0, "")
    assert [line.rsplit("slug=")[1] for line in ran.out.splitlines()] == ["lab", "one", "two"]


# --- the fleet as a whole ----------------------------------------------------------------------------


def test_status_is_the_board(server: CommandServer, bcctl: CommandLine) -> None:
    bcctl("reserve", "--pool", "h100", "--gpus", "3", "--for", "1h")
    bcctl("reserve", "--pool", "h100", "--gpus", "16", "--for", "1h", "--no-wait")
    bcctl("nodes", "cordon", "node-1")
    ran = bcctl("status")
    assert [line.split() for line in ran.value.splitlines()[:3]] == [
        ["NODE", "POOL", "USED", "GPUS", "VCPUS", "MEMORY", "NOTE"],
        ["node-0", "h100", "███░░░░░", "3/8", "0/64", "0/976.6GiB"],
        ["node-1", "h100", "░░░░░░░░", "0/8", "0/64", "0/976.6GiB", "cordoned"],
    ]
    assert ran.out.splitlines()[-1] == (
        "nodes 1/2 taking reservations   GPUs 3/16, 5 free   vCPUs 0/128   memory 0/1.9TiB   pending 1   overlaps 0"
    )
    assert bcctl("status", "--query", "totals.reservations.queued").value == "1"
    assert bcctl("status", "--limit", "1").err == "these are 1 of 2 nodes; ask with --limit N or --all\n"
    assert bcctl("status", "--pool", "h10").err == "NOT_FOUND: pool: no pool h10; did you mean h100?\n"
    assert json.loads(bcctl("status", "-o", "json").value)["items"][0]["gpus_held"] == 3


def test_capacity_is_what_is_free_and_how_it_lies(server: CommandServer, bcctl: CommandLine) -> None:
    bcctl("pools", "create", "cpu", "--site", "lab", "--cpu")
    bcctl("reserve", "--pool", "h100", "--gpus", "3", "--for", "1h")
    assert [line.split() for line in bcctl("pools", "capacity").value.splitlines()[1:]] == [
        ["h100", "lab", "2/2", "13/16", "1", "1", "0", "0", "0", "128/128", "1.9TiB/1.9TiB"],
        ["cpu", "lab", "-", "-", "-", "-", "-", "-", "-", "-", "-"],
    ]
    bcctl("nodes", "cordon", "node-1")
    server.execute("update device set health = 'missing' where node_id = 1 and slot = 7")
    shown = fields(bcctl("pools", "capacity", "h100").value)
    assert shown["nodes"] == "1 of 2 take reservations, 1 cordoned"
    assert shown["gpus"] == "4 free, at most 4 on one node; 3 of 16 held, 1 unhealthy"
    assert shown["free sets"] == "4 on 1 node"
    assert bcctl("pools", "capacity", "h100", "--query", "gpus_free_max").value == "4"
    assert bcctl("pools", "capacity", "--limit", "1").err == (
        "there are more pools than these 1; ask with --limit N or --all\n"
    )
    assert bcctl("pools", "capacity", "--site", "lab", "--query", "items[1].slug").value == "cpu"
    assert bcctl("pools", "capacity", "h10").err == "NOT_FOUND: pool: no pool h10; did you mean h100?\n"
    ran = bcctl("pools", "capacity", "h100", "--site", "lab")
    assert (ran.status, ran.err.partition(":")[0]) == (1, "INVALID")
    member = bcctl("keys", "create", "ann", "--role", "member", "--query", "key").value
    assert bcctl("pools", "capacity", "h100", "--query", "gpus_free", BCCTL_KEY=member).value == "4"


def test_status_fails_if_anything_is_held_twice(server: CommandServer, bcctl: CommandLine) -> None:
    for gpus in ("1", "2"):
        bcctl("reserve", "--pool", "h100", "--gpus", gpus, "--for", "1h")
    server.execute("alter table allocation drop constraint allocation_one_hold")
    server.execute("update allocation set spans = '{[0,48)}'")
    ran = bcctl("status")
    assert ran.status == 1
    assert "overlaps 1" in ran.out
    assert ran.err.startswith("OVERLAPS: 1 pairs hold the same thing")


def test_doctor_checks_the_client_the_server_and_the_ledger(
    server: CommandServer, bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = bcctl("doctor")
    assert ran.status == 1
    lines = dict(line.split(": ", 1) for line in ran.out.splitlines())
    assert lines["ok    client.url"] == f"{server.url} from BCCTL_URL"
    assert lines["ok    server.health"] == "answers"
    assert lines["ok    ledger.bookings.overlap"] == "no two bookings overlap"
    # this server runs no workers and says it is version 0
    assert lines["FAIL  workers.controllers"] == "none is alive"
    assert "start one: `bcctl serve --roles controllers`" in ran.out
    failed = [line.split(": ")[0].split()[1] for line in ran.out.splitlines() if line.startswith("FAIL")]
    assert failed == ["server.version", "workers.controllers", "workers.scheduler"]
    assert ran.err.startswith("UNHEALTHY: 3 of ")
    server.execute("insert into worker (worker_id, roles) values ('w', '{controllers,scheduler}')")
    monkeypatch.setattr("controlplane.cli.commands.doctor.version", lambda _: "0")
    ran = bcctl("doctor")
    assert ran.status == 0
    assert ran.err.startswith("all ")
    assert json.loads(bcctl("doctor", "-o", "json").value)["healthy"] is True


def test_doctor_without_a_server_or_a_key(bcctl: CommandLine) -> None:
    ran = bcctl("doctor", "--url", "http://127.0.0.1:9", "--key", "bck_x.y")
    assert ran.status == 1
    assert "FAIL  server.health: no answer from http://127.0.0.1:9: Connection refused" in ran.out
    ran = bcctl("doctor", "--url", "http://127.0.0.1:9")
    assert "FAIL  client.key: no --key, no BCCTL_KEY, and no profile in " in ran.out


def test_a_profile_is_enough(server: CommandServer, bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCCTL_URL")
    monkeypatch.delenv("BCCTL_KEY")
    ran = bcctl("sites", "list", "--url", server.url)
    assert ran.err.startswith("UNAUTHENTICATED: ")
    assert "`bcctl dev` writes one" in ran.err
    write_profile("dev", server.url, server.key)
    assert bcctl("sites", "list", "--query", "items[0].slug").value == "lab"
    assert bcctl("--profile", "dev", "--query", "items[0].slug", "sites", "list").value == "lab"
    # what stands after the command wins
    assert bcctl("--query", "items[0].slug", "sites", "list", "--query", "items[0].name").value == "The lab"
    assert bcctl("--profile", "prod", "sites", "list").err.startswith("PROFILE: --profile: there is no profile 'prod'")


def test_a_query_that_leads_nowhere_says_what_there_is(server: CommandServer, bcctl: CommandLine) -> None:
    ran = bcctl("sites", "get", "lab", "--query", "nme")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == "QUERY: the answer has no field 'nme'; there are: id, slug, name, pools, version, created_at\n"
