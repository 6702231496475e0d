"""One session with a gateway, from Hello to its end.

The reader hands every event to `Session`, whose handlers never wait: a spec goes to the binder's one
place, a command to the executor's queue, an acknowledgement to the uplink. What goes up is taken from
the uplink by one task whenever there is credit. A second task keeps time: Welcome and the lanes have a
deadline, then a heartbeat and a PING go out at each interval, and two PINGs without an answer end the
session, because a connection that was cut without a word would otherwise look alive for minutes.

A session knows why it ended and when to dial again; `dialing` does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import structlog
import trio

from shared.http2.core import Core
from shared.http2.events import LaneAccepted, LaneClosed, LaneFull, Message, NotOpen, ProtocolViolation
from shared.transport import Wake, run_connection
from shared.wire import (
    INITIAL_CREDITS,
    LANES,
    PROTOCOL,
    Ack,
    Command,
    Credit,
    Drain,
    Heartbeat,
    Hello,
    Refuse,
    Spec,
    Welcome,
    WireError,
    costs_credit,
    decode_down,
    encode,
)

if TYPE_CHECKING:
    from random import Random

    from agent.binder import Binder
    from agent.commands import Executor
    from agent.config import Timing
    from agent.journal import Journal
    from agent.membership import Standing
    from agent.statements import Statements
    from agent.uplink import Uplink
    from agent.watch import Watch
    from shared.http2.events import Event
    from shared.wire import Down, Lane, Up

_log = structlog.get_logger()

EPOCH_HEADER = "bc-epoch"
PINGS_MISSED_MAX = 2
LATER_LANES: tuple[Lane, ...] = ("provision", "bulk")

EndReason = Literal["refused", "drained", "replaced", "silent", "late", "cut", "unreachable"]


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """Why a session ended, or never began.

    refused: by the gateway. drained: it is stopping. replaced: the node has a new certificate. silent:
    PINGs went unanswered. late: Welcome or the lanes did not come in time. cut: the connection ended.
    unreachable: there was none. `retry_after_s` is when the gateway wants to see us again.
    """

    reason: EndReason
    detail: str
    welcomed: bool = False
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What a session works with; all of it outlives the session."""

    standing: Standing
    journal: Journal
    statements: Statements
    uplink: Uplink
    binder: Binder
    executor: Executor
    watch: Watch
    timing: Timing
    rng: Random
    agent_version: str


