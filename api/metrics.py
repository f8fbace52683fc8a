"""`GET /metrics`: the scheduler's counts and HTTP's own, in the text format of Prometheus."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from scheduler.metrics import Histogram
from scheduler.metrics import Metrics as SchedulerMetrics
from scheduler.views import MemoryView

LEVELS = {"normal": 0, "high": 1, "emergency": 2}

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
            "Tokens of finished requests' prompts that were restored.",
            "tier",
            {"memory": metrics.memory_hit_tokens, "disk": metrics.disk_hit_tokens},
        )
        yield labelled("pauses", "Requests that came to be held.", "reason", metrics.pauses)
        yield labelled(
            "adoptions", "Requests sent again that another one answers.", "by", metrics.adoptions
        )
        yield labelled("kv_drops", "Rows held without their KV.", "reason", metrics.kv_drops)
        yield labelled("kv_evicted_blocks", "Blocks sent away.", "reason", metrics.evicted_blocks)
        yield labelled("kv_save_failures", "Files not saved.", "reason", metrics.save_failures)
        yield labelled("kv_bad_files", "Files that were unusable.", "reason", metrics.bad_files)
        for name, text, value in (
            ("prompt_tokens", "Tokens of the prompts received.", metrics.prompt_tokens),
            (
                "prefilled_tokens",
                "Tokens of finished requests' prompts that were computed.",
                metrics.prefilled_tokens,
            ),
            ("fed_tokens", "Tokens fed to the engine in chunks, also again.", metrics.fed_tokens),
            ("kv_restores", "Rows filled from saved blocks.", metrics.restores),
            ("kv_saved_blocks", "Blocks saved.", metrics.saved_blocks),
            ("output_tokens", "Tokens put out.", metrics.output_tokens),
            ("orphans_expired", "Requests to which nobody came back.", metrics.orphans_expired),
            ("resumes", "Held requests that got a row again.", metrics.resumes),
            ("memory_reclaims", "Times the allocator gave back.", metrics.reclaims),
            ("memory_reclaimed_bytes", "What the allocator gave back.", metrics.reclaimed_bytes),
            ("memory_emergencies", "Times usage was at the ceiling.", metrics.emergencies),
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
        yield from self._gauges()
        yield from memory_metrics(metrics.memory)
        yield seconds_of(
            "step_seconds", "Time that scheduler and journal took for a step.", metrics.step_ns
        )
        yield seconds_of(
            "held_seconds", "How long requests had been held when they went on.", metrics.held_ns
        )

    def _gauges(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, value in (
            (
                "requests_waiting",
                "Requests without a row, held ones with them.",
                metrics.num_waiting,
            ),
            ("requests_held", "Requests that are held.", metrics.num_held),
            ("requests_pausing", "Requests on their way to being held.", metrics.num_pausing),
            ("requests_resuming", "Requests whose row is filled again.", metrics.num_resuming),
            ("orphans", "Open requests without a client.", metrics.num_orphans),
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

    def _ends(self) -> Metric:
        family = CounterMetricFamily(
            "fermata_requests_ended", "Requests ended.", labels=("outcome", "reason")
        )
        for key, count in sorted(self._metrics.requests_ended.items()):
            outcome, _, reason = key.partition(":")
            family.add_metric((outcome, reason), count)
        return family


def memory_metrics(memory: MemoryView) -> Iterator[Metric]:
    """Memory as of the last reading. Without a ceiling there are no marks, and no readings."""
    usage_bytes = None if memory.ceiling_bytes is None else memory.usage_bytes
    for name, text, value in (
        ("usage_bytes", "What the marks are compared with.", usage_bytes),
        ("ceiling_bytes", "The ceiling that holds now.", memory.ceiling_bytes),
        ("low_bytes", "The mark above which nobody gets a row.", memory.low_bytes),
        ("high_bytes", "The mark above which memory is given back.", memory.high_bytes),
        ("emergency_bytes", "The mark above which that is urgent.", memory.emergency_bytes),
        ("level", "0 below the high mark, 1 above it, 2 in an emergency.", LEVELS[memory.level]),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"fermata_memory_{name}", text, value)


def seconds_of(name: str, text: str, histogram: Histogram) -> Metric:
    """A histogram of nanoseconds, in seconds."""
    family = HistogramMetricFamily(f"fermata_{name}", text)
    buckets: list[tuple[str, float]] = []
    total = 0
    names = [str(bound / 1e9) for bound in histogram.bounds] + ["+Inf"]
    for bound, count in zip(names, histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric((), buckets=buckets, sum_value=histogram.total / 1e9)
    return family


def labelled(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    """One counter for each value of a label."""
    family = CounterMetricFamily(f"fermata_{name}", text, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family
