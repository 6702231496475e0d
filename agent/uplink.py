"""What waits to be told to the control plane, whichever session will carry it.

Four kinds of things, each with a bound of its own:

* *reports*, signed (`statements`): one for each subject, the newest; sent in every session until an
  Ack names its key. What cannot be said again from other knowledge (how a command ended) is also in
  the journal; what is held and what was released is signed anew after each Welcome instead.
* *the spec that was applied*: the newest.
* *the status*: the newest; sent when its hash is not the one that was sent, and now and then anyway.
* *the inventory*: a section whose hash is not the one that the control plane has. A section is sent
  from one snapshot, chunk by chunk, and again if it has changed meanwhile.

The session takes what it can send and says what was acknowledged; everybody else puts things in.
Nothing here waits, except for `run_acknowledgements`, which tells the journal.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from agent.journal import REPORTS_MAX
from shared.inventory import SECTIONS, hash_section
from shared.transport import Wake
from shared.wire import CHUNK_BYTES, SECTION_BYTES_MAX, InventorySection, Report, SpecApplied, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from agent.journal import Journal, StoredReport
    from shared.inventory import Section
    from shared.wire import Up

_log = structlog.get_logger()


@dataclass(slots=True)
class _Waiting:
    report: StoredReport
    durable: bool
    sent_at: float | None = None


def _nothing() -> None:
    """What wakes nobody while there is no session."""


class Uplink:
    """Made once; survives sessions."""

    def __init__(self, journal: Journal, stored: Sequence[StoredReport]) -> None:
        """`stored` are the journal's reports: what an earlier run of the agent did not get acknowledged."""
        self._journal = journal
        self._reports = {report.slot: _Waiting(report, durable=True) for report in stored}
        self._acknowledged: list[str] = []
        self._to_forget = Wake()
        self._applied: SpecApplied | None = None
        self._status: Status | None = None
        self._status_sent: tuple[str, float] | None = None  # in this session: its hash, and when
        self._bodies: Mapping[Section, bytes] = {}
        self._hashes: dict[Section, str] = {}
        self._known: dict[Section, str] = {}  # what the control plane has
        self._chunks: list[InventorySection] = []  # of one section, last chunk first
        self._wake: Callable[[], None] = _nothing

    # --- what the parts say ------------------------------------------------------------------

    def put_report(self, report: StoredReport, *, durable: bool = False) -> None:
        """Tell this, in place of what is still to be told of the same slot; `durable` if the journal has it."""
        self._reports.pop(report.slot, None)
        self._reports[report.slot] = _Waiting(report, durable)
        if len(self._reports) > REPORTS_MAX:
            oldest = next(iter(self._reports))
            del self._reports[oldest]
            _log.warning("uplink.report_dropped", slot=oldest, reports_max=REPORTS_MAX)
        self._wake()

    def withdraw(self, slots: Iterable[str]) -> None:
        """Nothing is to be told of these any more."""
        for slot in slots:
            self._reports.pop(slot, None)

    def put_applied(self, applied: SpecApplied) -> None:
        self._applied = applied
        self._wake()

    def put_status(self, status: Status) -> None:
        self._status = status
        self._wake()

    def put_inventory(self, bodies: Mapping[Section, bytes]) -> None:
        """This is the machine now. Sections that are too large to be sent are left out."""
        self._bodies = {name: body for name, body in bodies.items() if len(body) <= SECTION_BYTES_MAX}
        self._hashes = {name: hash_section(body) for name, body in self._bodies.items()}
        self._wake()

    # --- what the session asks ---------------------------------------------------------------

    @property
    def section_hashes(self) -> dict[str, str]:
        """For Hello: what the control plane should have."""
        return {str(name): digest for name, digest in self._hashes.items()}

    @property
    def reports_waiting(self) -> int:
        """Reports that are not acknowledged."""
        return len(self._reports)

    @property
    def is_quiet(self) -> bool:
        """Everything that was put in has been sent and acknowledged."""
        return not self._reports and self._applied is None

    def begin_session(self, wanted: Collection[str], told: Mapping[str, str], wake: Callable[[], None]) -> None:
        """A session is open: everything unacknowledged goes out again.

        Args:
            wanted: the sections that Welcome asks for.
            told: the hashes in Hello; what Welcome does not want of them is known.
            wake: called whenever there may be something to send; it must not wait.
        """
        for waiting in self._reports.values():
            waiting.sent_at = None
        self._status_sent = None
        self._chunks.clear()
        self._known = {name: told[name] for name in SECTIONS if name in told and name not in wanted}
        self._wake = wake
        wake()

    def end_session(self) -> None:
        self._wake = _nothing

    def take_control(self, now: float, *, resend_s: float, status_every_s: float) -> Up | None:
        """Return the next message for the control lane, or None; it counts as sent at `now`."""
        if self._applied is not None:
            applied, self._applied = self._applied, None
            return applied
        for waiting in self._reports.values():
            if waiting.sent_at is None or now - waiting.sent_at >= resend_s:
                waiting.sent_at = now
                report = waiting.report
                return Report(kind=report.kind, key=report.key, envelope=report.envelope)
        status = self._status
        if status is not None and (
            self._status_sent is None
            or self._status_sent[0] != status.hash
            or now - self._status_sent[1] >= status_every_s
        ):
            self._status_sent = (status.hash, now)
            return status
        return None

    def take_bulk(self) -> InventorySection | None:
        """Return the next message for the bulk lane, or None; it counts as sent."""
        if not self._chunks:
            stale = self._find_stale()
            if stale is None:
                return None
            self._known[stale] = self._hashes[stale]
            self._chunks = _cut(stale, self._hashes[stale], self._bodies[stale])
        return self._chunks.pop()

    def _find_stale(self) -> Section | None:
        """Return a section that the control plane does not have as it is now."""
        for name in SECTIONS:
            if name in self._hashes and self._hashes[name] != self._known.get(name):
                return name
        return None

    def acknowledge(self, keys: Iterable[str]) -> None:
        """The control plane has committed these reports."""
        slots = {waiting.report.key: slot for slot, waiting in self._reports.items()}
        for key in keys:
            slot = slots.get(key)
            if slot is None:
                continue  # replaced since by a newer one about the same subject
            if self._reports.pop(slot).durable:
                self._acknowledged.append(key)
                self._to_forget.set()

    async def run_acknowledgements(self) -> None:
        """Take what was acknowledged out of the journal, until cancelled; several at a time when it is slow."""
        while True:
            await self._to_forget.wait()
            keys, self._acknowledged = self._acknowledged, []
            try:
                await self._journal.drop_reports(keys)
            except sqlite3.Error as exc:
                # They stay on record, are told again after the next start, and acknowledged again.
                _log.warning("uplink.not_forgotten", keys=keys, reason=str(exc))


def _cut(section: Section, digest: str, body: bytes) -> list[InventorySection]:
    """Cut a section into messages, last one first."""
    count = max(1, -(-len(body) // CHUNK_BYTES))
    return [
        InventorySection(
            section=section,
            hash=digest,
            index=index,
            count=count,
            body=body[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES],
        )
        for index in reversed(range(count))
    ]
