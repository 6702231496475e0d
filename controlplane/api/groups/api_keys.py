"""API keys: credentials of the embedded IAM's users and services.

`create` without a principal makes one, with a role in its tenant; with a principal it adds a key to
an existing one. The key is in the answer once, as `key`; a repeat of the request does not show it
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Ref, Seconds
from controlplane.db import iam as db_iam
from controlplane.db import outbox
from controlplane.errors import Conflict, Invalid, NotFound
from controlplane.iam.embedded import make_key
from controlplane.iam.port import Resource

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.tx import Tx

# Enough to choose from; who has one name in more tenants knows which is meant.
_TENANTS_SHOWN = 5

RoleName = Literal["admin", "operator", "member"]
KeyName = Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="Whose it is, or what it is for.")]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A credential, without its secret."""

    id: str
    name: str
    principal: str
    principal_name: str
    kind: Literal["user", "service"]
    tenant: str
    roles: list[RoleName]
    created_at: Instant
    expires_at: Instant | None
    revoked_at: Instant | None
    key: Annotated[str | None, msgspec.Meta(description="The credential itself, in the first answer alone.")] = None


class CreateApiKey(Idempotent, frozen=True, kw_only=True):
    name: KeyName
    tenant: Ref | None = None
    principal: Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="Id or name.")] | None = None
    role: RoleName | None = None
    kind: Literal["user", "service"] = "user"
    expires_in_s: Seconds | None = None


class ApiKeyRef(Input, frozen=True, kw_only=True):
    id: Ref


class ListApiKeys(ListInput, frozen=True, kw_only=True):
    tenant: Ref | None = None


class RevokeApiKey(Idempotent, frozen=True, kw_only=True):
    id: Ref


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who gets the new key: an existing principal, or None for one that is to be made."""

    tenant: db_iam.Tenant
    principal: db_iam.Principal | None


def _shown(row: db_iam.ApiKey) -> ApiKey:
    return ApiKey(
        id=row.public_id,
        name=row.name,
        principal=row.principal_id,
        principal_name=row.principal_name,
        kind=row.principal_kind,
        tenant=row.tenant_slug,
        roles=row.roles,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )


def _find(tx: Tx, call: Call, ref: str) -> db_iam.ApiKey:
    row = db_iam.find_key(tx, ref, within=call.scope.filter)
    if row is None:
        raise resolve.not_found("API key", ref, field="id")
    return row


def _reload(tx: Tx, public_id: str) -> ApiKey:
    row = db_iam.find_key(tx, public_id, within=None)
    assert row is not None, "written in this transaction"
    return _shown(row)


def _get(tx: Tx, call: Call, typed: ApiKeyRef) -> ApiKey:
    return _shown(_find(tx, call, typed.id))


def _list(tx: Tx, call: Call, typed: ListApiKeys) -> Page[ApiKey]:
    tenant_id = None if typed.tenant is None else resolve.find_tenant(tx, call, typed.tenant).tenant_id
    rows = db_iam.list_keys(
        tx,
        within=call.scope.filter,
        tenant_id=tenant_id,
        after=after("apiKeys", typed.cursor),
        limit=typed.limit + 1,
    )
    return make_page("apiKeys", rows, typed.limit, item=_shown, keys=lambda row: (row.key_id,))


def _no_principal(tx: Tx, call: Call, ref: str, tenant: db_iam.Tenant) -> NotFound:
    elsewhere = db_iam.tenants_of_principal(tx, ref, within=call.scope.filter, limit=_TENANTS_SHOWN)
    fix = f"; there is one in {', '.join(elsewhere)}: name that tenant" if elsewhere else ""
    return NotFound(f"principal: no user or service {ref} in tenant {tenant.slug}{fix}", field="principal")


def _load_new(tx: Tx, call: Call, typed: CreateApiKey) -> Target[_Holder]:
    tenant = resolve.find_tenant(tx, call, typed.tenant)
    principal = None
    if typed.principal is not None:
        principal = db_iam.find_principal(tx, typed.principal, tenant_id=tenant.tenant_id)
        if principal is None:
            raise _no_principal(tx, call, typed.principal, tenant)
        if typed.role is not None:
            raise Invalid("role: an existing user or service has its role; leave it out", field="role")
    elif typed.role == "operator" and tenant.parent_id is not None:
        raise Invalid("role: operators run the whole fleet, so they belong to the root tenant", field="role")
    resource = Resource(
        id="",
        tenant_id=tenant.tenant_id,
        attributes={
            "tenant": tenant.public_id,
            "principal": principal.public_id if principal else "",
            "role": typed.role or "",
        },
    )
    return Target(resource, _Holder(tenant, principal))


def _create(tx: Tx, call: Call, typed: CreateApiKey, target: Target[_Holder]) -> Outcome[ApiKey]:
    tenant, principal = target.row.tenant, target.row.principal
    if principal is not None:
        principal_id = principal.principal_id
    else:
        with guards.taken(
            f"name: tenant {tenant.slug} has a {typed.name} already;"
            f" give principal: {typed.name} to add a key, or another name",
            field="name",
        ):
            principal_id = db_iam.insert_principal(
                tx,
                public_id=call.context.ids.new("usr"),
                tenant_id=tenant.tenant_id,
                name=typed.name,
                kind=typed.kind,
                role=typed.role or "member",
            )
    key = make_key(call.context.ids)
    db_iam.insert_key(
        tx,
        public_id=key.public_id,
        principal_id=principal_id,
        secret_sha256=key.secret_sha256,
        name=typed.name,
        expires_in_s=typed.expires_in_s,
    )
    outbox.publish(tx, "apiKey.created", key.public_id, {"name": typed.name}, tenant_id=tenant.tenant_id)
    return Outcome(_reload(tx, key.public_id), resource_id=key.public_id, secrets={"key": key.text})


def _load_revoke(tx: Tx, call: Call, typed: RevokeApiKey) -> Target[db_iam.ApiKey]:
    row = _find(tx, call, typed.id)
    return Target(Resource(id=row.public_id, tenant_id=row.tenant_id), row)


def _revoke(tx: Tx, call: Call, typed: RevokeApiKey, target: Target[db_iam.ApiKey]) -> Outcome[ApiKey]:
    row = target.row
    if not db_iam.revoke_key(tx, row.key_id):
        raise Conflict(f"id: {row.public_id} was revoked before", field="id")
    outbox.publish(tx, "apiKey.revoked", row.public_id, {"name": row.name}, tenant_id=row.tenant_id)
    return Outcome(_reload(tx, row.public_id), forget_credential=row.public_id)


METHODS = (
    Mutation(
        group="apiKeys",
        name="create",
        action="api_key.create",
        input=CreateApiKey,
        output=ApiKey,
        summary="Make a key, for a new user or service or an existing one; it is shown once.",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="apiKeys",
        name="get",
        action="api_key.read",
        input=ApiKeyRef,
        output=ApiKey,
        summary="Look at one key, without its secret.",
        read=_get,
    ),
    Read(
        group="apiKeys",
        name="list",
        action="api_key.read",
        input=ListApiKeys,
        output=Page[ApiKey],
        summary="List the keys that you may see, oldest first.",
        read=_list,
    ),
    Mutation(
        group="apiKeys",
        name="revoke",
        action="api_key.revoke",
        input=RevokeApiKey,
        output=ApiKey,
        summary="End a key at once.",
        load=_load_revoke,
        perform=_revoke,
    ),
)
