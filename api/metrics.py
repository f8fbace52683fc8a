"""`GET /metrics`: the scheduler's counts and HTTP's own, in the text format of Prometheus."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from scheduler.metrics import Metrics as SchedulerMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpMetrics:
    """What HTTP counts by itself. One per server, so that two servers in one process stay apart."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.answers = Counter(
            "fermata_http_answers",
            "Answers that were begun, by status.",
            ("status",),
            registry=self.registry,
        )
        self.open_exchanges = Gauge(
            "fermata_http_open_exchanges",
            "Exchanges that are open now, streams included.",
            registry=self.registry,
        )
        self.clients_gone = Counter(
            "fermata_http_clients_gone",
            "Clients that left before the end of their answer.",
            registry=self.registry,
        )

    def text(self, scheduler: SchedulerMetrics) -> bytes:
        """All metrics, as of now."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SchedulerCollector(scheduler))
        return generate_latest(self.registry) + generate_latest(registry)


class SchedulerCollector:
    """The scheduler's numbers under their public names."""

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Each number once; called by the registry."""
        metrics = self._metrics
        yield CounterMetricFamily(
            "fermata_requests_received", "Requests received.", metrics.requests_received
        )
        yield self._ends()
        yield labelled(
            "hit_tokens",
            "Tokens of ended requests' prompts that were restored.",
            "tier",
            {"memory": metrics.memory_hit_tokens, "disk": metrics.disk_hit_tokens},
        )
        yield labelled("kv_evicted_blocks", "Blocks sent away.", "reason", metrics.evicted_blocks)
        yield labelled("kv_save_failures", "Files not saved.", "reason", metrics.save_failures)
        yield labelled("kv_bad_files", "Files that were unusable.", "reason", metrics.bad_files)
        for name, text, value in (
            ("prompt_tokens", "Tokens of the prompts received.", metrics.prompt_tokens),
            (
                "prefilled_tokens",
                "Tokens of ended requests' prompts that were computed.",
                metrics.prefilled_tokens,
            ),
            ("fed_tokens", "Tokens fed to the engine in chunks, also again.", metrics.fed_tokens),
            ("kv_restores", "Rows filled from saved blocks.", metrics.restores),
            ("kv_saved_blocks", "Blocks saved.", metrics.saved_blocks),
            ("output_tokens", "Tokens put out.", metrics.output_tokens),
            ("row_retries", "Rows that failed and were run again.", metrics.retries),
            ("steps", "Steps committed.", metrics.steps),
            ("events", "Events committed.", metrics.events),
            ("snapshots", "Snapshots of the state.", metrics.snapshots),
            ("journal_full_waits", "Commits tried again.", metrics.journal_full_waits),
        ):
            yield CounterMetricFamily(f"fermata_{name}", text, value)
        yield CounterMetricFamily(
            "fermata_decode_seconds", "Time in decode steps.", metrics.decode_ns / 1e9
        )
        for name, text, value in (
            ("requests_waiting", "Requests waiting, held ones with them.", metrics.num_waiting),
            ("requests_admitted", "Requests that have a row.", metrics.num_admitted),
            ("batch_rows", "Rows that are decoded together.", metrics.batch_rows),
            ("reserved_bytes", "Upper bound of the rows' memory.", metrics.reserved_bytes),
            ("active_bytes", "The allocator's last reading.", metrics.active_bytes),
            ("kv_blocks", "Blocks on disk.", metrics.num_blocks),
            ("kv_disk_bytes", "Saved KV on disk.", metrics.disk_bytes),
            ("kv_memory_bytes", "Saved KV that memory holds too.", metrics.hot_bytes),
            ("kv_writing_bytes", "KV in the writers' hands.", metrics.writing_bytes),
        ):
            yield GaugeMetricFamily(f"fermata_{name}", text, value)
        yield self._step_seconds()

    def _ends(self) -> Metric:
        family = CounterMetricFamily(
            "fermata_requests_ended", "Requests ended.", labels=("outcome", "reason")
        )
        for key, count in sorted(self._metrics.requests_ended.items()):
            outcome, _, reason = key.partition(":")
            family.add_metric((outcome, reason), count)
        return family

    def _step_seconds(self) -> Metric:
        family = HistogramMetricFamily(
            "fermata_step_seconds", "Time that scheduler and journal took for a step."
        )
        histogram = self._metrics.step_ns
        buckets: list[tuple[str, float]] = []
        total = 0
        names = [str(bound / 1e9) for bound in histogram.bounds] + ["+Inf"]
        for name, count in zip(names, histogram.counts, strict=True):
            total += count
            buckets.append((name, total))
        family.add_metric((), buckets=buckets, sum_value=histogram.total / 1e9)
        return family


def labelled(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    """One counter for each value of a label."""
    family = CounterMetricFamily(f"fermata_{name}", text, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family
