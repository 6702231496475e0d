"""Who may come in: connections whose peer is not known yet, counted by address.

A handshake costs memory and CPU before anything is known of the peer. So many may be under way at
once, and fewer from one address. What is over is *parked*: an accepted socket without a task,
started when one of its address is through. Nobody is turned away for being many (behind a balancer
or NAT a whole fleet has one address), and a flood from one address keeps only that address waiting.
Addresses take turns.

Pure bookkeeping: the listener owns the sockets.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrival(Enum):
    """What becomes of a connection that was accepted."""

    ENTERS = auto()
    PARKED = auto()
    REFUSED = auto()


class Door(Generic[T]):
    """Counts who is inside without being known, and keeps who waits."""

    def __init__(self, *, pending_max: int, per_address_max: int, parked_max: int) -> None:
        self._pending_max = pending_max
        self._per_address_max = per_address_max
        self._parked_max = parked_max
        self._pending: dict[str, int] = {}
        self._parked: OrderedDict[str, deque[T]] = OrderedDict()
        self.pending = 0
        self.parked = 0

    def arrive(self, address: str, item: T) -> Arrival:
        """Say whether a connection enters (then `leave` must be called once), waits in the door, or is refused."""
        if address not in self._parked and self._has_room(address):
            self._enter(address)
            return Arrival.ENTERS
        if self.parked >= self._parked_max:
            return Arrival.REFUSED
        self._parked.setdefault(address, deque()).append(item)
        self.parked += 1
        return Arrival.PARKED

    def leave(self, address: str) -> list[tuple[str, T]]:
        """A connection of this address is known now, or gone. Return those that enter in its place."""
        self.pending -= 1
        self._pending[address] -= 1
        if not self._pending[address]:
            del self._pending[address]
        entering: list[tuple[str, T]] = []
        while (candidate := self._next_address()) is not None:
            waiting = self._parked[candidate]
            entering.append((candidate, waiting.popleft()))
            self.parked -= 1
            if waiting:
                self._parked.move_to_end(candidate)
            else:
                del self._parked[candidate]
            self._enter(candidate)
        return entering

    def empty(self) -> list[T]:
        """Forget all that are parked, and return them."""
        items = [item for waiting in self._parked.values() for item in waiting]
        self._parked.clear()
        self.parked = 0
        return items

    def _next_address(self) -> str | None:
        if self.pending >= self._pending_max:
            return None
        return next((address for address in self._parked if self._has_room(address)), None)

    def _has_room(self, address: str) -> bool:
        return self.pending < self._pending_max and self._pending.get(address, 0) < self._per_address_max

    def _enter(self, address: str) -> None:
        self.pending += 1
        self._pending[address] = self._pending.get(address, 0) + 1
