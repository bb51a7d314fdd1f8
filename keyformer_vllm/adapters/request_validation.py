# SPDX-License-Identifier: Apache-2.0
"""Refuses bad per-request settings with HTTP 400, before the engine sees them.

A value that is first checked inside the engine loop stops every other request
with it. ``InputProcessor`` (``vllm/v1/engine/input_processor.py``) is the one
gate that completions, chat, responses and ``LLM.generate`` all pass. For an answer
that is streamed it comes too late: its status has been sent by then. So completions
and chat are checked when they call ``AsyncLLM.generate`` as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from keyformer_vllm.adapters import compat
from keyformer_vllm.config import (
    KVPolicyError,
    config_from_additional,
    refuse_request_without_policy,
    wants_report,
)

_MAX_NAME = 60
_NO_REPORT_STREAMED = ("cmpl-", "chatcmpl-")
"""Ids of requests whose streamed chunks have no field for a report: completions, chat
(``vllm/entrypoints/openai/*/serving.py`` begin them so)."""


def install() -> None:
    """Wrap vLLM's gates for requests, once however often this is called."""
    processor = compat.InputProcessor
    if hasattr(processor._validate_params, compat.WRAPPED):
        return
    processor._validate_params = _wrap_validate(processor._validate_params)
    processor.process_inputs = _wrap_process(processor.process_inputs)
    engine = compat.AsyncLLM
    engine.generate = _wrap_generate(engine.generate)


def check_request(additional_config: Any, extra_args: Any) -> None:
    """Check the ``kv_*`` settings of one request.

    Args:
        additional_config: the engine's, with or without a policy in it.
        extra_args: the request's ``vllm_xargs``, or None.

    Raises:
        VLLMValidationError: naming the setting as ``vllm_xargs.<name>``; the
            front end turns it into HTTP 400.
    """
    if extra_args is None:
        return
    if not isinstance(extra_args, Mapping):
        raise compat.VLLMValidationError(
            "extra_args must be a mapping", parameter="extra_args"
        )
    try:
        config = config_from_additional(additional_config)
        if config is None:
            refuse_request_without_policy(extra_args)
        else:
            config.with_request(extra_args)
    except KVPolicyError as error:
        raise compat.VLLMValidationError(
            str(error), parameter=f"vllm_xargs.{error.parameter[:_MAX_NAME]}"
        ) from None


def check_streamed_report(sampling_params: Any, request_id: str) -> None:
    """Refuse to promise a report that a streamed answer cannot carry.

    Args:
        sampling_params: of a request that :func:`check_request` let through.
        request_id: tells by its start which endpoint asks.

    Raises:
        VLLMValidationError: for streamed completions and chat.
    """
    streamed = sampling_params.output_kind is compat.RequestOutputKind.DELTA
    if (
        streamed
        and request_id.startswith(_NO_REPORT_STREAMED)
        and wants_report(sampling_params.extra_args)
    ):
        raise compat.VLLMValidationError(
            "kv_report cannot be combined with stream: the chunks of streamed "
            "completions and chat have no field for it; ask without stream, or use "
            "/v1/responses, whose last event carries it",
            parameter="vllm_xargs.kv_report",
        )


def check_session(additional_config: Any, resumable: bool) -> None:
    """Refuse a streaming session, which keeps its cache between its inputs.

    Raises:
        VLLMValidationError: when a policy is on and the request is resumable.
    """
    config = config_from_additional(additional_config) if resumable else None
    if config is not None:
        raise compat.VLLMValidationError(
            f"--kv-policy {config.policy} cannot be combined with streaming input: "
            "the cache of a resumable request outlives its prompt; send the whole "
            "prompt at once, or start the server without --kv-policy",
            parameter="resumable",
        )


def _wrap_validate(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        resolved = stock(self, params, *args, **kwargs)
        check_request(
            self.vllm_config.additional_config, getattr(params, "extra_args", None)
        )
        return resolved

    setattr(_validate_params, compat.WRAPPED, True)
    return _validate_params


def _wrap_process(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = stock(self, *args, **kwargs)
        check_session(self.vllm_config.additional_config, request.resumable)
        return request

    return process_inputs


def _wrap_generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def generate(
        self: Any,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Now, not when the caller first waits for the asynchronous generator.
        check_request(
            self.vllm_config.additional_config,
            getattr(sampling_params, "extra_args", None),
        )
        check_streamed_report(sampling_params, request_id)
        return stock(self, prompt, sampling_params, request_id, *args, **kwargs)

    return generate
