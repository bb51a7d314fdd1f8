# SPDX-License-Identifier: Apache-2.0
"""Per-request settings are refused at vLLM's own gate, by name, before the engine."""

import math
from inspect import isasyncgen
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from keyformer_vllm import plugin
from keyformer_vllm.adapters import request_validation

TASKS = ("generate",)

BAD = [
    *(("kv_budget", value) for value in (-1, 0, 2, -0.5, 1.5, "abc", "", "0.5")),
    *(("kv_budget", value) for value in (math.nan, math.inf, [], [1, 2], None, True)),
    *(
        ("kv_budget", value)
        for value in ({"a": 1}, [[0.5]], "x" * 10**6, [0.5] * 10**5)
    ),
    *(("kv_policy", value) for value in ("", "off", 1, 0.5, [], ["h2o"], None, {})),
    ("kv_policy", "x" * 10**6),
    ("kv_policy", "h2o\nkeyformer"),
    *((key, 1) for key in ("kv_sinks", "kv_budgets", "kv_", "kv_Budget")),
]
GOOD = [
    None,
    {},
    {"kv_budget": 0.25},
    {"kv_budget": 1.0},
    {"kv_budget": 4096},
    {"kv_policy": "full"},
    {"kv_policy": "h2o", "kv_budget": 0.9, "other": "x"},
    {"kv_transfer_params": {"do_remote_decode": True}},
    {"kv_cache_report_mode": "full"},
    {1: 2, "budget": "x"},
]

PROTOCOLS = {
    "completions": lambda xargs: CompletionRequest.model_validate(
        {"model": "M", "prompt": "Hello", "max_tokens": 4, "vllm_xargs": xargs}
    ),
    "chat": lambda xargs: ChatCompletionRequest.model_validate(
        {
            "model": "M",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4,
            "vllm_xargs": xargs,
        }
    ),
    "responses": lambda xargs: ResponsesRequest.model_validate(
        {"model": "M", "input": "Hello", "vllm_xargs": xargs}
    ),
}


@pytest.fixture(scope="module")
def make_processor(tiny_model):
    """From ``additional_config`` to vLLM's own input processor, without an engine."""
    plugin.register()
    folder = str(tiny_model("llama-4-2"))
    made = {}

    def make(policy):
        if policy not in made:
            additional = {"keyformer": {"policy": policy}} if policy else {}
            args = EngineArgs(model=folder, additional_config=additional)
            made[policy] = InputProcessor(args.create_engine_config())
        return made[policy]

    return make


def process(processor, extra_args, **kwargs):
    return processor.process_inputs(
        "request",
        TokensPrompt(prompt_token_ids=[1, 2, 3]),
        SamplingParams(max_tokens=4, extra_args=extra_args),
        TASKS,
        **kwargs,
    )


def refusal_of(processor, extra_args):
    with pytest.raises(VLLMValidationError) as caught:
        process(processor, extra_args)
    return caught.value


def test_installing_again_changes_nothing():
    def wrapped():
        return (
            InputProcessor._validate_params,
            InputProcessor.process_inputs,
            AsyncLLM.generate,
        )

    request_validation.install()
    before = wrapped()
    request_validation.install()
    assert wrapped() == before
    assert not any(hasattr(method.__wrapped__, "__wrapped__") for method in before)


def test_refused_before_a_streamed_answer_begins():
    """Not when the generator is first waited for: its 200 is out by then."""
    request_validation.install()
    config = SimpleNamespace(additional_config={"keyformer": {"policy": "h2o"}})
    engine = SimpleNamespace(vllm_config=config)
    with pytest.raises(VLLMValidationError) as caught:
        AsyncLLM.generate(
            engine, "Hello", SamplingParams(extra_args={"kv_foo": 1}), "r"
        )
    assert caught.value.parameter == "vllm_xargs.kv_foo"
    good = SamplingParams(extra_args={"kv_budget": 0.5})
    for params in (good, SamplingParams()):
        answer = AsyncLLM.generate(
            engine, prompt="Hello", sampling_params=params, request_id="r"
        )
        assert isasyncgen(answer)


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_setting_is_refused_by_name_and_the_next_request_is_served(
    make_processor, index
):
    key, value = BAD[index]
    processor = make_processor("keyformer")
    error = refusal_of(processor, {key: value})
    assert error.parameter == f"vllm_xargs.{key}"
    assert error.value is None
    assert key in str(error) and "\n" not in str(error)
    assert len(str(error)) < 400
    assert process(processor, {"kv_budget": 0.5}).prompt_token_ids == [1, 2, 3]


