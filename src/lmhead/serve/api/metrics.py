"""What the server did, in the text form of Prometheus."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmhead.serve.worker import Worker

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of one server; two servers in a process do not share them."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "lmhead_requests", "Requests by address and status.", ["path", "status"], **made
        )
        self.prompt_tokens = Counter("lmhead_prompt_tokens", "Tokens of prompts.", **made)
        self.generated = Counter("lmhead_generated_tokens", "Tokens that were drawn.", **made)
        self.steered = Counter("lmhead_steered_tokens", "Of them, steered ones.", **made)
        self.held_back = Counter(
            "lmhead_held_back_tokens", "Of these, where a guard held steering back.", **made
        )
        self.refused = Counter("lmhead_queue_full", "Requests that found the queue full.", **made)
        self.gone = Counter("lmhead_disconnects", "Clients that went away early.", **made)
        self.first = Histogram(
            "lmhead_first_token_seconds", "Time to the first token.", buckets=_SECONDS, **made
        )
        self.each = Histogram(
            "lmhead_token_seconds", "Time from token to token.", buckets=_SECONDS, **made
        )
        self.registry.register(_Live(worker))

    def text(self) -> bytes:
        """Return everything."""
        return generate_latest(self.registry)


class _Live:
    """What is read off the worker and the head when somebody asks."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def collect(self) -> Iterator[Metric]:
        """Yield what is so now."""
        worker, counts = self.worker, self.worker.counts
        yield GaugeMetricFamily("lmhead_queue", "Requests that wait.", worker.waiting)
        yield GaugeMetricFamily("lmhead_batch", "Requests in the batch.", worker.running)
        yield CounterMetricFamily("lmhead_steps", "Steps of the batch.", counts.steps)
        yield CounterMetricFamily("lmhead_step_seconds", "Time that steps took.", counts.seconds)
        yield CounterMetricFamily("lmhead_cancelled", "Requests cancelled.", counts.cancelled)
        yield CounterMetricFamily("lmhead_failed", "Requests that failed.", counts.failed)
        stats = getattr(worker.engine.head, "stats", None)  # of engines that keep some
        if stats is None:
            return
        yield CounterMetricFamily(
            "lmhead_rescored_rows", "Rows that the head scored exactly.", stats.rescored
        )
        falls = CounterMetricFamily(
            "lmhead_fallbacks", "Answers of the dense head instead, by reason.", labels=["reason"]
        )
        for reason, count in list(stats.fallbacks.items()):
            falls.add_metric([reason], count)
        yield falls
