"""Runs commands: each at most once, whatever is repeated, cut or lost.

A command is an envelope that an intent key signed. Before it runs it is in the journal, and before its
end is told that is there too, in one transaction with the report. So a repeat is answered from the
journal; one that was cut by a crash is `indeterminate` and never run again; and a command that was
bound to another journal (ours was lost, so nobody knows whether it ran) is refused.

Each lane has a queue and one worker: commands of one lane run in order, and a long one on `bulk` does
not keep a short one on `control` waiting. A queue holds what the lane's credit allows; the credit goes
back when the command leaves the queue. What still waits when a new session opens is dropped: it has not
begun, so the new session's gateway, which alone has the right to it now, brings it again.

What a command does is a `Handler`, by kind; an unknown kind is `unsupported`. A handler's driver may
fail, and that is the command's failure. Anything else that it raises is a bug and ends the process: the
journal then has the command as begun, so the restart reports it `indeterminate` and does not repeat it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog
import trio

from agent.drivers.base import DriverError
from agent.journal import JournalFull
from agent.statements import Outcome
from shared.signing import BadSignature, Context
from shared.wire import (
    COMMAND_OUTPUT_BYTES_MAX,
    INITIAL_CREDITS,
    LANES,
    CommandPayload,
    Lane,
    WireError,
    decode_payload,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.journal import CommandRecord, Journal
    from agent.membership import Standing
    from agent.statements import Statements
    from agent.uplink import Uplink
    from shared.clocks import Clock
    from shared.wire import Command

_log = structlog.get_logger()

# A deadline may be a week away, and a lane must not be shut for so long.
RUN_S_MAX = 900.0

STALE_JOURNAL = "STALE_JOURNAL"


class Handler(Protocol):
    """Does what one kind of command asks for. `arguments` is JSON, from the control plane.

    Raises:
        BadArguments: they are not what this kind takes.
        DriverError: the machine did not do it.
    """

    async def __call__(self, arguments: bytes, /) -> Outcome: ...


class BadArguments(Exception):
    """The command's arguments are not what its kind takes; the message names the field."""


@dataclass(slots=True)
class _Queued:
    payload: CommandPayload
    left_queue: Callable[[], None]


