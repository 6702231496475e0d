"""Reservations in words: how one stands, what it asks for, what it holds, what to type next."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from controlplane.cli.amounts import show_duration, show_memory, show_time

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDED = frozenset({"released", "rejected", "cancelled", "failed", "expired"})
_WORKING = {
    "queued": "waiting for room",
    "placed": "starting",
    "binding": "waiting for the node to bind it",
    "releasing": "waiting for the node to let go",
}


def is_placed_for_later(found: Mapping[str, Any]) -> bool:
    """Whether it is booked for a time that was still to come when it was placed."""
    if found["state"] != "placed" or found["start"] is None or found["placed_at"] is None:
        return False
    return datetime.fromisoformat(found["start"]) > datetime.fromisoformat(found["placed_at"])


def describe(found: Mapping[str, Any]) -> str:
    """One line on how a reservation stands."""
    line = f"{found['id']} {found['state']}"
    if found["state"] in _WORKING:
        line += f": {_WORKING[found['state']]}"
    if found["pending_reason"]:
        when = _estimate(found)
        line += f" ({found['pending_reason']}{f'; could start {when}' if when else ''})"
    if found["conditions"]:
        line += f" [{', '.join(found['conditions'])}]"
    return line


def _borrows(found: Mapping[str, Any]) -> str:
    """How much of it is lent, and may be taken back by preemption."""
    count = found["borrows"]
    return f"{count} GPU{'s' if count != 1 else ''} beyond what its quota guarantees" if count else ""


def _estimate(found: Mapping[str, Any]) -> str:
    start = found["estimated_start"]
    return show_time(datetime.fromisoformat(start)) if start else ""


def why_ended(found: Mapping[str, Any]) -> str:
    """Why a reservation ended, for people."""
    reasons = [found["end_cause"] or "", found["end_detail"] or found["pending_reason"] or ""]
    return ": ".join(reason for reason in reasons if reason) or found["state"]


def window_of(found: Mapping[str, Any]) -> str:
    """The window of a reservation, for people."""
    if found["start"] is None:
        return f"{show_duration(found['duration_s'])} from when there is room" if found["duration_s"] else "-"
    start = datetime.fromisoformat(found["start"])
    if found["end"] is None and found["duration_s"]:
        return f"{show_duration(found['duration_s'])} from when there is room, not before {show_time(start)}"
    if found["end"] is None:
        return f"{show_time(start)} until released"
    end = datetime.fromisoformat(found["end"])
    return f"{show_time(start)} to {show_time(end)} ({show_duration(round((end - start).total_seconds()))})"


def asked_of(found: Mapping[str, Any]) -> str:
    """What a reservation or an offering asks for, for people: `8 GPUs on 2 nodes, nvlink-all`."""
    amounts = [
        f"{found['gpus']} GPU{'s' if found['gpus'] != 1 else ''}" if found["gpus"] else "",
        *(f"{device['count']} x {device['class']}" for device in found["devices"]),
        f"{found['vcpus']} vCPU{'s' if found['vcpus'] != 1 else ''}" if found["vcpus"] else "",
        show_memory(found["memory_mib"]) if found["memory_mib"] else "",
    ]
    what = ", ".join(amount for amount in amounts if amount)
    if found["whole_node"]:
        whole = f"{found['nodes']} whole node{'s' if found['nodes'] > 1 else ''}"
        what = f"{what}, {whole}" if what else whole
    elif found["nodes"] is not None and found["nodes"] > 1:
        what += f" on {found['nodes']} nodes"
    if found["topology"] not in (None, "any"):
        what += f", {found['topology']}"
    if found["strategy"] not in (None, "pack"):
        what += f", {found['strategy']}"
    return what


def pairs_of(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A reservation as labels and texts: what it is, where it is, and what to type next."""
    pairs = [
        ("reservation", found["id"]),
        ("name", found["name"]),
        ("state", found["state"]),
        ("conditions", ", ".join(found["conditions"])),
        ("impaired", found["impaired_reason"]),
        ("reason", found["pending_reason"]),
        ("could start", _estimate(found)),
        ("priority", str(found["priority"]) if found["priority"] else ""),
        ("ended", why_ended(found) if found["end_cause"] or found["end_detail"] else ""),
        ("pool", found["pool"]),
        ("asked for", asked_of(found)),
        ("borrows", _borrows(found)),
        ("selector", ", ".join(found["selector"])),
        ("window", window_of(found)),
        ("tenant", found["tenant"] if found["project"] is None else f"{found['tenant']} / {found['project']}"),
    ]
    for part in found["parts"]:
        pairs += _part(part)
    return [(label, text) for label, text in pairs if text]


def _part(part: Mapping[str, Any]) -> list[tuple[str, str]]:
    state = "" if part["state"] == "bound" and part["connectivity"] == "connected" else f": {part['state']}"
    if part["connectivity"] != "connected":
        state += f", node {part['connectivity']}"
    pairs = [("node", f"{part['node_name']} ({part['node']}){state}")]
    if part["vcpus"] or part["memory_mib"]:
        amounts = [f"{part['vcpus']} vCPUs" if part["vcpus"] else ""]
        amounts.append(show_memory(part["memory_mib"]) if part["memory_mib"] else "")
        pairs.append(("holds", ", ".join(amount for amount in amounts if amount)))
    for number, uuid in enumerate(part["gpu_uuids"]):
        pairs.append(("gpus" if number == 0 else " ", uuid))
    if part["cdi_device"]:
        pairs.append(("cdi device", part["cdi_device"]))
    return pairs


def next_steps(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What to type next for a reservation that stands."""
    steps: list[tuple[str, str]] = []
    devices = [part["cdi_device"] for part in found["parts"] if part["cdi_device"]]
    if found["state"] == "active" and devices:
        steps.append(("use it", f"podman run --rm --device {devices[0]} IMAGE"))
    if found["state"] in ("binding", "active") and found["impaired_reason"]:
        steps.append(("replace what is broken", f"bcctl reservations repair {found['id']}"))
    if found["state"] not in ENDED and found["state"] != "releasing":
        steps.append(("let it go", f"bcctl reservations release {found['id']}"))
    return steps
