"""The refusals that many methods share: something hangs on it, it has moved, the name is taken."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from controlplane.db.tx import UniqueConflict
from controlplane.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence


def check_version(given: int | None, current: int, *, what: str) -> None:
    """Refuse a change that was prepared from an older version. Raises Conflict."""
    if given is not None and given != current:
        raise Conflict(f"version: {what} is at version {current}, not {given}; read it again", field="version")


def check_changed(changed: bool, *, what: str) -> None:  # noqa: FBT001 - the result of a guarded update
    """Turn a guarded update that touched nothing into Conflict."""
    if not changed:
        raise Conflict(f"{what} was changed or removed by another request at the same time; read it again")


def check_free(dependents: Sequence[tuple[str, int]], *, what: str) -> None:
    """Refuse to delete what something hangs on. Raises Conflict."""
    if dependents:
        reasons = ", ".join(f"{count} {name}" for name, count in dependents)
        raise Conflict(f"{what} still has {reasons}; remove these first")


@contextmanager
def taken(message: str, *, field: str) -> Generator[None]:
    """Turn a unique constraint's refusal into Conflict; put it around an insert that ends the transaction."""
    try:
        yield
    except UniqueConflict as exc:
        raise Conflict(message, field=field) from exc
