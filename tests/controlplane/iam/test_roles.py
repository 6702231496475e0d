"""What the built-in roles may do, and where."""

from __future__ import annotations

import pytest

from controlplane.db.iam import Binding, Role
from controlplane.iam import roles
from controlplane.iam.catalog import ACTIONS, RESOURCE_TYPES
from controlplane.iam.port import Resource

ROOT, ACME, LABS, RIVAL = 1, 2, 3, 4


def _root(role: Role) -> Binding:
    return Binding(role=role, tenant_id=ROOT, is_root=True, below=[])


def _acme(role: Role) -> Binding:
    return Binding(role=role, tenant_id=ACME, is_root=False, below=[ACME, LABS])


def _may(bindings: list[Binding], action: str, tenant_id: int | None) -> bool:
    return roles.decide(bindings, ACTIONS[action], Resource(id="", tenant_id=tenant_id)).allowed


def test_the_catalog_is_whole() -> None:
    assert all(action.resource_type.name in RESOURCE_TYPES for action in ACTIONS.values())
    assert {action.resource_type.name for action in ACTIONS.values()} == set(RESOURCE_TYPES)
    assert all(action.name.startswith(f"{action.resource_type.name}.") for action in ACTIONS.values())


@pytest.mark.parametrize("action", ACTIONS)
def test_the_first_admin_may_do_everything_and_nobody_nothing(action: str) -> None:
    for tenant_id in (None, ROOT, ACME):
        assert _may([_root("admin")], action, tenant_id)
        assert not _may([], action, tenant_id)


@pytest.mark.parametrize("action", ACTIONS)
def test_an_admin_of_a_tenant_rules_it_and_what_is_below(action: str) -> None:
    kind = ACTIONS[action].resource_type.ownership
    against_a_holder = action in {"reservation.evict", "reservation.prioritize", "allocation.force_release"}
    for tenant_id in (ACME, LABS):
        assert _may([_acme("admin")], action, tenant_id) == (not against_a_holder)
    assert not _may([_acme("admin")], action, RIVAL)
    assert not _may([_acme("admin")], action, ROOT)
    assert _may([_acme("admin")], action, None) == (kind == "shared" and ACTIONS[action].reads)


@pytest.mark.parametrize("action", ACTIONS)
def test_an_operator_runs_the_fleet_and_sees_everything_but_keys(action: str) -> None:
    found = ACTIONS[action]
    fleet = found.resource_type.ownership != "tenant"
    allowed = (
        fleet
        or (found.reads and action != "api_key.read")
        or action in {"reservation.evict", "reservation.prioritize", "allocation.force_release"}
    )
    assert _may([_root("operator")], action, None if fleet else ACME) == allowed
    assert not _may([_acme("operator")], action, ACME), "the fleet belongs to no tenant"


def test_a_member_uses_its_own_tenant_alone() -> None:
    assert _may([_acme("member")], "reservation.create", ACME)
    assert _may([_acme("member")], "reservation.release", ACME)
    assert not _may([_acme("member")], "reservation.create", LABS)
    assert not _may([_acme("member")], "reservation.evict", ACME)
    assert not _may([_acme("member")], "project.create", ACME)
    assert not _may([_acme("member")], "node.read", None)
    assert _may([_acme("member")], "pool.read", None)
    assert not _may([_acme("member")], "pool.create", None)
    assert not _may([_root("member")], "reservation.create", ACME)


def test_roles_add_up() -> None:
    both = [_root("operator"), _acme("member")]
    assert _may(both, "node.cordon", None)
    assert _may(both, "reservation.create", ACME)
    assert not _may(both, "reservation.create", RIVAL)


def test_scopes() -> None:
    read = ACTIONS["reservation.read"]
    everything = roles.scope([_root("operator")], read)
    assert everything.allowed
    assert everything.everything
    assert everything.filter is None
    assert everything.sees(None)
    assert roles.scope([_acme("admin")], read).tenant_ids == {ACME, LABS}
    assert roles.scope([_acme("member")], read).tenant_ids == {ACME}
    assert not roles.scope([_acme("member")], read).sees(None)
    assert not roles.scope([_acme("member")], ACTIONS["node.read"]).allowed
    assert not roles.scope([_acme("admin")], ACTIONS["node.read"]).allowed
    assert roles.scope([_acme("admin")], ACTIONS["pool.read"]).allowed
    assert not roles.scope([_root("operator")], ACTIONS["api_key.read"]).allowed
    assert not roles.scope([], read).allowed
    assert roles.scope([_acme("member")], None).tenant_ids == {ACME}
    assert roles.scope([_root("member")], None).filter == [ROOT]
