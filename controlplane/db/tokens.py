"""Join tokens, and the answers that are kept for a moment in case they are lost on the way.

`lock_token` is the first lock of a join. What else it must know is read afterwards in one statement
(`look_around`), because a row that was waited for is seen as it is now, and everything joined to it
as it was before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.db.tx import Tx

_COLUMNS = """
  t.token_id, t.public_id, t.pool_id, p.public_id as pool_public_id, p.slug as pool_slug, t.node_name,
  e.public_id as expect_node, t.uses_total, t.uses_left, t.expires_at, t.revoked_at, t.created_by, t.version,
  t.created_at, t.expires_at <= compute_now() as expired
"""
_FROM = """
  from join_token t join pool p using (pool_id) left join node e on e.node_id = t.expect_node_id
"""


@dataclass(frozen=True, slots=True)
class JoinTokenRow:
    """A token as operators see it; its secret is not kept."""

    token_id: int
    public_id: str
    pool_id: int
    pool_public_id: str
    pool_slug: str
    node_name: str | None
    expect_node: str | None
    uses_total: int
    uses_left: int
    expires_at: datetime
    revoked_at: datetime | None
    created_by: str
    version: int
    created_at: datetime
    expired: bool


def insert_token(
    tx: Tx,
    *,
    public_id: str,
    secret_sha256: bytes,
    pool_id: int,
    node_name: str | None,
    expect_node_id: int | None,
    uses: int,
    expires_s: float,
    created_by: str,
) -> JoinTokenRow:
    """Store a new token that ends `expires_s` seconds from now."""
    tx.execute(
        """
        insert into join_token (public_id, secret_sha256, pool_id, node_name, expect_node_id, uses_total, uses_left,
                                expires_at, created_by)
        values (%(public_id)s, %(secret)s, %(pool)s, %(name)s, %(expect)s, %(uses)s, %(uses)s,
                compute_now() + make_interval(secs => %(expires)s), %(created_by)s)
        """,
        {
            "public_id": public_id,
            "secret": secret_sha256,
            "pool": pool_id,
            "name": node_name,
            "expect": expect_node_id,
            "uses": uses,
            "expires": expires_s,
            "created_by": created_by,
        },
    )
    token = find_token(tx, public_id)
    assert token is not None, "inserted above"
    return token


def find_token(tx: Tx, public_id: str) -> JoinTokenRow | None:
    return tx.row(JoinTokenRow, "select" + _COLUMNS + _FROM + "where t.public_id = %(id)s", {"id": public_id})


def page_tokens(tx: Tx, *, pool_id: int | None, before: int | None, limit: int) -> list[JoinTokenRow]:
    """One page, newest first, of tokens older than `before`."""
    return tx.rows(
        JoinTokenRow,
        "select"
        + _COLUMNS
        + _FROM
        + """
        where (%(pool)s::int4 is null or t.pool_id = %(pool)s) and (%(before)s::int4 is null or t.token_id < %(before)s)
        order by t.token_id desc limit %(limit)s
        """,
        {"pool": pool_id, "before": before, "limit": limit},
    )


def revoke_token(tx: Tx, token_id: int, *, version: int) -> bool:
    """End a token; False if its version has moved. One that is revoked already stays as it is."""
    return (
        tx.execute(
            """
            update join_token set revoked_at = coalesce(revoked_at, compute_now()), version = version + 1
            where token_id = %(id)s and version = %(version)s
            """,
            {"id": token_id, "version": version},
        )
        == 1
    )


# --- joining ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LockedToken:
    """A token that one join holds, with the place that it leads to."""

    token_id: int
    public_id: str
    secret_sha256: bytes
    role: str
    node_name: str | None
    expect_node_id: int | None
    uses_left: int
    expires_at: datetime
    revoked: bool
    pool_id: int
    pool_public_id: str
    pool_slug: str
    pool_deleted: bool
    site_id: int
    site_slug: str


def lock_token(tx: Tx, public_id: str) -> LockedToken | None:
    """Read a token and keep it until the transaction ends."""
    return tx.row(
        LockedToken,
        """
        select t.token_id, t.public_id, t.secret_sha256, t.role, t.node_name, t.expect_node_id, t.uses_left,
               t.expires_at, t.revoked_at is not null as revoked, t.pool_id, p.public_id as pool_public_id,
               p.slug as pool_slug, p.deleted_at is not null as pool_deleted, s.site_id, s.slug as site_slug
        from join_token t join pool p using (pool_id) join site s using (site_id)
        where t.public_id = %(id)s
        for no key update of t
        """,
        {"id": public_id},
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a join must know besides its token, as of after the lock.

    `replay` is the answer that the same token and key got a moment ago; `name_taken_by` the live node
    that has the name; `key_used_by` a live node that has, or had, the key.
    """

    now: datetime
    replay: bytes | None
    name_taken_by: str | None
    key_used_by: str | None


def look_around(tx: Tx, *, token_id: int, site_id: int, name: str, key_id: str) -> Surroundings:
    found = tx.row(
        Surroundings,
        """
        select compute_now() as now,
          (select r.answer from join_replay r join node_authorization a using (node_id)
           where r.token_id = %(token)s and r.key_id = %(key)s and r.expires_at > compute_now()
             and a.revoked_at is null) as replay,
          (select n.public_id from node n
           where n.site_id = %(site)s and n.name = %(name)s and n.provision_state <> 'decommissioned') as name_taken_by,
          (select n.public_id from certificate c join node n using (node_id)
           where c.key_id = %(key)s and n.provision_state <> 'decommissioned'
           order by c.certificate_id desc limit 1) as key_used_by
        """,
        {"token": token_id, "site": site_id, "name": name, "key": key_id},
    )
    assert found is not None, "a select without a from has one row"
    return found
