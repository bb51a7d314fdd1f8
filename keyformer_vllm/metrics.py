# SPDX-License-Identifier: Apache-2.0
"""What operators see: one table of metrics, and how a step's counts become samples.

Imports neither vLLM nor, before an exporter is made, prometheus_client. What counts
lies in ``adapters``; here is what the counts are called and what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keyformer_vllm.core.policies import POLICIES

PREFIX = "keyformer:"
"""Start of every metric's name, and of every key of a step's counts."""

SKIP_REASONS = ("opted_out", "within_budget", "prompt", "preempted")
"""Why nothing was evicted; the help text of ``skipped_evictions`` explains each."""

_NANOSECOND = 1e-9


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: without prefix and, for a counter, without ``_total``.
        kind: a ``counter`` is sent as what was added, a ``gauge`` as what it is, a
            ``histogram`` as how often each value was observed.
        documentation: its help text.
        label: a label besides those that vLLM's own metrics have.
        label_values: every value that the label takes; all are shown from the start.
        unit: what a count of 1 is worth. Counts are integers: times are nanoseconds.
            Of a histogram, what observed values are rounded to.
        buckets: upper limits of a histogram's buckets.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    label: str | None = None
    label_values: tuple[str, ...] = ()
    unit: float = 1.0
    buckets: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        """The name that ``/metrics`` shows."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


_TABLE = (
    Metric(
        "evicted_tokens",
        "counter",
        "Tokens evicted; each was dropped in every layer and KV head.",
    ),
    Metric(
        "freed_blocks",
        "counter",
        "KV cache blocks that running requests gave back to the pool.",
    ),
    Metric(
        "compactions",
        "counter",
        "Evictions carried out: one request in one step, however many blocks.",
    ),
    Metric(
        "scoring_seconds",
        "counter",
        "Worker seconds spent on scoring keys beside attention; in score mode fused, "
        "decode steps score inside attention and are not in it.",
        unit=_NANOSECOND,
    ),
    Metric(
        "selection_seconds",
        "counter",
        "Worker seconds spent on selecting the tokens that stay.",
        unit=_NANOSECOND,
    ),
    Metric(
        "compaction_seconds",
        "counter",
        "Worker seconds spent on moving the tokens that stay.",
        unit=_NANOSECOND,
    ),
    Metric(
        "skipped_evictions",
        "counter",
        "Evictions that did not take place. Requests that ended without any: opted_out "
        "(policy full or budget 1.0), within_budget (never over their budget by a "
        "block), prompt (ended before a decode step). preempted: evictions that were "
        "due in the step that preempted their request.",
        label="reason",
        label_values=SKIP_REASONS,
    ),
    Metric(
        "requests",
        "counter",
        "Requests that arrived, by their KV policy; each of n sequences is one.",
        label="policy",
        label_values=tuple(POLICIES),
    ),
    Metric(
        "resident_tokens",
        "gauge",
        "Tokens of running requests that the KV cache holds.",
    ),
    Metric(
        "logical_tokens",
        "gauge",
        "Tokens of running requests computed so far, evicted ones included.",
    ),
    Metric(
        "audit_evictions",
        "counter",
        "Under an audit: evictions that would have been carried out.",
    ),
    Metric(
        "audit_evicted_tokens",
        "counter",
        "Under an audit: tokens that would have been evicted.",
    ),
    Metric(
        "audit_mass_lost",
        "histogram",
        "Under an audit: share of the attention of a decode step that went to tokens "
        "that would be gone, mean of all layers and heads. One observation per request "
        "and step, from its first eviction that would have been.",
        unit=1e-5,
        buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
        + (0.3, 0.5, 1.0),
    ),
    Metric(
        "audit_steps_at_risk",
        "counter",
        "Under an audit: of these observations, those whose token likely would have "
        "been another one.",
    ),
)

METRICS = {metric.name: metric for metric in _TABLE}
"""All metrics by :attr:`Metric.name`."""


def exported_names() -> list[str]:
    """Names of all metrics as ``/metrics`` shows them."""
    return [metric.exported_name for metric in _TABLE]


