"""Join tokens: the right to add servers to a pool. The secret is in the first answer alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import decode_cursor, make_page
from controlplane.api.fields import Instant, NodeName, Ref
from controlplane.db import outbox, tokens
from controlplane.errors import Conflict, Invalid
from controlplane.iam.port import Resource
from shared.joining import make_token

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.node_views import NodeRow
    from controlplane.db.places import Pool
    from controlplane.db.tokens import JoinTokenRow
    from controlplane.db.tx import Tx

Uses = Annotated[int, msgspec.Meta(ge=1, le=10_000, description="How many servers may join with it.")]
# Long enough to walk to the machine; a token in a shell history is soon worth nothing.
EXPIRES_DEFAULT_S = 3600
ExpiresInS = Annotated[int, msgspec.Meta(ge=60, le=30 * 86400, description="Seconds from now.")]


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token, without its secret."""

    id: str
    pool: str
    node_name: str | None
    expect: Annotated[str | None, msgspec.Meta(description="The node that a machine becomes again.")]
    uses: int
    uses_left: int
    expires_at: Instant
    expired: bool
    revoked_at: Instant | None
    created_by: str
    created_at: Instant
    pin: Annotated[str, msgspec.Meta(description="Of the trust bundle; public.")]
    url: Annotated[str, msgspec.Meta(description="Where servers join; public.")]
    token: Annotated[str | None, msgspec.Meta(description="The token itself, in the first answer alone.")] = None
    command: Annotated[
        str | None, msgspec.Meta(description="One line to paste on the server, in the first answer alone.")
    ] = None


class CreateJoinToken(Idempotent, frozen=True, kw_only=True):
    pool: Annotated[
        Ref | None, msgspec.Meta(description="Required, unless `expect` names a node: then it is the node's.")
    ] = None
    node_name: NodeName | None = None
    expect: Annotated[
        Ref | None, msgspec.Meta(description="A node that the machine was before: its row and holds are kept.")
    ] = None
    uses: Uses = 1
    expires_in_s: ExpiresInS = EXPIRES_DEFAULT_S


class JoinTokenRef(Input, frozen=True, kw_only=True):
    id: Ref


class ListJoinTokens(ListInput, frozen=True, kw_only=True):
    pool: Ref | None = None


