"""What somebody can enqueue to is served by exactly one reconciler, and every role has its work."""

from __future__ import annotations

from typing import Any, cast

from controlplane.config import WORKER_ROLES
from controlplane.model.queues import QUEUES
from controlplane.reconcilers.registry import Registry, WorkerParts, build_registry


def registry() -> Registry:
    nothing = cast("Any", None)  # describing a reconciler uses none of its parts
    return build_registry(WorkerParts(nothing, nothing, "worker", 100))


def test_every_queue_is_served() -> None:
    assert {reconciler.queue for reconciler in registry().reconcilers} == set(QUEUES)
    assert Registry().unserved() == set(QUEUES)


def test_only_placement_is_the_schedulers() -> None:
    assert [part.name for part in registry().of(["scheduler"]).reconcilers] == ["placement"]
    assert registry().of(["scheduler"]).sharded_roles() == {"scheduler"}
    assert registry().of(["controllers"]).sharded_roles() == {"controllers"}


def test_nothing_is_left_to_a_role_that_no_worker_has() -> None:
    whole = registry()
    assert {part.role for part in (*whole.reconcilers, *whole.jobs)} <= WORKER_ROLES
    assert whole.of(sorted(WORKER_ROLES)) == whole
