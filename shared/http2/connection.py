"""h2's connection as we use it: our limits on both sides of it, its memory, and its reference cycles.

`Connection` puts the frame guard before h2 and makes sending safe: h2 raises when it is asked to
send on a stream that the peer ended in the same read, which is no error of ours.

What `_BoundedH2` reaches into is private to h2 4.4 (pinned in pyproject, guarded by tests): nothing
public bounds what it remembers, gives back what its settings hold, or lets a closed connection be
freed without the garbage collector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast
from urllib.parse import quote

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

from shared.http2 import limits
from shared.http2.events import ProtocolViolation
from shared.http2.guard import FrameGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from h2.events import Event

    from shared.http2.events import GrpcStatus

CONTENT_TYPE: Final = "application/grpc+msgpack"
_PING_BYTES: Final = 8

Headers = list[tuple[str, str]]


def nothing() -> None:
    """What `Connection.wake` is until somebody writes."""


class _ShortQueue(list[int]):
    """Stands in for the deques in h2's settings: 14 of them are 9 KiB in every session."""

    __slots__ = ()

    def popleft(self) -> int:
        return self.pop(0)


class _BoundedH2(H2Connection):
    """An h2 connection that announces our limits and can be taken apart."""

    # Class attributes, because h2's constructor reads them.
    MAX_CLOSED_STREAMS: Final = limits.CLOSED_STREAMS_MAX
    DEFAULT_MAX_HEADER_LIST_SIZE: Final = limits.HEADER_LIST_BYTES_MAX

    def __init__(self, *, client_side: bool) -> None:
        super().__init__(
            H2Configuration(
                client_side=client_side,
                header_encoding=None,  # bytes: a header that is not UTF-8 must not raise inside h2
                validate_outbound_headers=False,  # ours, and lower-case
                normalize_outbound_headers=False,
            )
        )
        values = {
            SettingCodes.INITIAL_WINDOW_SIZE: limits.STREAM_WINDOW_BYTES,
            SettingCodes.MAX_FRAME_SIZE: limits.FRAME_BYTES_MAX,
            SettingCodes.MAX_HEADER_LIST_SIZE: limits.HEADER_LIST_BYTES_MAX,
            SettingCodes.ENABLE_PUSH: 0,
        }
        if not client_side:
            values[SettingCodes.MAX_CONCURRENT_STREAMS] = limits.CONCURRENT_STREAMS_MAX
            del values[SettingCodes.ENABLE_PUSH]
        # As initial values: `update` before `initiate_connection` would announce the old ones.
        self.local_settings = Settings(client=client_side, initial_values=values)
        # Until the peer's SETTINGS come, its windows are taken for ours and not for HTTP/2's 64 KiB: h2
        # holds us to the value it announces even for what was sent before the announcement arrived.
        self.remote_settings = Settings(
            client=not client_side,
            initial_values={SettingCodes.INITIAL_WINDOW_SIZE: limits.STREAM_WINDOW_BYTES},
        )
        self.max_inbound_frame_size = limits.FRAME_BYTES_MAX
        for settings in (self.local_settings, self.remote_settings):
            stored = settings._settings  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            for code, queue in stored.items():
                stored[code] = _ShortQueue(queue)  # pyright: ignore[reportArgumentType]
        self.initiate_connection()

    @property
    def outbound_bytes(self) -> int:
        """How much is ready to be sent."""
        return len(self._data_to_send)

    def dismantle(self) -> None:
        """Break the cycle of bound methods, so that the last reference frees the connection."""
        table = cast("dict[object, object]", self._frame_dispatch_table)
        table.clear()
        self.streams.clear()


class Connection:
    """What `Core` builds on: frames in and out of one HTTP/2 connection, within the limits."""

    __slots__ = ("_guard", "_h2", "wake")

    def __init__(self, *, client_side: bool) -> None:
        self.wake: Callable[[], None] = nothing  # called when there may be something to write
        self._h2 = _BoundedH2(client_side=client_side)
        self._guard = FrameGuard(client_side=client_side)

    def receive(self, data: bytes | bytearray, now: float) -> list[Event]:
        """Take one read. Raises ProtocolViolation."""
        self._guard.check(data, now)
        try:
            events = self._h2.receive_data(bytes(data))
        except Exception as exc:  # h2 reads a stranger's bytes: whatever that raises is the stranger's doing
            raise ProtocolViolation("protocol", f"{type(exc).__name__}: {exc}") from exc
        if self._h2.outbound_bytes > limits.OUTBOUND_BYTES_MAX:
            raise ProtocolViolation("not_reading")
        self._wake_if_outbound()
        return events

    def take(self) -> bytes:
        """Return what is ready to be written."""
        return self._h2.data_to_send()

    def next_stream_id(self) -> int:
        return self._h2.get_next_available_stream_id()

    def room(self, stream_id: int, at_most: int) -> int:
        """How many bytes one DATA frame may carry now; 0 if the window is shut or the stream is gone."""
        try:
            window = self._h2.local_flow_control_window(stream_id)
        except H2Error:
            return 0
        return max(0, min(window, limits.FRAME_BYTES_MAX, at_most))

    # Each of these returns whether h2 took it.

    def send_data(self, stream_id: int, data: bytes, *, end_stream: bool = False) -> bool:
        self._guard.sent(len(data))
        return self._try(lambda: self._h2.send_data(stream_id, data, end_stream=end_stream))

    def send_headers(self, stream_id: int, headers: Iterable[tuple[str, str]], *, end_stream: bool = False) -> bool:
        return self._try(lambda: self._h2.send_headers(stream_id, headers, end_stream=end_stream))

    def refuse(self, stream_id: int, grpc_status: GrpcStatus, detail: str) -> bool:
        """End a stream with gRPC trailers alone, and tell the client that it need not send the rest."""
        headers = [
            (":status", "200"),
            ("content-type", CONTENT_TYPE),
            ("grpc-status", str(int(grpc_status))),
            ("grpc-message", quote(detail, safe=" ,;:")),
        ]
        return self.send_headers(stream_id, headers, end_stream=True) and self.reset(stream_id, ErrorCodes.NO_ERROR)

    def end_stream(self, stream_id: int) -> bool:
        return self._try(lambda: self._h2.end_stream(stream_id))

    def reset(self, stream_id: int, error_code: ErrorCodes) -> bool:
        return self._try(lambda: self._h2.reset_stream(stream_id, error_code))

    def ping(self, number: int) -> bool:
        return self._try(lambda: self._h2.ping(number.to_bytes(_PING_BYTES, "big")))

    def go_away(self, error_code: ErrorCodes) -> bool:
        if self._h2.state_machine.state is ConnectionState.CLOSED:
            return False  # h2 has said it itself
        return self._try(lambda: self._h2.close_connection(error_code))

    def _try(self, send: Callable[[], None]) -> bool:
        try:
            send()
        except H2Error:
            return False
        self.wake()
        return True

    def return_window(self, stream_id: int, size: int) -> None:
        """Let the peer send so many bytes more; h2 tells it when it is worth a frame."""
        if size:
            self._h2.acknowledge_received_data(size, stream_id)
            self._wake_if_outbound()

    def _wake_if_outbound(self) -> None:
        if self._h2.outbound_bytes:
            self.wake()

    def dismantle(self) -> None:
        self.wake = nothing
        self._h2.dismantle()