class RevokeJoinToken(Idempotent, frozen=True, kw_only=True):
    id: Ref


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the token leads."""

    pool: Pool
    node: NodeRow | None


def _shown(row: JoinTokenRow, call: Call) -> JoinToken:
    return JoinToken(
        id=row.public_id,
        pool=row.pool_slug,
        node_name=row.node_name,
        expect=row.expect_node,
        uses=row.uses_total,
        uses_left=row.uses_left,
        expires_at=row.expires_at,
        expired=row.expired,
        revoked_at=row.revoked_at,
        created_by=row.created_by,
        created_at=row.created_at,
        pin=call.context.join.pin,
        url=call.context.join.url,
    )


def _find(tx: Tx, call: Call, ref: str) -> JoinTokenRow:
    # only the part before the dot: whoever pastes a whole token here has not told us its secret
    row = tokens.find_token(tx, ref.partition(".")[0]) if call.scope.everything else None
    if row is None:
        raise resolve.not_found("join token", ref.partition(".")[0], field="id")
    return row


def _get(tx: Tx, call: Call, typed: JoinTokenRef) -> JoinToken:
    return _shown(_find(tx, call, typed.id), call)


def _list(tx: Tx, call: Call, typed: ListJoinTokens) -> Page[JoinToken]:
    before = decode_cursor("joinTokens", typed.cursor)
    rows = tokens.page_tokens(
        tx,
        pool_id=None if typed.pool is None else resolve.find_pool(tx, typed.pool).pool_id,
        before=None if before is None else before[0],
        limit=typed.limit + 1,
    )
    return make_page(
        "joinTokens", rows, typed.limit, item=lambda row: _shown(row, call), keys=lambda row: (row.token_id,)
    )


def _load_new(tx: Tx, call: Call, typed: CreateJoinToken) -> Target[_Place]:
    node = None if typed.expect is None else resolve.find_node(tx, call, typed.expect, field="expect")
    if node is not None:
        _check_expect(typed, node)
        pool = resolve.find_pool(tx, node.pool_slug)
        if typed.pool is not None and typed.pool not in (pool.slug, pool.public_id):
            raise Invalid(f"pool: {node.name} is in {pool.slug}; leave pool out", field="pool")
    elif typed.pool is None:
        raise Invalid("pool: is required, unless expect names a node", field="pool")
    else:
        pool = resolve.find_pool(tx, typed.pool)
    if typed.node_name is not None and typed.uses > 1:
        raise Invalid("node_name: is for one server; make a token for each, or leave it out", field="node_name")
    attributes = {"pool": pool.slug, "uses": typed.uses, "expect": node.public_id if node else ""}
    return Target(Resource(id="", tenant_id=None, attributes=attributes), _Place(pool, node))


def _check_expect(typed: CreateJoinToken, node: NodeRow) -> None:
    if node.provision_state == "decommissioned":
        raise Conflict(f"expect: {node.name} has been decommissioned; join it as a new node", field="expect")
    if typed.uses > 1:
        raise Invalid("uses: a token for a known node has one use; leave it out", field="uses")
    if typed.node_name is not None:
        raise Invalid("node_name: a known node keeps its name; leave it out", field="node_name")


def _create(tx: Tx, call: Call, typed: CreateJoinToken, target: Target[_Place]) -> Outcome[JoinToken]:
    place, advice = target.row, call.context.join
    token = make_token()
    row = tokens.insert_token(
        tx,
        public_id=token.token_id,
        secret_sha256=token.hash,
        pool_id=place.pool.pool_id,
        node_name=typed.node_name,
        expect_node_id=None if place.node is None else place.node.node_id,
        uses=typed.uses,
        expires_s=typed.expires_in_s,
        created_by=call.principal.id,
    )
    outbox.publish(tx, "joinToken.created", token.token_id, {"pool": place.pool.slug}, tenant_id=None)
    return Outcome(
        _shown(row, call),
        resource_id=token.token_id,
        # a pipe from the shell's own echo: the token is in no process's arguments
        secrets={
            "token": token.text,
            "command": f"echo {token.text} | bcd join {advice.url} --pin {advice.pin} --token-file -",
        },
    )


def _load(tx: Tx, call: Call, typed: RevokeJoinToken) -> Target[JoinTokenRow]:
    row = _find(tx, call, typed.id)
    return Target(Resource(id=row.public_id, tenant_id=None, attributes={"pool": row.pool_slug}), row)


def _revoke(tx: Tx, call: Call, typed: RevokeJoinToken, target: Target[JoinTokenRow]) -> Outcome[JoinToken]:
    row = target.row
    if row.revoked_at is not None:
        raise Conflict(f"id: {row.public_id} was revoked before", field="id")
    changed = tokens.revoke_token(tx, row.token_id, version=row.version)
    guards.check_changed(changed, what=f"join token {row.public_id}")
    outbox.publish(tx, "joinToken.revoked", row.public_id, {"pool": row.pool_slug}, tenant_id=None)
    return Outcome(_shown(_find(tx, call, row.public_id), call))


METHODS = (
    Mutation(
        group="joinTokens",
        name="create",
        action="join_token.create",
        input=CreateJoinToken,
        output=JoinToken,
        summary="Let a server join a pool; the token is shown once, with the line to paste.",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="joinTokens",
        name="get",
        action="join_token.read",
        input=JoinTokenRef,
        output=JoinToken,
        summary="Look at one token.",
        read=_get,
    ),
    Read(
        group="joinTokens",
        name="list",
        action="join_token.read",
        input=ListJoinTokens,
        output=Page[JoinToken],
        summary="List tokens, newest first.",
        read=_list,
    ),
    Mutation(
        group="joinTokens",
        name="revoke",
        action="join_token.revoke",
        input=RevokeJoinToken,
        output=JoinToken,
        summary="End a token at once; nodes that joined with it stay.",
        load=_load,
        perform=_revoke,
    ),
)
