"""Every metric of the control plane: its name, its labels and its buckets, in one place.

`Metrics` is built once, on a registry of its own, by the composition root; each part is given the
group it reports to and knows no other.  Label sets are constants here, and their values come from
closed lists (a method of the method table, a state, an error code).  Where a peer has a say in the
value, the metric is `Bounded`: past `LABEL_SETS_MAX` combinations every further one is counted
under "other", so that nobody can grow the process or the time-series database by sending names.

Nodes, reservations and tenants are never labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "better_compute"

# About 150 methods times the handful of codes each of them answers with.
LABEL_SETS_MAX = 2_000
OTHER = "other"

# From a cached read to the longest deadline of a request.
REQUEST_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# A transaction is a few statements on a local network; past 5 s it is over its own deadline.
TX_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# A group commit holds from one item to the limit of a batch.
BATCH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
# A loop that is 50 ms late has a step that belongs in a thread.
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

M = TypeVar("M", Counter, Gauge, Histogram)


class Bounded(Generic[M]):
    """A metric with labels that never has more than `label_sets_max` children."""

    def __init__(self, metric: M, labels: tuple[str, ...], label_sets_max: int, dropped: Counter) -> None:
        self._metric: M = metric
        self._labels = labels
        self._label_sets_max = label_sets_max
        self._dropped = dropped
        self._children: dict[tuple[str, ...], M] = {}

    def of(self, *values: str) -> M:
        """Return the child for these label values, in the order of the label names."""
        child = self._children.get(values)
        if child is not None:
            return child
        assert len(values) == len(self._labels), f"labels are {self._labels}, got {values}"
        other = (OTHER,) * len(self._labels)
        if len(self._children) >= self._label_sets_max and values != other:
            self._dropped.inc()
            return self.of(*other)
        child = self._children[values] = self._metric.labels(*values)
        return child


class Metrics:
    """All groups, on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # a second series for each counter, which nothing of ours reads
        make = _Maker(registry)
        self.registry = registry
        self.gateway = GatewayMetrics(make)
        self.db = DatabaseMetrics(make)
        self.placement = PlacementMetrics(make)
        self.queue = QueueMetrics(make)
        self.reconcilers = ReconcilerMetrics(make)
        self.iam = IamMetrics(make)
        self.http = HttpMetrics(make)
        self.process = ProcessMetrics(make)


class GatewayMetrics:
    """The listener for agents: sessions, floods at the door, and what flows through the lanes."""

    def __init__(self, make: _Maker) -> None:
        self.sessions = make.gauge("gateway_sessions", "Agent sessions that have had their Welcome.")
        self.connections = make.gauge("gateway_connections", "TCP connections, joining and refused ones included.")
        self.ends = make.bounded_counter(
            "gateway_connection_ends", "Connections ended after the handshake, by reason.", ("reason",)
        )
        self.hellos_pending = make.gauge("gateway_pending_hellos", "Hellos that wait for their Welcome.")
        self.handshakes = make.bounded_counter(
            "gateway_handshakes", "TLS handshakes by result: ok, failed, timeout, refused.", ("result",)
        )
        self.frames = make.bounded_counter(
            "gateway_frames", "Messages by direction, lane and kind.", ("direction", "lane", "kind")
        )
        self.refusals = make.bounded_counter("gateway_refusals", "Sessions refused, by code.", ("code",))
        self.ingest_batch_size = make.histogram(
            "gateway_ingest_batch_size", "Items in one group commit.", BATCH_BUCKETS
        )
        self.ingest_latency = make.histogram(
            "gateway_ingest_latency_seconds", "From a message read to its group committed.", TX_BUCKETS_S
        )
        self.dispatch_latency = make.histogram(
            "gateway_dispatch_latency_seconds", "From a spec or command written to it being sent.", REQUEST_BUCKETS_S
        )


