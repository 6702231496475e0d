"""Tenants, principals, roles and API keys: the rows of the embedded IAM.

Of a key only the SHA-256 of its secret is stored (the secret has 256 random bits, so nothing slower
is needed). A principal's roles are rows (tenant, role); which tenants lie below a tenant is asked of
the tree each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx

Role = Literal["admin", "operator", "member"]
PrincipalKind = Literal["user", "service"]

_SELECT_TENANT = """
  select t.tenant_id, t.public_id, t.parent_id, p.slug as parent_slug, t.slug, t.name, t.version, t.created_at
  from iam.tenant t left join iam.tenant p on p.tenant_id = t.parent_id
"""
_SELECT_KEY = """
  select k.key_id, k.public_id, k.name, p.public_id as principal_id, p.name as principal_name,
         p.kind as principal_kind, p.tenant_id, t.slug as tenant_slug,
         array(select b.role from iam.role_binding b where b.principal_id = p.principal_id order by b.role) as roles,
         k.created_at, k.expires_at, k.revoked_at, k.version
  from iam.api_key k join iam.principal p using (principal_id) join iam.tenant t using (tenant_id)
"""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A node of the tenant tree; the root has no parent."""

    tenant_id: int
    public_id: str
    parent_id: int | None
    parent_slug: str | None
    slug: str
    name: str
    version: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A credential and whose it is, without its secret."""

    key_id: int
    public_id: str
    name: str
    principal_id: str
    principal_name: str
    principal_kind: PrincipalKind
    tenant_id: int
    tenant_slug: str
    roles: list[Role]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    version: int


@dataclass(frozen=True, slots=True)
class Credential:
    """What authentication compares; `live` is whether the key and its principal are in force now."""

    public_id: str
    secret_sha256: bytes
    live: bool
    principal_id: str
    principal_name: str
    tenant_id: int


@dataclass(frozen=True, slots=True)
class Binding:
    """A role of a principal. `below` is the tenant and all below it, empty for the root: there it is everything."""

    role: Role
    tenant_id: int
    is_root: bool
    below: list[int]


@dataclass(frozen=True, slots=True)
class Principal:
    """A user or service of a tenant."""

    principal_id: int
    public_id: str
    name: str


# --- authentication and roles ----------------------------------------------------------------


def load_credential(tx: Tx, key_public_id: str) -> Credential | None:
    """Return what belongs to a key's public id."""
    return tx.row(
        Credential,
        """
        select k.public_id, k.secret_sha256,
               k.revoked_at is null and (k.expires_at is null or k.expires_at > compute_now())
                 and p.disabled_at is null as live,
               p.public_id as principal_id, p.name as principal_name, p.tenant_id
        from iam.api_key k join iam.principal p using (principal_id)
        where k.public_id = %s
        """,
        (key_public_id,),
    )


def load_bindings(tx: Tx, principal_public_id: str) -> list[Binding]:
    """Return the roles of a principal, none if it is disabled."""
    return tx.rows(
        Binding,
        """
        select b.role, b.tenant_id, t.parent_id is null as is_root,
               case when t.parent_id is null then '{}'::int4[]
                    else array(select iam.tenant_subtree(b.tenant_id) order by 1) end as below
        from iam.role_binding b join iam.principal p using (principal_id) join iam.tenant t on t.tenant_id = b.tenant_id
        where p.public_id = %s and p.disabled_at is null
        order by b.tenant_id, b.role
        """,
        (principal_public_id,),
    )


# --- tenants -----------------------------------------------------------------------------------


def find_tenant(tx: Tx, ref: str, *, within: Sequence[int] | None) -> Tenant | None:
    """Return a tenant by public id or slug, if it is one of `within` (None is all)."""
    return tx.row(
        Tenant,
        _SELECT_TENANT
        + """
        where (t.public_id = %(ref)s or t.slug = %(ref)s)
          and (%(within)s::int4[] is null or t.tenant_id = any (%(within)s::int4[]))
        """,
        {"ref": ref, "within": None if within is None else list(within)},
    )


