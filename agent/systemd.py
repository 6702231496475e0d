"""Tell systemd how the agent is doing (sd_notify), and that its loop still turns (the watchdog).

The protocol is one datagram of ``KEY=value`` lines to the socket in ``NOTIFY_SOCKET``. Without that
variable every call does nothing, so the agent runs the same from a shell. A datagram that cannot be
sent is logged and forgotten: no agent stops because its supervisor is busy.

The watchdog is fed by a task of the trio loop and by nothing else, so a loop that hangs starves it and
systemd restarts the agent. A hanging NVML call does not: that is in another process.

Source: https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = structlog.get_logger()

SEND_S = 1.0  # systemd reads its socket all the time; if it does not for so long, it will not soon


class Notifier:
    """Sends the agent's state to systemd.

    Args:
        address: the notify socket, in the file system or abstract (``@name``); None sends nothing.
        watchdog_s: seconds after which systemd kills a silent agent; None if it does not.
    """

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        self._address = address
        self._watchdog_s = watchdog_s

    async def ready(self) -> None:
        """Start-up is over. Units that are ordered after this one are started now."""
        await self._send("READY=1")

    async def status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""
        await self._send("STATUS=" + text.replace("\n", " "))

    async def stopping(self) -> None:
        await self._send("STOPPING=1")

    async def extend_timeout(self, seconds: float) -> None:
        """Ask for so many more seconds, from now, for starting or stopping."""
        await self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1_000_000)}")

    async def run_watchdog(self) -> None:
        """Feed the watchdog until cancelled; three times per limit, so that one late turn is no death.

        Returns at once where there is none.
        """
        while self._watchdog_s is not None:
            await self._send("WATCHDOG=1")
            await trio.sleep(self._watchdog_s / 3)

    async def _send(self, line: str) -> None:
        if self._address is None:
            await trio.lowlevel.checkpoint()
            return
        # An abstract address is written with "@" and begins with a zero byte.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as socket:
            try:
                with trio.fail_after(SEND_S):
                    # Connected, because a socket that is not is always reported as writable, and waiting
                    # for a full queue would be a busy loop.
                    await socket.connect(address)
                    await socket.send(line.encode())
            except (OSError, trio.TooSlowError) as exc:
                _log.warning("systemd.notify_failed", line=line, reason=str(exc))


def notifier_from_environment(environment: Mapping[str, str]) -> Notifier:
    """Return the notifier for the service that this process is, or one that does nothing.

    ``WATCHDOG_PID`` keeps a child that inherits the environment from feeding its parent's watchdog.
    """
    address = environment.get("NOTIFY_SOCKET") or None
    microseconds = environment.get("WATCHDOG_USEC", "")
    ours = environment.get("WATCHDOG_PID") in (None, str(os.getpid()))
    watchdog_s = int(microseconds) / 1_000_000 if microseconds.isdecimal() and int(microseconds) > 0 and ours else None
    return Notifier(address, watchdog_s if address is not None else None)