class DatabaseMetrics:
    """Transactions, and the wait for a connection."""

    def __init__(self, make: _Maker) -> None:
        self.tx_duration = make.bounded_histogram(
            "tx_duration_seconds", "One transaction with its retries, by login role.", ("role",), TX_BUCKETS_S
        )
        self.tx_retries = make.bounded_counter(
            "tx_retries", "Transactions begun again after a serialization failure or deadlock.", ("role",)
        )
        self.tx_unknown = make.bounded_counter(
            "tx_unknown_commits", "Commits whose outcome nobody knows, by login role.", ("role",)
        )
        self.pool_waiting = make.bounded_gauge(
            "db_pool_waiting", "Transactions that wait for a connection, by login role.", ("role",)
        )


class PlacementMetrics:
    """Both placers."""

    def __init__(self, make: _Maker) -> None:
        self.lock_held = make.bounded_histogram(
            "placement_lock_held_seconds",
            "From a placement's nodes locked to the end of its commit or rollback, by placer: inline, pool-lease.",
            ("placer",),
            TX_BUCKETS_S,
        )


class QueueMetrics:
    """The work queue: how much is due and how it goes."""

    def __init__(self, make: _Maker) -> None:
        self.depth = make.bounded_gauge("queue_depth", "Keys that are due.", ("queue",))
        self.oldest = make.bounded_gauge("queue_oldest_seconds", "Age of the key that is due longest.", ("queue",))
        self.items = make.bounded_counter(
            "queue_items", "Runs of keys, by result: done, again, failed.", ("queue", "result")
        )
        self.shards_held = make.gauge("queue_shards_held", "Shards this worker holds the lease of.")


class ReconcilerMetrics:
    """Every reconciler's runs."""

    def __init__(self, make: _Maker) -> None:
        self.duration = make.bounded_histogram(
            "reconcile_duration_seconds", "One run.", ("reconciler",), REQUEST_BUCKETS_S
        )
        self.errors = make.bounded_counter(
            "reconcile_errors", "Items that failed in a run, and runs that failed.", ("reconciler",)
        )


class IamMetrics:
    """Decisions: exactly one per mutation, none on the fleet's path."""

    def __init__(self, make: _Maker) -> None:
        self.decisions = make.bounded_counter(
            "iam_decisions", "Decisions by action and outcome: allow, deny, timeout, error.", ("action", "outcome")
        )
        self.call_duration = make.bounded_histogram(
            "iam_call_duration_seconds", "One call of the IAM, by operation.", ("operation",), REQUEST_BUCKETS_S
        )


class HttpMetrics:
    """The public API."""

    def __init__(self, make: _Maker) -> None:
        self.requests = make.bounded_counter(
            "http_requests", 'Requests by method of the table and code ("OK" or an error code).', ("method", "code")
        )
        self.duration = make.bounded_histogram(
            "http_request_duration_seconds", "From request read to answer written.", ("method",), REQUEST_BUCKETS_S
        )
        self.streams = make.gauge("http_event_streams", "Open event streams.")


class ProcessMetrics:
    """The event loop of this process."""

    def __init__(self, make: _Maker) -> None:
        self.loop_lag = make.histogram("loop_lag_seconds", "How late a timer of the event loop fires.", LAG_BUCKETS_S)
        self.slow_steps = make.counter("slow_steps", "Task steps that held the event loop longer than the budget.")


class _Maker:
    """Builds metrics with the common prefix on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._dropped = self.counter("metric_label_sets_dropped", 'Observations counted under "other": a label leaks.')

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, namespace=PREFIX, registry=self._registry)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, namespace=PREFIX, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, namespace=PREFIX, registry=self._registry, buckets=buckets)

    def bounded_counter(self, name: str, text: str, labels: tuple[str, ...]) -> Bounded[Counter]:
        return self._bounded(Counter(name, text, labels, namespace=PREFIX, registry=self._registry), labels)

    def bounded_gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Bounded[Gauge]:
        return self._bounded(Gauge(name, text, labels, namespace=PREFIX, registry=self._registry), labels)

    def bounded_histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Bounded[Histogram]:
        metric = Histogram(name, text, labels, namespace=PREFIX, registry=self._registry, buckets=buckets)
        return self._bounded(metric, labels)

    def _bounded(self, metric: M, labels: tuple[str, ...]) -> Bounded[M]:
        return Bounded(metric, labels, LABEL_SETS_MAX, self._dropped)
