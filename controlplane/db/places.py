"""Sites and pools.

Both are deleted softly, because history names them; a deleted one gives its slug free by taking
`<slug>~<key>`, which no slug can be. Changes are guarded by `version`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from controlplane.model.requests import WindowLimits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx

PoolKind = Literal["gpu", "cpu"]

_SELECT_SITE = """
  select s.site_id, s.public_id, s.slug, s.name, s.version, s.created_at,
         (select count(*) from pool p where p.site_id = s.site_id and p.deleted_at is null) as pools
  from site s
"""
_SELECT_POOL = """
  select p.pool_id, p.public_id, p.slug, p.name, p.site_id, s.slug as site_slug, p.kind, p.gpu_model, p.acceptance,
         p.max_duration_s, p.max_horizon_s, p.preemption, p.version, p.created_at
  from pool p join site s using (site_id)
"""


@dataclass(frozen=True, slots=True)
class Site:
    """A place where pools are."""

    site_id: int
    public_id: str
    slug: str
    name: str
    version: int
    created_at: datetime
    pools: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes of one kind in one site; `acceptance` are the command kinds that a new node must pass.

    Reservations are at most `max_duration_s` long and begin at most `max_horizon_s` from now; None is no limit.
    With `preemption`, those that were placed on borrowed quota go when an owner asks for what it is guaranteed.
    """

    pool_id: int
    public_id: str
    slug: str
    name: str
    site_id: int
    site_slug: str
    kind: PoolKind
    gpu_model: str | None
    acceptance: list[str]
    max_duration_s: int | None
    max_horizon_s: int | None
    preemption: bool
    version: int
    created_at: datetime


# --- sites -------------------------------------------------------------------------------------


def find_site(tx: Tx, ref: str) -> Site | None:
    """Return a site by public id or slug."""
    return tx.row(
        Site,
        _SELECT_SITE + "where s.deleted_at is null and (s.public_id = %(ref)s or s.slug = %(ref)s)",
        {"ref": ref},
    )


def list_sites(tx: Tx, *, after: int, limit: int) -> list[Site]:
    """Return sites with a key beyond `after`, in the order in which they were made."""
    return tx.rows(
        Site,
        _SELECT_SITE + "where s.deleted_at is null and s.site_id > %s order by s.site_id limit %s",
        (after, limit),
    )


def insert_site(tx: Tx, *, public_id: str, slug: str, name: str) -> None:
    """Add a site; raises UniqueConflict for a slug that is taken."""
    tx.execute("insert into site (public_id, slug, name) values (%s, %s, %s)", (public_id, slug, name))


def update_site(tx: Tx, site_id: int, *, version: int, name: str) -> bool:
    """Rename a site; False if its version has moved."""
    changed = tx.execute(
        "update site set name = %s, version = version + 1 where site_id = %s and version = %s and deleted_at is null",
        (name, site_id, version),
    )
    return changed == 1


def site_dependents(tx: Tx, site_id: int) -> list[tuple[str, int]]:
    """Lock a site and count what hangs on it, as (what, how many), nothing for a count of 0."""
    tx.execute("select from site where site_id = %s for update", (site_id,))
    return tx.tuples(
        """
        select what, n from (values
          ('pools', (select count(*) from pool where site_id = %(id)s and deleted_at is null)),
          ('nodes', (select count(*) from node where site_id = %(id)s and provision_state <> 'decommissioned'))
        ) as dependent (what, n) where n > 0
        """,
        {"id": site_id},
    )


def delete_site(tx: Tx, site_id: int, *, version: int) -> bool:
    """Delete a site on which nothing hangs; False if its version has moved."""
    changed = tx.execute(
        """
        update site set deleted_at = compute_now(), slug = slug || '~' || site_id, version = version + 1
        where site_id = %s and version = %s and deleted_at is null
        """,
        (site_id, version),
    )
    return changed == 1


def site_slugs(tx: Tx, *, limit: int) -> list[str]:
    """Return slugs, for suggestions."""
    return [
        slug for (slug,) in tx.tuples("select slug from site where deleted_at is null order by slug limit %s", (limit,))
    ]


# --- pools -------------------------------------------------------------------------------------


def find_pool(tx: Tx, ref: str) -> Pool | None:
    """Return a pool by public id or slug."""
    return tx.row(
        Pool,
        _SELECT_POOL + "where p.deleted_at is null and (p.public_id = %(ref)s or p.slug = %(ref)s)",
        {"ref": ref},
    )


