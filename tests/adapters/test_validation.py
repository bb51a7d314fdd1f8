# SPDX-License-Identifier: Apache-2.0
"""Every refusal: the line it prints, and that its neighbours are still served."""

import copy
import re
import types

import pytest
import vllm.model_executor.models.registry as model_registry
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from keyformer_vllm import plugin
from keyformer_vllm.adapters import compat, validation
from keyformer_vllm.adapters.model_rules import MODEL_RULES, OUTCOME_RULES
from keyformer_vllm.adapters.rules import (
    ENGINE_ARGS_RULES,
    ENVIRONMENT_RULES,
    SCHEDULER,
    WORKERS,
)
from keyformer_vllm.config import KVPolicyError
from tests.refused_models import REFUSED_MODELS, SERVED_MODELS, write_config

VLLM_CONFIG_RULES = MODEL_RULES + OUTCOME_RULES
POLICY = {"keyformer": {"policy": "keyformer"}}
NO = lambda: False  # noqa: E731
LINE = re.compile(
    r"--kv-policy keyformer cannot be combined with (?P<setting>[^\n]+?): "
    r"(?P<reason>[^\n]+); (?P<remedy>[^\n]+)"
)

# Flags of vLLM, the rule that refuses them and the setting its line names.
REFUSED_FLAGS = [
    (
        "speculative decoding",
        "--speculative-config",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ),
    ("speculative decoding", "--spec-method", {"spec_method": "ngram"}),
    (
        "KV offloading",
        "--kv-offloading-size 1.0",
        {"kv_offloading_size": 1.0, "kv_offloading_backend": "native"},
    ),
    (
        "KV events",
        "--kv-events-config",
        {"kv_events_config": {"enable_kv_cache_events": True}},
    ),
    *(
        ("quantised KV cache", f"--kv-cache-dtype {name}", {"kv_cache_dtype": name})
        for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int8_per_token_head")
    ),
    (
        "context parallel",
        "--decode-context-parallel-size 2",
        {"decode_context_parallel_size": 2},
    ),
    (
        "context parallel",
        "--prefill-context-parallel-size 2",
        {"prefill_context_parallel_size": 2},
    ),
    (
        "KV sharing fast prefill",
        "--kv-sharing-fast-prefill",
        {"kv_sharing_fast_prefill": True},
    ),
    ("ubatching", "--enable-dbo", {"enable_dbo": True}),
    ("ubatching", "--ubatch-size 2", {"ubatch_size": 2}),
    (
        "pipeline parallel",
        "--pipeline-parallel-size 2",
        {"pipeline_parallel_size": 2},
    ),
    ("block size", "--block-size 48", {"block_size": 48}),
    (
        "auxiliary output",
        "--enable-return-routed-experts",
        {"enable_return_routed_experts": True},
    ),
    (
        "audit of several ranks",
        "--kv-audit and --tensor-parallel-size 2",
        {
            "additional_config": {"keyformer": {"policy": "keyformer", "audit": True}},
            "tensor_parallel_size": 2,
        },
    ),
    ("scheduler class", "--scheduler-cls a.B", {"scheduler_cls": "a.B"}),
    ("scheduler class", "--scheduler-cls dict", {"scheduler_cls": dict}),
    ("worker class", "--worker-cls a.B", {"worker_cls": "a.B"}),
]

