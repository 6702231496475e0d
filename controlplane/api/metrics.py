"""GET /metrics, for Prometheus. Nothing in it names a tenant, a node or a reservation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

CONTENT_TYPE = CONTENT_TYPE_LATEST


class MetricsPage:
    """Renders a registry, one request at a time: a few thousand series take some 20 ms, in a thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._thread = trio.CapacityLimiter(1)

    async def render(self) -> bytes:
        return await trio.to_thread.run_sync(generate_latest, self._registry, limiter=self._thread)
