"""Conversations between two cores: lanes, messages, credit, windows, requests, endings."""

from __future__ import annotations

import gc
import struct
from typing import TYPE_CHECKING

import pytest
from h2.errors import ErrorCodes

from shared.http2 import limits
from shared.http2.core import Core
from shared.http2.events import (
    GrpcStatus,
    LaneAccepted,
    LaneClosed,
    LaneFull,
    LaneOpened,
    Message,
    MessageTooLarge,
    NotOpen,
    PeerLeft,
    ProtocolViolation,
    Request,
    RequestFailed,
    Response,
)
from shared.http2.lanes import Inbox
from shared.wire import INITIAL_CREDITS, LANES, MESSAGE_BYTES_MAX
from tests.support.http2 import End, Pair, accept, open_pair

if TYPE_CHECKING:
    from shared.http2.events import Event
    from shared.wire import Lane

# --- lanes -----------------------------------------------------------------------------------


def test_lanes_open_with_headers_and_carry_messages_both_ways():
    pair = Pair()
    pair.server.on_event = accept(pair.server)
    for lane in LANES:
        pair.client.core.open_lane(lane, {"bc-epoch": "7"})
    pair.client.core.send("control", b"hello", costs_credit=False)
    pair.settle()
    opened = [event for event in pair.server.events if isinstance(event, LaneOpened)]
    assert [event.lane for event in opened] == list(LANES)
    assert all(event.headers["bc-epoch"] == "7" for event in opened)
    assert all(event.headers["content-type"] == "application/grpc+msgpack" for event in opened)
    assert pair.client.events == [LaneAccepted(lane) for lane in LANES]
    assert pair.server.bodies("control") == [b"hello"]
    pair.server.core.send("bulk", b"", costs_credit=False)
    pair.settle()
    assert pair.client.bodies() == [b""]


def test_a_refused_lane_tells_why_and_drops_what_was_behind_it():
    pair = Pair()

    def refuse(event: object) -> None:
        assert isinstance(event, LaneOpened), "nothing of a refused lane is reported"
        pair.server.core.refuse_lane(event.lane, GrpcStatus.FAILED_PRECONDITION, "epoch 6, not 7: \u00fc")

    pair.server.on_event = refuse
    pair.client.core.open_lane("bulk")
    pair.client.core.send("bulk", b"too early", costs_credit=False)
    pair.settle()
    assert pair.client.events == [LaneClosed("bulk", 9, "epoch 6, not 7: \u00fc")]
    assert not pair.client.core.is_open("bulk")
    with pytest.raises(NotOpen):
        pair.client.core.send("bulk", b"x", costs_credit=False)
    with pytest.raises(NotOpen):
        pair.client.core.open_lane("bulk")


@pytest.mark.parametrize("ending", ["refused", "ended", "reset"])
def test_a_lane_that_is_gone_does_not_keep_the_connections_window(ending: str):
    pair = Pair()

    def on_event(event: Event) -> None:
        if isinstance(event, LaneOpened) and ending == "refused":
            pair.server.core.refuse_lane(event.lane, GrpcStatus.FAILED_PRECONDITION, "epoch")
        else:
            accept(pair.server)(event)

    pair.server.on_event = on_event
    pair.client.core.open_lane("bulk")
    for _ in range(3 if ending != "refused" else 1):
        pair.client.core.send("bulk", bytes(MESSAGE_BYTES_MAX["bulk"]), costs_credit=False)
        pair.settle()
    if ending == "ended":
        pair.server.core.close_lane("bulk")
    elif ending == "reset":
        pair.client.core._connection.reset(1, ErrorCodes.CANCEL)
    pair.settle()
    for message in pair.server.messages():
        pair.server.core.release(message)  # too late, and not counted twice
    manager = pair.server.core._connection._h2._inbound_flow_control_window_manager
    assert manager.current_window_size + manager._bytes_processed == 65_535


@pytest.mark.parametrize(
    ("path", "content_type"),
    [("/lane/express", "application/grpc"), ("/lane/control", "application/json"), ("/lane/", "application/grpc")],
)
def test_what_is_no_lane_is_unimplemented(path: str, content_type: str):
    pair = Pair()
    pair.client.core.request("POST", path, b"", {"content-type": content_type})
    pair.settle()
    assert pair.server.events == []
    (answer,) = pair.client.events
    assert isinstance(answer, Response)
    assert answer.headers["grpc-status"] == "12"


