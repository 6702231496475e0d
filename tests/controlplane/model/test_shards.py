"""Shards are the same for everybody and for ever, and fall evenly to the workers."""

from __future__ import annotations

from collections import Counter

import pytest

from controlplane.model.shards import SHARD_COUNT, fnv1a_32, owned_shards, rendezvous, shard_of


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", 0x811C9DC5), (b"a", 0xE40C292C), (b"foobar", 0xBF9CF968), (b"chongo was here!\n", 0xD49930D5)],
)
def test_fnv1a_is_the_published_one(data: bytes, value: int) -> None:
    assert fnv1a_32(data) == value


@pytest.mark.parametrize(("key", "shard"), [("", 0xC5), ("a", 0x2C), ("foobar", 0x68), ("1", 0x1C), ("10000", 0x1C)])
def test_shards_never_change(key: str, shard: int) -> None:
    assert shard_of(key) == shard


def test_keys_spread_over_all_shards() -> None:
    sizes = Counter(shard_of(str(key)) for key in range(10_000))
    assert len(sizes) == SHARD_COUNT
    assert max(sizes.values()) < 3 * 10_000 / SHARD_COUNT


def test_the_order_of_the_workers_does_not_matter() -> None:
    workers = [f"wrk_{number}" for number in range(7)]
    assert [rendezvous(workers, shard) for shard in range(SHARD_COUNT)] == [
        rendezvous(workers[::-1], shard) for shard in range(SHARD_COUNT)
    ]


def test_shards_fall_evenly_to_the_workers() -> None:
    workers = [f"wrk_01j{number}" for number in range(8)]
    sizes = [len(owned_shards(worker, workers)) for worker in workers]
    assert sum(sizes) == SHARD_COUNT
    assert min(sizes) > SHARD_COUNT / 8 / 2
    assert max(sizes) < SHARD_COUNT / 8 * 2


def test_a_worker_that_leaves_moves_only_its_own_shards() -> None:
    workers = [f"wrk_{number}" for number in range(8)]
    before = {shard: rendezvous(workers, shard) for shard in range(SHARD_COUNT)}
    after = {shard: rendezvous(workers[1:], shard) for shard in range(SHARD_COUNT)}
    assert {shard for shard in before if before[shard] != after[shard]} == owned_shards(workers[0], workers)
