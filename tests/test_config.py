# SPDX-License-Identifier: Apache-2.0
"""Every setting: what it takes, what it refuses, and in which words."""

import dataclasses
import math
import pickle
import subprocess
import sys

import pytest

from keyformer_vllm.config import (
    POLICY_NAMES,
    REQUEST_KEYS,
    VLLM_REQUEST_KEYS,
    KeyformerConfig,
    KVPolicyError,
    config_from_additional,
    is_full_budget,
    parse_budget,
    refuse_request_without_policy,
    wants_report,
)
from keyformer_vllm.flags import FLAGS, settings_from_flags

NAN, INF = math.nan, math.inf
HUGE_INT = 10**6000  # more digits than Python turns into text

DEBUGGING = ("check_ranks", "poison_freed", "reference_kernels")
SWITCHES = ("audit", *DEBUGGING)
UNFLAGGED = ("attention", *DEBUGGING)

GOOD_VALUES = [
    *(("policy", name) for name in POLICY_NAMES),
    *(("budget", value) for value in (0.001, 0.5, 1.0, 256, 2048)),
    *(("min_tokens", value) for value in (1, 256)),
    *(("budget_base", value) for value in ("prompt", "sequence")),
    *(("recent_ratio", value) for value in (0, 0.0, 0.2, 1.0)),
    *(("sinks", value) for value in (0, 4, 100)),
    *(("tau_init", value) for value in (0.25, 1, 2.0)),
    *(("tau_end", value) for value in (1.0, 2, 100.0)),
    *(("noise", value) for value in ("gumbel", "none")),
    *(("seed", value) for value in (0, 2**63 - 1)),
    *(("score_queries", value) for value in ("all", "last:1", "stride:1", "stride:4")),
    *(("score_mode", value) for value in ("auto", "deferred", "step", "fused")),
    *(("select", value) for value in ("token", "block")),
    *(("positions", value) for value in ("original", "compact")),
    *(("trace", value) for value in (None, "trace.jsonl")),
    *(("kernels", value) for value in ("auto", "cuda", "triton")),
    *(("attention", value) for value in ("FLASH_ATTN", "TRITON_ATTN")),
    *((name, value) for name in SWITCHES for value in (True, False)),
]

NOT_NUMBERS = ("abc", "", "0.5", None, [], [1, 2], {}, {"a": 1}, True, NAN)
BAD_VALUES = {
    "policy": ("", "Keyformer", "snapkv", None, 1, ["h2o"], {}, "x" * 2000),
    "budget": (*NOT_NUMBERS, -1, 0, 2, 255, -0.5, 0.0, 1.5, INF, 2**31, HUGE_INT),
    "min_tokens": (*NOT_NUMBERS, 0, -1, 1.5, 2**31, HUGE_INT),
    "budget_base": ("", "Prompt", "answer", None, 1),
    "recent_ratio": (*NOT_NUMBERS, -0.1, 1.1, INF),
    "sinks": (*NOT_NUMBERS, -1, 0.5, 2**31),
    "tau_init": (*NOT_NUMBERS, 0, -1.0, 0.2, 101, INF),
    "tau_end": (*NOT_NUMBERS, 0, 0.9, 101, INF),
    "noise": ("", "Gumbel", "gauss", None, 0),
    "seed": (*NOT_NUMBERS, -1, 0.5, 2**63),
    "score_queries": (
        *("", "ALL", "all:1", 32, "last", "last:", "last:0", "last:-1", "last:x"),
        *("stride", "stride:", "stride:0", "stride:-1", "stride:1.5", "stride:x"),
        *("last:1,stride:2", "stride:" + "1" * 40, " stride:4"),
    ),
    "score_mode": ("", "Deferred", "lazy", None, 1),
    "select": ("", "Token", "head", None, 1),
    "positions": ("", "Compact", "new", None, 1),
    "trace": ("", 1, [], {}),
    "kernels": ("", "CUDA", "cpu", None, 1),
    "attention": ("", "CUSTOM", "flash_attn", None, 1),
    **dict.fromkeys(SWITCHES, (0, 1, "true", "", None, [])),
}


