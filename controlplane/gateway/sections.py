"""Inventory sections on their way in: chunks put together, within one pool of memory.

Room for a whole section is reserved with its first chunk, so a section that has begun can always be
finished; if there is none, its lane waits. What is reserved is given back when the section is
committed, or when it is given up.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from shared.http2.events import ProtocolViolation
from shared.wire import CHUNK_BYTES, SECTION_BYTES_MAX

if TYPE_CHECKING:
    from shared.wire import InventorySection

# All sections of all sessions that are not committed: eight of the largest, or 1,300 of one chunk.
POOL_BYTES: Final = 8 * SECTION_BYTES_MAX
# 8 MiB at 150 KB/s; a sender that is slower than this keeps others from the pool.
SECTION_S: Final = 60.0


class SectionPool:
    """How much of the memory for sections is spoken for."""

    def __init__(self, total_bytes: int = POOL_BYTES) -> None:
        self._total_bytes = total_bytes
        self.reserved_bytes = 0

    def reserve(self, size: int) -> bool:
        """Take so many bytes, if there are."""
        if self.reserved_bytes + size > self._total_bytes:
            return False
        self.reserved_bytes += size
        return True

    def free(self, size: int) -> None:
        """Give bytes back."""
        self.reserved_bytes -= size


def bytes_of(chunk: InventorySection) -> int:
    """How much its whole section may be."""
    return min(chunk.count * CHUNK_BYTES, SECTION_BYTES_MAX)


class Assembly:
    """One section that is not whole yet."""

    __slots__ = ("_count", "_digest", "_hasher", "_parts", "_section", "began", "reserved_bytes")

    def __init__(self, first: InventorySection, now: float) -> None:
        self._section = first.section
        self._digest = first.hash
        self._count = first.count
        self._parts: list[bytes] = []
        self._hasher = hashlib.sha256()
        self.began = now
        self.reserved_bytes = bytes_of(first)

    def check_next(self, chunk: InventorySection) -> None:
        """Raise ProtocolViolation unless this is the chunk that comes next."""
        expected = (self._section, self._digest, self._count, len(self._parts))
        if (chunk.section, chunk.hash, chunk.count, chunk.index) != expected:
            raise ProtocolViolation("message", f"chunk {chunk.index} of {chunk.section} is out of order")

    def add(self, body: bytes) -> None:
        """Take the next chunk's body."""
        self._parts.append(body)
        self._hasher.update(body)

    def finish(self) -> bytes:
        """Return the whole body. Raises ProtocolViolation if it is not what its hash says, or too large."""
        body = b"".join(self._parts)
        if len(body) > self.reserved_bytes:
            raise ProtocolViolation("message", f"section {self._section} has {len(body)} bytes")
        if self._hasher.hexdigest() != self._digest:
            raise ProtocolViolation("message", f"section {self._section} does not have its hash")
        return body
