# SPDX-License-Identifier: Apache-2.0
"""The clients that people use, unchanged, against one `vllm serve` with a policy.

OpenAI's own client, curl, LangChain and vLLM's load generator. What each asks for is
looked up in the trace: it says what became of a request, whoever sent it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import openai
import pytest
from langchain_openai import ChatOpenAI

from tests.engine import random_prompt
from tests.server import serve

FLAGS = (
    *("--dtype", "float32", "--seed", "0", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "200"),
    *("--served-model-name", "tiny", "--kv-policy", "keyformer", "--kv-budget", "0.5"),
    # The last queries are computed whatever the prefix cache has: what is asked again
    # is answered as before, though most of it is a hit.
    *("--kv-min-tokens", "16", "--kv-score-queries", "last:32"),
    "--enable-prompt-tokens-details",
)
PRINTABLE = {"allowed_token_ids": list(range(94))}
"""Only printable ASCII: a random model would otherwise write broken UTF-8."""

QUESTION = [{"role": "user", "content": "q" * 300}]
OPT_OUT = {"vllm_xargs": {"kv_policy": "full"}}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("clients") / "trace.jsonl"


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama-4-2")


@pytest.fixture(scope="module")
def server(model, trace):
    log = trace.with_name("serve.log")
    with serve(model, (*FLAGS, "--kv-trace", str(trace)), log) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.openai()


def lines_of(trace, request_id):
    lines = map(json.loads, trace.read_text().splitlines())
    return [line for line in lines if request_id in line["req"]]


def evicted_blocks(trace, request_id):
    lines = lines_of(trace, request_id)
    assert lines, f"{request_id} left no trace"
    return lines[-1]["evicted_blocks"]


def ask(client, **settings):
    extra = PRINTABLE | settings.pop("extra_body", {})
    return client.chat.completions.create(
        model="tiny",
        extra_body=extra,
        **{"messages": QUESTION, "max_tokens": 40, "temperature": 0, **settings},
    )


def test_openai_completion_with_logprobs(client, trace):
    answer = client.completions.create(
        model="tiny",
        prompt=random_prompt(200, 1, 94),
        max_tokens=40,
        temperature=0,
        logprobs=2,
        extra_body=PRINTABLE,
    )
    (choice,) = answer.choices
    assert answer.usage.prompt_tokens == 200
    assert answer.usage.completion_tokens == len(choice.logprobs.tokens) == 40
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert evicted_blocks(trace, answer.id) > 0


def test_openai_chat_streams_what_it_would_answer_at_once(client, trace):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 10
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, count) == getattr(whole.usage, count)
    assert evicted_blocks(trace, chunks[0].id) == evicted_blocks(trace, whole.id) > 0


def test_the_second_turn_of_a_chat_hits_the_first(client, server, trace):
    """Though that one evicted half of it before it answered."""
    first = ask(client, messages=[{"role": "user", "content": "z" * 400}])
    assert first.usage.prompt_tokens_details.cached_tokens in (None, 0)
    assert evicted_blocks(trace, first.id) > 4
    answer = first.choices[0].message.content
    hits = server.metric("vllm:prefix_cache_hits_total")
    second = ask(
        client,
        messages=[
            {"role": "user", "content": "z" * 400},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And then?"},
        ],
    )
    hit = second.usage.prompt_tokens_details.cached_tokens
    assert hit == first.usage.prompt_tokens // 32 * 32
    assert server.metric("vllm:prefix_cache_hits_total") - hits == hit
    assert evicted_blocks(trace, second.id) > 4


def test_openai_chat_with_two_answers_and_logprobs(client, trace):
    answer = ask(client, n=2, temperature=1, seed=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        tokens = [entry.token for entry in choice.logprobs.content]
        assert len(tokens) == 40 and "".join(tokens) == choice.message.content
    evicted = {
        line["req"] for line in lines_of(trace, answer.id) if line["evicted_blocks"]
    }
    assert len(evicted) == 2


def test_openai_request_has_settings_of_its_own(client, trace):
    tight = ask(client, extra_body={"vllm_xargs": {"kv_budget": 0.2}})
    full = ask(client, extra_body=OPT_OUT)
    assert {line["k"] for line in lines_of(trace, tight.id)[1:]} == {
        tight.usage.prompt_tokens // 5
    }
    assert evicted_blocks(trace, full.id) == 0 < evicted_blocks(trace, tight.id)
    assert full.choices[0].message.content != tight.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("setting", [{"kv_budget": 7.5}, {"kv_sinks": 4}])
def test_openai_client_raises_and_names_the_parameter(client, setting, stream):
    (name,) = setting
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, stream=stream, extra_body={"vllm_xargs": setting})
    assert caught.value.status_code == 400
    assert caught.value.param == f"vllm_xargs.{name}"
    assert name in caught.value.message


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server, trace):
    def curl(*arguments, body):
        command = ["curl", "--silent", "--show-error", "--max-time", "60", *arguments]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        command.append(f"{server.url}/v1/chat/completions")
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 30, "temperature": 0}
    body |= PRINTABLE
    whole = json.loads(curl(body=body | {"vllm_xargs": {"kv_budget": 0.3}}))
    assert evicted_blocks(trace, whole["id"]) > 0
    events = curl("--no-buffer", body=body | {"stream": True}).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) > 10
    refused = curl("-w", "\n%{http_code}", body=body | {"vllm_xargs": {"kv_foo": 1}})
    error, status = refused.rsplit("\n", 1)
    assert status == "400"
    assert json.loads(error)["error"]["param"] == "vllm_xargs.kv_foo"


def test_langchain(server, trace):
    def chat(**xargs):
        return ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            model="tiny",
            temperature=0,
            max_tokens=40,
            max_retries=0,
            extra_body=PRINTABLE | ({"vllm_xargs": xargs} if xargs else {}),
        )

    question = QUESTION[0]["content"]
    answer = chat().invoke(question)
    assert answer.usage_metadata["output_tokens"] == 40
    assert evicted_blocks(trace, answer.response_metadata["id"]) > 0
    pieces = [chunk.content for chunk in chat().stream(question)]
    assert "".join(pieces) == answer.content and len(pieces) > 10
    full = chat(kv_policy="full").invoke(question)
    assert evicted_blocks(trace, full.response_metadata["id"]) == 0
    with pytest.raises(openai.BadRequestError, match="kv_budget"):
        chat(kv_budget=-1).invoke(question)


def test_vllm_bench_serve(server, model, tmp_path):
    """vLLM's own load generator; other requests follow, so nothing stays behind."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--base-url", server.url, "--model", "tiny", "--tokenizer", str(model)]
    command += ["--dataset-name", "random", "--num-prompts", "4", "--seed", "0"]
    command += ["--random-input-len", "200", "--random-output-len", "40"]
    command += ["--ignore-eos", "--disable-tqdm", "--save-result"]
    command += ["--result-filename", str(tmp_path / "result.json")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 4
    assert result["total_output_tokens"] == 4 * 40
    server.wait_until_idle()
