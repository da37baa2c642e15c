"""Figures for Prometheus: requests, times, tokens, and the state of the engine at the moment it is asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workbench.serving.copies import Copies
from workbench.serving.engine import Engine
from workbench.serving.fleet import Fleet
from workbench.serving.http.gate import Gate

__all__ = ["Metrics"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """One registry per server, so that several may live in one process."""

    def __init__(self, engine: Engine | Fleet, gate: Gate, copies: Copies | Fleet | None = None) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "workbench_http_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "workbench_http_request_seconds",
            "From the request to its last byte",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "workbench_first_token_seconds", "From queueing to the first token", buckets=SECONDS, registry=registry
        )
        self.token_gap = Histogram(
            "workbench_token_gap_seconds", "From token to token", buckets=SECONDS, registry=registry
        )
        self.prompt_tokens = Counter(
            "workbench_prompt_tokens", "Prompt tokens, image tokens among them", registry=registry
        )
        self.image_tokens = Counter(
            "workbench_image_tokens", "Prompt tokens that stand for pictures", registry=registry
        )
        self.completion_tokens = Counter("workbench_completion_tokens", "Generated tokens", registry=registry)
        self.registry.register(_EngineState(engine, gate, copies))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def answered(self, *, submitted_s: float, token_times: list[float]) -> None:
        """Times of one answer, all on one clock."""
        if token_times:
            self.first_token.observe(max(0.0, token_times[0] - submitted_s))
        for before, after in itertools.pairwise(token_times):
            self.token_gap.observe(after - before)


class _EngineState(Collector):
    def __init__(self, engine: Engine | Fleet, gate: Gate, copies: Copies | Fleet | None) -> None:
        self._engine, self._gate, self._copies = engine, gate, copies

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges = {
            "running": ("Requests with a slot", stats.num_running),
            "waiting": ("Requests that wait for a slot", stats.num_waiting),
            "free_slots": ("Slots without a request", stats.num_free_slots),
            "pool_pages_free": ("Pages of the cache that hold nothing", stats.num_free_pool_pages),
            "pool_pages_used": (
                "Pages of the cache that sequences or kept beginnings of prompts hold",
                stats.num_pool_pages - stats.num_free_pool_pages,
            ),
            "in_flight": ("Requests inside the server", self._gate.num_inside),
            "failed": ("1 where the engine has failed for good", float(self._engine.error is not None)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"workbench_{name}", text, value=value)
        if self._copies is not None:
            copies = GaugeMetricFamily("workbench_copies", "Copies of the model by state", labels=["state"])
            for state, number in self._copies.num_by_state().items():
                copies.add_metric([state], number)
            yield copies
        counters = {
            "prefix_cached_tokens": (
                "Prompt tokens that kept beginnings saved from being read",
                stats.num_cached_tokens,
            ),
            "draft_tokens": ("Tokens guessed ahead of the model", stats.num_drafted),
            "accepted_draft_tokens": ("Guessed tokens that held", stats.num_accepted),
            "restarts": ("Times the ranks were replaced after one of them failed", stats.num_restarts),
            "engine_preempted": ("Requests that gave their slot, or pages, to one before them", stats.num_preempted),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"workbench_{name}", text, value=value)
        yield CounterMetricFamily("workbench_engine_steps", "Steps of the model", value=stats.num_steps)
        yield CounterMetricFamily(
            "workbench_engine_aborted", "Requests given up by their callers", value=stats.num_aborted
        )

    def describe(self) -> Iterator[Metric]:
        return iter(())
