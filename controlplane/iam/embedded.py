"""The IAM that comes with Better Compute: API keys, a tenant tree and three roles, in the same database.

An API key is ``bck_<id>.<secret>``: the id names the row, the secret has 256 random bits and is
compared, by its SHA-256, in constant time. It is shown once. Policy is in `controlplane.iam.roles`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.db import iam as db_iam
from controlplane.db.tx import DatabaseError
from controlplane.iam import roles
from controlplane.iam.port import BadCredential, Decision, IamUnavailable, Principal, Resource, Scope
from shared.ids import ULID_LENGTH, is_ulid

if TYPE_CHECKING:
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from controlplane.iam.catalog import Action
    from shared.ids import IdSource

KEY_PREFIX = "bck_"
_SECRET_BYTES = 32
_CREDENTIAL = re.compile(rf"{KEY_PREFIX}(?P<id>[0-9a-z]{{{ULID_LENGTH}}})\.(?P<secret>[A-Za-z0-9_-]{{43}})\Z")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made; `text` is what its holder gets, and nobody can show it again."""

    public_id: str
    text: str
    secret_sha256: bytes


def make_key(ids: IdSource) -> NewKey:
    """Make up a key; nothing is stored."""
    body = ids.ulid()
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    return NewKey(f"key_{body}", f"{KEY_PREFIX}{body}.{secret}", hashlib.sha256(secret.encode()).digest())


class EmbeddedIam:
    """Implements `controlplane.iam.port.Iam` on the tables of the schema `iam`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def authenticate(self, credential: str) -> Principal:
        match = _CREDENTIAL.match(credential)
        if match is None or not is_ulid(match["id"]):
            raise BadCredential("not an API key: it looks like bck_<id>.<secret>")
        try:
            found = await self._database.run_read(db_iam.load_credential, f"key_{match['id']}")
        except DatabaseError as exc:
            raise IamUnavailable(str(exc)) from exc
        given = hashlib.sha256(match["secret"].encode()).digest()
        if found is None or not hmac.compare_digest(bytes(found.secret_sha256), given):
            raise BadCredential("unknown API key")
        if not found.live:
            raise BadCredential("the API key has expired or was revoked")
        return Principal(
            id=found.principal_id,
            name=found.principal_name,
            tenant_id=found.tenant_id,
            credential_id=found.public_id,
        )

    async def decide(self, principal: Principal, action: Action, resource: Resource) -> Decision:
        return roles.decide(await self._load_bindings(principal), action, resource)

    async def scope(self, principal: Principal, action: Action | None) -> Scope:
        return roles.scope(await self._load_bindings(principal), action)

    def confirm(self, tx: Tx, principal: Principal) -> None:
        found = db_iam.load_credential(tx, principal.credential_id)
        if found is None or not found.live:
            raise BadCredential("the API key has expired or was revoked")

    async def _load_bindings(self, principal: Principal) -> list[db_iam.Binding]:
        try:
            return await self._database.run_read(db_iam.load_bindings, principal.id)
        except DatabaseError as exc:
            raise IamUnavailable(str(exc)) from exc
