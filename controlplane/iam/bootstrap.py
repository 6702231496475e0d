"""The first tenant and the first key, without which nobody could make any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.db import audit
from controlplane.db import iam as db_iam
from controlplane.iam.embedded import make_key

if TYPE_CHECKING:
    from controlplane.db.tx import Tx
    from shared.ids import IdSource

ROOT_SLUG = "root"
ADMIN_NAME = "admin"


@dataclass(frozen=True, slots=True)
class Root:
    """The root tenant; `key` is the first admin's API key, None unless it was made now."""

    tenant_id: int
    key: str | None


def ensure_root(tx: Tx, ids: IdSource) -> Root:
    """Make the root tenant, its first admin and that admin's key, if the database has no tenant yet.

    Two at once: the second gets UniqueConflict and finds the root when it tries again.
    """
    existing = db_iam.root_tenant_id(tx)
    if existing is not None:
        return Root(existing, None)
    tenant_id = db_iam.insert_tenant(tx, public_id=ids.new("ten"), parent_id=None, slug=ROOT_SLUG, name="Everything")
    admin_id = ids.new("usr")
    principal_id = db_iam.insert_principal(
        tx, public_id=admin_id, tenant_id=tenant_id, name=ADMIN_NAME, kind="user", role="admin"
    )
    key = _store_key(tx, ids, principal_id, tenant_id, name="first key", reason="first key of an empty database")
    return Root(tenant_id, key)


def mint_admin_key(tx: Tx, ids: IdSource, tenant_id: int) -> str:
    """Make one more key for the root's admin, for whoever has the database and lost the key.

    Raises LookupError if that admin is gone.
    """
    admin = db_iam.find_principal(tx, ADMIN_NAME, tenant_id=tenant_id)
    if admin is None:
        raise LookupError(f"the root tenant has no principal {ADMIN_NAME!r}")
    return _store_key(tx, ids, admin.principal_id, tenant_id, name="recovered", reason="made by `bcctl db init`")


def _store_key(tx: Tx, ids: IdSource, principal_id: int, tenant_id: int, *, name: str, reason: str) -> str:
    key = make_key(ids)
    db_iam.insert_key(
        tx,
        public_id=key.public_id,
        principal_id=principal_id,
        secret_sha256=key.secret_sha256,
        name=name,
        expires_in_s=None,
    )
    audit.record(
        tx,
        principal="system:bootstrap",
        action="api_key.create",
        decision="allow",
        resource=key.public_id,
        tenant_id=tenant_id,
        reason=reason,
    )
    return key.text
