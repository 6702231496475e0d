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

The transitions of reservations are the schema's trigger's, those of commands are here.
"""

from __future__ import annotations

from typing import Literal

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

EndCause = Literal[
    "window_ended",
    "released_by_holder",
    "cancelled",
    "evicted_by_operator",
    "preempted",
    "node_decommissioned",
    "bind_failed",
]

ReservationCondition = Literal["impaired", "waiting_for_release", "overrun", "spec_full", "maintenance_planned"]

ProvisionState = Literal["registered", "provisioning", "adopting", "adopted", "quarantined", "decommissioned"]
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