def make_config(**settings):
    return KeyformerConfig(**{"policy": "keyformer", **settings})


@pytest.mark.parametrize(("setting", "value"), GOOD_VALUES)
def test_good_value_is_kept(setting, value):
    settings = {"min_tokens": 1} if setting == "min_tokens" else {}
    config = make_config(**{**settings, setting: value})
    assert getattr(config, setting) == value
    assert type(getattr(config, setting)) is type(value)


@pytest.mark.parametrize("setting", BAD_VALUES)
def test_bad_value_is_refused_by_name_and_in_one_short_line(setting):
    for value in BAD_VALUES[setting]:
        with pytest.raises(KVPolicyError) as caught:
            make_config(**{setting: value})
        message = str(caught.value)
        assert f"kv_{setting}" in message, value
        assert caught.value.parameter == f"kv_{setting}", value
        assert "\n" not in message and len(message) < 300, value


def test_every_setting_has_good_and_bad_values_here():
    settings = {field.name for field in dataclasses.fields(KeyformerConfig)}
    assert {setting for setting, _ in GOOD_VALUES} == settings
    assert set(BAD_VALUES) == settings
    assert {flag.setting for flag in FLAGS} == settings - set(UNFLAGGED)


def test_cooling_temperature_is_refused():
    with pytest.raises(KVPolicyError, match="kv_tau_end=1.0 is below kv_tau_init=1.5"):
        make_config(tau_init=1.5, tau_end=1.0)


def test_defaults_are_the_documented_ones():
    config = KeyformerConfig(policy="keyformer")
    assert config.to_mapping() == {
        "policy": "keyformer",
        "budget": 0.5,
        "min_tokens": 256,
        "budget_base": "prompt",
        "recent_ratio": 0.2,
        "sinks": 4,
        "tau_init": 1.0,
        "tau_end": 2.0,
        "noise": "gumbel",
        "seed": 0,
        "score_queries": "all",
        "score_mode": "auto",
        "kernels": "auto",
        "select": "token",
        "positions": "original",
        "audit": False,
        "trace": None,
        "attention": "FLASH_ATTN",
        "reference_kernels": False,
        "poison_freed": False,
        "check_ranks": False,
    }


def test_config_is_frozen_hashable_and_survives_a_process_boundary():
    config = make_config(budget=2048, seed=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 0.5
    assert hash(config) == hash(make_config(budget=2048, seed=7))
    assert config != make_config(budget=2048, seed=8)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("budget", [0.5, 1.0, 2048])
def test_mapping_round_trip_keeps_the_kind_of_budget(budget):
    config = make_config(budget=budget, trace="trace.jsonl")
    again = KeyformerConfig.from_mapping(config.to_mapping())
    assert again == config
    assert type(again.budget) is type(budget)


def test_full_budget_is_the_float_one():
    assert is_full_budget(1.0)
    assert not is_full_budget(1)
    assert not is_full_budget(0.999)


@pytest.mark.parametrize(
    ("settings", "evicts"),
    [
        ({}, True),
        ({"budget": 1.0}, False),
        ({"policy": "full"}, False),
        ({"policy": "window", "budget": 300}, True),
    ],
)
def test_evicts(settings, evicts):
    assert make_config(**settings).evicts is evicts


@pytest.mark.parametrize(
    ("value", "last", "stride"),
    [
        ("all", None, 1),
        ("last:32", 32, 1),
        ("stride:4", None, 4),
        ("stride:1", None, 1),
    ],
)
def test_score_queries_are_a_limit_or_a_stride(value, last, stride):
    config = make_config(score_queries=value)
    assert config.num_score_queries == last
    assert config.score_query_stride == stride


@pytest.mark.parametrize("layout", ["vec", "vec16", "amx"])
@pytest.mark.parametrize("has_alibi", [False, True])
def test_score_mode_auto_depends_on_model_and_cpu(has_alibi, layout):
    auto = "deferred" if layout == "amx" and not has_alibi else "fused"
    assert make_config().score_mode_for(has_alibi, layout) == auto
    for mode in ("deferred", "step", "fused"):
        config = make_config(score_mode=mode)
        assert config.score_mode_for(has_alibi, layout) == mode


@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_an_audit_is_measured_while_queries_attend(layout):
    assert make_config(audit=True).score_mode_for(False, layout) == "fused"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "full"),
        ("budget", 1.0),
        ("score_mode", "deferred"),
        ("score_mode", "step"),
        ("positions", "compact"),
        ("poison_freed", True),
    ],
)
def test_an_audit_is_refused_what_it_cannot_measure(name, value):
    values = {"policy": "keyformer", "audit": True} | {name: value}
    with pytest.raises(
        KVPolicyError, match="cannot be combined with kv_audit"
    ) as caught:
        KeyformerConfig.from_mapping(values)
    assert caught.value.parameter == f"kv_{name}"
    KeyformerConfig.from_mapping(values | {"audit": False})


