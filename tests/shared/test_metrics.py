"""Metrics sit on their own registry, carry the prefix, and cannot be made to grow."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest

import controlplane
from shared.metrics import OTHER, Bounded, Metrics


def test_two_processes_worth_of_metrics_live_side_by_side() -> None:
    one, two = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    one.gateway.sessions.set(5)
    assert one.registry.get_sample_value("better_compute_gateway_sessions") == 5
    assert two.registry.get_sample_value("better_compute_gateway_sessions") == 0


def test_names_carry_the_prefix_and_units() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.http.requests.of("reservations/create", "OK").inc()
    metrics.iam.call_duration.of("decide").observe(0.004)
    metrics.db.tx_duration.of("load_nodes").observe(0.004)
    text = generate_latest(metrics.registry).decode()
    assert 'better_compute_http_requests_total{code="OK",method="reservations/create"} 1.0' in text
    assert 'better_compute_iam_call_duration_seconds_bucket{le="0.005",operation="decide"} 1.0' in text
    assert "_created" not in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert all(name.startswith("better_compute_") for name in names)
    assert len(names) == len(set(names))


def test_a_label_under_a_peer_s_control_is_bounded() -> None:
    registry = CollectorRegistry()
    requests = Counter("requests", "r", ("method",), registry=registry)
    dropped = Counter("dropped", "d", registry=registry)
    bounded = Bounded(requests, ("method",), 3, dropped)
    for i in range(10):
        bounded.of(f"m{i}").inc()
    bounded.of("m1").inc()
    assert registry.get_sample_value("requests_total", {"method": "m1"}) == 2
    assert registry.get_sample_value("requests_total", {"method": OTHER}) == 7
    assert registry.get_sample_value("dropped_total") == 7
    assert len(next(iter(requests.collect())).samples) == 4


def test_what_is_declared_is_set_somewhere() -> None:
    """A metric that stays at 0 for ever tells an operator that all is well."""
    sources = Path(controlplane.__path__[0]).rglob("*.py")
    program = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    groups = {name: vars(group) for name, group in vars(Metrics(CollectorRegistry())).items() if name != "registry"}
    dead = [
        f"{group}.{metric}"
        for group, declared in groups.items()
        for metric in declared
        if not re.search(rf"metrics\.(?:{group}\.)?{metric}\b", program)
    ]
    assert len(groups) >= 7
    assert dead == []