class Executor:
    """Takes commands and runs them. Made once; `run` does the work."""

    def __init__(
        self,
        *,
        standing: Standing,
        journal: Journal,
        statements: Statements,
        uplink: Uplink,
        handlers: Mapping[str, Handler],
        clock: Clock,
    ) -> None:
        self._standing = standing
        self._journal = journal
        self._statements = statements
        self._uplink = uplink
        self._handlers = handlers
        self._clock = clock
        self._under_way: set[str] = set()
        self._closed = False
        self._idle = trio.Event()  # set when closed and nothing is under way any more
        # As much as the credit of one session.
        self._queues = {lane: trio.open_memory_channel[_Queued](INITIAL_CREDITS[lane]) for lane in LANES}
        self.on_end: Callable[[str, Outcome], None] = lambda _kind, _outcome: None

    def submit(self, command: Command, lane: Lane, left_queue: Callable[[], None]) -> None:
        """Take a command that has come on a lane.

        `left_queue` is called once, now or later, when the command no longer waits; it must not wait.
        """
        payload = None if self._closed else self._open(command)
        if payload is None or payload.command_id in self._under_way:
            left_queue()
            return
        send, _ = self._queues[lane]
        ahead = send.statistics().current_buffer_used
        send.send_nowait(_Queued(payload, left_queue))  # the lane's credit is no larger than its queue
        self._under_way.add(payload.command_id)
        if ahead:
            self._tell(payload.command_id, Outcome(state="accepted"))

    def forget_waiting(self) -> None:
        """A new session is open: what has not begun is its to bring."""
        for _, receive in self._queues.values():
            while receive.statistics().current_buffer_used:
                queued = receive.receive_nowait()
                queued.left_queue()
                self._under_way.discard(queued.payload.command_id)

    def _open(self, command: Command) -> CommandPayload | None:
        try:
            data = self._standing.intent_verifier().open(command.envelope, Context.INTENT_COMMAND)
            payload = decode_payload(CommandPayload, data)
        except (BadSignature, WireError) as exc:
            reason = str(exc)
        else:
            if payload.node_id == self._standing.node_id and payload.command_id == command.command_id:
                return payload
            reason = f"it is {payload.command_id} for {payload.node_id}"
        # Nobody whose word counts has asked, so nobody is answered.
        _log.warning("command.refused", command=command.command_id, reason=reason)
        return None

    async def report_cut(self) -> None:
        """Tell which commands were cut by the end of an earlier run of the agent; for start-up."""
        for record in await self._journal.list_commands():
            if record.state == "indeterminate":
                report = self._statements.command(record.command_id, self._journal.journal_id, _told(record))
                await self._journal.put_report(report)
                self._uplink.put_report(report, durable=True)

    async def close(self) -> None:
        """Begin no more commands, and wait until those that have begun are at their end."""
        self._closed = True
        self._note_idle()
        await self._idle.wait()

    def _note_idle(self) -> None:
        if self._closed and not self._under_way:
            self._idle.set()

    async def run(self) -> None:
        """Run commands until cancelled, one of each lane at a time."""
        async with trio.open_nursery() as nursery:
            for lane in LANES:
                nursery.start_soon(self._work, lane)

    async def _work(self, lane: Lane) -> None:
        _, receive = self._queues[lane]
        async for queued in receive:
            queued.left_queue()
            try:
                if not self._closed:  # what has not begun by then comes again to the next run of the agent
                    await self._execute(queued.payload)
            except (sqlite3.Error, JournalFull) as exc:
                # Not on record: if it has not run it comes again, and if it has, a restart finds it cut.
                _log.warning("command.not_recorded", command=queued.payload.command_id, reason=str(exc))
            finally:
                self._under_way.discard(queued.payload.command_id)
                self._note_idle()

    async def _execute(self, payload: CommandPayload) -> None:
        known = await self._journal.begin_command(payload.command_id, payload.kind)
        if known is not None:
            _log.info("command.repeated", command=payload.command_id, state=known.state)
            report = self._statements.command(payload.command_id, self._journal.journal_id, _told(known))
            self._uplink.put_report(report)
            return
        outcome = self._find_refusal(payload) or await self._run_handler(payload)
        _log.info("command.ended", command=payload.command_id, kind=payload.kind, state=outcome.state)
        report = self._statements.command(payload.command_id, self._journal.journal_id, outcome)
        await self._journal.finish_command(payload.command_id, msgspec.msgpack.encode(outcome), report)
        self._uplink.put_report(report, durable=True)
        self.on_end(payload.kind, outcome)

    def _find_refusal(self, payload: CommandPayload) -> Outcome | None:
        """Return why the command is not run. It is an end like any other, and recorded like one."""
        if payload.journal_id not in ("", self._journal.journal_id):
            detail = f"it is for journal {payload.journal_id}; this node has {self._journal.journal_id}"
            return Outcome(state="failed", code=STALE_JOURNAL, detail=detail)
        if payload.kind not in self._handlers:
            return Outcome(state="unsupported", detail=f"this agent knows no {payload.kind}")
        if self._clock.now() >= payload.deadline:
            return Outcome(state="expired", detail=f"the deadline was {payload.deadline.isoformat()}")
        return None

    async def _run_handler(self, payload: CommandPayload) -> Outcome:
        self._tell(payload.command_id, Outcome(state="running"))
        left_s = (payload.deadline - self._clock.now()).total_seconds()
        limit_s = min(left_s, RUN_S_MAX)
        try:
            with trio.move_on_after(limit_s):
                return _bounded(await self._handlers[payload.kind](payload.arguments))
        except BadArguments as exc:
            return Outcome(state="failed", code="BAD_ARGUMENTS", detail=str(exc))
        except DriverError as exc:
            return Outcome(state="failed", code="DRIVER_FAILED", detail=str(exc))
        return Outcome(state="failed", code="TIMED_OUT", detail=f"it was stopped after {limit_s:.0f} s")

    def _tell(self, command_id: str, outcome: Outcome) -> None:
        """Say how far it has come; worth nothing after a restart, so the journal does not have it."""
        self._uplink.put_report(self._statements.command(command_id, self._journal.journal_id, outcome))


def _told(record: CommandRecord) -> Outcome:
    """Return how a command ended that the journal knows."""
    if record.result is None:
        return Outcome(state="indeterminate", detail="the agent ended while it ran")
    return msgspec.msgpack.decode(record.result, type=Outcome)


def _bounded(outcome: Outcome) -> Outcome:
    if len(outcome.output) <= COMMAND_OUTPUT_BYTES_MAX:
        return outcome
    detail = f"the output has {len(outcome.output)} bytes of at most {COMMAND_OUTPUT_BYTES_MAX}"
    return Outcome(state="failed", code="OUTPUT_TOO_LARGE", detail=detail)
