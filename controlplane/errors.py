"""Every error that a caller of the API can meet: one class per outcome, with its code and HTTP status.

The codes are part of the interface: `docs/reference/errors.md` has a section for each, and a test
compares the two. A message names the field and what to do about it; `field` repeats the field's
name for programs. The cause of an internal failure goes to the log with the request id, never to
the caller.
"""

from __future__ import annotations

from typing import ClassVar


class ApiError(Exception):
    """Base of the outcomes that are not success.

    Args:
        message: a sentence for a person; names the field and the fix.
        field: path of the input field at fault, as in ``devices[0].count``.
        retry_after_ms: how long to wait before the same request can succeed.
    """

    code: ClassVar[str]
    status: ClassVar[int]

    def __init__(self, message: str, *, field: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


class Invalid(ApiError):
    """The input can never be accepted as it is."""

    code = "INVALID"
    status = 400


class CsrfRequired(ApiError):
    """The header X-Better-Compute: 1 is missing."""

    code = "CSRF_REQUIRED"
    status = 400


class Unauthenticated(ApiError):
    """No credential, or one that is unknown, expired or revoked."""

    code = "UNAUTHENTICATED"
    status = 401


class Denied(ApiError):
    """The IAM said no."""

    code = "DENIED"
    status = 403


class NotFound(ApiError):
    """There is no such thing, or none that the caller may know of."""

    code = "NOT_FOUND"
    status = 404


class MethodNotFound(ApiError):
    """There is no such group or method."""

    code = "METHOD_NOT_FOUND"
    status = 404


class MethodNotAllowed(ApiError):
    """The path exists, and not for this HTTP method."""

    code = "METHOD_NOT_ALLOWED"
    status = 405


class Conflict(ApiError):
    """The thing is in another state or version than the request assumed, or exists already."""

    code = "CONFLICT"
    status = 409


class InProgress(ApiError):
    """The same idempotency key is being worked on; ask again."""

    code = "IN_PROGRESS"
    status = 409


class SoldOut(ApiError):
    """Nothing free for the request at that time, and it was asked not to queue."""

    code = "SOLD_OUT"
    status = 409


class QuotaExceeded(ApiError):
    """The tenant's or project's quota does not allow it."""

    code = "QUOTA_EXCEEDED"
    status = 409


class Impossible(ApiError):
    """No node of the pool could ever hold it, however empty."""

    code = "IMPOSSIBLE"
    status = 422


class TooLarge(ApiError):
    """The body is larger than 64 KiB."""

    code = "TOO_LARGE"
    status = 413


class UnsupportedMediaType(ApiError):
    """The body is not application/json."""

    code = "UNSUPPORTED_MEDIA_TYPE"
    status = 415


class RateLimited(ApiError):
    """Too many requests at once."""

    code = "RATE_LIMITED"
    status = 429


class Internal(ApiError):
    """A fault of ours; the log has it under the request id."""

    code = "INTERNAL"
    status = 500


class Unavailable(ApiError):
    """The database or another part cannot answer now; the outcome of a mutation may be unknown."""

    code = "UNAVAILABLE"
    status = 503


def all_errors() -> tuple[type[ApiError], ...]:
    """Every error class, in the order of this file."""
    return tuple(ApiError.__subclasses__())
