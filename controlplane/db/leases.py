"""Leases: rows that say who may do something, until when, and for the how manieth time.

`epoch` is the fencing token.  Every acquisition raises it, also by the same holder, and a renewal
does not.  A row is never deleted while its epoch could still be compared with an older one:
releasing only ends it.  A holder that let its lease run out has lost it, even if nobody else came;
it acquires again and gets a new epoch.

All statements work on sets, because a worker renews up to 256 shard leases at a time, and take
their rows in the order of the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from controlplane.db.tx import Tx


class StaleEpoch(Exception):
    """The lease has run out or is held under another epoch: what was about to be written must not be."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A lease as its holder knows it; goes with every write that only the holder may make."""

    name: str
    holder: str
    epoch: int

    def check(self, tx: Tx) -> None:
        """Keep the lease from being taken by others until this transaction ends.  Raises StaleEpoch."""
        check_epoch(tx, self.name, self.holder, self.epoch)


def acquire(tx: Tx, name: str, holder: str, ttl_s: float) -> int | None:
    """Take a lease that is free, has run out, or is the holder's own; return its new epoch, None if it is another's."""
    return acquire_all(tx, [name], holder, ttl_s).get(name)


def renew(tx: Tx, name: str, holder: str, epoch: int, ttl_s: float) -> bool:
    """Extend a lease to `ttl_s` seconds from now; return False if it is no longer held under that epoch."""
    return bool(renew_all(tx, {name: epoch}, holder, ttl_s))


def release(tx: Tx, name: str, holder: str, epoch: int) -> None:
    """End a lease now, if it is still held under that epoch."""
    release_all(tx, {name: epoch}, holder)


def check_epoch(tx: Tx, name: str, holder: str, epoch: int) -> None:
    """Keep the lease from being taken by others until this transaction ends.

    Raises StaleEpoch if it has run out or is not held by that holder under that epoch.
    """
    held = tx.value(
        """
        select 1 from lease
        where name = %s and holder = %s and epoch = %s and expires_at > compute_now()
        for share
        """,
        (name, holder, epoch),
    )
    if held is None:
        raise StaleEpoch(f"{name} is not held by {holder} under epoch {epoch}")


def acquire_all(tx: Tx, names: Collection[str], holder: str, ttl_s: float) -> dict[str, int]:
    """Take those of the leases that can be taken; return the new epochs by name."""
    taken = tx.tuples(
        """
        insert into lease as l (name, holder, expires_at)
        select name, %(holder)s, compute_now() + make_interval(secs => %(ttl_s)s)
        from unnest(%(names)s::text[]) as t (name) order by name
        on conflict (name) do update
          set holder = excluded.holder, epoch = l.epoch + 1, expires_at = excluded.expires_at
          where l.holder = excluded.holder or l.expires_at <= compute_now()
        returning name, epoch
        """,
        {"names": sorted(names), "holder": holder, "ttl_s": ttl_s},
    )
    return dict(taken)


def renew_all(tx: Tx, epochs: Mapping[str, int], holder: str, ttl_s: float) -> set[str]:
    """Extend those of the leases that are still held under their epochs; return their names."""
    renewed = tx.tuples(
        """
        with held as materialized (
          select l.name
          from unnest(%(names)s::text[], %(epochs)s::int8[]) as t (name, epoch)
          join lease l using (name, epoch)
          where l.holder = %(holder)s and l.expires_at > compute_now()
          order by l.name for update of l
        )
        update lease l set expires_at = compute_now() + make_interval(secs => %(ttl_s)s)
        from held where l.name = held.name
        returning l.name
        """,
        {"names": list(epochs), "epochs": list(epochs.values()), "holder": holder, "ttl_s": ttl_s},
    )
    return {name for (name,) in renewed}


def release_all(tx: Tx, epochs: Mapping[str, int], holder: str) -> None:
    """End now those of the leases that are still held under their epochs."""
    tx.execute(
        """
        with held as materialized (
          select l.name
          from unnest(%(names)s::text[], %(epochs)s::int8[]) as t (name, epoch)
          join lease l using (name, epoch)
          where l.holder = %(holder)s and l.expires_at > compute_now()
          order by l.name for update of l
        )
        update lease l set expires_at = compute_now() from held where l.name = held.name
        """,
        {"names": list(epochs), "epochs": list(epochs.values()), "holder": holder},
    )


def prune(tx: Tx, *, ended_before_s: float, limit: int) -> int:
    """Delete leases that ended at least that many seconds ago: of sinks and gateways that are gone."""
    return tx.execute(
        """
        delete from lease where name in (
          select name from lease where expires_at < compute_now() - make_interval(secs => %s)
          order by name limit %s for update skip locked
        )
        """,
        (ended_before_s, limit),
    )
