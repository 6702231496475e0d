"""One connection of an agent, and the session it may become. No waiting, no tasks: events in, messages out.

    connected   a stranger may post a join or a renewal; a node may open control and say Hello
    pending     the Hello waits for its transaction (`admission`)
    open        it has an epoch: Welcome is sent, the other lanes open, messages flow

Everything here runs on the event loop and is called with whole events of the connection's `Core`.
What costs credit goes to the ingest and is answered when it is committed (`committed`); what does
not is dealt with at once. A session that belongs to a lease which has ended is deaf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import trio
from h2.errors import ErrorCodes

from controlplane.db.inbox import NewReport
from controlplane.db.sessions import NewSection, NewSession, NewStatus, ObservedSpec
from controlplane.gateway import checks
from controlplane.gateway.ingest import Item
from controlplane.gateway.sections import SECTION_S, Assembly, bytes_of
from shared.http2.events import (
    GrpcStatus,
    LaneClosed,
    LaneFull,
    LaneOpened,
    Message,
    NotOpen,
    ProtocolViolation,
    Request,
)
from shared.wire import (
    INITIAL_CREDITS,
    LANES,
    PROTOCOL,
    PROTOCOL_MIN,
    Ack,
    Command,
    Credit,
    Drain,
    Heartbeat,
    Hello,
    InventorySection,
    Refuse,
    Report,
    Spec,
    SpecApplied,
    Status,
    Welcome,
    WireError,
    decode_up,
    encode,
)

if TYPE_CHECKING:
    from controlplane.db.delivery import Handout
    from controlplane.db.sessions import OpenedSession, StoredSpec
    from controlplane.gateway.state import GatewayState
    from controlplane.gateway.tenure import Tenure
    from shared.http2.core import Core
    from shared.http2.events import Event
    from shared.identity import NodeName
    from shared.wire import Down, Lane

# Between two plain requests on a connection without lanes.
PLAIN_IDLE_S: Final = 10.0
# The header with which the other lanes name the session they belong to.
EPOCH_HEADER: Final = "bc-epoch"

# Why a connection was ended from this side; words for metrics and the log.
Ending = Literal[
    "drained",
    "fenced",
    "hello_late",
    "idle",
    "lane_closed",
    "lanes_late",
    "not_reading",
    "refused",
    "refused_item",
    "revoked",
    "section_late",
    "silent",
    "stopped",
    "superseded",
]
RefuseCode = Literal["BUSY", "FENCED", "REVOKED", "WRONG_NODE", "PROTOCOL", "UNAVAILABLE"]
# Trying again soon changes nothing about these.
LASTING: Final[frozenset[RefuseCode]] = frozenset({"REVOKED", "WRONG_NODE", "PROTOCOL"})
CostsCredit = SpecApplied | Report | InventorySection | Status


class Session:
    """One connection. `epoch` is 0 until its Hello has been accepted."""

    __slots__ = (
        "_assembly",
        "_core",
        "_deadline",
        "_held",
        "_hello",
        "_last_heard",
        "_late",
        "_name",
        "_plain_pending",
        "_serial",
        "_starved",
        "_state",
        "_status_hash",
        "_tenure",
        "address",
        "ending",
        "epoch",
        "node_id",
        "sent_spec",
    )

    def __init__(self, core: Core, state: GatewayState, name: NodeName | None, serial: str, address: str) -> None:
        self.address = address
        self._core = core
        self._state = state
        self._name = name
        self._serial = serial
        self._tenure: Tenure | None = None
        self._hello: Hello | None = None
        self._last_heard = trio.current_time()
        self._deadline: float | None = self._last_heard + state.settings.hello_s
        self._late: Ending = "hello_late"  # what it is called when the deadline passes
        self._plain_pending = 0
        self._held: dict[Lane, list[tuple[Message, CostsCredit]]] = {}  # lanes that are paused, and their messages
        self._assembly: Assembly | None = None
        self._status_hash: str | None = None
        self._starved = False  # a command waited for credit
        self.ending: Ending | None = None
        self.node_id = 0
        self.epoch = 0
        self.sent_spec = (0, 0)

    @property
    def node_name(self) -> str:
        """The node's public id, for the log; empty for a stranger."""
        return self._name.node_id if self._name is not None else ""

    @property
    def tenure(self) -> Tenure | None:
        """The lease under which its Hello was taken."""
        return self._tenure

    def silent_s(self, now: float) -> float:
        """Return for how long nothing was heard of the agent."""
        return now - self._last_heard

    # --- what the connection reports ---------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Take one event. Raises ProtocolViolation, which ends the connection."""
        match event:
            case Message():
                self._on_message(event)
            case LaneOpened():
                self._on_lane(event)
            case Request():
                self._on_request(event)
            case LaneClosed():
                self.end("lane_closed")
            case _:
                pass

    def leave(self) -> None:
        """The connection is over and its core closed: let go of whatever knows of this session."""
        tenure = self._tenure
        if tenure is None:
            return
        self._drop_assembly()
        tenure.hellos.withdraw(self)
        tenure.ingest.forget(self)
        tenure.ingest.resume("bulk")  # it may have held room in the pool
        if self.epoch:
            tenure.close(self)

    def _on_lane(self, event: LaneOpened) -> None:
        lane = event.lane
        if self._name is None:
            self._core.refuse_lane(lane, GrpcStatus.UNAUTHENTICATED, "lanes are for nodes with a certificate")
        elif lane == "control":
            self._core.accept_lane(lane)
        elif not self.epoch or event.headers.get(EPOCH_HEADER) != str(self.epoch):
            self._core.refuse_lane(lane, GrpcStatus.FAILED_PRECONDITION, "not the epoch of this session")
        else:
            self._core.accept_lane(lane)
            if all(self._core.is_open(other) for other in LANES):
                self._deadline = None
            if self._tenure is not None:
                self._tenure.dispatcher.poke_node(self.node_id)

    def _on_message(self, message: Message) -> None:
        if self._tenure is not None and self._tenure.ended:
            return  # fenced; its end is on the way
        try:
            decoded = decode_up(message.body)
        except WireError as exc:
            raise ProtocolViolation("message", str(exc)) from exc
        self._last_heard = trio.current_time()
        self._count("in", message.lane, decoded)
        match decoded:
            case Hello():
                self._core.release(message)
                self._on_hello(message.lane, decoded)
            case Heartbeat():
                self._core.release(message)
            case Credit():
                self._core.release(message)
                self._on_credit(decoded)
            case _:
                if not self.epoch:
                    raise ProtocolViolation("message", f"{type(decoded).__name__} before Welcome")
                _check(decoded)
                self._take(message, decoded)

    def _on_credit(self, credit: Credit) -> None:
        checks.check_credit(credit)
        for lane, grant in credit.grants.items():
            self._core.grant_send_credit(lane, grant)
        if self._starved and self._tenure is not None:
            self._starved = False
            self._tenure.dispatcher.poke_node(self.node_id)

    # --- plain requests ----------------------------------------------------------------------

    def _on_request(self, request: Request) -> None:
        if not self._core.is_open("control"):
            self._deadline = None
        self._plain_pending += 1
        self._state.desk.take(self, request)

    def respond(self, stream_id: int, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Answer a plain request; nothing happens if the client has gone away."""
        self._core.respond(stream_id, status, body, headers)
        self._plain_pending -= 1
        if not self._plain_pending and not self._core.is_open("control"):
            self._late = "idle"
            self._deadline = trio.current_time() + PLAIN_IDLE_S

    # --- Hello and Welcome -------------------------------------------------------------------

    def _on_hello(self, lane: Lane, hello: Hello) -> None:
        if lane != "control" or self._hello is not None:
            raise ProtocolViolation("message", "a Hello out of place")
        checks.check_hello(hello)
        self._hello = hello
        self._deadline = None  # from here on it waits for us
        assert self._name is not None, "only nodes open lanes"
        tenure = self._state.tenure
        if hello.protocol < PROTOCOL_MIN:
            self.refuse("PROTOCOL", f"this gateway speaks protocols {PROTOCOL_MIN} to {PROTOCOL}; upgrade bcd")
        elif hello.node_id != self._name.node_id:
            self.refuse("WRONG_NODE", f"the certificate is {self._name.node_id}'s")
        elif self._state.draining:
            self.refuse("UNAVAILABLE", "this gateway is stopping")
        elif tenure is None:
            self.refuse("FENCED", "this gateway does not hold its lease")
        elif not self._state.bucket.admit(trio.current_time()):
            self.refuse("BUSY", "too many sessions at once")
        else:
            self._tenure = tenure
            new = NewSession(
                public_id=hello.node_id,
                serial=self._serial,
                boot_id=hello.boot_id,
                agent_version=hello.agent_version,
                journal_id=hello.journal_id,
                journal_high=hello.journal_high,
                observed_incarnation=hello.observed_incarnation,
                observed_generation=hello.observed_generation,
            )
            if not tenure.hellos.submit(self, new):
                self.refuse("BUSY", "too many sessions at once")

    def refuse(self, code: RefuseCode, message: str) -> None:
        """Do not open the session, and say when to come back."""
        self._state.metrics.refusals.of(code).inc()
        bucket = self._state.bucket
        pushback_s = bucket.long_pushback_s() if code in LASTING else bucket.pushback_s(trio.current_time())
        self.tell(Refuse(code=code, message=message, retry_after_ms=round(pushback_s * 1000)))
        self.end("refused")

    def welcome(self, opened: OpenedSession) -> None:
        """The session is the node's newest: register it and let it begin, unless its connection is gone by now."""
        tenure, hello = self._tenure, self._hello
        assert tenure is not None
        assert hello is not None
        self.node_id, self.epoch = opened.node_id, opened.epoch
        if self._core.finished:
            tenure.close(self)
            return
        tenure.register(self)
        if self.ending is not None:
            return
        for lane in LANES:
            self._core.grant_receive_credit(lane, INITIAL_CREDITS[lane])
            self._core.grant_send_credit(lane, hello.credits.get(lane, 0))
        settings = self._state.settings
        self.tell(
            Welcome(
                epoch=opened.epoch,
                heartbeat_s=settings.heartbeat_s,
                lease_s=settings.session_lease_s,
                credits=dict(INITIAL_CREDITS),
                wanted_sections=sorted(
                    section for section, digest in hello.sections.items() if opened.sections.get(section) != digest
                ),
            )
        )
        self._last_heard = trio.current_time()
        self._late = "lanes_late"
        self._deadline = self._last_heard + settings.lanes_s
        self.sent_spec = (hello.observed_incarnation, hello.observed_generation)
        if opened.spec is not None:
            self.send_spec(opened.spec)
        tenure.dispatcher.poke_node(self.node_id)

    # --- upward ------------------------------------------------------------------------------

    def _take(self, message: Message, decoded: CostsCredit) -> None:
        """Pass a message on, or keep it, and what follows it on its lane, until there is room."""
        held = self._held.get(message.lane)
        if held is not None:
            held.append((message, decoded))
        elif not self._submit(message, decoded):
            self._held[message.lane] = [(message, decoded)]
            self._tenure_of_open().ingest.wait_for_room(message.lane, self)

    def resume(self, lane: Lane) -> bool:
        """Pass on what was kept; False if there is still no room for all of it."""
        held = self._held.get(lane, [])
        try:
            while held and not self._core.finished:
                if not self._submit(*held[0]):
                    return False
                held.pop(0)
        except ProtocolViolation:
            self._core.go_away(ErrorCodes.ENHANCE_YOUR_CALM)
        self._held.pop(lane, None)
        return True

    def _submit(self, message: Message, decoded: CostsCredit) -> bool:
        ingest = self._tenure_of_open().ingest
        if isinstance(decoded, InventorySection):
            return self._submit_chunk(message, decoded)
        if not ingest.has_room(message.lane):
            return False
        self._core.spend_credit(message)
        news = False
        match decoded:
            case Report():
                payload = NewReport(self.node_id, self.epoch, decoded.kind, decoded.key, decoded.envelope)
            case SpecApplied():
                payload = ObservedSpec(self.node_id, self.epoch, decoded.incarnation, decoded.generation)
            case Status():
                payload = NewStatus(self.node_id, self.epoch, decoded.hash, decoded.body)
                news = decoded.hash != self._status_hash
                self._status_hash = decoded.hash
        ingest.put(message.lane, Item(self, message, payload, trio.current_time(), news=news))
        return True

    def _submit_chunk(self, message: Message, chunk: InventorySection) -> bool:
        ingest = self._tenure_of_open().ingest
        now = trio.current_time()
        if chunk.index == 0:
            self._drop_assembly()
            if not ingest.sections.reserve(bytes_of(chunk)):
                return False
            self._assembly = Assembly(chunk, now)
        assembly = self._assembly
        if assembly is None:
            raise ProtocolViolation("message", f"chunk {chunk.index} without a beginning")
        assembly.check_next(chunk)
        is_last = chunk.index + 1 == chunk.count
        if is_last and not ingest.has_room(message.lane):
            return False
        self._core.spend_credit(message)
        assembly.add(chunk.body)
        if not is_last:
            self._core.release(message)
            self._return_credit()
            return True
        payload = NewSection(self.node_id, self.epoch, chunk.section, chunk.hash, assembly.finish())
        self._assembly = None  # what it has reserved goes with the item
        ingest.put(message.lane, Item(self, message, payload, now, reserved_bytes=assembly.reserved_bytes))
        return True

    def _drop_assembly(self) -> None:
        if self._assembly is not None:
            self._tenure_of_open().ingest.sections.free(self._assembly.reserved_bytes)
            self._assembly = None

    def committed(self, items: list[Item]) -> None:
        """These messages are safe: acknowledge the reports among them and return their credit."""
        for item in items:
            self._core.release(item.message)
        if keys := [item.payload.key for item in items if isinstance(item.payload, NewReport)]:
            self.tell(Ack(keys=keys))
        self._return_credit()

    def _return_credit(self) -> None:
        grants: dict[Lane, int] = {lane: grant for lane in LANES if (grant := self._core.consumed(lane))}
        if grants:
            self.tell(Credit(grants=grants))

    # --- downward ----------------------------------------------------------------------------

    def tell(self, message: Welcome | Ack | Credit | Drain | Refuse) -> None:
        """Send a message that costs no credit; a peer that does not read them is let go."""
        try:
            self._core.send("control", encode(message), costs_credit=False)
        except NotOpen:
            return
        except LaneFull:
            self.end("not_reading")
            return
        self._count("out", "control", message)

    def send_spec(self, stored: StoredSpec) -> bool:
        """Send a spec, in the place of an older one that still waits; False if the lane takes none now."""
        message = Spec(incarnation=stored.incarnation, generation=stored.generation, envelope=stored.envelope)
        try:
            self._core.send_latest("control", "spec", encode(message), costs_credit=True)
        except (NotOpen, LaneFull):
            return False
        self.sent_spec = (stored.incarnation, stored.generation)
        self._count("out", "control", message)
        return True

    def room(self, lane: Lane) -> int:
        """How many commands the lane takes now. Where it is none, the agent's next credit wakes the dispatcher."""
        room = self._core.room(lane)
        if not room:
            self._starved = True
        return room

    def send_command(self, handout: Handout) -> bool:
        """Send a command that is recorded as delivered.

        If the lane takes it no more, the session ends: only a new epoch has the right to it.
        """
        message = Command(command_id=handout.public_id, envelope=handout.envelope)
        try:
            self._core.send(handout.lane, encode(message), costs_credit=True)
        except (NotOpen, LaneFull):
            self.end("not_reading")
            return False
        self._count("out", handout.lane, message)
        return True

    def end(self, ending: Ending) -> None:
        """End the connection in order: what is queued and the windows admit goes out first."""
        if self.ending is None and not self._core.finished:
            self.ending = ending
            self._core.go_away()

    def sweep(self, now: float) -> None:
        """End the connection if it is late."""
        if self._deadline is not None and now > self._deadline:
            self.end(self._late)
        elif self._assembly is not None and now - self._assembly.began > SECTION_S:
            self.end("section_late")
        elif self.epoch and "control" not in self._held and now - self._last_heard > self._state.settings.silence_s:
            self.end("silent")

    def _tenure_of_open(self) -> Tenure:
        assert self._tenure is not None, "an open session has been admitted under a lease"
        return self._tenure

    def _count(self, direction: str, lane: Lane, message: Down | Hello | Heartbeat | CostsCredit) -> None:
        self._state.metrics.frames.of(direction, lane, str(message.__struct_config__.tag)).inc()


def _check(decoded: CostsCredit) -> None:
    match decoded:
        case Report():
            checks.check_report(decoded)
        case SpecApplied():
            checks.check_spec_applied(decoded)
        case Status():
            checks.check_status(decoded)
        case InventorySection():
            checks.check_chunk(decoded)
