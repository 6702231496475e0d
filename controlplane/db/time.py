"""The one clock, for code that decides by time inside a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.db.tx import Tx


def load_now(tx: Tx) -> datetime:
    """The instant a transaction works with: read once, then passed on, so that all its rows agree."""
    now: datetime | None = tx.value("select compute_now()")
    assert now is not None, "compute_now() returns an instant"
    return now