class StepCounts:
    """Integers by metric and label value, added up until somebody takes them.

    They travel between processes as a plain dict: ``keyformer:requests=h2o`` is the
    metric ``requests`` with the label value ``h2o``, and of a histogram
    ``keyformer:audit_mass_lost=70`` counts how often 70 units were observed.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, name: str, amount: int = 1, label_value: str | None = None) -> None:
        """Add to one count.

        Args:
            name: a key of ``METRICS``.
            amount: in the metric's unit.
            label_value: one of the metric's, where it has a label.
        """
        key = PREFIX + name if label_value is None else f"{PREFIX}{name}={label_value}"
        self._counts[key] = self._counts.get(key, 0) + amount

    def observe(self, name: str, value: float) -> None:
        """Note one value of a histogram.

        Args:
            name: a key of ``METRICS``.
            value: rounded to the metric's unit, so that the different ones stay few.
        """
        self.add(name, label_value=str(round(value / METRICS[name].unit)))

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add counts that were taken elsewhere.

        Args:
            counts: as from :meth:`take`.
        """
        for key, amount in counts.items():
            self._counts[key] = self._counts.get(key, 0) + amount

    def take(self) -> dict[str, int]:
        """The counts since the last call, which start at nothing again."""
        taken, self._counts = self._counts, {}
        return taken


def samples(counts: Mapping[str, int]) -> Iterator[tuple[Metric, str | None, float]]:
    """What a step's counts say: metric, label value or None, and the value.

    A histogram's value comes once for each time it was observed.

    Args:
        counts: as from :meth:`StepCounts.take`.

    Raises:
        KeyError: for a metric or a label value that is not in the table.
    """
    for key, count in counts.items():
        name, _, label_value = key.removeprefix(PREFIX).partition("=")
        metric = METRICS[name]
        if metric.kind == "histogram":
            for _ in range(count):
                yield metric, None, int(label_value) * metric.unit
            continue
        if label_value not in (metric.label_values or ("",)):
            raise KeyError(key)
        yield metric, label_value or None, count * metric.unit


class PrometheusExporter:
    """The metrics in prometheus_client's default registry, labelled as vLLM's are.

    With several API servers each process has its own and vLLM's ``/metrics`` adds
    them up: counters and histograms as sums, gauges as what was set last.

    Args:
        model_name: the served model's name.
        engine_indexes: the engines whose counts will come.
    """

    _registered: list[Any] = []
    """Of the last exporter of this process; one name can be registered only once."""

    def __init__(self, model_name: str, engine_indexes: Iterable[int]) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        while self._registered:
            REGISTRY.unregister(self._registered.pop())
        self._children: dict[tuple[int, str, str | None], Any] = {}
        engines = list(engine_indexes)
        for metric in _TABLE:
            labels = ["model_name", "engine", *([metric.label] if metric.label else [])]
            collector: Any
            named = (PREFIX + metric.name, metric.documentation, labels)
            if metric.kind == "counter":
                collector = Counter(*named)
            elif metric.kind == "histogram":
                collector = Histogram(*named, buckets=metric.buckets)
            else:
                collector = Gauge(*named, multiprocess_mode="mostrecent")
            self._registered.append(collector)
            for engine in engines:
                for value in metric.label_values or (None,):
                    values = [model_name, str(engine), *([value] if value else [])]
                    child = collector.labels(*values)
                    if metric.kind == "gauge":
                        # In multiprocess mode a gauge that was never set is not shown.
                        child.set(0)
                    self._children[engine, metric.name, value] = child

    def observe(self, counts: Mapping[str, int], engine_index: int) -> None:
        """Add one step's counts to counters and histograms, and set the gauges.

        Args:
            counts: as from :meth:`StepCounts.take`; empty when nothing happened.
            engine_index: the engine they come from.
        """
        for metric, label_value, value in samples(counts):
            child = self._children[engine_index, metric.name, label_value]
            if metric.kind == "counter":
                child.inc(value)
            elif metric.kind == "histogram":
                child.observe(value)
            else:
                child.set(value)