# What vLLM, a plugin or a model can settle in a VllmConfig beyond its flags.
REFUSED_OUTCOMES = [
    ("speculative decoding", "speculative_config", object()),
    ("KV connector", "kv_transfer_config", object()),
    (
        "KV events",
        "kv_events_config",
        types.SimpleNamespace(enable_kv_cache_events=True),
    ),
    ("KV cache dtype", "cache_config.cache_dtype", "fp8"),
    ("KV cache dtype", "cache_config.cache_dtype", "float16"),
    ("block size", "cache_config.block_size", 16),
    ("non-causal", "attention_config.use_non_causal", True),
    ("replaced class", "scheduler_config.scheduler_cls", "a.B"),
    ("replaced class", "parallel_config.worker_cls", "a.B"),
    (
        "compact positions",
        "additional_config",
        {"keyformer": {"policy": "h2o", "positions": "compact"}},
    ),
    ("diffusion", "model_config.is_diffusion", True),
    ("pooling", "model_config.runner_type", "pooling"),
    (
        "layers that differ",
        "model_config.model_arch_config.per_layer_overrides",
        [{}, {"total_num_kv_heads": 1}],
    ),
]
REFUSED_ARCHITECTURES = [
    ("square-root ALiBi", "Step1ForCausalLM"),
    ("prefix-LM", "HrmTextForCausalLM"),
    ("streaming sessions", "VoxtralRealtimeGeneration"),
    ("streaming sessions", "Qwen3ASRRealtimeGeneration"),
]
REFUSED_ENVIRONMENT = [
    ("Rust front end", "VLLM_USE_RUST_FRONTEND"),
    ("batch invariance", "VLLM_BATCH_INVARIANT"),
    ("model runner V2", "VLLM_USE_V2_MODEL_RUNNER"),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """From a kind and vLLM's own arguments to a VllmConfig with a policy on."""
    plugin.register()
    root = tmp_path_factory.mktemp("refused")
    # vLLM looks at each new architecture in a process of its own: 15 s apiece.
    patch = pytest.MonkeyPatch()
    patch.setattr(model_registry, "_run_in_subprocess", lambda inspect: inspect())

    def make(kind="llama", **arguments):
        folder = root / kind
        if not folder.exists():
            write_config(kind, folder)
        arguments = {"additional_config": dict(POLICY), **arguments}
        engine_args = EngineArgs(model=str(folder), tokenizer=str(folder), **arguments)
        return engine_args.create_engine_config()

    yield make
    patch.undo()


@pytest.fixture(scope="module")
def served(build):
    """The VllmConfig of a plain model with a policy on."""
    return build("llama")


def lines_of(error):
    """The settings of a refusal, after checking the form of every line."""
    matches = [LINE.fullmatch(line) for line in str(error.value).splitlines()]
    assert all(matches), str(error.value)
    return [match["setting"] for match in matches]


def names_of(rules, subject):
    return [rule.name for rule in rules if rule.find(subject) is not None]


def edited(config, path, value):
    """A copy of a configuration in which one attribute has another value."""
    head, _, rest = path.partition(".")
    config = copy.copy(config)
    value = edited(getattr(config, head), rest, value) if rest else value
    if head in vars(config):
        object.__setattr__(config, head, value)
    else:  # a property of vLLM's
        config.__dict__[head] = value
    return config


@pytest.mark.parametrize("kind", SERVED_MODELS)
def test_model_that_only_resembles_a_refused_one_is_served(build, kind):
    vllm_config = build(kind)
    assert names_of(VLLM_CONFIG_RULES, vllm_config) == []
    assert vllm_config.scheduler_config.scheduler_cls == SCHEDULER
    assert vllm_config.parallel_config.worker_cls == WORKERS["cpu"]
    assert vllm_config.cache_config.enable_prefix_caching is True


@pytest.mark.parametrize("block_size", [32, 64, 128, 96])
def test_block_sizes_of_the_cpu_layouts_are_served(build, block_size):
    assert build(block_size=block_size).cache_config.block_size == block_size


def test_default_block_size_stays_vllm_s(served):
    assert served.cache_config.block_size == 128


@pytest.mark.parametrize("kind", ["mistral-sliding", "gemma2"])
def test_window_that_is_switched_off_is_served(build, kind):
    vllm_config = build(kind, disable_sliding_window=True)
    assert names_of(VLLM_CONFIG_RULES, vllm_config) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": True},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_events_config": {"enable_kv_cache_events": False}},
        {"enable_lora": True},
        {"scheduler_cls": SCHEDULER, "worker_cls": WORKERS["cpu"]},
        {"worker_cls": "auto"},
        {"tensor_parallel_size": 1, "ubatch_size": 1},
    ],
)
def test_harmless_setting_is_served(build, arguments):
    assert build(**arguments).scheduler_config.scheduler_cls == SCHEDULER


@pytest.mark.parametrize("kind", REFUSED_MODELS)
def test_model_is_refused(build, kind):
    rule, _ = REFUSED_MODELS[kind]
    with pytest.raises(KVPolicyError) as caught:
        build(kind)
    settings = lines_of(caught)
    assert all(kind in setting and "--model" in setting for setting in settings)
    reasons = {entry.name: entry.reason for entry in VLLM_CONFIG_RULES}
    assert reasons[rule] in str(caught.value)


@pytest.mark.parametrize("kind", ["bloom", "falcon-alibi"])
def test_compact_positions_are_served_with_alibi(build, kind):
    policy = {"keyformer": {"policy": "keyformer", "positions": "compact"}}
    assert names_of(VLLM_CONFIG_RULES, build(kind, additional_config=policy)) == []


def test_pooling_runner_is_refused(build):
    with pytest.raises(KVPolicyError) as caught:
        build(runner="pooling")
    (setting,) = lines_of(caught)
    assert setting.endswith("(pooling)")


@pytest.mark.parametrize(
    ("rule", "setting", "arguments"),
    REFUSED_FLAGS,
    ids=[setting for _, setting, _ in REFUSED_FLAGS],
)
def test_flag_is_refused(build, rule, setting, arguments):
    with pytest.raises(KVPolicyError) as caught:
        build(**arguments)
    assert lines_of(caught) == [setting]


