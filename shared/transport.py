"""Runs a `Core` over a stream of bytes: one reader, one writer, one nursery.

The reader (the caller's own task) never waits for the application: it hands each event to a plain
function. The writer sleeps until there may be something to write. Whatever a peer or a network does
ends in a `ConnectionEnd`; only an error of ours is raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import trio
from h2.errors import ErrorCodes

from shared.http2 import limits
from shared.http2.events import PeerLeft, ProtocolViolation
from shared.tls import CLOSE_S, close_tls

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.http2.core import Core
    from shared.http2.events import Event

# A peer that takes nothing for this long is gone or hostile; TCP alone would wait many minutes.
WRITE_STALL_S: Final = 30.0
# How long the peer may take to hear our last words (and why we end), and to close on its side.
LAST_WORDS_S: Final = 5.0

EndReason = Literal["local", "peer_left", "eof", "broken", "stalled", "violation"]


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    """Why a connection ended.

    local: `Core.go_away` was called here. peer_left: GOAWAY came. eof, broken: the stream ended with
    or without order. stalled: nothing could be written for `WRITE_STALL_S`. violation: the peer
    broke a rule; `detail` begins with the offence.
    """

    reason: EndReason
    detail: str = ""


class Wake:
    """An edge for one waiting task: any number of `set` before it looks are one."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = trio.Event()


async def run_connection(stream: trio.abc.Stream, core: Core, on_event: Callable[[Event], None]) -> ConnectionEnd:
    """Run until the connection has ended, then close the stream and the core.

    `on_event` must not wait. What it raises ends the connection: a ProtocolViolation is the peer's,
    anything else is ours and is raised (in a group).
    """
    wake = Wake()
    wake.set()  # SETTINGS are ready
    core.call_on_output(wake.set)
    ends: list[ConnectionEnd] = []  # the first one is the reason
    try:
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                ends.append(await _write(stream, core, wake))
                if ends[0].reason == "local":
                    # The reader goes on: closing on unread bytes makes TCP throw our last words away.
                    nursery.cancel_scope.deadline = trio.current_time() + LAST_WORDS_S
                else:
                    nursery.cancel_scope.cancel("the writer has ended")

            nursery.start_soon(write)
            ends.append(await _read(stream, core, on_event))
            if ends[0].reason == "violation":
                nursery.cancel_scope.deadline = trio.current_time() + LAST_WORDS_S
            else:
                nursery.cancel_scope.cancel("the reader has ended")
    finally:
        core.close()
        with trio.move_on_after(CLOSE_S, shield=True):
            await close_tls(stream)
    return ends[0]


async def _read(stream: trio.abc.Stream, core: Core, on_event: Callable[[Event], None]) -> ConnectionEnd:
    try:
        while data := await stream.receive_some(limits.READ_BYTES_MAX):
            core.feed(data, trio.current_time())
            while (event := core.next_event()) is not None:
                on_event(event)
                if isinstance(event, PeerLeft):
                    return ConnectionEnd("peer_left")
    except ProtocolViolation as violation:
        core.go_away(ErrorCodes.ENHANCE_YOUR_CALM)
        return ConnectionEnd("violation", str(violation))
    except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
        return ConnectionEnd("broken", str(exc.__cause__ or exc))
    return ConnectionEnd("local" if core.finished else "eof")


async def _write(stream: trio.abc.Stream, core: Core, wake: Wake) -> ConnectionEnd:
    try:
        while True:
            await wake.wait()
            while data := core.take():
                with trio.fail_after(WRITE_STALL_S):
                    await stream.send_all(data)
            if core.finished:
                return ConnectionEnd("local")
    except trio.TooSlowError:
        return ConnectionEnd("stalled")
    except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
        return ConnectionEnd("broken", str(exc.__cause__ or exc))
