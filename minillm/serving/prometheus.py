"""What a server tells Prometheus, under the names that vLLM 0.33 gives it.

So vLLM's dashboards and load generators read it as well. Times in seconds.
Not here: the same numbers for one load test (`minillm.serving.metrics`).
"""

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minillm.serving.engine import Engine
from minillm.serving.request import Completion

_FIRST = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_NEXT = (0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)


class _EngineState(Collector):
    """How the engine stands at the moment of a scrape, and what it counts by itself."""

    def __init__(self, engine: Engine, model: str):
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        scheduler, stats = self._engine.scheduler, self._engine.stats
        used = 1 - scheduler.manager.n_available / scheduler.capacity
        gauges = {
            "num_requests_running": ("requests in the engine's batch", len(scheduler.running)),
            "num_requests_waiting": ("requests in the queue", len(scheduler.waiting)),
            "kv_cache_usage_perc": ("share of the cache's blocks in use, from 0 to 1", used),
        }
        counters = {
            "num_preemptions": ("requests sent back to the queue", stats.preemptions),
            "prefix_cache_queries": ("prompt tokens looked up", stats.prefix_query_tokens),
            "prefix_cache_hits": ("prompt tokens found", stats.prefix_hit_tokens),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (what, value) in values.items():
                metric = family(f"vllm:{name}", what, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric


class ServerMetrics:
    """The metrics of one engine, in a registry of their own."""

    def __init__(self, engine: Engine):
        self._registry, self._model = CollectorRegistry(), engine.model.config.name
        self._registry.register(_EngineState(engine, self._model))
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of ended requests")
        self._generated = self._counter("generation_tokens", "tokens produced")
        self._rejected = self._counter("admission_rejections", "requests that the queue refused")
        self._ended = Counter(
            "vllm:request_success", "requests that ended, by reason",
            ["model_name", "finished_reason"], registry=self._registry,
        )  # fmt: skip
        self._ttft = self._histogram("time_to_first_token_seconds", _FIRST)
        self._itl = self._histogram("inter_token_latency_seconds", _NEXT)
        self._tpot = self._histogram("request_time_per_output_token_seconds", _NEXT)
        self._e2e = self._histogram("e2e_request_latency_seconds", _WHOLE)
        self._queued = self._histogram("request_queue_time_seconds", _WHOLE)
        self._prefill = self._histogram("request_prefill_time_seconds", _WHOLE)
        self._decode = self._histogram("request_decode_time_seconds", _WHOLE)
        self._n_prompt = self._histogram("request_prompt_tokens", _TOKENS)
        self._n_generated = self._histogram("request_generation_tokens", _TOKENS)

    def _counter(self, name: str, what: str) -> Counter:
        counter = Counter(f"vllm:{name}", what, ["model_name"], registry=self._registry)
        return counter.labels(self._model)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        what = name.replace("_", " ")
        histogram = Histogram(
            f"vllm:{name}", what, ["model_name"], buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model)

    def token(self, seconds: float, *, first: bool) -> None:
        """Count a token that came so long after the one before it, or after its request."""
        self._generated.inc()
        (self._ttft if first else self._itl).observe(seconds)

    def completed(self, completion: Completion) -> None:
        """Count a request that is over. Aborted ones have no latencies."""
        c = completion
        reason = "abort" if c.finish_reason == "aborted" else c.finish_reason
        self._ended.labels(self._model, reason).inc()
        self._prompt_tokens.inc(c.n_prompt)
        if reason == "abort" or math.isnan(c.queued):  # never let in, as where no token was asked
            return
        self._n_prompt.observe(c.n_prompt)
        self._n_generated.observe(len(c.tokens))
        self._e2e.observe(c.latency)
        self._queued.observe(c.queued)
        self._prefill.observe(c.ttft - c.queued)
        self._decode.observe(c.latency - c.ttft)
        if len(c.tokens) > 1:
            self._tpot.observe(c.tpot)

    def rejected(self) -> None:
        """Count a request that found the queue full."""
        self._rejected.inc()

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)