def test_a_lane_is_opened_once():
    pair = open_pair()
    pair.client.core.request("POST", "/lane/control", b"", {"content-type": "application/grpc"})
    pair.settle()
    (answer,) = pair.client.events
    assert isinstance(answer, Response)
    assert answer.headers["grpc-status"] == "9"
    assert pair.server.core.is_open("control")


def test_the_server_ends_a_lane_with_trailers_after_what_is_queued():
    pair = open_pair()
    pair.server.core.send("bulk", bytes(50_000), costs_credit=True)
    pair.server.core.close_lane("bulk", GrpcStatus.UNAVAILABLE)
    with pytest.raises(NotOpen):
        pair.server.core.send("bulk", b"late", costs_credit=True)
    pair.settle()
    message, closed = pair.client.events
    assert isinstance(message, Message)
    assert len(message.body) == 50_000
    assert closed == LaneClosed("bulk", 14, "")
    assert not pair.client.core.is_open("bulk")


def test_the_client_ends_a_lane_and_both_know():
    pair = open_pair()
    pair.client.core.send("bulk", b"last", costs_credit=True)
    pair.client.core.close_lane("bulk")
    pair.settle()
    assert pair.server.bodies() == [b"last"]
    assert pair.server.events[-1] == LaneClosed("bulk", None, "")
    assert pair.client.events == [LaneClosed("bulk", 0, "")]
    assert pair.server.core.is_open("control")


# --- sizes and shape -------------------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
def test_the_largest_message_of_each_lane_passes_and_one_byte_more_does_not(lane: Lane):
    pair = open_pair()
    largest = bytes(MESSAGE_BYTES_MAX[lane])
    pair.client.core.send(lane, largest, costs_credit=True)
    pair.settle()
    assert pair.server.bodies(lane) == [largest]
    with pytest.raises(MessageTooLarge):
        pair.client.core.send(lane, largest + b"x", costs_credit=True)


def test_an_oversize_message_is_refused_by_its_prefix():
    inbox = Inbox("control")
    inbox.add(struct.pack(">BI", 0, MESSAGE_BYTES_MAX["control"]))
    with pytest.raises(ProtocolViolation, match="message_too_large"):
        Inbox("control").add(struct.pack(">BI", 0, MESSAGE_BYTES_MAX["control"] + 1))


def test_a_compressed_message_is_refused():
    pair = open_pair()
    pair.client.core._connection.send_data(1, struct.pack(">BI", 1, 3) + b"abc")
    pair.client.flush()
    with pytest.raises(ProtocolViolation) as caught:
        pair.carry(pair.client)
    assert caught.value.offence == "compressed"
    assert pair.server.core.finished
    pair.server.flush()
    pair.carry(pair.server)
    assert pair.client.events == [PeerLeft(ErrorCodes.ENHANCE_YOUR_CALM)]


def test_empty_messages_are_counted():
    pair = open_pair()
    pair.client.core._connection.send_data(1, struct.pack(">BI", 0, 0) * limits.MESSAGES_PER_READ_MAX)
    pair.settle()
    assert len(pair.server.messages()) == limits.MESSAGES_PER_READ_MAX
    pair.client.core._connection.send_data(1, struct.pack(">BI", 0, 0) * (limits.MESSAGES_PER_READ_MAX + 1))
    pair.client.flush()
    with pytest.raises(ProtocolViolation, match="message_flood"):
        pair.carry(pair.client)


# --- credit ----------------------------------------------------------------------------------


def test_without_credit_a_payload_waits_and_what_is_free_does_not():
    pair = open_pair(credit=False)
    sender = pair.server.core
    assert not sender.can_send("provision")
    for number in range(INITIAL_CREDITS["provision"]):
        sender.send("provision", b"command %d" % number, costs_credit=True)
    with pytest.raises(LaneFull):
        sender.send("provision", b"one too many", costs_credit=True)
    sender.send("provision", b"credit", costs_credit=False)
    pair.settle()
    assert pair.client.bodies() == [b"credit"]
    sender.grant_send_credit("provision", 2)
    pair.settle()
    assert pair.client.bodies() == [b"credit", b"command 0", b"command 1"]
    assert not sender.can_send("provision"), "two still wait for the credit that comes next"
    sender.grant_send_credit("provision", 3)
    assert sender.can_send("provision")
    pair.settle()
    assert pair.client.bodies()[3:] == [b"command 2", b"command 3"]


