"""Waiting for a reservation to be usable, or to have ended.

The server is asked again and again, quickly at first: a node that is there binds within a tenth of a
second, and a queue may last for days. A server that restarts meanwhile is waited for. What was seen last
stays known when the waiting is cut short, by Ctrl-C or by the caller's deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from controlplane.cli.client import ClientError
from controlplane.cli.reservation_text import ENDED, describe, is_placed_for_later, why_ended
from controlplane.cli.session import Failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from controlplane.cli.client import AsyncApiClient, JsonObject
    from controlplane.cli.progress import Progress

POLL_FIRST_S = 0.05
POLL_GROWTH = 1.3
POLL_MAX_S = 1.0
# A server that is restarted, or a database that fails over, is back before this.
SILENCE_MAX_S = 120.0


class Watch:
    """Looks at one reservation until it is as wished; `latest` is how it was last seen."""

    def __init__(self, client: AsyncApiClient, progress: Progress, reservation: JsonObject) -> None:
        self._client = client
        self._progress = progress
        self.latest = reservation

    async def wait_usable(self) -> None:
        """Wait until it is active, or booked for later. Raises Failed if it ends instead, and ClientError."""
        await self._wait(_is_usable)

    async def wait_ended(self) -> None:
        """Wait until nothing of it is held any more. Raises ClientError."""
        await self._wait(lambda found: found["state"] in ENDED)

    async def _wait(self, done: Callable[[JsonObject], bool]) -> None:
        pause_s = POLL_FIRST_S
        silent_since: float | None = None
        while not done(self.latest):
            if silent_since is None:
                self._progress.show(describe(self.latest))
            await trio.sleep(pause_s)
            pause_s = min(POLL_MAX_S, pause_s * POLL_GROWTH)
            try:
                self.latest = await self._client.read("reservations/get", {"id": self.latest["id"]})
                silent_since = None
            except ClientError as exc:
                if not exc.may_pass:
                    raise
                silent_since = trio.current_time() if silent_since is None else silent_since
                if trio.current_time() - silent_since > SILENCE_MAX_S:
                    raise
                self._progress.show(f"{self.latest['id']}: asking again: {exc}")


def _is_usable(found: JsonObject) -> bool:
    state: str = found["state"]
    if state in ENDED or state == "releasing":
        code = f"RESERVATION_{state.upper()}"
        how = "ended before it could be used"
        if found["active_at"] is not None:
            how = "is ending" if state == "releasing" else "has ended"
        raise Failed(code, f"{found['id']} {how}: {why_ended(found)}")
    return state == "active" or is_placed_for_later(found)