def load_tenant(tx: Tx, tenant_id: int) -> Tenant | None:
    """Return a tenant by its key."""
    return tx.row(
        Tenant,
        _SELECT_TENANT + "where t.tenant_id = %s",
        (tenant_id,),
    )


def list_tenants(tx: Tx, *, within: Sequence[int] | None, after: int, limit: int) -> list[Tenant]:
    """Return tenants with a key beyond `after`, in the order in which they were made."""
    return tx.rows(
        Tenant,
        _SELECT_TENANT
        + """
        where t.tenant_id > %(after)s and (%(within)s::int4[] is null or t.tenant_id = any (%(within)s::int4[]))
        order by t.tenant_id limit %(limit)s
        """,
        {"after": after, "within": None if within is None else list(within), "limit": limit},
    )


def tenant_slugs(tx: Tx, *, within: Sequence[int] | None, limit: int) -> list[str]:
    """Return slugs, for suggestions."""
    found = tx.tuples(
        """
        select slug from iam.tenant where %(within)s::int4[] is null or tenant_id = any (%(within)s::int4[])
        order by slug limit %(limit)s
        """,
        {"within": None if within is None else list(within), "limit": limit},
    )
    return [slug for (slug,) in found]


def insert_tenant(tx: Tx, *, public_id: str, parent_id: int | None, slug: str, name: str) -> int:
    """Add a tenant; raises UniqueConflict for a slug that is taken. Returns its key."""
    tenant_id = tx.value(
        "insert into iam.tenant (public_id, parent_id, slug, name) values (%s, %s, %s, %s) returning tenant_id",
        (public_id, parent_id, slug, name),
    )
    assert tenant_id is not None
    return tenant_id


def update_tenant(tx: Tx, tenant_id: int, *, version: int, name: str) -> bool:
    """Rename a tenant; False if its version has moved."""
    return (
        tx.execute(
            "update iam.tenant set name = %s, version = version + 1 where tenant_id = %s and version = %s",
            (name, tenant_id, version),
        )
        == 1
    )


def tenant_dependents(tx: Tx, tenant_id: int) -> list[tuple[str, int]]:
    """Lock a tenant and count what hangs on it, as (what, how many), nothing for a count of 0."""
    tx.execute("select from iam.tenant where tenant_id = %s for update", (tenant_id,))
    return tx.tuples(
        """
        select what, n from (values
          ('tenants below it', (select count(*) from iam.tenant where parent_id = %(id)s)),
          ('projects', (select count(*) from project where tenant_id = %(id)s and deleted_at is null)),
          ('quotas', (select count(*) from quota where tenant_id = %(id)s)),
          ('offerings', (select count(*) from offering where tenant_id = %(id)s and deleted_at is null)),
          ('reservations, ended ones included', (select count(*) from reservation where tenant_id = %(id)s)),
          ('API keys in force', (select count(*) from iam.api_key k join iam.principal p using (principal_id)
            where p.tenant_id = %(id)s and k.revoked_at is null
              and (k.expires_at is null or k.expires_at > compute_now())))
        ) as dependent (what, n) where n > 0
        """,
        {"id": tenant_id},
    )


def delete_tenant(tx: Tx, tenant_id: int, *, version: int) -> bool:
    """Remove a tenant on which nothing hangs, with its principals; False if its version has moved."""
    tx.execute(
        "delete from iam.api_key where principal_id in (select principal_id from iam.principal where tenant_id = %s)",
        (tenant_id,),
    )
    tx.execute(
        """
        delete from iam.role_binding where tenant_id = %(id)s
          or principal_id in (select principal_id from iam.principal where tenant_id = %(id)s)
        """,
        {"id": tenant_id},
    )
    tx.execute("delete from iam.principal where tenant_id = %s", (tenant_id,))
    return tx.execute("delete from iam.tenant where tenant_id = %s and version = %s", (tenant_id, version)) == 1


def root_tenant_id(tx: Tx) -> int | None:
    """Return the key of the tenant above all, None in an empty database."""
    return tx.value("select tenant_id from iam.tenant where parent_id is null order by tenant_id limit 1")


# --- principals and keys -------------------------------------------------------------------------


