"""Idempotency keys: a repeat of a request gets the first outcome, whatever became of the connection.

A row is (principal, method, key) with a hash of the input. A method that writes a draft claims the
key together with it, and finishes it with the outcome in the transaction that admits or rejects the
draft. Between the two the key is unfinished: repeats are told to wait, until `RESUME_AFTER_S` have
passed since somebody last took it up; then the next repeat takes the draft over. A key nobody
finished is reaped after `REAP_AFTER_S` (the draft is the ledger's to expire). Methods without a
draft claim and finish in one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from controlplane.db.tx import Tx

# Longer than a request can live, so that two never work on one draft.
RESUME_AFTER_S = 30.0
REAP_AFTER_S = 600.0
# Most requests are over in less.
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Key:
    """Names one request of one principal."""

    principal: str
    method: str
    key: str
    input_sha256: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a key.

    `state`: ``new`` (now claimed by the caller, or free if only looked at), ``done`` (`status` and
    `outcome` are the first answer), ``running`` (ask again after `retry_after_s`), ``resumed``
    (claimed by the caller, with the draft `resource_id`), ``mismatch`` (used with another input).
    """

    state: Literal["new", "done", "running", "resumed", "mismatch"]
    resource_id: str = ""
    status: int = 0
    outcome: Any = None
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Row:
    input_sha256: bytes
    resource_id: str
    status: int | None
    outcome: Any
    idle_s: float


def look_up(tx: Tx, key: Key) -> Found:
    """Say what is known of a key, without claiming it; an unfinished one is ``running``."""
    row = tx.row(
        _Row,
        """
        select input_sha256, resource_id, status, outcome,
               extract(epoch from compute_now() - touched_at)::float8 as idle_s
        from idempotency where principal = %s and method = %s and key = %s
        """,
        (key.principal, key.method, key.key),
    )
    if row is None:
        return Found("new")
    return _judge(row, key)


def claim(tx: Tx, key: Key, resource_id: str = "") -> Found:
    """Claim a key, or say why it cannot be claimed. `resource_id` is the draft that is written with it.

    Waits for a transaction that is claiming the same key now; LockTimeout if that takes long.
    """
    claimed = tx.execute(
        """
        insert into idempotency (principal, method, key, input_sha256, resource_id) values (%s, %s, %s, %s, %s)
        on conflict (principal, method, key) do nothing
        """,
        (key.principal, key.method, key.key, key.input_sha256, resource_id),
    )
    if claimed:
        return Found("new")
    row = tx.row(
        _Row,
        """
        select input_sha256, resource_id, status, outcome,
               extract(epoch from compute_now() - touched_at)::float8 as idle_s
        from idempotency where principal = %s and method = %s and key = %s for update
        """,
        (key.principal, key.method, key.key),
    )
    if row is None:  # reaped a moment ago
        return Found("running", retry_after_s=RETRY_AFTER_S)
    found = _judge(row, key)
    if found.state != "running" or row.idle_s < RESUME_AFTER_S:
        return found
    tx.execute(
        "update idempotency set touched_at = compute_now() where principal = %s and method = %s and key = %s",
        (key.principal, key.method, key.key),
    )
    return Found("resumed", resource_id=row.resource_id)


def finish(tx: Tx, key: Key, *, status: int, outcome: object) -> None:
    """Store a refusal as the first outcome, if there is none; a success is `audit.record_outcome`'s to store."""
    tx.execute(
        """
        update idempotency set status = %s, outcome = %s::jsonb, touched_at = compute_now()
        where principal = %s and method = %s and key = %s and status is null
        """,
        (status, msgspec.json.encode(outcome).decode(), key.principal, key.method, key.key),
    )


def release(tx: Tx, key: Key) -> None:
    """Let the next repeat take an unfinished key over at once."""
    tx.execute(
        """
        update idempotency set touched_at = compute_now() - make_interval(secs => %s)
        where principal = %s and method = %s and key = %s and status is null
        """,
        (RESUME_AFTER_S, key.principal, key.method, key.key),
    )


def reap(tx: Tx, *, limit: int) -> int:
    """Delete keys that nobody finished in REAP_AFTER_S; return how many."""
    return tx.execute(
        """
        delete from idempotency where (principal, method, key) in (
          select principal, method, key from idempotency
          where status is null and created_at < compute_now() - make_interval(secs => %s)
            and touched_at < compute_now() - make_interval(secs => %s)
          order by created_at, principal, method, key limit %s for update skip locked)
        """,
        (REAP_AFTER_S, RESUME_AFTER_S, limit),
    )


def _judge(row: _Row, key: Key) -> Found:
    if bytes(row.input_sha256) != key.input_sha256:
        return Found("mismatch", resource_id=row.resource_id)
    if row.status is not None:
        return Found("done", resource_id=row.resource_id, status=row.status, outcome=row.outcome)
    return Found("running", resource_id=row.resource_id, retry_after_s=RETRY_AFTER_S)
