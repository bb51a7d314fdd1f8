# SPDX-License-Identifier: Apache-2.0
"""What is refused on a GPU and only there, and what the flags become."""

import re
from types import SimpleNamespace

import pytest
import torch

from keyformer_vllm.adapters import compat, gpu_rules, validation
from keyformer_vllm.adapters.gpu_rules import (
    CUSTOM,
    GPU_ARGS_RULES,
    GPU_OUTCOME_RULES,
    take_attention,
)
from keyformer_vllm.adapters.kernels import CUDA_HEAD_SIZES, kernels_in_use
from keyformer_vllm.adapters.score_mode import score_mode_in_use
from keyformer_vllm.config import KeyformerConfig, KVPolicyError
from tests.conftest import ROOT


@pytest.fixture
def gpu(monkeypatch):
    """vLLM's platform is CUDA, and the extension is built."""
    monkeypatch.setattr(compat, "on_gpu", lambda: True)
    monkeypatch.setattr(
        "keyformer_vllm.adapters.kernels.find_spec", lambda name: object()
    )


def engine_args(policy=None, **changes):
    """The part of ``EngineArgs`` that the rules read."""
    settings = {
        "attention_backend": None,
        "attention_config": SimpleNamespace(backend=None),
        "additional_config": {"keyformer": {"policy": "keyformer", **(policy or {})}},
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
    }
    return SimpleNamespace(**{**settings, **changes})


def vllm_config(policy=None, *, head_size=64, dtype=torch.bfloat16, alibi=False):
    model = SimpleNamespace(
        model="M", dtype=dtype, uses_alibi=alibi, get_head_size=lambda: head_size
    )
    additional = engine_args(policy).additional_config
    return SimpleNamespace(model_config=model, additional_config=additional)


def names_of(rules, subject):
    return [rule.name for rule in rules if rule.find(subject) is not None]


REFUSED = [
    ("several GPUs", {}, {"tensor_parallel_size": 2}),
    ("several GPUs", {}, {"data_parallel_size": 2}),
    ("attention backend", {}, {"attention_backend": "FLASHINFER"}),
    ("score mode", {"score_mode": "step"}, {}),
    ("audit", {"audit": True}, {}),
]


@pytest.mark.parametrize(("rule", "policy", "changes"), REFUSED)
def test_refused_on_a_gpu_and_served_on_a_cpu(gpu, monkeypatch, rule, policy, changes):
    assert names_of(GPU_ARGS_RULES, engine_args(policy, **changes)) == [rule]
    monkeypatch.setattr(compat, "on_gpu", lambda: False)
    assert names_of(GPU_ARGS_RULES, engine_args(policy, **changes)) == []


OUTCOMES = [
    ("CUDA kernels", {"head_size": 32}),
    ("CUDA kernels", {"dtype": torch.float32}),
    ("ALiBi", {"alibi": True}),
]


@pytest.mark.parametrize(("rule", "changes"), OUTCOMES)
def test_model_is_refused_on_a_gpu_and_served_on_a_cpu(gpu, monkeypatch, rule, changes):
    assert names_of(GPU_OUTCOME_RULES, vllm_config(**changes)) == [rule]
    monkeypatch.setattr(compat, "on_gpu", lambda: False)
    assert names_of(GPU_OUTCOME_RULES, vllm_config(**changes)) == []


def test_every_rule_is_tested_here():
    tested = {rule for rule, *_ in REFUSED} | {"kernels", "fused kernel"}
    assert {rule.name for rule in GPU_ARGS_RULES} == tested
    assert {rule.name for rule in GPU_OUTCOME_RULES} == {rule for rule, _ in OUTCOMES}


@pytest.mark.parametrize("backend", [None, "FLASH_ATTN", "TRITON_ATTN", "auto"])
@pytest.mark.parametrize("mode", ["auto", "deferred", "fused"])
def test_plain_settings_are_served_on_a_gpu(gpu, backend, mode):
    args = engine_args({"score_mode": mode}, attention_backend=backend)
    assert names_of(GPU_ARGS_RULES, args) == []
    assert names_of(GPU_OUTCOME_RULES, vllm_config()) == []


