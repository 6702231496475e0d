"""What lives in a tenant: projects and offerings.

Functions that read take `within`, the tenants that the caller may know of (None is all): a record
of any other tenant is as good as none. Projects and offerings are deleted softly, as
`controlplane.db.places` describes. Changes are guarded by `version`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.model.shares import charged_gpus, parse_parts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx

_SELECT_PROJECT = """
  select p.project_id, p.public_id, p.tenant_id, t.slug as tenant_slug, p.slug, p.name, p.version, p.created_at
  from project p join iam.tenant t using (tenant_id)
"""
_SELECT_OFFERING = """
  select o.offering_id, o.public_id, o.tenant_id, t.slug as tenant_slug, o.pool_id, p.slug as pool_slug, o.slug,
         o.name, o.gpus, o.vcpus, o.memory_mib, o.parts, o.whole_node, o.nodes, o.topology, o.selector, o.strategy,
         m.meters, o.version, o.created_at
  from offering o join iam.tenant t using (tenant_id) join pool p on p.pool_id = o.pool_id
  cross join lateral (
    select coalesce(jsonb_object_agg(u.meter, u.quantity), '{}') as meters
    from usage_meters(p.gpu_model, 1, o.gpus, o.vcpus, o.parts) u
  ) m
"""


@dataclass(frozen=True, slots=True)
class Project:
    """A part of a tenant's work."""

    project_id: int
    public_id: str
    tenant_id: int
    tenant_slug: str
    slug: str
    name: str
    version: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Offering:
    """A named shape that can be asked for.

    Amounts are totals over all nodes, memory in MiB, `parts` as `model.shares` writes them. `nodes`, `topology`,
    `selector` and `strategy` are None or empty where they are left to the request. `meters` are those that a
    reservation of it is recorded under, with the quantity for every hour.
    """

    offering_id: int
    public_id: str
    tenant_id: int
    tenant_slug: str
    pool_id: int
    pool_slug: str
    slug: str
    name: str
    gpus: int
    vcpus: int
    memory_mib: int
    parts: list[str]
    whole_node: bool
    nodes: int | None
    topology: str | None
    selector: list[str]
    strategy: str | None
    meters: dict[str, int]
    version: int
    created_at: datetime

    @property
    def gpus_charged(self) -> int:
        """GPUs that a reservation of it takes of a quota."""
        return charged_gpus(1, self.gpus, parse_parts(self.parts))


@dataclass(frozen=True, slots=True)
class NewOffering:
    """What an offering is made of; the fields are those of `Offering`."""

    public_id: str
    tenant_id: int
    pool_id: int
    slug: str
    name: str
    gpus: int
    vcpus: int
    memory_mib: int
    parts: list[str]
    whole_node: bool
    nodes: int | None
    topology: str | None
    selector: list[str]
    strategy: str | None


def _filter(within: Sequence[int] | None) -> list[int] | None:
    return None if within is None else list(within)


# --- projects ----------------------------------------------------------------------------------


def find_projects(tx: Tx, ref: str, *, tenant_id: int | None, within: Sequence[int] | None) -> list[Project]:
    """Return the project with a public id, or those with a slug: two tenants may use the same one."""
    return tx.rows(
        Project,
        _SELECT_PROJECT
        + """
        where p.deleted_at is null and (p.public_id = %(ref)s or p.slug = %(ref)s)
          and (%(tenant_id)s::int4 is null or p.tenant_id = %(tenant_id)s)
          and (%(within)s::int4[] is null or p.tenant_id = any (%(within)s::int4[]))
        order by p.project_id limit 2
        """,
        {"ref": ref, "tenant_id": tenant_id, "within": _filter(within)},
    )


def list_projects(
    tx: Tx, *, tenant_id: int | None, within: Sequence[int] | None, after: int, limit: int
) -> list[Project]:
    """Return projects with a key beyond `after`, in the order in which they were made."""
    return tx.rows(
        Project,
        _SELECT_PROJECT
        + """
        where p.deleted_at is null and p.project_id > %(after)s
          and (%(tenant_id)s::int4 is null or p.tenant_id = %(tenant_id)s)
          and (%(within)s::int4[] is null or p.tenant_id = any (%(within)s::int4[]))
        order by p.project_id limit %(limit)s
        """,
        {"tenant_id": tenant_id, "within": _filter(within), "after": after, "limit": limit},
    )


def project_slugs(tx: Tx, *, tenant_id: int | None, within: Sequence[int] | None, limit: int) -> list[str]:
    """Return slugs, for suggestions."""
    found = tx.tuples(
        """
        select slug from project
        where deleted_at is null and (%(tenant_id)s::int4 is null or tenant_id = %(tenant_id)s)
          and (%(within)s::int4[] is null or tenant_id = any (%(within)s::int4[]))
        order by slug limit %(limit)s
        """,
        {"tenant_id": tenant_id, "within": _filter(within), "limit": limit},
    )
    return [slug for (slug,) in found]


def insert_project(tx: Tx, *, public_id: str, tenant_id: int, slug: str, name: str) -> None:
    """Add a project; raises UniqueConflict for a slug that the tenant has used."""
    tx.execute(
        "insert into project (public_id, tenant_id, slug, name) values (%s, %s, %s, %s)",
        (public_id, tenant_id, slug, name),
    )