def test_credit_comes_back_in_halves():
    pair = open_pair()
    for _ in range(4):
        pair.client.core.send("provision", b"x", costs_credit=True)
    pair.settle()
    given_back: list[int] = []
    for message in pair.server.messages():
        pair.server.core.spend_credit(message)
        pair.server.core.release(message)
        given_back.append(pair.server.core.consumed("provision"))
    assert given_back == [0, 2, 0, 2]


def test_a_payload_without_credit_is_a_violation():
    pair = open_pair()
    pair.client.core.grant_send_credit("provision", 100)  # as a liar would
    for _ in range(5):
        pair.client.core.send("provision", b"x", costs_credit=True)
        pair.client.flush()
    pair.settle()
    *honest, last = pair.server.messages()
    for message in honest:
        pair.server.core.spend_credit(message)
    with pytest.raises(ProtocolViolation, match="no_credit"):
        pair.server.core.spend_credit(last)


def test_the_latest_of_a_key_takes_the_place_of_the_waiting_one():
    pair = open_pair(credit=False)
    sender = pair.server.core
    sender.send_latest("control", "spec", b"spec 1", costs_credit=True)
    sender.send("control", b"command", costs_credit=True)
    for generation in range(2, 200):
        sender.send_latest("control", "spec", b"spec %d" % generation, costs_credit=True)
    sender.grant_send_credit("control", 2)
    pair.settle()
    assert pair.client.bodies() == [b"spec 199", b"command"]
    sender.grant_send_credit("control", 1)
    sender.send_latest("control", "spec", b"spec 200", costs_credit=True)
    pair.settle()
    assert pair.client.bodies()[2:] == [b"spec 200"]


def test_free_messages_are_bounded_too():
    pair = open_pair()
    for _ in range(limits.FREE_MESSAGES_MAX):
        pair.server.core.send("control", b"beat", costs_credit=False)
    with pytest.raises(LaneFull):
        pair.server.core.send("control", b"beat", costs_credit=False)
    pair.server.core.send("provision", bytes(MESSAGE_BYTES_MAX["provision"]), costs_credit=False)
    pair.server.core.send("provision", bytes(MESSAGE_BYTES_MAX["provision"]), costs_credit=False)
    with pytest.raises(LaneFull):
        pair.server.core.send("provision", b"", costs_credit=False)


# --- windows and priority --------------------------------------------------------------------


def test_lanes_that_nobody_reads_never_block_control():
    pair = open_pair()
    # What cannot be classified is never released: the worst that the windows have to bear.
    for lane in ("provision", "bulk"):
        for _ in range(3):
            pair.client.core.send(lane, bytes(30_000), costs_credit=True)
    pair.settle()
    held = len(pair.server.messages())
    assert held < 6, "the lanes' own windows are shut"
    for number in range(50):
        pair.client.core.send("control", b"%d" % number * 2_000, costs_credit=False)
        pair.settle()
        (message,) = pair.server.messages("control")
        pair.server.core.release(message)
        pair.server.events.remove(message)
    for message in pair.server.messages():
        pair.server.core.release(message)
    pair.settle()
    for message in pair.server.messages()[held:]:
        pair.server.core.release(message)
    pair.settle()
    assert len(pair.server.messages()) == 6


def test_a_lane_whose_every_credit_waits_still_passes_a_heartbeat():
    pair = open_pair()
    for _ in range(INITIAL_CREDITS["control"]):
        pair.client.core.send("control", bytes(MESSAGE_BYTES_MAX["control"]), costs_credit=True)
    held: list[Message] = []

    def on_event(event: object) -> None:
        assert isinstance(event, Message)
        if event.body == b"beat":
            pair.server.core.release(event)
        else:
            pair.server.core.spend_credit(event)
            held.append(event)

    pair.server.on_event = on_event
    pair.settle()
    assert len(held) == INITIAL_CREDITS["control"]
    beats: list[object] = []
    pair.server.on_event = lambda event: (beats.append(event), on_event(event))[0]
    for _ in range(1_000):
        pair.client.core.send("control", b"beat", costs_credit=False)
        pair.settle()
    assert len(beats) == 1_000


