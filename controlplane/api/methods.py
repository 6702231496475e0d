"""The method table: every method of the API, by path, with its IAM action.

`load_methods` is called at start-up and refuses a table that is wrong: a path twice, an action that
the catalog does not have, a read whose action changes things or the other way round. A new group is
added to `_GROUPS` by hand, so that what is reachable can be read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controlplane.api.calls import Drafted, Idempotent, Mutation, Read
from controlplane.api.groups import (
    allocations,
    api_keys,
    audit,
    commands,
    devices,
    events,
    fleet,
    join_tokens,
    maintenance,
    nodes,
    offerings,
    pools,
    projects,
    quotas,
    reservations,
    series,
    sites,
    tenants,
)
from controlplane.iam.catalog import ACTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controlplane.iam.catalog import Action

AnyMethod = Read[Any, Any] | Mutation[Any, Any, Any] | Drafted[Any, Any, Any]

_GROUPS: tuple[tuple[AnyMethod, ...], ...] = (
    sites.METHODS,
    pools.METHODS,
    tenants.METHODS,
    projects.METHODS,
    quotas.METHODS,
    offerings.METHODS,
    api_keys.METHODS,
    events.METHODS,
    audit.METHODS,
    reservations.METHODS,
    series.METHODS,
    nodes.METHODS,
    maintenance.METHODS,
    devices.METHODS,
    join_tokens.METHODS,
    commands.METHODS,
    allocations.METHODS,
    fleet.METHODS,
)


class BadMethodTable(Exception):
    """The program cannot start: its method table is wrong."""


def load_methods(
    groups: Iterable[tuple[AnyMethod, ...]] = _GROUPS, actions: Mapping[str, Action] = ACTIONS
) -> dict[str, AnyMethod]:
    """Return the methods by path. Raises BadMethodTable naming every fault."""
    table: dict[str, AnyMethod] = {}
    problems: list[str] = []
    for method in (method for group in groups for method in group):
        if method.path in table:
            problems.append(f"{method.path} is there twice")
        table[method.path] = method
        problems += _faults(method, actions)
    if problems:
        raise BadMethodTable("; ".join(problems))
    return table


def _faults(method: AnyMethod, actions: Mapping[str, Action]) -> list[str]:
    action = actions.get(method.action)
    if action is None:
        return [f"{method.path}: the IAM catalog has no action {method.action}"]
    faults: list[str] = []
    if action.reads != isinstance(method, Read):
        faults.append(f"{method.path}: {method.action} does not fit a {type(method).__name__.lower()}")
    if isinstance(method, Drafted) and not issubclass(method.input, Idempotent):
        faults.append(f"{method.path}: a drafted method takes an idempotency key")
    return faults
