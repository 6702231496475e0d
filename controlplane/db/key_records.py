"""The public halves of the control plane's own keys: whose keys this database belongs to.

They are written once, by the first api that serves a database, and compared by every process from then on
(`controlplane.fleet.authority`). A retired key is kept, so that it cannot come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.db.tx import Tx

Purpose = Literal["node_ca", "serving_ca", "service_ca", "sealing", "join_signing", "intent"]


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key by what it is for; `public_key` is SubjectPublicKeyInfo in DER."""

    key_id: str
    purpose: Purpose
    public_key: bytes


def insert_first_keys(tx: Tx, records: Sequence[KeyRecord]) -> None:
    """Write down the keys of a database that has none; of two that do so at once, the first is there afterwards."""
    tx.execute(
        """
        insert into key_record (key_id, purpose, public_key, created_at)
        select r.key_id, r.purpose, r.public_key, compute_now()
        from unnest(%s::text[], %s::text[], %s::bytea[]) as r (key_id, purpose, public_key)
        where not exists (select from key_record where retired_at is null)
        order by r.purpose, r.key_id
        on conflict do nothing
        """,
        (
            [record.key_id for record in records],
            [record.purpose for record in records],
            [record.public_key for record in records],
        ),
    )


def load_live_keys(tx: Tx) -> list[KeyRecord]:
    """The keys that are not retired: few, and none before an api has served this database."""
    return tx.rows(
        KeyRecord,
        "select key_id, purpose, public_key from key_record where retired_at is null order by purpose, key_id",
    )