def test_a_peer_without_credit_cannot_make_us_hold_much():
    pair = open_pair()
    pair.client.core.grant_send_credit("control", 1_000)
    for _ in range(100):
        try:
            pair.client.core.send("control", bytes(MESSAGE_BYTES_MAX["control"]), costs_credit=True)
        except LaneFull:
            break
        pair.settle()  # the server releases nothing and classifies nothing
    inbox = pair.server.core._lanes["control"].inbox
    most = limits.free_bytes_max("control") + limits.STREAM_WINDOW_BYTES
    assert inbox.held_bytes + inbox.buffered_bytes <= most
    for message in pair.server.messages():
        pair.server.core.release(message)
    before = len(pair.server.messages())
    pair.settle()
    assert len(pair.server.messages()) > before, "and goes on when something is released"


def test_control_goes_first_and_bulk_at_most_32_kib_in_a_pass():
    pair = open_pair()
    client = pair.client.core
    # The server has windows for much more than a pass.
    for stream_id in (1, 3, 5):
        pair.server.core._connection._h2.increment_flow_control_window(500_000, stream_id)
    pair.server.core._connection._h2.increment_flow_control_window(1_000_000)
    pair.settle()
    for _ in range(4):
        client.send("bulk", b"b" * 60_000, costs_credit=True)
    client.send("provision", b"p" * 40_000, costs_credit=True)
    client.send("control", b"c" * 20_000, costs_credit=True)
    first = client.take()
    assert (first.count(b"c") >= 20_000, first.count(b"p") >= 40_000) == (True, True)
    assert first.index(b"ccc") < first.index(b"ppp")
    assert first.count(b"b") <= limits.PASS_BYTES_MAX - 60_000
    client.send("control", b"d" * 1_000, costs_credit=True)
    second = client.take()
    assert second.index(b"ddd") < second.index(b"bbb")
    assert second.count(b"b") <= limits.BULK_PASS_BYTES_MAX
    assert 0 < limits.BULK_PASS_BYTES_MAX - client.take().count(b"b") <= 5, "but for the prefix of a message"


def test_small_messages_share_a_frame():
    pair = open_pair()
    for number in range(16):
        pair.client.core.send("control", b"%d" % number, costs_credit=True)
    data = pair.client.core.take()
    assert len(data) == 9 + sum(5 + len(b"%d" % number) for number in range(16))


# --- plain requests --------------------------------------------------------------------------


def test_a_request_and_its_answer_are_whole():
    pair = Pair()
    body, answer = bytes(range(256)) * 200, b"a" * limits.RESPONSE_BODY_BYTES_MAX
    stream_id = pair.client.core.request("POST", "/join", body, {"content-type": "application/jose"})
    pair.settle()
    (request,) = pair.server.events
    assert isinstance(request, Request)
    assert (request.method, request.path, request.body) == ("POST", "/join", body)
    assert request.headers["content-type"] == "application/jose"
    pair.server.core.respond(request.stream_id, 200, answer, {"content-type": "application/json"})
    pair.server.core.respond(request.stream_id, 500, b"a second answer is ignored")
    pair.settle()
    (response,) = pair.client.events
    assert isinstance(response, Response)
    assert (response.stream_id, response.status, response.body) == (stream_id, 200, answer)
    assert response.headers["content-type"] == "application/json"


def test_a_request_body_too_large_is_refused_with_413():
    pair = Pair()
    pair.client.core.request("POST", "/join", bytes(limits.REQUEST_BODY_BYTES_MAX + 1))
    pair.settle()
    assert pair.server.events == []
    (response,) = pair.client.events
    assert isinstance(response, Response)
    assert response.status == 413
    pair.client.core.request("POST", "/join", bytes(limits.REQUEST_BODY_BYTES_MAX))
    pair.settle()
    (request,) = pair.server.events
    assert isinstance(request, Request)
    assert len(request.body) == limits.REQUEST_BODY_BYTES_MAX


def test_an_answer_too_large_fails_the_request():
    pair = Pair()
    stream_id = pair.client.core.request("POST", "/join", b"")
    pair.settle()
    pair.server.core.respond(1, 200, bytes(limits.RESPONSE_BODY_BYTES_MAX + 1))
    pair.settle()
    assert pair.client.events == [RequestFailed(stream_id, "the answer is too large")]


