"""Exception groups, for the places where what went wrong becomes text."""

from __future__ import annotations

from typing import cast


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors of a group and of the groups in it, in order; an error itself if it is no group."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    members = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [leaf for member in members for leaf in leaves(member)]
