"""What planning itself costs: loading an index, what it holds in memory, and a plan of each shape of request.

A plan is booked in the index and taken back before the next one is made: so nothing is answered from what the index
remembers of the same question, and all plans are made in the same fleet. Only the planning is timed.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from controlplane.db.views import load_node_views
from controlplane.model.index import PoolIndex
from controlplane.model.planner import NoPlan
from controlplane.model.requests import PoolShape, resolve_request
from fleetsim.bench.synthetic import GPU_MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from controlplane.db.tx import Tx
    from controlplane.model.nodeview import NodeView
    from controlplane.model.requests import PlacementRequest

# Plans of one shape, or as many as are made in the time.
PLANS: Final = 200
PLANS_S: Final = 0.5
DURATION: Final = timedelta(hours=8)
AHEAD: Final = timedelta(days=2)
LATER: Final = "later"
# What a user would ask for, by the name that it has in figures; `LATER` begins in two days.
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "1_gpu": {"gpus": 1},
    "2_gpus": {"gpus": 2},
    "4_gpus": {"gpus": 4},
    "8_gpus": {"gpus": 8},
    "4_linked": {"gpus": 4, "topology": "nvlink-all"},
    "whole_node": {"nodes": 1, "whole_node": True},
    "gang_4x8": {"gpus": 32, "nodes": 4},
    "vcpus": {"vcpus": 16, "memory_mib": 64 * 1024},
    LATER: {"gpus": 2},
}


@dataclass(frozen=True, slots=True)
class ColdLoad:
    """An index from nothing: seconds of reading the ledger and of filing the nodes."""

    read_s: float
    file_s: float

    @property
    def total_s(self) -> float:
        return self.read_s + self.file_s


def load_cold(tx: Tx, pool_id: int) -> tuple[ColdLoad, Sequence[NodeView]]:
    """Load a pool's index from nothing; returns also what it was made of."""
    gc.collect()
    began = time.perf_counter()
    views = load_node_views(tx, pool_id)
    read = time.perf_counter()
    PoolIndex(views)
    return ColdLoad(read - began, time.perf_counter() - read), views


def measure_memory(tx: Tx, pool_id: int) -> float:
    """Load a pool's index once more, slowly, and return how many MiB it holds."""
    gc.collect()
    tracemalloc.start()
    index = PoolIndex(load_node_views(tx, pool_id))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del index
    return held / 2**20


def time_plans(views: Sequence[NodeView], gpus_per_node: int, now: datetime) -> dict[str, float]:
    """Return the microseconds of a plan, by shape."""
    return {name: _time_plans(views, _make_request(name, now, gpus_per_node), now) for name in SHAPES}


def _make_request(shape: str, now: datetime, gpus_per_node: int) -> PlacementRequest:
    start = now + AHEAD if shape == LATER else None
    pool = PoolShape(GPU_MODEL, gpus_per_node)
    return resolve_request(pool, now, start=start, duration=DURATION, **SHAPES[shape])


def _time_plans(views: Sequence[NodeView], request: PlacementRequest, now: datetime) -> float:
    index = PoolIndex(views)
    as_it_was = {view.node_id: view for view in views}
    spent, count = 0.0, 0
    while count < PLANS and spent < PLANS_S:
        began = time.perf_counter()
        plan = index.plan(request, now, None)
        spent += time.perf_counter() - began
        count += 1
        if isinstance(plan, NoPlan):
            # a change somewhere in the pool makes it forget the refusal
            touched = [views[0].node_id]
        else:
            index.book(plan)
            touched = [part.node_id for part in plan.parts]
        for node_id in touched:
            index.put(as_it_was[node_id])
    return spent / count * 1e6