def update_project(tx: Tx, project_id: int, *, version: int, name: str) -> bool:
    """Rename a project; False if its version has moved."""
    changed = tx.execute(
        """
        update project set name = %s, version = version + 1
        where project_id = %s and version = %s and deleted_at is null
        """,
        (name, project_id, version),
    )
    return changed == 1


def project_dependents(tx: Tx, project_id: int) -> list[tuple[str, int]]:
    """Lock a project and count what hangs on it, as (what, how many), nothing for a count of 0."""
    tx.execute("select from project where project_id = %s for update", (project_id,))
    return tx.tuples(
        """
        select what, n from (values
          ('reservations', (select count(*) from reservation where project_id = %(id)s and ended_at is null)),
          ('quotas', (select count(*) from quota where project_id = %(id)s))
        ) as dependent (what, n) where n > 0
        """,
        {"id": project_id},
    )


def delete_project(tx: Tx, project_id: int, *, version: int) -> bool:
    """Delete a project on which nothing hangs; False if its version has moved."""
    changed = tx.execute(
        """
        update project set deleted_at = compute_now(), slug = slug || '~' || project_id, version = version + 1
        where project_id = %s and version = %s and deleted_at is null
        """,
        (project_id, version),
    )
    return changed == 1


# --- offerings ---------------------------------------------------------------------------------


def find_offerings(tx: Tx, ref: str, *, tenant_id: int | None, within: Sequence[int] | None) -> list[Offering]:
    """Return the offering with a public id, or those with a slug: two tenants may use the same one."""
    return tx.rows(
        Offering,
        _SELECT_OFFERING
        + """
        where o.deleted_at is null and (o.public_id = %(ref)s or o.slug = %(ref)s)
          and (%(tenant_id)s::int4 is null or o.tenant_id = %(tenant_id)s)
          and (%(within)s::int4[] is null or o.tenant_id = any (%(within)s::int4[]))
        order by o.offering_id limit 2
        """,
        {"ref": ref, "tenant_id": tenant_id, "within": _filter(within)},
    )


def offering_slugs(tx: Tx, *, tenant_id: int | None, within: Sequence[int] | None, limit: int) -> list[str]:
    """Return slugs, for suggestions."""
    found = tx.tuples(
        """
        select distinct slug from offering
        where deleted_at is null and (%(tenant_id)s::int4 is null or tenant_id = %(tenant_id)s)
          and (%(within)s::int4[] is null or tenant_id = any (%(within)s::int4[]))
        order by slug limit %(limit)s
        """,
        {"tenant_id": tenant_id, "within": _filter(within), "limit": limit},
    )
    return [slug for (slug,) in found]


def list_offerings(
    tx: Tx, *, tenant_id: int | None, within: Sequence[int] | None, after: int, limit: int
) -> list[Offering]:
    """Return offerings with a key beyond `after`, in the order in which they were made."""
    return tx.rows(
        Offering,
        _SELECT_OFFERING
        + """
        where o.deleted_at is null and o.offering_id > %(after)s
          and (%(tenant_id)s::int4 is null or o.tenant_id = %(tenant_id)s)
          and (%(within)s::int4[] is null or o.tenant_id = any (%(within)s::int4[]))
        order by o.offering_id limit %(limit)s
        """,
        {"tenant_id": tenant_id, "within": _filter(within), "after": after, "limit": limit},
    )


def insert_offering(tx: Tx, new: NewOffering) -> None:
    """Add an offering; raises UniqueConflict for a slug that the tenant has used."""
    tx.execute(
        """
        insert into offering
          (public_id, tenant_id, pool_id, slug, name, gpus, vcpus, memory_mib, parts, whole_node, nodes, topology,
           selector, strategy)
        values
          (%(public_id)s, %(tenant_id)s, %(pool_id)s, %(slug)s, %(name)s, %(gpus)s, %(vcpus)s, %(memory_mib)s,
           %(parts)s, %(whole_node)s, %(nodes)s, %(topology)s, %(selector)s, %(strategy)s)
        """,
        {name: getattr(new, name) for name in NewOffering.__slots__},
    )


def update_offering(tx: Tx, offering_id: int, *, version: int, name: str) -> bool:
    """Rename an offering; False if its version has moved."""
    changed = tx.execute(
        """
        update offering set name = %s, version = version + 1
        where offering_id = %s and version = %s and deleted_at is null
        """,
        (name, offering_id, version),
    )
    return changed == 1


def offering_dependents(tx: Tx, offering_id: int) -> list[tuple[str, int]]:
    """Lock an offering and count what hangs on it, as (what, how many), nothing for a count of 0."""
    tx.execute("select from offering where offering_id = %s for update", (offering_id,))
    return tx.tuples(
        """
        select what, n from (values
          ('reservations', (select count(*) from reservation where offering_id = %(id)s and ended_at is null))
        ) as dependent (what, n) where n > 0
        """,
        {"id": offering_id},
    )


def delete_offering(tx: Tx, offering_id: int, *, version: int) -> bool:
    """Delete an offering on which nothing hangs; False if its version has moved."""
    changed = tx.execute(
        """
        update offering set deleted_at = compute_now(), slug = slug || '~' || offering_id, version = version + 1
        where offering_id = %s and version = %s and deleted_at is null
        """,
        (offering_id, version),
    )
    return changed == 1
