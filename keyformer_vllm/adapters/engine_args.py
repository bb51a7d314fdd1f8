# SPDX-License-Identifier: Apache-2.0
"""The three wraps on ``EngineArgs``: flags in, settings through, refusals out.

vLLM loads plugins before it defines its flags (``vllm/engine/arg_utils.py``), so
wrapping three of its methods is enough for every way in: ``vllm serve``, a YAML
file, ``LLM(...)`` and ``AsyncLLM``. With no policy each wrap hands straight on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keyformer_vllm import __version__
from keyformer_vllm.adapters import (
    compat,
    request_validation,
    stat_logger,
    validation,
)
from keyformer_vllm.adapters.gpu_rules import take_attention
from keyformer_vllm.adapters.rules import SCHEDULER, WORKERS, platform_name
from keyformer_vllm.config import (
    ADDITIONAL_CONFIG_KEY,
    VERSION_KEY,
    KeyformerConfig,
    KVPolicyError,
    config_from_additional,
)
from keyformer_vllm.flags import FLAGS, Flag, settings_from_flags

EXIT_STATUS = 2
"""What a refused command line exits with, as argparse's own errors do."""

_FROM_CLI = "_keyformer_from_cli"


def install() -> None:
    """Wrap ``EngineArgs`` of vLLM, once however often this is called."""
    if is_installed():
        return
    engine_args = compat.EngineArgs
    engine_args.add_cli_args = staticmethod(_wrap_add(engine_args.add_cli_args))
    engine_args.from_cli_args = classmethod(
        _wrap_from_cli(engine_args.from_cli_args.__func__)
    )
    engine_args.create_engine_config = _wrap_create(engine_args.create_engine_config)


def is_installed() -> bool:
    """Whether the wraps are in place, that is, whether vLLM loaded the plugin."""
    return hasattr(compat.EngineArgs.create_engine_config, compat.WRAPPED)


def add_flags(parser: Any) -> None:
    """Add the ``--kv-*`` flags to an argument parser, in a group of their own.

    Their default is None, which tells "given" from "not given".
    """
    group = parser.add_argument_group(
        title="KV policy",
        description="Keyformer: keep a bounded KV cache and give the rest back.",
    )
    for flag in FLAGS:
        shown = ""
        taken: dict[str, Any] = {"action": "store_const", "const": True}
        if not flag.is_switch:
            shown = f" (default: {flag.default})" if flag.default is not None else ""
            taken = {
                "action": _PolicyAction if flag.setting == "policy" else "store",
                "type": functools.partial(_read_flag, flag),
                "metavar": flag.metavar,
            }
        group.add_argument(
            flag.option,
            dest=flag.dest,
            default=None,
            # Printed with precision 0: keeps vLLM's help formatter from adding
            # the None above as this flag's default.
            help=f"{flag.help}{shown}%(default).0s",
            **taken,
        )


def fold_flags(engine_args: Any, settings: Mapping[str, Any]) -> None:
    """Move settings given as flags into ``additional_config``.

    Args:
        engine_args: vLLM's ``EngineArgs``; ``additional_config`` is replaced.
        settings: setting name to value, at least one.

    Raises:
        KVPolicyError: when ``additional_config`` cannot take them, or has its own.
    """
    first = next(flag.option for flag in FLAGS if flag.setting in settings)
    additional = engine_args.additional_config
    if not isinstance(additional, Mapping):
        raise KVPolicyError(
            "additional_config",
            f"{first} needs --additional-config to be a JSON object; correct it or "
            "leave it out",
        )
    if additional.get(ADDITIONAL_CONFIG_KEY) is not None:
        raise KVPolicyError(
            ADDITIONAL_CONFIG_KEY,
            f"{first} cannot be combined with --additional-config "
            f"{ADDITIONAL_CONFIG_KEY}: both set the KV policy; drop one of them",
        )
    engine_args.additional_config = {**additional, ADDITIONAL_CONFIG_KEY: settings}


