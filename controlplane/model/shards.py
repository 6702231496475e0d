"""Which shard a key belongs to, and which worker a shard.

A key's shard is a function of its text, so every process, in any language and at any time, agrees
on it.  A shard's owner is the worker with the highest score for it (rendezvous hashing): when a
worker comes or goes, only the shards that it gains or had move, and nobody coordinates anything.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

# Enough for two hundred workers to have work, few enough for one statement to renew all leases.
# Never changed: the shard is stored with the key.
SHARD_COUNT = 256

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193


def fnv1a_32(data: bytes) -> int:
    """Return the 32-bit FNV-1a hash."""
    value = _FNV_OFFSET
    for byte in data:
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def shard_of(key: str) -> int:
    """Return the key's shard, 0 to SHARD_COUNT - 1."""
    return fnv1a_32(key.encode()) % SHARD_COUNT


def rendezvous(worker_ids: Collection[str], shard: int) -> str:
    """Return the owner of the shard among at least one worker; their order does not matter."""
    # FNV-1a would not do here: ids that differ only in their ends get scores that are nearly sorted.
    return max(worker_ids, key=lambda worker_id: (blake2b(f"{worker_id}/{shard}".encode()).digest(), worker_id))


def owned_shards(worker_id: str, worker_ids: Collection[str]) -> frozenset[int]:
    """Return the shards that fall to `worker_id` among `worker_ids`."""
    return frozenset(shard for shard in range(SHARD_COUNT) if rendezvous(worker_ids, shard) == worker_id)
