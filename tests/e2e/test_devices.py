# SPDX-License-Identifier: Apache-2.0
"""Several devices: ranks of one model, and engines beside each other.

Two ranks must say and keep what one process does, through vLLM's own executors.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from keyformer_vllm.config import KeyformerConfig
from tests.e2e.conftest import POLICY
from tests.e2e.test_kept_sets import TIE
from tests.engine import Engine, Request, open_engine, random_prompt
from tests.hf_reference import HFReference, oracle_request
from tests.ray_cluster import DEVICE_KEY, EngineActor, ray_cluster, supply_device_key

PROMPTS = [(150, 1), (230, 2)]
MAX_TOKENS = 100
SETTINGS: dict[str, Any] = {"num_blocks": 200, "max_num_batched_tokens": 128}
CHECKED = POLICY | {"check_ranks": True}
TWO_RANKS = SETTINGS | {"tensor_parallel_size": 2}


@pytest.fixture(autouse=True)
def one_core_per_rank(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def serve_batch(engine: Engine, **params: Any) -> list[Request]:
    prompts = [random_prompt(*prompt) for prompt in PROMPTS]
    return engine.generate(prompts, max_tokens=MAX_TOKENS, **params)


def tokens_of_one_process(start_engine, kind: str, **params: Any) -> list[list[int]]:
    engine = start_engine(kind, **SETTINGS)
    return [request.tokens for request in serve_batch(engine, **params)]


def kept_by_rank(engine: Engine, request: Request) -> list[dict[int, Any]]:
    """Per rank of two: tokens computed by then -> layer -> KV head -> positions."""
    ranks = [engine.kept_sets(request)]
    with open(f"{engine.trace_file}.rank1", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    ranks.append(
        {
            line["positions"][0]: line["kept"]
            for line in lines
            if line["req"] == request.engine_id and "kept" in line
        }
    )
    assert list(ranks[0]) == list(ranks[1]), "ranks evict at different steps"
    assert len(ranks[0]) >= 3
    return ranks


def check_against_oracle(
    reference: HFReference, request: Request, kept: dict[int, Any], kv: Any = None
) -> None:
    config = KeyformerConfig.from_mapping(POLICY).with_request(kv)
    expected = oracle_request(config, len(request.prompt), MAX_TOKENS, interval=32)
    disagreements = reference.follow(request.prompt, request.tokens, expected, kept)
    assert all(entry.gap <= TIE for entry in disagreements), disagreements


def test_two_ranks_share_the_kv_heads(start_engine, tiny_model, tmp_path):
    """Each rank scores and keeps for a head of its own, with that head's noise."""
    expected = tokens_of_one_process(start_engine, "llama-4-2")
    model = tiny_model("llama-4-2")
    reference = HFReference(model)
    trace = tmp_path / "trace.jsonl"
    with open_engine(model, CHECKED, trace=trace, **TWO_RANKS) as engine:
        requests = serve_batch(engine)
        assert [request.tokens for request in requests] == expected
        for request in requests:
            first, second = kept_by_rank(engine, request)
            both = {
                step: [a + b for a, b in zip(first[step], second[step], strict=True)]
                for step in first
            }
            assert first != second
            check_against_oracle(reference, request, both)


def differ(worker: Any) -> None:
    """Make rank 1 believe that a block more of every request is gone."""
    if worker.rank == 1:
        worker.keyformer.table.column("evicted_blocks")[:] += 1


def test_two_ranks_share_one_kv_head(start_engine, tiny_model, tmp_path):
    """Replicas add their scores up; a rank that differs stops the engine."""
    policies = ({"kv_policy": "keyformer"}, {"kv_policy": "random"})
    expected = [
        tokens_of_one_process(start_engine, "llama-4-1", kv=k) for k in policies
    ]
    model = tiny_model("llama-4-1")
    reference = HFReference(model)
    trace = tmp_path / "trace.jsonl"
    with open_engine(model, CHECKED, trace=trace, **TWO_RANKS) as engine:
        for kv, tokens in zip(policies, expected, strict=True):
            requests = serve_batch(engine, kv=kv)
            assert [request.tokens for request in requests] == tokens
            for request in requests:
                first, second = kept_by_rank(engine, request)
                assert first == second
                check_against_oracle(reference, request, first, kv)
        engine.add(random_prompt(100, 3), max_tokens=40)
        for _ in range(3):
            engine.step()
        executor = engine.llm_engine.engine_core.engine_core.model_executor
        executor.collective_rpc(differ)
        with pytest.raises(RuntimeError, match="ranks disagree on evicted blocks"):
            engine.run()


