"""Acts on what a node says of itself: its conditions become rows, and a GPU that it complains of is not sold.

The names are the agent's (`agent.health` lists them) and all have a dot in them; what the control
plane finds by itself has none, so neither overwrites the other. A status replaces what the node has
said before, in whichever session; only one of its present session counts, because an earlier one may
be of the machine that was there before.

A status is not signed. It can keep a GPU from being sold; it releases nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db import devices, nodes
from controlplane.db.nodes import NODE_SLOT, Condition
from controlplane.model.devices import BY_SEVERITY
from shared.status import SEVERITIES, StatusError, decode_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controlplane.db.nodes import ConditionChange, LifecycleNode
    from controlplane.db.tx import Tx
    from controlplane.model.devices import KnownDevice, Verdict
    from shared.status import Condition as Reported
    from shared.status import NodeStatus

UNREADABLE = "status.unreadable"
# A warning about a GPU is for people, but these say that work on it will meet errors.
SUSPECT_KINDS = frozenset({"gpu.reset_needed", "gpu.fabric"})
# Several complaints of one name about parts without a slot are one condition; this much of the others is kept.
DETAIL_CHARS_MAX = 2000


def apply_status(tx: Tx, node: LifecycleNode) -> list[ConditionChange]:
    """Make the conditions of a locked node what its status says; returns what has changed."""
    if node.status is None:
        return []
    try:
        status = decode_status(node.status)
    except StatusError as exc:
        # an agent of another time; what an earlier one said is still the best that is known
        return nodes.raise_conditions(tx, node.node_id, [Condition(NODE_SLOT, UNREADABLE, "warning", _plain(str(exc)))])
    if not status.conditions and not node.reported_kinds:
        return []
    known = devices.load_known(tx, node.node_id) if status.conditions else []
    return nodes.sync_conditions(tx, node.node_id, owned=node.reported_kinds, wanted=list_conditions(status, known))


def list_conditions(status: NodeStatus, known: Sequence[KnownDevice]) -> list[Condition]:
    """Return the rows for a status: one for each slot and name, the worst complaint first."""
    slot_of = {name: device.slot for device in known for name in (device.uuid, device.pci_bus_id)}
    found: dict[tuple[int, str], list[Reported]] = {}
    for reported in sorted(status.conditions, key=lambda reported: -SEVERITIES.index(reported.severity)):
        place = slot_of.get(reported.subject, NODE_SLOT), _kind(reported.name)
        found.setdefault(place, []).append(reported)
    return [
        Condition(slot, kind, worst.severity, _text(worst), "; ".join(map(_text, others))[:DETAIL_CHARS_MAX])
        for (slot, kind), (worst, *others) in sorted(found.items())
    ]


def _kind(name: str) -> str:
    name = _plain(name)
    return name if "." in name else f"agent.{name}"


def _text(reported: Reported) -> str:
    return _plain(f"{reported.subject}: {reported.text}" if reported.subject else reported.text)


def _plain(text: str) -> str:
    # the one character that a text column does not take
    return text.replace("\0", "")


def judge_gpus(conditions: Sequence[Condition]) -> Mapping[int, Verdict]:
    """Return how the GPUs fare that a node complains of, by slot: the worst that is said of each."""
    verdicts: dict[int, Verdict] = {}
    for condition in conditions:
        if not condition.kind.startswith("gpu."):
            continue
        if condition.severity == "critical":
            verdict: Verdict = "unhealthy", f"{condition.kind}: {condition.reason}"
        elif condition.severity == "warning" and condition.kind in SUSPECT_KINDS:
            verdict = "suspect", f"{condition.kind}: {condition.reason}"
        else:
            continue
        known = verdicts.get(condition.slot)
        if known is None or BY_SEVERITY.index(verdict[0]) > BY_SEVERITY.index(known[0]):
            verdicts[condition.slot] = verdict
    return verdicts
