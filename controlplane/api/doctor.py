"""The checks of `bcctl doctor`: each is a name, what was found, and what to do about it.

Names are stable, for scripts and alerts. The statements are in `controlplane.db.checks`; here is what
counts as wrong and what it means to an operator. What nodes and workers mend by themselves within seconds
is no finding; each limit says what it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from controlplane.db import checks, workers
from controlplane.db.migrate import required_version
from controlplane.db.tx import TransactionTooLong
from controlplane.model.queues import SHARDED_ROLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.db.checks import Found
    from controlplane.db.tx import Tx

# A node that is there signs within seconds; one that is away may be long gone.
HOLD_STUCK_S = 15 * 60.0
# A gateway's lease is 20 s, and its nodes count as connected for 40 s more.
GATEWAY_GRACE_S = 90.0
# Due keys are claimed within the second; a worker that died is replaced within its leases' 15 s.
WORK_LATE_S = 60.0
# The pauses between five failures add up to more than a passing fault of the database lasts.
WORK_ATTEMPTS = 5
WORKER_SILENT_S = 30.0
# Certificates and windows are checked by both clocks; leases by the database's alone.
CLOCK_SKEW_S = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One result. `fix` is empty when it is in order."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A check that is in order when nothing is found."""

    name: str
    find: Callable[[Tx], Found]
    good: str
    fix: str


_REPORT = "this must not happen: keep the database as it is, and report it with the output of doctor"
_TOO_LONG = "ask again when the database has less to do; after it was filled or restored, run `vacuum analyze` in it"
_RULES = (
    _Rule("ledger.bookings.overlap", checks.find_overlapping_bookings, "no two bookings overlap", _REPORT),
    _Rule("ledger.holds.overlap", checks.find_overlapping_holds, "no two holds overlap", _REPORT),
    _Rule(
        "ledger.active.evidence",
        checks.find_active_without_evidence,
        "every active reservation has its nodes' signatures",
        _REPORT,
    ),
    _Rule("ledger.bookings.missing", checks.find_bookings_missing, "every placement is booked", _REPORT),
    _Rule("ledger.orphans", checks.find_orphans, "every booking and hold belongs to a reservation", _REPORT),
    _Rule(
        "ledger.orphans.blocking",
        checks.find_blocking_orphans,
        "no node holds what the database does not know",
        "look on the node what runs there and end it",
    ),
    _Rule(
        "ledger.holds.stuck",
        partial(checks.find_stuck_holds, older_than_s=HOLD_STUCK_S),
        "every hold that was told to end has ended",
        "bring the node back; if the machine will not come back, `bcctl allocations force-release`, which is recorded",
    ),
    _Rule("capacity.device_counts.drift", checks.find_device_count_drift, "counts of GPUs equal the devices", _REPORT),
    _Rule("capacity.free.drift", checks.find_free_drift, "counts of free GPUs equal what no hold touches", _REPORT),
    _Rule("capacity.parts.drift", checks.find_part_drift, "counts of parts equal the shared GPUs", _REPORT),
    _Rule("capacity.mig.drift", checks.find_mig_drift, "every MIG instance for sale is on its GPU", _REPORT),
    _Rule("capacity.held.drift", checks.find_held_drift, "held counters equal the holds", _REPORT),
    _Rule("quota.used.drift", checks.find_quota_drift, "quotas equal their reservations", _REPORT),
    _Rule("quota.hours.drift", checks.find_quota_hours_drift, "GPU-hours equal what reservations use", _REPORT),
    _Rule("quota.claims.drift", checks.find_quota_claims_drift, "quotas count the owners that wait", _REPORT),
    _Rule(
        "leases.gateways",
        partial(checks.find_lapsed_gateways, grace_s=GATEWAY_GRACE_S),
        "every connected node's gateway holds its lease",
        "see whether that gateway runs; its nodes go to another one, or are unreachable soon",
    ),
    _Rule(
        "queue.late",
        partial(checks.find_late_work, later_than_s=WORK_LATE_S),
        "work is done when it is due",
        "see whether workers run and how loaded the database is; more `bcctl serve --roles controllers` help",
    ),
    _Rule(
        "queue.failing",
        partial(checks.find_failing_work, attempts=WORK_ATTEMPTS),
        "no work keeps failing",
        "the workers' log has the errors; they are tried again by themselves once the cause is gone",
    ),
)


def run_checks(tx: Tx, *, clock_s: float) -> list[Check]:
    """Run every check, each as long as a statement may run and all as long as a transaction.

    `tx` is for reading (`run_read`), so that a statement that takes too long leaves it usable. `clock_s` is how far the
    server's clock is ahead of the database's, in seconds.
    """
    return [
        _check_version(tx),
        _check_clock(clock_s),
        *(_check_workers(tx, role) for role in SHARDED_ROLES),
        *(_run(tx, rule) for rule in _RULES),
    ]


def _run(tx: Tx, rule: _Rule) -> Check:
    try:
        found = rule.find(tx)
    except TransactionTooLong:
        # the others, in what is left of the time, are worth more than no answer
        return Check(rule.name, ok=False, detail="not checked: there was no time for it", fix=_TOO_LONG)
    return _apply(rule, found)


def _apply(rule: _Rule, found: Found) -> Check:
    if not found.count:
        return Check(rule.name, ok=True, detail=rule.good)
    more = found.count - len(found.examples)
    detail = f"{found.count}: {'; '.join(found.examples)}" + (f"; and {more} more" if more else "")
    return Check(rule.name, ok=False, detail=detail, fix=rule.fix)


def _check_version(tx: Tx) -> Check:
    has, needs = checks.load_version(tx), required_version()
    if has < needs:
        return Check("database.migrations", ok=False, detail=f"at {has}, needs {needs}", fix="run `bcctl db migrate`")
    newer = f", newer than this server's {needs}" if has > needs else ""
    return Check("database.migrations", ok=True, detail=f"at {has}{newer}")


def _check_clock(clock_s: float) -> Check:
    detail = f"the server's clock is {abs(clock_s):.1f} s {'ahead of' if clock_s >= 0 else 'behind'} the database's"
    if abs(clock_s) > CLOCK_SKEW_S:
        return Check("database.clock", ok=False, detail=detail, fix="synchronise both machines' clocks (chrony, ntpd)")
    return Check("database.clock", ok=True, detail=detail)


def _check_workers(tx: Tx, role: str) -> Check:
    alive = len(workers.live_workers(tx, role, WORKER_SILENT_S))
    if alive:
        return Check(f"workers.{role}", ok=True, detail=f"{alive} alive")
    return Check(f"workers.{role}", ok=False, detail="none is alive", fix=f"start one: `bcctl serve --roles {role}`")
