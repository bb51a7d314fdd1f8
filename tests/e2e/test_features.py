# SPDX-License-Identifier: Apache-2.0
"""What vLLM offers beside plain generation keeps working while the cache is evicted.

Cases: A36 and A38 of public reports on eviction, and features of the issue that go
without a server: LoRA, prompt logprobs, `min_tokens`, the spawned engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.stock_driver import describe, open_stock_engine
from tests.e2e.test_masked_reference import check
from tests.engine import Engine, random_prompt
from tests.hf_reference import HFReference
from tests.models import HEAD_SIZE, NUM_LAYERS

POLICY = {"policy": "keyformer", "budget": 0.5, "min_tokens": 16}
RANK, ALPHA = 8, 16
HIDDEN = 4 * HEAD_SIZE


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine("llama-4-2", max_num_batched_tokens=128)


def test_structured_output_in_a_batch(engine):
    """The grammar of one request, while it and its neighbours are evicted."""
    from vllm.sampling_params import StructuredOutputsParams

    words = ["a" * 50 + "x", "b" * 50 + "y", "c" * 50 + "z"]
    others = [engine.add(random_prompt(150, i), max_tokens=60) for i in range(3)]
    request = engine.add(
        random_prompt(200, 5, 94),
        max_tokens=60,
        ignore_eos=False,
        detokenize=True,
        structured_outputs=StructuredOutputsParams(choice=words),
    )
    engine.run()
    assert request._only.text in words
    assert request.finish_reason == "stop"
    assert engine.trace_of(request)[-1]["evicted_blocks"] >= 3
    assert all(len(other.tokens) == 60 for other in others)


def test_min_tokens_and_stop_tokens(engine):
    prompt = random_prompt(200, 6)
    (free,) = engine.generate([prompt], max_tokens=100)
    stop = free.tokens[20]
    settings = {"max_tokens": 100, "stop_token_ids": [stop], "ignore_eos": False}
    (early,) = engine.generate([prompt], **settings)
    assert early.finish_reason == "stop"
    assert early.tokens == free.tokens[: free.tokens.index(stop) + 1]
    (late,) = engine.generate([prompt], min_tokens=70, **settings)
    assert len(late.tokens) > 70
    assert stop not in late.tokens[:70]
    assert engine.trace_of(late)[-1]["evicted_blocks"] >= 4


def test_prompt_logprobs_are_those_of_full_attention(engine, start_engine):
    """Nothing is evicted before the prompt is through, chunk by chunk or not."""
    stock = start_engine("llama-4-2", None, max_num_batched_tokens=128)
    prompts = [random_prompt(length, 7) for length in (40, 129, 300)]
    found, expected = (prompt_logprobs(e, prompts) for e in (engine, stock))
    assert [len(positions) for positions in found] == [40, 129, 300]
    assert found == expected


def prompt_logprobs(engine: Engine, prompts: list[list[int]]) -> list[list[Any]]:
    """Per prompt and position: token id to log-probability, None for the first."""
    collected: dict[str, list[Any]] = {}
    stock_step = engine.llm_engine.step

    def step() -> Any:
        outputs = stock_step()
        for output in outputs:
            known = collected.setdefault(output.request_id, [])
            known.extend(output.prompt_logprobs or ())
        return outputs

    engine.llm_engine.step = step
    try:
        requests = [
            engine.add(p, max_tokens=40, prompt_logprobs=2, request_id=f"p{number}")
            for number, p in enumerate(prompts)
        ]
        engine.run()
    finally:
        del engine.llm_engine.step
    if engine.trace_file is not None:
        assert any(engine.kept_sets(request) for request in requests)
    return [
        [
            position and {token: entry.logprob for token, entry in position.items()}
            for position in collected[f"p{number}"]
        ]
        for number in range(len(prompts))
    ]


def write_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """A LoRA adapter of q_proj and v_proj, and what it adds to their weights."""
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors, added = {}, {}
    for layer in range(NUM_LAYERS):
        for name, width in (("q_proj", 4 * HEAD_SIZE), ("v_proj", 2 * HEAD_SIZE)):
            module = f"model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, HIDDEN, generator=generator) * HIDDEN**-0.5
            up = torch.randn(width, RANK, generator=generator) * RANK**-0.5 * 0.5
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
            added[f"{module}.weight"] = ALPHA / RANK * up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


def test_lora(start_engine, tiny_model, tmp_path):
    """With and without an adapter in one batch, each against its own reference."""
    from vllm.lora.request import LoRARequest

    added = write_adapter(tmp_path / "adapter")
    engine = start_engine(
        "llama-4-2",
        enable_lora=True,
        max_lora_rank=RANK,
        # Two for one adapter: to vLLM 0.32 on CPU, no adapter (-1) is the last slot,
        # which has to stay empty in a mixed batch, with or without a policy.
        max_loras=2,
        max_num_batched_tokens=256,
        max_model_len=1024,
    )
    lora = LoRARequest("tiny-adapter", 1, str(tmp_path / "adapter"))
    prompt = random_prompt(180, 8)
    plain = engine.add(prompt, max_tokens=90, logprobs=-1)
    adapted = engine.add(prompt, max_tokens=90, logprobs=-1, lora_request=lora)
    engine.run()
    assert plain.tokens != adapted.tokens
    reference = HFReference(tiny_model("llama-4-2"))
    check(engine, reference, plain)
    with torch.no_grad():
        for name, value in added.items():
            reference.model.get_parameter(name).add_(value)
    check(engine, reference, adapted)
    assert engine.kept_sets(adapted) != engine.kept_sets(plain)


def test_plugin_without_a_policy_is_stock_vllm(tiny_model, tmp_path):
    """A38: same parts, same pages, same tokens as where vLLM loads no plugin."""
    model = tiny_model("llama-4-2")
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.stock_driver", str(model), str(result)],
        env={**os.environ, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    without = json.loads(result.read_text())
    assert without.pop("plugin") is False
    engine = open_stock_engine(model)
    try:
        found = json.loads(json.dumps(describe(engine)))
    finally:
        engine.close()
    from vllm.engine.arg_utils import EngineArgs

    assert hasattr(EngineArgs.create_engine_config, "_keyformer_wrapped")
    assert found == without
    assert all(name.startswith("vllm.") for name in found["classes"])


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_engine_in_a_process_of_its_own(tiny_model, tmp_path, monkeypatch, method):
    """A36: the plugin is at work in front end, engine and worker alike."""
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.inputs import TokensPrompt

    from keyformer_vllm import plugin

    plugin.register()
    plugin.register()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
    trace = tmp_path / "trace.jsonl"
    llm = LLM(
        model=str(tiny_model("llama-4-2")),
        dtype="float32",
        block_size=32,
        num_gpu_blocks_override=100,
        max_model_len=1024,
        enforce_eager=True,
        additional_config={"keyformer": POLICY | {"trace": str(trace)}},
    )
    try:
        params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
        prompts = [TokensPrompt(prompt_token_ids=random_prompt(200, i)) for i in (1, 2)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [80, 80]
        with pytest.raises(VLLMValidationError, match="kv_budget"):
            params.extra_args = {"kv_budget": 2}
            llm.generate(prompts[:1], params, use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len({line["req"] for line in lines if line["evicted_tokens"] > 0}) == 2
