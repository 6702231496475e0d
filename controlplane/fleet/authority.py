"""Whether a process has the keys of the authority that its database belongs to.

A mistyped `keys_dir` would otherwise make a new authority without a word: it serves, and no server that has joined
accepts it, nor the intent it signs. So the first api writes the public halves of its permanent keys into the
database, makes no new ones from then on, and whoever has others does not start. An api compares all of them, a
worker the key that it signs with, a gateway the CA by which it knows nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.db.key_records import insert_first_keys, load_live_keys
from controlplane.fleet.keys import OTHER_KEYS_FIX, KeysError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from controlplane.db.key_records import KeyRecord, Purpose
    from controlplane.db.tx import Tx

_NAMES: dict[Purpose, str] = {
    "node_ca": "node CA",
    "serving_ca": "serving CA",
    "service_ca": "service CA",
    "sealing": "sealing key",
    "join_signing": "join-signing key",
    "intent": "intent key",
}


def has_authority(tx: Tx) -> bool:
    """Whether an api has served this database before, so that its keys must exist."""
    return bool(load_live_keys(tx))


def claim_authority(tx: Tx, directory: Path, keys: Sequence[KeyRecord]) -> None:
    """Write down the keys of a new database; refuse others than those that it has. Raises KeysError."""
    insert_first_keys(tx, keys)
    recorded = load_live_keys(tx)
    for key in keys:
        _refuse_unknown(directory, key.key_id, key.purpose, recorded)


def check_authority(tx: Tx, directory: Path, key_id: str, purpose: Purpose) -> None:
    """Refuse one key if the database has another for the purpose, and not if it has none yet. Raises KeysError."""
    if recorded := load_live_keys(tx):
        _refuse_unknown(directory, key_id, purpose, recorded)


def _refuse_unknown(directory: Path, key_id: str, purpose: Purpose, recorded: Sequence[KeyRecord]) -> None:
    theirs = [record.key_id for record in recorded if record.purpose == purpose]
    if key_id not in theirs:
        raise KeysError(
            directory,
            f"holds keys of another authority than this database's: the {_NAMES[purpose]} is {key_id},"
            f" the database's is {', '.join(theirs) or 'retired'}",
            OTHER_KEYS_FIX,
        )