@pytest.mark.parametrize("connector", sorted(KVConnectorFactory._registry))
def test_every_kv_connector_of_vllm_is_refused(build, connector):
    transfer = {"kv_connector": connector, "kv_role": "kv_both"}
    with pytest.raises(KVPolicyError) as caught:
        build(kv_transfer_config=transfer)
    assert lines_of(caught) == ["--kv-transfer-config"]


@pytest.mark.parametrize(("rule", "path", "value"), REFUSED_OUTCOMES)
def test_outcome_is_refused(served, rule, path, value):
    changed = edited(served, path, value)
    assert names_of(VLLM_CONFIG_RULES, changed) == [rule]
    with pytest.raises(KVPolicyError) as caught:
        validation.check_vllm_config("keyformer", changed)
    assert len(lines_of(caught)) == 1


def test_a_ring_that_fills_the_cache_is_refused_where_there_is_one(served):
    cramped = edited(served, "cache_config.kv_cache_memory_bytes", 1000)
    assert names_of(VLLM_CONFIG_RULES, cramped) == []
    policy = {"keyformer": {"policy": "keyformer", "score_mode": "deferred"}}
    cramped = edited(cramped, "additional_config", policy)
    assert names_of(VLLM_CONFIG_RULES, cramped) == ["query ring"]
    with pytest.raises(KVPolicyError) as caught:
        validation.check_vllm_config("keyformer", cramped)
    assert len(lines_of(caught)) == 1


@pytest.mark.parametrize(("rule", "architecture"), REFUSED_ARCHITECTURES)
def test_architecture_is_refused(served, rule, architecture):
    path = "model_config.model_arch_config.architectures"
    changed = edited(served, path, [architecture])
    assert names_of(VLLM_CONFIG_RULES, changed) == [rule]


@pytest.mark.parametrize(("rule", "variable"), REFUSED_ENVIRONMENT)
def test_environment_is_refused(build, monkeypatch, rule, variable):
    monkeypatch.setenv(variable, "1")
    assert names_of(ENVIRONMENT_RULES, None) == [rule]
    with pytest.raises(KVPolicyError) as caught:
        build()
    assert lines_of(caught) == [f"{variable}=1"]
    monkeypatch.setenv(variable, "0")
    assert names_of(ENVIRONMENT_RULES, None) == []


def test_model_runner_v2_is_refused_when_vllm_chooses_it(served, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert names_of(VLLM_CONFIG_RULES, served) == ["model runner V2"]


@pytest.mark.parametrize(
    ("platform", "setting"),
    [
        (
            types.SimpleNamespace(device_name="rocm", device_type="cuda", is_cuda=NO),
            "the rocm platform",
        ),
        (types.SimpleNamespace(device_type="", is_cuda=NO), "the unknown platform"),
        (
            types.SimpleNamespace(
                device_name="cpu",
                is_cuda=NO,
                get_cpu_architecture=lambda: types.SimpleNamespace(name="ARM"),
            ),
            "a CPU of architecture ARM",
        ),
    ],
)
def test_platform_is_refused(build, monkeypatch, platform, setting):
    monkeypatch.setattr(compat, "current_platform", lambda: platform)
    with pytest.raises(KVPolicyError) as caught:
        build()
    assert lines_of(caught) == [setting]


def test_every_violated_rule_has_its_line(build):
    with pytest.raises(KVPolicyError) as caught:
        build(enable_dbo=True, spec_method="ngram", block_size=16)
    assert lines_of(caught) == [
        "--spec-method",
        "--enable-dbo",
        "--block-size 16",
    ]


def test_flags_are_refused_before_the_model_is_read(build, monkeypatch):
    def read(self):
        raise AssertionError("the model was read")

    monkeypatch.setattr(EngineArgs, "create_model_config", read)
    with pytest.raises(KVPolicyError):
        build(enable_dbo=True)


def test_every_rule_is_tested_here():
    tested = {rule for rule, *_ in REFUSED_FLAGS} | {"platform", "KV connector"}
    assert {rule.name for rule in ENGINE_ARGS_RULES} == tested
    tested = {rule for rule, _ in REFUSED_ENVIRONMENT}
    assert {rule.name for rule in ENVIRONMENT_RULES} == tested
    tested = {rule for rule, _ in REFUSED_MODELS.values()} | {
        "model runner V2",
        "query ring",
    }
    tested |= {rule for rule, *_ in REFUSED_OUTCOMES}
    tested |= {rule for rule, _ in REFUSED_ARCHITECTURES}
    assert {rule.name for rule in VLLM_CONFIG_RULES} == tested