def test_a_worker_without_the_plugin_fails_the_start(tiny_model, monkeypatch, capfd):
    """A36: in one line that names the rank; rank 0 has the plugin."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    make = WorkerProc.make_worker_process

    def make_other(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if kwargs["rank"] == 1:
                patch.setenv("VLLM_PLUGINS", "another")
            return make(*args, **kwargs)

    monkeypatch.setattr(WorkerProc, "make_worker_process", make_other)
    with pytest.raises(Exception, match="initialization failed"):
        Engine(tiny_model("llama-4-2"), POLICY, **TWO_RANKS)
    captured = capfd.readouterr()
    lines = (captured.out + captured.err).splitlines()
    (line,) = {
        line[line.index("worker rank") :] for line in lines if "worker rank" in line
    }
    assert line.startswith("worker rank 1 on node ")
    assert "did not load the plugin keyformer" in line
    assert "VLLM_PLUGINS='another' there must list it or be unset" in line


@pytest.fixture(scope="module")
def ray():
    with ray_cluster() as module:
        yield module


def test_stock_vllm_refuses_ray_on_cpu(ray, tiny_model):
    """With a policy or without; a vLLM that learns it makes the next fixture moot."""
    from vllm.platforms.cpu import CpuPlatform

    assert CpuPlatform.ray_device_key == ""
    for policy in (None, POLICY):
        with pytest.raises(ValueError, match="platform cpu does not support ray"):
            Engine(
                tiny_model("llama-4-2"),
                policy,
                distributed_executor_backend="ray",
                **TWO_RANKS,
            )


def test_two_ranks_on_ray(ray, start_engine, tiny_model, tmp_path, monkeypatch):
    """``--distributed-executor-backend ray``: workers are actors of the cluster."""
    from vllm.platforms.cpu import CpuPlatform

    expected = tokens_of_one_process(start_engine, "llama-4-2")
    monkeypatch.setattr(CpuPlatform, "ray_device_key", "")
    supply_device_key()
    assert CpuPlatform.ray_device_key == DEVICE_KEY
    with open_engine(
        tiny_model("llama-4-2"),
        CHECKED,
        trace=tmp_path / "trace.jsonl",
        distributed_executor_backend="ray",
        **TWO_RANKS,
    ) as engine:
        executor = engine.llm_engine.engine_core.engine_core.model_executor
        assert type(executor).__name__ == "RayExecutorV2"
        requests = serve_batch(engine)
        assert [request.tokens for request in requests] == expected
        for request in requests:
            first, second = kept_by_rank(engine, request)
            assert first != second


def test_two_engines_in_ray_actors(ray, start_engine, tiny_model, tmp_path):
    """Data parallel: requests spread over both, each as if it were alone."""
    prompts = [random_prompt(150, seed) for seed in range(6)]
    single = start_engine("llama-4-2", **SETTINGS)
    requests = single.generate(prompts, max_tokens=60)
    model = tiny_model("llama-4-2")
    actors = [
        ray.remote(EngineActor)
        .options(num_cpus=1)
        .remote(model, POLICY, tmp_path / f"trace{number}.jsonl", **SETTINGS)
        for number in range(2)
    ]
    answers = ray.get(
        [
            actor.generate.remote(prompts[number::2], 60)
            for number, actor in enumerate(actors)
        ]
    )
    for number, answer in enumerate(answers):
        for request, (tokens, kept) in zip(requests[number::2], answer, strict=True):
            assert tokens == request.tokens
            assert kept == single.kept_sets(request) and len(kept) >= 2
    processes = ray.get([actor.close.remote() for actor in actors])
    assert len({os.getpid(), *processes}) == 3
