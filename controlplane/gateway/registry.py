"""The open sessions of one gateway, by node: the newest of each node, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controlplane.gateway.session import Session


class Registry:
    """Finds the session of a node. After a storm half-open connections of yesterday are still there: epochs decide."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}
        self._empty = trio.Event()
        self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until there is no session."""
        while self._sessions:
            await self._empty.wait()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions that are registered now."""
        return iter(list(self._sessions.values()))

    def add(self, session: Session) -> Session | None:
        """Register a session that was opened; return the one that has to end for it, which may be itself."""
        other = self._sessions.get(session.node_id)
        if other is not None and other.epoch > session.epoch:
            return session
        if not self._sessions:
            self._empty = trio.Event()
        self._sessions[session.node_id] = session
        return other

    def remove(self, session: Session) -> None:
        """Forget a session, if it is still the one of its node."""
        if self._sessions.get(session.node_id) is session:
            del self._sessions[session.node_id]
            if not self._sessions:
                self._empty.set()

    def find(self, node_id: int, epoch: int) -> Session | None:
        """Return the node's session if it is the one of this epoch."""
        session = self._sessions.get(node_id)
        return session if session is not None and session.epoch == epoch else None

    def find_any(self, node_id: int) -> Session | None:
        """Return the node's session."""
        return self._sessions.get(node_id)

    def epochs(self) -> dict[int, int]:
        """Return each node's epoch."""
        return {node_id: session.epoch for node_id, session in self._sessions.items()}