def find_principal(tx: Tx, ref: str, *, tenant_id: int) -> Principal | None:
    """Return a principal of a tenant by public id or name."""
    return tx.row(
        Principal,
        """
        select principal_id, public_id, name from iam.principal
        where tenant_id = %(tenant_id)s and (public_id = %(ref)s or name = %(ref)s) and disabled_at is null
        """,
        {"tenant_id": tenant_id, "ref": ref},
    )


def tenants_of_principal(tx: Tx, ref: str, *, within: Sequence[int] | None, limit: int) -> list[str]:
    """Return the slugs of tenants that have a principal of this public id or name, for suggestions."""
    found = tx.tuples(
        """
        select t.slug from iam.principal p join iam.tenant t using (tenant_id)
        where (p.public_id = %(ref)s or p.name = %(ref)s) and p.disabled_at is null
          and (%(within)s::int4[] is null or p.tenant_id = any (%(within)s::int4[]))
        order by t.slug limit %(limit)s
        """,
        {"ref": ref, "within": None if within is None else list(within), "limit": limit},
    )
    return [slug for (slug,) in found]


def insert_principal(tx: Tx, *, public_id: str, tenant_id: int, name: str, kind: PrincipalKind, role: Role) -> int:
    """Add a principal with one role in its own tenant; raises UniqueConflict for a name that is taken."""
    principal_id = tx.value(
        "insert into iam.principal (public_id, tenant_id, name, kind) values (%s, %s, %s, %s) returning principal_id",
        (public_id, tenant_id, name, kind),
    )
    assert principal_id is not None
    tx.execute(
        "insert into iam.role_binding (principal_id, tenant_id, role) values (%s, %s, %s)",
        (principal_id, tenant_id, role),
    )
    return principal_id


def insert_key(
    tx: Tx, *, public_id: str, principal_id: int, secret_sha256: bytes, name: str, expires_in_s: float | None
) -> None:
    """Add a key for a principal."""
    tx.execute(
        """
        insert into iam.api_key (public_id, principal_id, secret_sha256, name, expires_at)
        values (%s, %s, %s, %s, compute_now() + make_interval(secs => %s))
        """,
        (public_id, principal_id, secret_sha256, name, expires_in_s),
    )


def find_key(tx: Tx, public_id: str, *, within: Sequence[int] | None) -> ApiKey | None:
    """Return a key by public id, if its principal's tenant is one of `within` (None is all)."""
    return tx.row(
        ApiKey,
        _SELECT_KEY
        + """
        where k.public_id = %(ref)s and (%(within)s::int4[] is null or p.tenant_id = any (%(within)s::int4[]))
        """,
        {"ref": public_id, "within": None if within is None else list(within)},
    )


def list_keys(tx: Tx, *, within: Sequence[int] | None, tenant_id: int | None, after: int, limit: int) -> list[ApiKey]:
    """Return keys with a key beyond `after`, in the order in which they were made."""
    return tx.rows(
        ApiKey,
        _SELECT_KEY
        + """
        where k.key_id > %(after)s and (%(within)s::int4[] is null or p.tenant_id = any (%(within)s::int4[]))
          and (%(tenant_id)s::int4 is null or p.tenant_id = %(tenant_id)s)
        order by k.key_id limit %(limit)s
        """,
        {
            "after": after,
            "within": None if within is None else list(within),
            "tenant_id": tenant_id,
            "limit": limit,
        },
    )


def revoke_key(tx: Tx, key_id: int) -> bool:
    """End a key now; False if it had been revoked before."""
    return (
        tx.execute(
            """
            update iam.api_key set revoked_at = compute_now(), version = version + 1
            where key_id = %s and revoked_at is null
            """,
            (key_id,),
        )
        == 1
    )


def delete_dead_keys(tx: Tx, *, dead_for_s: float, limit: int) -> int:
    """Delete keys that were revoked or expired that long ago; return how many."""
    return tx.execute(
        """
        delete from iam.api_key where key_id in (
          select key_id from iam.api_key
          where coalesce(revoked_at, expires_at) < compute_now() - make_interval(secs => %s)
          order by key_id limit %s for update skip locked)
        """,
        (dead_for_s, limit),
    )
