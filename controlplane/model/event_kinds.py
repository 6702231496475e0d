"""The kinds of events that there are: `noun.verb`.

A closed list, so that who asks for a kind that there is not is told so, and waits for nothing. What publishes takes
its verb from here, by type; a new kind is written down here first.
"""

from __future__ import annotations

from typing import Final, Literal, NewType, get_args

from controlplane.model.states import CommandState, ReservationState

ReservationVerb = Literal[
    ReservationState,
    "condition",
    "extended",
    "maintenance_planned",
    "moved",
    "node_rebooted",
    "prioritized",
    "replacement_failed",
    "shrunk",
]
NodeVerb = Literal[
    "adopted",
    "adopting",
    "condition",
    "connected",
    "cordoned",
    "decommissioned",
    "device_shared",
    "drained",
    "draining",
    "labelled",
    "maintenance_ended",
    "maintenance_started",
    "quarantined",
    "revoked",
    "uncordoned",
    "undrained",
    "updated",
]
# Those that are published by their whole names.
OtherKind = Literal[
    "apiKey.created",
    "apiKey.revoked",
    "joinToken.created",
    "joinToken.revoked",
    "node.joined",
    "node.unreachable",
    "offering.created",
    "offering.deleted",
    "offering.updated",
    "pool.created",
    "pool.deleted",
    "pool.updated",
    "project.created",
    "project.deleted",
    "project.updated",
    "quota.created",
    "quota.deleted",
    "quota.updated",
    "reservation.preempting",
    "series.cancelled",
    "series.created",
    "site.created",
    "site.deleted",
    "site.updated",
    "tenant.created",
    "tenant.deleted",
    "tenant.updated",
]

# One that was put together from a verb of these.
Kind = NewType("Kind", str)


def of_reservation(verb: ReservationVerb) -> Kind:
    return Kind(f"reservation.{verb}")


def of_node(verb: NodeVerb) -> Kind:
    return Kind(f"node.{verb}")


def of_command(state: CommandState) -> Kind:
    return Kind(f"command.{state}")


KINDS: Final[frozenset[str]] = frozenset(
    {
        *map(of_reservation, get_args(ReservationVerb)),
        *map(of_node, get_args(NodeVerb)),
        *map(of_command, get_args(CommandState)),
        *get_args(OtherKind),
    }
)
NOUNS: Final = tuple(sorted({kind.partition(".")[0] for kind in KINDS}))
# What a reader may ask for: a kind, or all kinds of one noun.
ASKABLE: Final = KINDS.union(NOUNS)