def test_a_request_may_opt_out_of_an_audit():
    server = KeyformerConfig.from_mapping({"policy": "keyformer", "audit": True})
    assert not server.with_request({"kv_policy": "full"}).evicts
    assert not server.with_request({"kv_budget": 1.0}).evicts


def test_unknown_setting_is_refused_with_the_list_of_valid_ones():
    with pytest.raises(KVPolicyError) as caught:
        KeyformerConfig.from_mapping({"policy": "h2o", "budgett": 0.5})
    assert "'budgett' is unknown" in str(caught.value)
    for field in dataclasses.fields(KeyformerConfig):
        assert field.name in str(caught.value)


@pytest.mark.parametrize("key", [None, 1, ("a",), "x" * 5000, "two\nlines"])
def test_odd_setting_names_are_refused_in_one_line(key):
    with pytest.raises(KVPolicyError) as caught:
        KeyformerConfig.from_mapping({"policy": "h2o", key: 1})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("values", ["h2o", ["policy"], 5, True])
def test_settings_that_are_no_mapping_are_refused(values):
    with pytest.raises(KVPolicyError, match="must be a mapping of settings"):
        config_from_additional({"keyformer": values})


@pytest.mark.parametrize(
    ("values", "asked"),
    [({}, "the keyformer settings need a policy"), ({"sinks": 2}, "--kv-sinks needs")],
)
def test_settings_without_a_policy_are_refused(values, asked):
    with pytest.raises(KVPolicyError) as caught:
        config_from_additional({"keyformer": values})
    assert asked in str(caught.value)
    assert all(name in str(caught.value) for name in POLICY_NAMES)


@pytest.mark.parametrize("additional", [None, {}, 5, {"other": 1}, {"keyformer": None}])
def test_no_policy_in_additional_config(additional):
    assert config_from_additional(additional) is None


# --- flags ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), (".5", 0.5), ("5e-1", 0.5), ("1.0", 1.0), ("1", 1), ("2048", 2048)],
)
def test_parse_budget_tells_tokens_from_fractions(text, value):
    parsed = parse_budget(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.option)
def test_flag_names_and_defaults(flag):
    assert flag.option == "--" + flag.dest.replace("_", "-")
    assert flag.dest == f"kv_{flag.setting}"
    assert flag.is_switch == (flag.default is False)
    if flag.setting not in ("policy", "trace") and not flag.is_switch:
        assert flag.read(str(flag.default)) == flag.default
    assert "%" not in flag.help


@pytest.mark.parametrize("option", ["--kv-budget", "--kv-tau-end", "--kv-sinks"])
@pytest.mark.parametrize("text", ["abc", "", "0,5", "9" * 5000 + "x", "two\nlines"])
def test_flag_that_is_no_number_is_refused_by_name(option, text):
    flag = next(flag for flag in FLAGS if flag.option == option)
    with pytest.raises(KVPolicyError) as caught:
        flag.read(text)
    assert option in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_settings_from_flags_keeps_only_what_was_given():
    assert settings_from_flags({}) is None
    assert settings_from_flags({flag.dest: None for flag in FLAGS}) is None
    given = {"kv_policy": "h2o", "kv_sinks": 0, "kv_budget": None, "port": 8000}
    assert settings_from_flags(given) == {"policy": "h2o", "sinks": 0}


