"""What goes back to the caller: ``{"data": …}`` or ``{"error": …}``, and which error an exception is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from controlplane import errors
from controlplane.db import tx as db_tx
from controlplane.iam.port import BadCredential, IamUnavailable

RETRY_AFTER_MS = 1000

_UNKNOWN = (
    "the database was lost while it committed: the request may have been done or not;"
    " look, or repeat it with the same idempotency_key"
)
_BUSY = "the database cannot do it now; nothing was done, try again"
# The first entry that fits is taken; what fits none is a bug.
_OUTCOMES: tuple[tuple[tuple[type[Exception], ...], type[errors.ApiError], str, int | None], ...] = (
    ((IamUnavailable,), errors.Unavailable, "the IAM cannot be asked now; try again", RETRY_AFTER_MS),
    ((db_tx.UnknownCommit,), errors.Unavailable, _UNKNOWN, RETRY_AFTER_MS),
    ((db_tx.Conflict,), errors.Conflict, "another request changed the same thing; read it again", None),
    ((db_tx.DiskFull,), errors.Unavailable, "the database has no room to write; tell its operator", None),
    (
        (db_tx.DatabaseUnavailable, db_tx.TransactionTooLong, db_tx.LockTimeout, db_tx.Contention),
        errors.Unavailable,
        _BUSY,
        RETRY_AFTER_MS,
    ),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, JSON body, and headers besides Content-Type."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict[str, str])


def as_api_error(exc: Exception) -> errors.ApiError:
    """Return the outcome for whatever was raised; Internal for a bug."""
    if isinstance(exc, errors.ApiError):
        return exc
    if isinstance(exc, BadCredential):
        return errors.Unauthenticated(str(exc))
    for kinds, outcome, message, retry_after_ms in _OUTCOMES:
        if isinstance(exc, kinds):
            return outcome(message, retry_after_ms=retry_after_ms)
    return errors.Internal("a fault of ours; the log has it under the request id")


def describe(error: errors.ApiError) -> dict[str, object]:
    """Return what stands under "error"."""
    described: dict[str, object] = {"code": error.code, "message": error.message}
    if error.field is not None:
        described["field"] = error.field
    if error.retry_after_ms is not None:
        described["retry_after_ms"] = error.retry_after_ms
    return described


def data_answer(data: object) -> Answer:
    """Answer with a success."""
    return Answer(200, msgspec.json.encode({"data": data}))


def repeated_answer(status: int, outcome: object) -> Answer:
    """Answer with the stored outcome of an idempotency key."""
    name = "data" if status == 200 else "error"
    return Answer(status, msgspec.json.encode({name: outcome, "duplicate": True}))


def error_answer(error: errors.ApiError, *, allow: str = "POST") -> Answer:
    """Answer with an error; `allow` is what the path takes when the HTTP method was the wrong one."""
    headers: dict[str, str] = {}
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.MethodNotAllowed):
        headers["allow"] = allow
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    return Answer(error.status, msgspec.json.encode({"error": describe(error)}), headers)
