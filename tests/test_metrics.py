# SPDX-License-Identifier: Apache-2.0
"""The table of metrics, how counts become samples, and the dashboard for them."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from keyformer_vllm import metrics
from keyformer_vllm.config import POLICY_NAMES

DASHBOARD = Path(__file__).parent.parent / "docker" / "grafana" / "keyformer.json"


def test_names_and_units():
    for metric in metrics.METRICS.values():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)+|[a-z]+", metric.name)
        assert metric.documentation.endswith(".")
        assert metric.exported_name.endswith("_total") == (metric.kind == "counter")
        assert (metric.unit == 1e-9) == metric.name.endswith("_seconds")
        assert (metric.kind == "histogram") == (metric.buckets != ())
        assert list(metric.buckets) == sorted(metric.buckets)
        assert (metric.label is None) == (metric.label_values == ())
    assert metrics.METRICS["requests"].label_values == POLICY_NAMES
    help_text = metrics.METRICS["skipped_evictions"].documentation
    assert all(reason in help_text for reason in metrics.SKIP_REASONS)


def test_counts_add_up_until_they_are_taken():
    counts = metrics.StepCounts()
    counts.add("freed_blocks", 3)
    counts.add("freed_blocks")
    counts.add("requests", label_value="h2o")
    counts.observe("audit_mass_lost", 0.07)
    counts.merge({"keyformer:freed_blocks": 2, "keyformer:scoring_seconds": 5})
    taken = counts.take()
    assert counts.take() == {}
    assert {(m.name, label): value for m, label, value in metrics.samples(taken)} == {
        ("freed_blocks", None): 6,
        ("requests", "h2o"): 1,
        ("scoring_seconds", None): pytest.approx(5e-9),
        ("audit_mass_lost", None): pytest.approx(0.07),
    }


@pytest.mark.parametrize("key", ["nothing", "requests", "requests=x", "compactions=x"])
def test_counts_outside_the_table_are_an_error(key):
    with pytest.raises(KeyError):
        list(metrics.samples({metrics.PREFIX + key: 1}))


def test_exporter_adds_to_counters_sets_gauges_and_can_be_made_again():
    from prometheus_client import REGISTRY

    def value(name, engine, **labels):
        return REGISTRY.get_sample_value(
            metrics.PREFIX + name, {"model_name": "m", "engine": engine, **labels}
        )

    metrics.PrometheusExporter("m", [0])
    exporter = metrics.PrometheusExporter("m", [0, 1])
    for blocks, tokens in ((2, 70), (5, 30)):
        counts = metrics.StepCounts()
        counts.add("freed_blocks", blocks)
        counts.add("logical_tokens", tokens)
        counts.add("skipped_evictions", label_value="prompt")
        exporter.observe(counts.take(), 1)
    assert value("freed_blocks_total", "1") == 7
    assert value("logical_tokens", "1") == 30
    assert value("skipped_evictions_total", "1", reason="prompt") == 2
    assert value("freed_blocks_total", "0") == 0


def test_exporter_observes_every_value_of_a_histogram():
    from prometheus_client import REGISTRY

    exporter = metrics.PrometheusExporter("m", [0])
    counts = metrics.StepCounts()
    for share in (0.0004, 0.04, 0.04, 0.040004, 1.0):
        counts.observe("audit_mass_lost", share)
    taken = counts.take()
    assert len(taken) == 3, "equal up to the unit: one entry"
    exporter.observe(taken, 0)

    def value(suffix, **labels):
        name = metrics.PREFIX + "audit_mass_lost" + suffix
        labels |= {"model_name": "m", "engine": "0"}
        return REGISTRY.get_sample_value(name, labels)

    assert value("_count") == 5
    assert value("_sum") == pytest.approx(1.1204)
    limits = {"0.001": 1, "0.03": 1, "0.05": 4, "0.5": 4, "1.0": 5, "+Inf": 5}
    assert {limit: value("_bucket", le=limit) for limit in limits} == limits


def queries_of(dashboard):
    """Every PromQL text: of panels, and of variables, which wrap one."""
    found = [
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    ]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found.append(variable["query"])
    return found


def is_mean(names):
    """Whether a query divides the sum of a histogram by its count."""
    whole = [name.removesuffix("_sum") for name in names[:1]]
    return names == [f"{name}_{part}" for name in whole for part in ("sum", "count")]


def vllm_names():
    """Names that vLLM's Prometheus logger gives, as exported."""
    logger = importlib.import_module("vllm.v1.metrics.loggers").PrometheusStatLogger
    source = inspect.getsource(logger)
    names = re.findall(r'_(gauge|counter)_cls\(\s*name="(vllm:\w+)"', source)
    return {name + ("_total" if kind == "counter" else "") for kind, name in names}


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = queries_of(dashboard)
    assert len(queries) >= len(dashboard["panels"]) >= 8
    asked = set()
    for query in queries:
        names = re.findall(r"[a-zA-Z_]\w*:\w+", query)
        assert len(set(names)) == 1 or is_mean(names), query
        asked |= set(names)
    # Of a histogram, its series.
    asked = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert asked <= set(metrics.exported_names()) | vllm_names()
    # All of ours are on it.
    assert set(metrics.exported_names()) <= asked
    assert {"vllm:num_requests_running", "vllm:num_preemptions_total"} <= asked


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(corners) == len(panels)