# --- requests ---------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {1: 2}, {("kv_",): 3}])
def test_request_without_settings_of_ours_keeps_the_server_s(extra):
    config = make_config()
    assert config.with_request(extra) is config
    refuse_request_without_policy(extra)


def test_request_overrides_policy_and_budget_only():
    config = make_config(seed=7, min_tokens=16)
    assert config.with_request({"kv_budget": 0.25}).budget == 0.25
    assert config.with_request({"kv_budget": 16}).budget == 16
    assert not config.with_request({"kv_policy": "full"}).evicts
    both = config.with_request({"kv_policy": "h2o", "kv_budget": 1.0})
    assert both == dataclasses.replace(config, policy="h2o", budget=1.0)
    assert set(REQUEST_KEYS) == {"kv_policy", "kv_budget", "kv_report"}


def test_a_request_asks_for_a_report_or_not():
    config = make_config()
    for value in (True, 1):
        assert config.with_request({"kv_report": value}) is config
        assert wants_report({"kv_report": value})
    for extra in ({"kv_report": False}, {"kv_report": 0}, {}, None):
        assert config.with_request(extra) is config
        assert not wants_report(extra)


@pytest.mark.parametrize("value", ["maybe", "true", "", 2, -1, 1.0, 0.5, None, [], {}])
def test_request_report_is_refused_by_name(value):
    with pytest.raises(KVPolicyError, match="must be true or false") as caught:
        make_config().with_request({"kv_report": value})
    assert caught.value.parameter == "kv_report"


@pytest.mark.parametrize(
    "value",
    [-1, 0, 2, 255, 1.5, INF, NAN, "abc", "", [], [1, 2], {}, None, "x" * 10**6],
)
def test_request_budget_is_refused_by_name(value):
    with pytest.raises(KVPolicyError) as caught:
        make_config().with_request({"kv_budget": value})
    assert caught.value.parameter == "kv_budget"
    assert "kv_budget" in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("value", ["", "off", 1, None, [], ["h2o"], "x" * 10**6])
def test_request_policy_is_refused_by_name(value):
    with pytest.raises(KVPolicyError) as caught:
        make_config().with_request({"kv_policy": value})
    assert caught.value.parameter == "kv_policy"
    assert "keyformer" in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["kv_sinks", "kv_budgets", "kv_", "kv_" + "x" * 10**6])
def test_unknown_request_setting_is_refused_with_the_valid_ones(key):
    with pytest.raises(KVPolicyError) as caught:
        make_config().with_request({key: 1})
    assert caught.value.parameter == key
    assert "valid ones: kv_policy, kv_budget" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["kv_policy", "kv_budget", "kv_other"])
def test_request_setting_without_a_policy_is_refused(key):
    with pytest.raises(KVPolicyError, match="--kv-policy") as caught:
        refuse_request_without_policy({key: "full"})
    assert caught.value.parameter == key


@pytest.mark.parametrize("key", sorted(VLLM_REQUEST_KEYS))
def test_vllm_s_own_request_keys_are_left_alone(key):
    config = make_config()
    assert config.with_request({key: {"any": "thing"}}) is config
    refuse_request_without_policy({key: {"any": "thing"}})


def test_import_is_light():
    code = (
        "import sys; import keyformer_vllm.config, keyformer_vllm.plugin; "
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trace_file_that_cannot_be_written_is_refused(tmp_path):
    good = KeyformerConfig("keyformer", trace=str(tmp_path / "trace.jsonl"))
    good.check_trace()
    KeyformerConfig("keyformer").check_trace()
    for bad in (tmp_path / "missing" / "trace.jsonl", tmp_path):
        with pytest.raises(KVPolicyError, match="kv_trace=.* cannot be written"):
            KeyformerConfig("keyformer", trace=str(bad)).check_trace()