def test_long_name_is_cut(make_processor):
    error = refusal_of(make_processor("keyformer"), {"kv_" + "x" * 10**6: 1})
    assert error.parameter.startswith("vllm_xargs.kv_xxx")
    assert len(str(error)) < 400


@pytest.mark.parametrize("extra_args", GOOD)
def test_good_settings_arrive_unchanged(make_processor, extra_args):
    request = process(make_processor("keyformer"), extra_args)
    assert request.sampling_params.extra_args == extra_args


@pytest.mark.parametrize("policy", [None, "full"])
@pytest.mark.parametrize(
    "extra_args", [{"kv_policy": "full"}, {"kv_budget": 0.5}, {"kv_other": 1}]
)
def test_setting_is_refused_where_no_policy_is_on(make_processor, policy, extra_args):
    (key,) = extra_args
    error = refusal_of(make_processor(policy), extra_args)
    assert error.parameter == f"vllm_xargs.{key}"
    assert "needs a server started with a --kv-policy" in str(error)


@pytest.mark.parametrize("policy", [None, "full"])
@pytest.mark.parametrize("extra_args", [None, {"x": 1}, {"kv_transfer_params": {}}])
def test_requests_are_stock_where_no_policy_is_on(make_processor, policy, extra_args):
    request = process(make_processor(policy), extra_args)
    assert request.sampling_params.extra_args == extra_args


def test_extra_args_that_are_no_mapping_are_refused():
    with pytest.raises(VLLMValidationError, match="must be a mapping"):
        request_validation.check_request(
            {"keyformer": {"policy": "h2o"}}, ["kv_policy"]
        )


def test_streaming_session_is_refused_under_a_policy_only(make_processor):
    with pytest.raises(VLLMValidationError) as caught:
        process(make_processor("keyformer"), None, resumable=True)
    assert caught.value.parameter == "resumable"
    assert "--kv-policy keyformer cannot be combined with streaming input" in str(
        caught.value
    )
    assert process(make_processor(None), None, resumable=True).resumable
    assert not process(make_processor("keyformer"), None, resumable=False).resumable


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_budget", 2),
        ("kv_budget", "abc"),
        ("kv_budget", float("1e309")),
        ("kv_budget", [1, 2]),
        ("kv_budget", True),
        ("kv_policy", "off"),
        ("kv_sinks", 4),
    ],
)
def test_settings_come_through_every_endpoint(make_processor, protocol, key, value):
    params = to_sampling_params(PROTOCOLS[protocol]({key: value}))
    with pytest.raises(VLLMValidationError) as caught:
        make_processor("keyformer")._validate_params(params, TASKS)
    assert caught.value.parameter == f"vllm_xargs.{key}"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_good_settings_come_through_every_endpoint(make_processor, protocol):
    xargs = {"kv_policy": "h2o", "kv_budget": 0.25}
    params = to_sampling_params(PROTOCOLS[protocol](xargs))
    assert params.extra_args == xargs
    make_processor("keyformer")._validate_params(params, TASKS)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [{"a": 1}, None, [[1]], [None]])
def test_vllm_s_own_layer_refuses_what_is_no_scalar_or_list(protocol, value):
    with pytest.raises(ValidationError, match="kv_budget"):
        PROTOCOLS[protocol]({"kv_budget": value})


def to_sampling_params(request):
    if isinstance(request, ResponsesRequest):
        return request.to_sampling_params(4)
    return request.to_sampling_params(4, {})