def list_pools(tx: Tx, *, site_id: int | None, after: int, limit: int) -> list[Pool]:
    """Return pools with a key beyond `after`, in the order in which they were made."""
    return tx.rows(
        Pool,
        _SELECT_POOL
        + """
        where p.deleted_at is null and p.pool_id > %(after)s and (%(site_id)s::int4 is null or p.site_id = %(site_id)s)
        order by p.pool_id limit %(limit)s
        """,
        {"site_id": site_id, "after": after, "limit": limit},
    )


def insert_pool(
    tx: Tx,
    *,
    public_id: str,
    site_id: int,
    slug: str,
    name: str,
    kind: PoolKind,
    gpu_model: str | None,
    acceptance: Sequence[str],
    max_duration_s: int | None = None,
    max_horizon_s: int | None = None,
) -> None:
    """Add a pool; raises UniqueConflict for a slug that is taken."""
    tx.execute(
        """
        insert into pool (public_id, site_id, slug, name, kind, gpu_model, acceptance, max_duration_s, max_horizon_s)
        values (%s, %s, %s, %s, %s, %s, %s, %s, %s)
        """,
        (public_id, site_id, slug, name, kind, gpu_model, list(acceptance), max_duration_s, max_horizon_s),
    )


def update_pool(
    tx: Tx,
    pool_id: int,
    *,
    version: int,
    name: str,
    acceptance: Sequence[str],
    max_duration_s: int | None,
    max_horizon_s: int | None,
    preemption: bool,
) -> bool:
    """Change a pool; False if its version has moved."""
    changed = tx.execute(
        """
        update pool
        set name = %s, acceptance = %s, max_duration_s = %s, max_horizon_s = %s, preemption = %s,
            version = version + 1
        where pool_id = %s and version = %s and deleted_at is null
        """,
        (name, list(acceptance), max_duration_s, max_horizon_s, preemption, pool_id, version),
    )
    return changed == 1


def load_window_limits(tx: Tx, pool_id: int) -> WindowLimits:
    """What the pool allows of a window as things are now."""
    found = tx.tuples("select max_duration_s, max_horizon_s from pool where pool_id = %s", (pool_id,))
    return WindowLimits.of_seconds(*found[0])


def pool_dependents(tx: Tx, pool_id: int) -> list[tuple[str, int]]:
    """Lock a pool and count what hangs on it, as (what, how many), nothing for a count of 0."""
    tx.execute("select from pool where pool_id = %s for update", (pool_id,))
    return tx.tuples(
        """
        select what, n from (values
          ('nodes', (select count(*) from node where pool_id = %(id)s and provision_state <> 'decommissioned')),
          ('reservations', (select count(*) from reservation where pool_id = %(id)s and ended_at is null)),
          ('offerings', (select count(*) from offering where pool_id = %(id)s and deleted_at is null)),
          ('quotas', (select count(*) from quota where pool_id = %(id)s)),
          ('join tokens in force', (select count(*) from join_token where pool_id = %(id)s and uses_left > 0
            and revoked_at is null and expires_at > compute_now()))
        ) as dependent (what, n) where n > 0
        """,
        {"id": pool_id},
    )


def lock_pool(tx: Tx, pool_id: int) -> None:
    """Keep a pool from being deleted, beside others who do; before any of its nodes is locked."""
    tx.execute("select from pool where pool_id = %s for share", (pool_id,))


def is_pool_open(tx: Tx, pool_id: int) -> bool:
    """Whether a locked pool is not deleted."""
    return bool(tx.value("select deleted_at is null from pool where pool_id = %s", (pool_id,)))


def delete_pool(tx: Tx, pool_id: int, *, version: int) -> bool:
    """Delete a pool on which nothing hangs; False if its version has moved."""
    changed = tx.execute(
        """
        update pool set deleted_at = compute_now(), slug = slug || '~' || pool_id, version = version + 1
        where pool_id = %s and version = %s and deleted_at is null
        """,
        (pool_id, version),
    )
    return changed == 1


def pool_slugs(tx: Tx, *, limit: int) -> list[str]:
    """Return slugs, for suggestions."""
    return [
        slug for (slug,) in tx.tuples("select slug from pool where deleted_at is null order by slug limit %s", (limit,))
    ]
