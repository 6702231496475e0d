"""Turns what the parts know into named conditions: pure, and the only place where the names are given.

A condition is something that somebody may have to act on, and its text says what with. `list_conditions`
is what the control plane is told; `list_local_conditions` adds what only a person on the machine can be
told, because the session is what is missing.

Names: driver.absent, driver.not_loaded, driver.reboot_needed, driver.hung, driver.failed,
machine.unreadable, gpu.missing, gpu.fault, gpu.worn_out, gpu.reset_needed, gpu.fabric,
assignment.failed, journal.failed, spec.refused, certificate.expiring, certificate.expired,
certificate.refused, session.down, session.refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.binder import JOURNAL
from shared.identity import RENEW_AFTER_LIFE
from shared.status import CONDITIONS_MAX, Condition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from agent.binder import Failure
    from agent.dialing import Connection
    from agent.renewal import Problem
    from shared.inventory import DriverFacts, DriverState, HealthFacts, Inventory
    from shared.status import Severity

TEXT_CHARS_MAX = 512
SESSION_REFUSED = "session.refused"
# Between the due date of a renewal and the end is a third of the life; half of that gone is a problem.
RENEWAL_LATE_LIFE = (1 + RENEW_AFTER_LIFE) / 2

_DRIVER_FIXES: dict[DriverState, str] = {
    "absent": "there are GPUs and no NVIDIA driver; install it",
    "not_loaded": "the NVIDIA kernel module is not loaded; run: modprobe nvidia",
    "reboot_needed": "the driver's library and its kernel module are of different versions; reboot the node",
    "hung": "the NVIDIA driver does not answer; reboot the node",
    "failed": "the NVIDIA driver fails",
}


@dataclass(frozen=True, slots=True)
class Vitals:
    """What is known at one moment."""

    now: datetime
    inventory: Inventory | None
    probe_problem: str
    failures: Sequence[Failure]
    spec_refused: str
    certificate_begin: datetime
    certificate_end: datetime
    renewal_problem: Problem
    renewal_detail: str


def list_conditions(vitals: Vitals) -> tuple[Condition, ...]:
    """Return what is wrong, the worst first, at most `CONDITIONS_MAX`."""
    found = [*_look_at_machine(vitals), *_look_at_assignments(vitals), *_look_at_certificate(vitals)]
    return tuple(sorted(found, key=_rank)[:CONDITIONS_MAX])


def list_local_conditions(vitals: Vitals, connection: Connection) -> tuple[Condition, ...]:
    """Return the same with what cannot be reported."""
    return tuple(sorted([*_look_at_session(connection), *list_conditions(vitals)], key=_rank))


def list_machine_conditions(inventory: Inventory) -> tuple[Condition, ...]:
    """Return what is wrong with the machine alone."""
    return tuple(sorted(_look_at_hardware(inventory), key=_rank))


def _rank(condition: Condition) -> tuple[int, str, str]:
    return ("critical", "warning", "info").index(condition.severity), condition.name, condition.subject


def _condition(name: str, severity: Severity, text: str, subject: str = "") -> Condition:
    return Condition(name=name, severity=severity, text=text[:TEXT_CHARS_MAX], subject=subject)


def _look_at_machine(vitals: Vitals) -> Iterator[Condition]:
    if vitals.probe_problem:
        yield _condition("machine.unreadable", "critical", vitals.probe_problem)
    if vitals.inventory is not None:
        yield from _look_at_hardware(vitals.inventory)


def _look_at_hardware(inventory: Inventory) -> Iterator[Condition]:
    driver = inventory.driver
    if driver.state != "ok":
        yield from _look_at_driver(driver)
    else:
        there = {gpu.pci_bus_id for gpu in inventory.gpus}
        for address in driver.pci_gpus:
            if address not in there:
                yield _condition("gpu.missing", "critical", "on the PCI bus, and the driver does not see it", address)
    yield from _look_at_gpus(inventory.health)


def _look_at_driver(driver: DriverFacts) -> Iterator[Condition]:
    if driver.state == "absent" and not driver.pci_gpus:
        return  # a machine without GPUs needs no driver
    text = f"{_DRIVER_FIXES.get(driver.state, driver.state)} ({driver.detail})"
    yield _condition(f"driver.{driver.state}", "critical", text)


def _look_at_gpus(health: HealthFacts) -> Iterator[Condition]:
    for fault in health.faults:
        yield _condition("gpu.fault", "critical", f"{fault.code}: {fault.detail}", f"index {fault.index}")
    for gpu in health.gpus:
        if gpu.remap_failed:
            yield _condition("gpu.worn_out", "critical", "no spare memory row is left; replace the board", gpu.uuid)
        asked = gpu.recovery_action not in (None, "none")
        if asked or gpu.remap_pending or gpu.retirement_pending:
            why = f"the driver asks for {gpu.recovery_action}" if asked else "bad memory waits for a reset"
            yield _condition("gpu.reset_needed", "warning", why, gpu.uuid)
        if gpu.fabric_faults:
            yield _condition("gpu.fabric", "warning", ", ".join(gpu.fabric_faults), gpu.uuid)


def _look_at_assignments(vitals: Vitals) -> Iterator[Condition]:
    for failure in vitals.failures:
        text = f"{failure.code}: {failure.detail} (tried {failure.attempts} times)"
        name = "journal.failed" if failure.subject == JOURNAL else "assignment.failed"
        yield _condition(name, "critical", text, failure.subject)
    if vitals.spec_refused:
        text = f"the control plane's last NodeSpec is not believed: {vitals.spec_refused}"
        yield _condition("spec.refused", "critical", text)


def _look_at_certificate(vitals: Vitals) -> Iterator[Condition]:
    end = f"{vitals.certificate_end:%Y-%m-%d %H:%M} UTC"
    life = vitals.certificate_end - vitals.certificate_begin
    if vitals.now >= vitals.certificate_end:
        yield _condition("certificate.expired", "critical", f"it ended {end}; {_renewal_text(vitals)}")
    elif vitals.now >= vitals.certificate_begin + life * RENEWAL_LATE_LIFE:
        yield _condition("certificate.expiring", "warning", f"it ends {end}; {_renewal_text(vitals)}")
    if vitals.renewal_problem == "refused":
        yield _condition("certificate.refused", "critical", vitals.renewal_detail)


def _renewal_text(vitals: Vitals) -> str:
    if not vitals.renewal_problem:
        return "a renewal is due"
    return f"its renewal failed ({vitals.renewal_problem}): {vitals.renewal_detail}"


def _look_at_session(connection: Connection) -> Iterator[Condition]:
    if connection.connected:
        return
    end = connection.last_end
    if end is None:
        yield _condition("session.down", "info", "no session yet")
    elif end.reason == "refused":
        yield _condition(SESSION_REFUSED, "critical", end.detail)
    else:
        yield _condition("session.down", "warning", f"{end.reason}: {end.detail}")
