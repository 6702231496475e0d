"""The state machines that two parties touch, as data.

*Reservation.* A `draft` exists for the IAM decision and holds nothing. `queued` waits for room and
holds no quota. `placed` has bookings, perhaps in the future. `binding` is in the NodeSpecs of its
nodes. `active` means that every allocation's signed AllocationBound was verified. `releasing` has an
end cause and waits for the nodes' signed AllocationReleased. Going back exists twice: a future
placement that repair takes apart is queued again, and so is one whose bind failed, after its nodes
have let go.

*Node.* `provision_state` says how far a machine has come, and only the lifecycle controller and
operators move it; `connectivity` is moved by liveness alone. Neither ever releases anything.

*Command.* Ends in exactly one of `COMMAND_ENDS`. `indeterminate` is an end: nobody knows whether
the command ran, so it is never run again.

The reservation table stands once more as a trigger in the schema; a test compares the two.
"""

from __future__ import annotations

from typing import Literal, get_args

ReservationState = Literal[
    "draft",
    "queued",
    "placed",
    "binding",
    "active",
    "releasing",
    "released",
    "rejected",
    "cancelled",
    "failed",
    "expired",
]
RESERVATION_STATES: tuple[ReservationState, ...] = get_args(ReservationState)
RESERVATION_TRANSITIONS: dict[ReservationState, frozenset[ReservationState]] = {
    "draft": frozenset({"queued", "placed", "binding", "rejected", "cancelled", "expired", "failed"}),
    "queued": frozenset({"placed", "binding", "cancelled", "expired", "failed"}),
    "placed": frozenset({"binding", "queued", "cancelled", "failed", "expired"}),
    "binding": frozenset({"active", "releasing"}),
    # back to `binding` while a broken part is replaced: `active` means that every node has signed
    "active": frozenset({"binding", "releasing"}),
    "releasing": frozenset({"released", "queued"}),
    "released": frozenset(),
    "rejected": frozenset(),
    "cancelled": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
}
RESERVATION_ENDS: frozenset[ReservationState] = frozenset(s for s, to in RESERVATION_TRANSITIONS.items() if not to)
HOLDS_QUOTA: frozenset[ReservationState] = frozenset({"placed", "binding", "active", "releasing"})

EndCause = Literal[
    "window_ended",
    "released_by_holder",
    "cancelled",
    "evicted_by_operator",
    "preempted",
    "node_decommissioned",
    "bind_failed",
]
END_CAUSES: tuple[EndCause, ...] = get_args(EndCause)
ReleaseEvidence = Literal["signed", "forced"]

ReservationCondition = Literal["impaired", "waiting_for_release", "overrun", "spec_full", "maintenance_planned"]

ProvisionState = Literal["registered", "provisioning", "adopting", "adopted", "quarantined", "decommissioned"]
PROVISION_STATES: tuple[ProvisionState, ...] = get_args(ProvisionState)
PROVISION_TRANSITIONS: dict[ProvisionState, frozenset[ProvisionState]] = {
    "registered": frozenset({"provisioning", "adopting", "decommissioned"}),
    "provisioning": frozenset({"adopting", "quarantined", "decommissioned"}),
    "adopting": frozenset({"adopted", "quarantined", "decommissioned"}),
    "adopted": frozenset({"adopting", "quarantined", "decommissioned"}),
    "quarantined": frozenset({"adopting", "adopted", "decommissioned"}),
    "decommissioned": frozenset(),
}
Connectivity = Literal["never", "connected", "unreachable"]

CommandState = Literal[
    "queued",
    "dispatched",
    "accepted",
    "running",
    "succeeded",
    "failed",
    "unsupported",
    "expired",
    "cancelled",
    "indeterminate",
]
COMMAND_ENDS: frozenset[CommandState] = frozenset(
    {"succeeded", "failed", "unsupported", "expired", "cancelled", "indeterminate"}
)
_FROM_ACCEPTED: frozenset[CommandState] = frozenset({"running", *COMMAND_ENDS})
_FROM_DISPATCHED: frozenset[CommandState] = frozenset({"accepted", *_FROM_ACCEPTED})
COMMAND_TRANSITIONS: dict[CommandState, frozenset[CommandState]] = {
    "queued": frozenset({"dispatched", *_FROM_DISPATCHED}),
    "dispatched": _FROM_DISPATCHED,
    "accepted": _FROM_ACCEPTED,
    "running": COMMAND_ENDS,
    **{end: frozenset[CommandState]() for end in COMMAND_ENDS},
}


def may_become(state: ReservationState, target: ReservationState) -> bool:
    """Whether a reservation may go from `state` to `target`."""
    return target in RESERVATION_TRANSITIONS[state]