class Session:
    """One session. `epoch` is 0 until Welcome."""

    def __init__(self, parts: SessionParts, authority: str) -> None:
        self.epoch = 0
        self._parts = parts
        self._core = Core(client_side=True, authority=authority)
        self._wake = Wake()
        self._welcomed = trio.Event()
        self._lanes_open = trio.Event()
        self._lanes_waited_for = set(LATER_LANES)
        self._heartbeat_s = 0.0
        self._told_sections = parts.uplink.section_hashes
        self._end: SessionEnd | None = None
        self._redial_at: float | None = None  # set while draining
        self._scope = trio.CancelScope()

    async def run(self, stream: trio.abc.Stream, opening_deadline: float, on_welcome: trio.Event) -> SessionEnd:
        """Run until the session has ended; `on_welcome` is set when it is open.

        Args:
            stream: authenticated; it is closed.
            opening_deadline: trio's time by which Welcome has to be here.
            on_welcome: of the caller.
        """
        self._say_hello()
        detail = ""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send)
                    nursery.start_soon(self._keep_time, opening_deadline, on_welcome)
                    ended = await run_connection(stream, self._core, self._on_event)
                    detail = f"{ended.reason} {ended.detail}".rstrip()
                    nursery.cancel_scope.cancel("the connection has ended")
        finally:
            self._parts.uplink.end_session()
        end = self._end or SessionEnd("cut", detail)
        pause_s = end.retry_after_s
        if self._redial_at is not None:
            pause_s = max(0.0, self._redial_at - trio.current_time())
        return SessionEnd(end.reason, end.detail, welcomed=self.epoch > 0, retry_after_s=pause_s)

    def leave(self) -> None:
        """End the session in order: the node has another certificate."""
        self._end = self._end or SessionEnd("replaced", "the certificate was renewed")
        self._core.go_away()

    def _abandon(self, end: SessionEnd) -> None:
        """End at once: the peer does not listen, or has said all it has to say. The first reason counts."""
        self._end = self._end or end
        self._scope.cancel(end.detail)

    # --- opening -----------------------------------------------------------------------------

    def _say_hello(self) -> None:
        parts = self._parts
        incarnation, generation = parts.binder.applied
        self._core.open_lane("control")
        for lane in LANES:
            self._core.grant_receive_credit(lane, INITIAL_CREDITS[lane])
        self._send_free(
            Hello(
                protocol=PROTOCOL,
                node_id=parts.standing.node_id,
                boot_id=parts.watch.boot_id,
                agent_version=parts.agent_version,
                journal_id=parts.journal.journal_id,
                journal_high=parts.journal.high_water,
                sections=self._told_sections,
                observed_incarnation=incarnation,
                observed_generation=generation,
                credits=INITIAL_CREDITS,
            )
        )

    def _on_welcome(self, welcome: Welcome) -> None:
        if self.epoch or welcome.epoch <= 0 or welcome.heartbeat_s <= 0:
            raise ProtocolViolation("message", "Welcome")
        self.epoch = welcome.epoch
        self._heartbeat_s = welcome.heartbeat_s
        for lane in LANES:
            self._core.grant_send_credit(lane, welcome.credits.get(lane, 0))
        self._parts.statements.epoch = welcome.epoch
        self._parts.executor.forget_waiting()
        self._parts.binder.say_again()
        self._parts.uplink.begin_session(welcome.wanted_sections, self._told_sections, self._wake.set)
        for lane in LATER_LANES:
            self._core.open_lane(lane, {EPOCH_HEADER: str(welcome.epoch)})
        self._welcomed.set()

    # --- what comes down ---------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case Message():
                self._on_message(event)
            case LaneAccepted(lane=lane):
                self._lanes_waited_for.discard(lane)
                if not self._lanes_waited_for:
                    self._lanes_open.set()
            case LaneClosed(lane=lane, grpc_status=status, detail=detail):
                self._abandon(SessionEnd("cut", f"lane {lane} was closed ({status}): {detail}"))
            case _:
                pass  # PeerLeft, which the connection reports as its end

    def _on_message(self, received: Message) -> None:
        try:
            message = decode_down(received.body)
        except WireError as exc:
            raise ProtocolViolation("message", str(exc)) from exc
        if costs_credit(message):
            self._core.spend_credit(received)
        if not self.epoch and not isinstance(message, Welcome | Refuse):
            raise ProtocolViolation("message", f"{type(message).__name__} before Welcome")
        if isinstance(message, Command) and self._redial_at is None:
            # the credit goes back when the command has left the executor's queue
            self._parts.executor.submit(message, received.lane, partial(self._release, received))
            return
        self._take(message)
        self._release(received)

    def _take(self, message: Down) -> None:
        match message:
            case Welcome():
                self._on_welcome(message)
            case Spec():
                self._parts.binder.offer(message)
            case Ack(keys=keys):
                self._parts.uplink.acknowledge(keys)
                self._wake.set()
            case Credit(grants=grants):
                for lane, credit in grants.items():
                    self._core.grant_send_credit(lane, credit)
                self._wake.set()
            case Drain(delay_s=delay_s, deadline_s=deadline_s):
                self._drain(delay_s, deadline_s)
            case Refuse(code=code, message=text, retry_after_ms=pause_ms):
                # one that names no pause leaves it to us
                pause_s = pause_ms / 1000 if pause_ms > 0 else None
                self._abandon(SessionEnd("refused", f"{code}: {text}", retry_after_s=pause_s))
            case Command():
                pass  # the gateway is leaving: whoever comes next will bring it again

    def _drain(self, delay_s: float, deadline_s: float) -> None:
        now = trio.current_time()
        self._end = self._end or SessionEnd("drained", "the gateway is stopping")
        self._redial_at = now + max(0.0, delay_s)
        self._scope.deadline = min(self._scope.deadline, now + max(0.0, deadline_s))
        self._wake.set()

    def _release(self, received: Message) -> None:
        self._core.release(received)
        if self._core.is_open("control") and (grant := self._core.consumed(received.lane)):
            self._send_free(Credit(grants={received.lane: grant}))

    # --- what goes up ------------------------------------------------------------------------

    def _send_free(self, message: Up) -> None:
        try:
            self._core.send("control", encode(message), costs_credit=False)
        except LaneFull:
            self._abandon(SessionEnd("silent", "the gateway does not read"))
        except NotOpen:
            return  # the session is ending, and its reason is known

    async def _send(self) -> None:
        """Send what there is credit for, until cancelled."""
        while True:
            await self._wake.wait()
            timing, uplink = self._parts.timing, self._parts.uplink
            while self._core.can_send("control"):
                message = uplink.take_control(
                    trio.current_time(), resend_s=timing.resend_s, status_every_s=timing.status_every_s
                )
                if message is None:
                    break
                self._core.send("control", encode(message), costs_credit=True)
            while self._core.can_send("bulk") and (chunk := uplink.take_bulk()) is not None:
                self._core.send("bulk", encode(chunk), costs_credit=True)
            if self._redial_at is not None and uplink.is_quiet:
                self._core.go_away()

    async def _keep_time(self, opening_deadline: float, on_welcome: trio.Event) -> None:
        with trio.move_on_at(opening_deadline):
            await self._welcomed.wait()
        if not self._welcomed.is_set():
            self._abandon(SessionEnd("late", "no Welcome came in time"))
            return
        on_welcome.set()
        with trio.move_on_after(self._parts.timing.lanes_s):
            await self._lanes_open.wait()
        if not self._lanes_open.is_set():
            self._abandon(SessionEnd("late", "the lanes were not opened in time"))
            return
        sequence = 0
        # A fleet that came back together need not beat together.
        await trio.sleep(self._parts.rng.uniform(0, self._heartbeat_s))
        while True:
            if self._core.pings_unanswered >= PINGS_MISSED_MAX:
                self._abandon(SessionEnd("silent", f"{PINGS_MISSED_MAX} PINGs were not answered"))
                return
            sequence += 1
            self._send_free(Heartbeat(sequence=sequence))
            self._core.ping()
            self._wake.set()  # reports and the status may be due again
            await trio.sleep(self._heartbeat_s)
