# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` and a request's own report say, against the trace.

Once with one API server process and once with two, where Prometheus works in its
multiprocess mode and each step's counts reach either of them.
"""

from __future__ import annotations

import concurrent.futures
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from keyformer_vllm import metrics
from tests.engine import random_prompt
from tests.server import serve

BLOCK_SIZE = 32
FLAGS = (
    *("--dtype", "float32", "--seed", "0", "--enforce-eager"),
    *("--block-size", str(BLOCK_SIZE), "--max-model-len", "2048"),
    *("--num-gpu-blocks-override", "200", "--max-num-seqs", "16"),
    *("--served-model-name", "tiny", "--kv-policy", "keyformer"),
    # A prompt that was cached scores with fewer queries: answers would not repeat.
    *("--kv-min-tokens", "16", "--no-enable-prefix-caching"),
)
TEXT_TOKENS = list(range(94))
MASS_LOST = "keyformer:audit_mass_lost"
LIMITS = [*map(str, metrics.METRICS["audit_mass_lost"].buckets), "+Inf"]


@pytest.fixture(scope="module", params=[1, 2], ids=["one-server", "two-servers"])
def served(tiny_model, tmp_path_factory, request):
    """A server and its trace."""
    folder = tmp_path_factory.mktemp("metrics")
    trace = folder / "trace.jsonl"
    flags = ("--kv-trace", str(trace), "--api-server-count", str(request.param))
    log = folder / "serve.log"
    with serve(tiny_model("llama-4-2"), (*FLAGS, *flags), log) as server:
        yield server, trace


def read_metrics(server):
    return ours_in(server.http.get("/metrics").text)


def ours_in(text):
    """Our metrics: (name as exported, value of the extra label) to value."""
    found = {}
    for family in text_string_to_metric_families(text):
        # Without multiprocess mode there is a time of creation beside each counter.
        if not family.name.startswith(metrics.PREFIX) or family.name.endswith(
            "_created"
        ):
            continue
        metric = metrics.METRICS[family.name.removeprefix(metrics.PREFIX)]
        assert family.type == metric.kind
        for sample in family.samples:
            labels = dict(sample.labels)
            if metric.kind == "histogram":
                assert labels.pop("le", "") in ("", *LIMITS)
            else:
                assert sample.name == metric.exported_name
            assert labels.pop("model_name") == "tiny"
            assert labels.pop("engine") == "0"
            assert set(labels) == ({metric.label} if metric.label else set())
            found[sample.name, labels.get(metric.label)] = sample.value
    return found


def trace_lines(trace, request_id=""):
    lines = map(json.loads, trace.read_text().splitlines())
    return [line for line in lines if request_id in line["req"]]


def body_of(prompt, max_tokens=80, **settings):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens}
    return {**body, "temperature": 0, "ignore_eos": True, **settings}


def ask(server, path="/v1/completions", **body):
    """On a connection of its own: which API server takes it is up to the system."""
    with httpx.Client(base_url=server.url, timeout=120.0) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_metric_is_there_from_the_start(served):
    server, _ = served
    expected = {
        (metric.exported_name, value)
        for metric in metrics.METRICS.values()
        for value in metric.label_values or (None,)
        if metric.kind != "histogram"
    }
    expected |= {(MASS_LOST + part, None) for part in ("_bucket", "_sum", "_count")}
    assert set(read_metrics(server)) == expected


def test_counters_equal_the_trace_and_gauges_fall_to_zero(served):
    server, trace = served
    before = read_metrics(server)
    num_lines = len(trace_lines(trace))
    long = [body_of(random_prompt(200 + 20 * seed, seed)) for seed in range(6)]
    others = [
        body_of(random_prompt(300, 10), vllm_xargs={"kv_policy": "full"}),
        body_of(random_prompt(300, 11), vllm_xargs={"kv_budget": 1.0}),
        body_of(random_prompt(300, 12), vllm_xargs={"kv_policy": "h2o"}),
        # The block over its budget is not full before its last token.
        body_of(random_prompt(100, 13), 5, vllm_xargs={"kv_budget": 100}),
        body_of(random_prompt(100, 14), 1),
    ]
    with concurrent.futures.ThreadPoolExecutor(11) as pool:
        list(pool.map(lambda body: ask(server, **body), long + others))
    server.wait_until_idle()
    after = read_metrics(server)

    def grown(name, label_value=None):
        key = (metrics.PREFIX + name, label_value)
        return after[key] - before[key]

    lines = trace_lines(trace)[num_lines:]
    freed = [line["freed_blocks"] for line in lines if line["freed_blocks"]]
    assert len(freed) > 20
    assert grown("freed_blocks_total") == sum(freed)
    assert grown("evicted_tokens_total") == sum(freed) * BLOCK_SIZE
    assert grown("compactions_total") == len(freed)
    for activity in ("scoring", "selection", "compaction"):
        assert 0 < grown(f"{activity}_seconds_total") < 60
    skipped = {
        reason: grown("skipped_evictions_total", reason)
        for reason in metrics.SKIP_REASONS
    }
    assert skipped == {
        "opted_out": 2,
        "within_budget": 1,
        "prompt": 1,
        "preempted": 0,
    }
    requests = {
        policy: grown("requests_total", policy)
        for policy in metrics.METRICS["requests"].label_values
    }
    named = {"keyformer": 9, "full": 1, "h2o": 1}
    assert requests == {policy: named.get(policy, 0) for policy in requests}
    assert after["keyformer:resident_tokens", None] == 0
    assert after["keyformer:logical_tokens", None] == 0


def test_gauges_of_a_running_request(served):
    server, _ = served
    body = body_of(random_prompt(500, 20), 1400, stream=True)
    now = ours_in(server.metrics_while_streaming(body))
    logical = now["keyformer:logical_tokens", None]
    resident = now["keyformer:resident_tokens", None]
    assert 500 < logical < 1900
    # Half of its prompt, up to a block more, and the token of the step.
    assert 250 <= resident <= 250 + BLOCK_SIZE
    assert read_metrics(server)["keyformer:logical_tokens", None] == 0


def report_in_trace(lines):
    return {
        "evicted_tokens": lines[-1]["evicted_tokens"],
        "resident_tokens": lines[-1]["physical"],
        "evictions": sum(line["freed_blocks"] > 0 for line in lines),
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_reports_what_its_request_evicted(served, path):
    server, trace = served
    body = body_of(random_prompt(300, 30, 94), allowed_token_ids=TEXT_TOKENS)
    if path != "/v1/completions":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "a" * 300}]
    answer = ask(server, path, **body, vllm_xargs={"kv_report": True})
    expected = report_in_trace(trace_lines(trace, answer["id"]))
    assert answer["kv_transfer_params"] == {"kv_report": expected}
    assert expected["evicted_tokens"] > 100 and expected["evictions"] >= 3
    for xargs in ({}, {"kv_report": False}):
        answer = ask(server, path, **body, vllm_xargs=xargs)
        assert answer["kv_transfer_params"] is None
    opted_out = {"kv_report": True, "kv_policy": "full"}
    answer = ask(server, path, **body, vllm_xargs=opted_out)
    logical = trace_lines(trace, answer["id"])[-1]["logical"]
    assert answer["kv_transfer_params"]["kv_report"] == {
        "evicted_tokens": 0,
        "resident_tokens": logical,
        "evictions": 0,
    }


def test_an_answer_that_a_stop_string_ends_has_a_report(served):
    """The front end ends it; the engine does not know that this output is the last."""
    server, _ = served
    body = body_of(random_prompt(200, 4, 94), 120, allowed_token_ids=TEXT_TOKENS)
    text = ask(server, **body)["choices"][0]["text"]
    stop = text[80:84]
    assert text.find(stop) > 60
    answer = ask(server, **body, stop=[stop], vllm_xargs={"kv_report": True})
    assert answer["choices"][0]["stop_reason"] == stop
    report = answer["kv_transfer_params"]["kv_report"]
    assert report["evicted_tokens"] > 0
    logical = report["evicted_tokens"] + report["resident_tokens"]
    used = answer["usage"]
    assert logical == used["prompt_tokens"] + used["completion_tokens"] - 1


def test_of_several_sequences_the_last_to_finish_is_reported(served):
    server, trace = served
    settings = {"n": 3, "temperature": 1.0, "vllm_xargs": {"kv_report": True}}
    answer = ask(server, **body_of(random_prompt(200, 31), **settings))
    lines = trace_lines(trace, answer["id"])
    reports = [
        report_in_trace([line for line in lines if line["req"] == request])
        for request in {line["req"] for line in lines}
    ]
    assert len(reports) == 3
    assert answer["kv_transfer_params"]["kv_report"] in reports


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_streamed_answer_that_cannot_carry_a_report_is_refused(served, path):
    server, _ = served
    body = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}
    body |= {"model": "tiny", "max_tokens": 4, "stream": True}
    refused = server.post(path, body | {"vllm_xargs": {"kv_report": True}})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "vllm_xargs.kv_report" and "stream" in error["message"]
    served_now = server.post(path, body | {"vllm_xargs": {"kv_report": False}})
    assert served_now.status_code == 200 and "[DONE]" in served_now.text


@pytest.mark.parametrize("stream", [False, True])
def test_responses_carry_a_report_streamed_or_not(served, stream):
    server, _ = served
    body = {"model": "tiny", "input": "a" * 300, "max_output_tokens": 60}
    body |= {"temperature": 0, "stream": stream, "vllm_xargs": {"kv_report": True}}
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [
            json.loads(line.removeprefix("data: "))
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        response = events[-1]["response"]
    else:
        response = answer.json()
    report = response["kv_transfer_params"]["kv_report"]
    assert report["evicted_tokens"] > 0 and report["evictions"] > 0


@pytest.mark.parametrize("value", ["maybe", "true", 2, 0.5, 1.0, []])
def test_a_malformed_kv_report_is_refused_by_name(served, value):
    server, _ = served
    refused = server.post(
        "/v1/completions", body_of("hello", 4, vllm_xargs={"kv_report": value})
    )
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "vllm_xargs.kv_report"
    assert "must be true or false" in error["message"]


def test_an_audit_is_measured_reported_and_evicts_nothing(tiny_model, tmp_path):
    """Two API servers add up their halves of the histogram; the engine is a process of
    its own, so what the worker measured was pickled."""
    flags = (*FLAGS, "--kv-audit", "--api-server-count", "2")
    log = tmp_path / "serve.log"
    with serve(tiny_model("llama-4-2"), flags, log) as server:
        bodies = [
            body_of(random_prompt(300, seed), vllm_xargs={"kv_report": True})
            for seed in range(6)
        ]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda body: ask(server, **body), bodies))
        server.wait_until_idle()
        text = server.http.get("/metrics").text
    assert "(audit: nothing is evicted)" in log.read_text()
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(metrics.PREFIX) and "le" not in sample.labels
    }
    reports = [answer["kv_transfer_params"]["kv_report"] for answer in answers]
    assert {report["evicted_tokens"] for report in reports} == {0}
    assert {report["resident_tokens"] for report in reports} == {379}
    audits = [report["audit"] for report in reports]
    for audit in audits:
        assert 0 < audit["mass_lost_mean"] < audit["mass_lost_max"] < 1
        assert audit["evicted_tokens"] > 200 and audit["steps"] >= 79
    for name in ("evictions", "evicted_tokens", "steps_at_risk"):
        total = sum(audit[name] for audit in audits)
        assert found[f"keyformer:audit_{name}_total"] == total
    assert found[MASS_LOST + "_count"] == sum(audit["steps"] for audit in audits)
    mass = sum(audit["steps"] * audit["mass_lost_mean"] for audit in audits)
    assert found[MASS_LOST + "_sum"] == pytest.approx(mass, rel=1e-3)
    for name in ("evicted_tokens", "freed_blocks", "compactions"):
        assert found[f"keyformer:{name}_total"] == 0