def prepare(engine_args: Any) -> KeyformerConfig | None:
    """Make ``EngineArgs`` ask for our scheduler and worker, if a policy is on.

    Args:
        engine_args: vLLM's ``EngineArgs``. With a policy: ``scheduler_cls``,
            ``worker_cls`` and ``additional_config`` are set. With policy ``full``:
            our key is taken out, all else is left alone. Without: untouched.

    Returns:
        The policy's settings, or None when stock vLLM is to run.

    Raises:
        KVPolicyError: for a bad setting or one that does not go with a policy.
    """
    additional = engine_args.additional_config
    if not isinstance(additional, Mapping) or ADDITIONAL_CONFIG_KEY not in additional:
        return None
    config = config_from_additional(additional)
    if config is None or config.policy == "full":
        engine_args.additional_config = {
            key: value
            for key, value in additional.items()
            if key not in (ADDITIONAL_CONFIG_KEY, VERSION_KEY)
        }
        return None
    validation.check_engine_args(config.policy, engine_args)
    config.check_trace()
    engine_args.scheduler_cls = SCHEDULER
    engine_args.worker_cls = WORKERS[platform_name()]
    if compat.on_gpu():
        config = dataclasses.replace(config, attention=take_attention(engine_args))
    engine_args.additional_config = {
        **additional,
        ADDITIONAL_CONFIG_KEY: config.to_mapping(),
        VERSION_KEY: __version__,
    }
    return config


def _wrap_add(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_cli_args(parser: Any) -> Any:
        parser = stock(parser)
        add_flags(parser)
        return parser

    return add_cli_args


def _wrap_from_cli(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        engine_args = stock(cls, args)
        setattr(engine_args, _FROM_CLI, True)
        given = {flag.dest: getattr(args, flag.dest, None) for flag in FLAGS}
        if isinstance(given["kv_policy"], _PolicyName):
            given["kv_policy"] = str(given["kv_policy"])
        settings = settings_from_flags(given)
        if settings is not None:
            with _exit_if_refused(from_cli=True):
                fold_flags(engine_args, settings)
        return engine_args

    return from_cli_args


def _wrap_create(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        request_validation.install()
        from_cli = getattr(self, _FROM_CLI, False)
        with _exit_if_refused(from_cli):
            config = prepare(self)
        vllm_config = stock(self, *args, **kwargs)
        if config is not None:
            with _exit_if_refused(from_cli):
                validation.check_vllm_config(config.policy, vllm_config)
            stat_logger.install()
        return vllm_config

    setattr(create_engine_config, compat.WRAPPED, True)
    return create_engine_config


class _PolicyAction(argparse.Action):
    """Stores the policy; refuses an environment that would fail before our wraps.

    ``vllm serve`` chooses its front end before it builds the engine's arguments.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values != "full":
            with _exit_if_refused(from_cli=True):
                validation.check_environment(values)
        setattr(namespace, self.dest, _PolicyName(values))


class _PolicyName(str):
    """A policy on a command line that is sent to other processes.

    With several API servers vLLM sends the parsed command line to each, and there
    reads it before it loads plugins: the flags would be lost. Unpickling this value
    comes earlier still and puts our wraps in place.
    """

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return _arrive, (str(self),)


def _arrive(policy: str) -> _PolicyName:
    install()
    return _PolicyName(policy)


@contextlib.contextmanager
def _exit_if_refused(from_cli: bool) -> Iterator[None]:
    """On a command line, turn a refusal into its lines on stderr and an exit.

    Nobody reads a traceback through an event loop for a flag mistyped. Callers of
    ``LLM(...)`` get the exception itself.
    """
    try:
        yield
    except KVPolicyError as error:
        if not from_cli:
            raise
        for line in str(error).splitlines():
            print(f"keyformer: error: {line}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_STATUS) from None


def _read_flag(flag: Flag, text: str) -> Any:
    try:
        return flag.read(text)
    except KVPolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