def test_kernels_are_a_choice_and_never_a_fallback(gpu, monkeypatch):
    def of(kernels):
        return kernels_in_use(KeyformerConfig(policy="keyformer", kernels=kernels))

    assert [of(name) for name in ("auto", "cuda", "triton")] == [
        *("cuda", "cuda", "triton")
    ]
    # Not built: nothing takes its place.
    monkeypatch.setattr("keyformer_vllm.adapters.kernels.find_spec", lambda name: None)
    for name in ("auto", "cuda"):
        assert names_of(GPU_ARGS_RULES, engine_args({"kernels": name})) == ["kernels"]
    assert names_of(GPU_ARGS_RULES, engine_args({"kernels": "triton"})) == []
    for size in (32, 64):
        other = vllm_config({"kernels": "triton"}, head_size=size)
        assert names_of(GPU_OUTCOME_RULES, other) == []
    monkeypatch.setattr(compat, "on_gpu", lambda: False)
    assert of("auto") == "cpu"
    assert names_of(GPU_ARGS_RULES, engine_args({"kernels": "triton"})) == ["kernels"]


@pytest.mark.parametrize(
    ("kernels", "modes"),
    [
        ("auto", {"auto": "fused", "fused": "fused", "deferred": "deferred"}),
        ("cuda", {"auto": "fused", "fused": "fused", "deferred": "deferred"}),
        ("triton", {"auto": "deferred", "deferred": "deferred"}),
    ],
)
def test_score_mode_follows_the_kernels(gpu, kernels, modes):
    """`auto` means `fused` where that kernel exists; elsewhere `fused` is refused."""
    for mode in ("auto", "fused", "deferred"):
        policy = {"kernels": kernels, "score_mode": mode}
        config = KeyformerConfig(policy="keyformer", **policy)
        found = names_of(GPU_ARGS_RULES, engine_args(policy))
        assert found == ([] if mode in modes else ["fused kernel"])
        if mode in modes:
            assert score_mode_in_use(config, vllm_config(policy)) == modes[mode]


def test_the_refusal_is_one_line(gpu):
    with pytest.raises(KVPolicyError) as caught:
        validation._refuse(
            "h2o", GPU_ARGS_RULES, engine_args(attention_backend="FLEX_ATTENTION")
        )
    assert str(caught.value) == (
        "--kv-policy h2o cannot be combined with --attention-backend FLEX_ATTENTION: "
        "its own backend is built on FLASH_ATTN or TRITON_ATTN; "
        "use --attention-backend FLASH_ATTN or TRITON_ATTN"
    )


@pytest.mark.parametrize(
    ("flag", "nested", "expected"),
    [
        (None, None, "FLASH_ATTN"),
        ("TRITON_ATTN", None, "TRITON_ATTN"),
        ("triton_attn", None, "TRITON_ATTN"),
        (None, "TRITON_ATTN", "TRITON_ATTN"),
    ],
)
def test_the_backend_asked_for_becomes_the_policy_s_own(gpu, flag, nested, expected):
    entry = None if nested is None else compat.AttentionBackendEnum[nested]
    args = engine_args(
        attention_backend=flag, attention_config=SimpleNamespace(backend=entry)
    )
    assert take_attention(args) == expected
    given = args.attention_config.backend or args.attention_backend
    assert given in (CUSTOM, compat.AttentionBackendEnum.CUSTOM)
    assert (args.attention_config.backend is None) == (nested is None)
    # The engine's arguments may be finished twice; what was asked for stays.
    args.additional_config["keyformer"]["attention"] = expected
    assert names_of(gpu_rules.GPU_ARGS_RULES, args) == []
    assert take_attention(args) == expected


def test_head_sizes_are_those_that_are_compiled():
    source = (ROOT / "csrc" / "cuda" / "score_keys.cu").read_text()
    body = source[source.index("bool scores_head_size") :].partition("}")[0]
    found = tuple(map(int, re.findall(r"head_size == (\d+)", body)))
    assert found == CUDA_HEAD_SIZES