def test_requests_at_once_are_bounded():
    pair = Pair()
    ids = [pair.client.core.request("POST", "/join", b"x") for _ in range(limits.REQUESTS_MAX + 1)]
    pair.settle()
    assert len(pair.server.events) == limits.REQUESTS_MAX
    assert pair.client.events == [RequestFailed(ids[-1], "reset by the server")]


def test_an_answer_to_a_client_that_has_gone_is_nothing():
    pair = Pair()
    stream_id = pair.client.core.request("POST", "/join", b"x")
    pair.settle()
    pair.client.core._connection.reset(stream_id, ErrorCodes.CANCEL)
    pair.settle()
    pair.server.core.respond(stream_id, 200, b"y")
    pair.settle()
    assert len(pair.client.events) == 0


# --- the connection --------------------------------------------------------------------------


def test_pings_are_counted_until_they_are_answered():
    pair = open_pair()
    pair.client.core.ping()
    pair.client.core.ping()
    assert pair.client.core.pings_unanswered == 2
    pair.settle()
    assert pair.client.core.pings_unanswered == 0
    pair.server.core.ping()
    pair.server.flush()
    assert pair.server.core.pings_unanswered == 1


def test_going_away_sends_what_waits_and_then_nothing():
    pair = open_pair()
    pair.server.core.send("control", b"refuse", costs_credit=False)
    pair.server.core.go_away()
    assert pair.server.core.finished
    with pytest.raises(NotOpen):
        pair.server.core.send("control", b"late", costs_credit=False)
    pair.client.core.send("control", b"crossing", costs_credit=False)
    pair.settle()
    assert pair.client.bodies() == [b"refuse"]
    assert pair.client.events[-1] == PeerLeft(ErrorCodes.NO_ERROR)
    assert pair.client.core.finished
    assert pair.server.events == []


def test_wake_is_called_when_there_is_something_to_write():
    pair = open_pair()
    wakes: list[None] = []
    pair.client.core.call_on_output(lambda: wakes.append(None))
    pair.client.core.send("control", b"x", costs_credit=False)
    assert len(wakes) == 1
    pair.settle()
    wakes.clear()
    pair.server.core.send("control", b"x", costs_credit=False)
    pair.settle()
    (message,) = pair.client.messages()
    pair.client.core.release(message)
    assert wakes == [], "window worth no frame yet"


def test_a_shut_window_that_opens_wakes_the_sender():
    pair = open_pair()
    pair.client.core.send("bulk", bytes(16_000), costs_credit=True)
    pair.client.core.send("bulk", bytes(16_000), costs_credit=True)
    pair.settle()
    (message,) = pair.server.messages()
    wakes: list[None] = []
    pair.client.core.call_on_output(lambda: wakes.append(None))
    pair.server.core.release(message)
    pair.server.flush()
    pair.carry(pair.server)
    assert wakes
    pair.settle()
    assert len(pair.server.messages()) == 2


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_closed_core_is_freed_without_the_collector(state: str):
    pair = open_pair()
    if state == "busy":
        for lane in LANES:
            pair.client.core.send(lane, bytes(60_000), costs_credit=True)
        pair.client.core.request("POST", "/renew", bytes(30_000))
        pair.settle()
        pair.client.core.send("control", b"queued", costs_credit=True)
    gc.collect()
    gc.disable()
    try:
        pair.client.core.close()
        pair.server.core.close()
        pair.server.on_event = print  # the test's own cycle
        del pair
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_messages_may_be_released_after_the_end():
    pair = open_pair()
    pair.client.core.send("control", b"x", costs_credit=True)
    pair.settle()
    (message,) = pair.server.messages()
    pair.server.core.close()
    pair.server.core.spend_credit(message)
    pair.server.core.release(message)
    assert pair.server.core.consumed("control") == 0


def test_a_session_is_small():
    """The settings' deques are what a session is made of if nobody looks."""
    core = Core(client_side=False)
    for settings in (core._connection._h2.local_settings, core._connection._h2.remote_settings):
        assert {type(queue).__name__ for queue in settings._settings.values()} == {"_ShortQueue"}
    end = End(client_side=True)
    end.flush()
    core.feed(bytes(end.wire), 0.0)
    assert core._connection._h2.remote_settings.initial_window_size == limits.STREAM_WINDOW_BYTES
