# SPDX-License-Identifier: Apache-2.0
"""One `vllm serve` with a policy, spoken to as users do: over HTTP.

Cases: A26, A27, A34, A36, A40, A41 of public reports on eviction. The tests share a
server and run in order; the last one stops it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import signal
import threading
import time

import httpx
import psutil
import pytest

from tests.engine import random_prompt
from tests.models import EOS
from tests.server import metric_in, serve

BLOCK_SIZE = 32
NUM_BLOCKS = 200
MAX_MODEL_LEN = 2048
MIN_TOKENS = 16
FLAGS = (
    *("--dtype", "float32", "--seed", "0", "--enforce-eager"),
    *("--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN)),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-seqs", "32"),
    # The same prompt again has to give the same answer here, hit or no hit.
    *("--served-model-name", "tiny", "--no-enable-prefix-caching"),
)
TEXT_TOKENS = list(range(94))
"""Tokens of printable ASCII: a random model would otherwise write broken UTF-8."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("http") / "trace.jsonl"


@pytest.fixture(scope="module")
def server(tiny_model, trace):
    policy = ("--kv-policy", "keyformer", "--kv-budget=0.5", "--kv_min_tokens")
    flags = (*policy, str(MIN_TOKENS), "--kv-trace", str(trace))
    log = trace.with_name("serve.log")
    with serve(tiny_model("llama-4-2"), (*FLAGS, *flags), log) as running:
        yield running


@pytest.fixture(scope="module")
def canary(server):
    """A fixed request that evicts, and what it has to give for ever after."""
    tokens = token_ids(complete(server, random_prompt(300, 99), max_tokens=80))
    assert len(tokens) == 80

    def check():
        again = complete(server, random_prompt(300, 99), max_tokens=80)
        assert token_ids(again) == tokens

    return check


def body_of(prompt, max_tokens=64, **settings):
    defaults = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {
        **{"model": "tiny", "prompt": prompt, "max_tokens": max_tokens},
        **defaults,
        **settings,
    }


def complete(server, prompt, max_tokens=64, **settings):
    answer = server.post("/v1/completions", body_of(prompt, max_tokens, **settings))
    assert answer.status_code == 200, answer.text
    return answer.json()


def token_ids(completion):
    (choice,) = completion["choices"]
    return choice["token_ids"]


def trace_of(trace, completion_id):
    """Trace lines of one completion; vLLM adds to the id that the client sees."""
    lines = map(json.loads, trace.read_text().splitlines())
    return [line for line in lines if completion_id in line["req"]]


def evicted_blocks(trace, completion):
    lines = trace_of(trace, completion["id"])
    assert lines, "the request left no trace"
    return lines[-1]["evicted_blocks"]


def test_start_up_line_says_what_is_on(server):
    text = server.log.read_text(errors="replace")
    (line,) = re.findall(r".*KV policy keyformer: .*", text)
    for words in (
        "budget 0.5 of the prompt (at least 16 tokens)",
        "4 sinks, recent window 20 % of the budget",
        "noise gumbel",
        f"block size {BLOCK_SIZE}",
        # Two KV heads, a float32 score and an int32 position for each slot.
        f"side data {2 * BLOCK_SIZE * 8} bytes per block and layer",
    ):
        assert words in line
    numbers = re.search(
        rf"{MAX_MODEL_LEN}-token requests running at once: (\d+), "
        r"(\d+) without eviction",
        line,
    )
    assert numbers, line
    on, off = map(int, numbers.groups())
    # 64 blocks each; 63 for a prompt, at most 33 once it evicted.
    assert (on, off) == (1 + (NUM_BLOCKS - 1 - 63) // 33, (NUM_BLOCKS - 1) // 64)
    own = re.search(r"Maximum concurrency for [\d,]+ tokens per request: (\S+)x", text)
    assert own and off <= float(own.group(1)) < off + 1


def test_completion_evicts_and_counts_its_tokens(server, trace):
    # By id: several tokens of a random model are the same broken character.
    settings = {"logprobs": 3, "return_tokens_as_token_ids": True}
    answer = complete(server, random_prompt(200, 1), max_tokens=100, **settings)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 200
    assert answer["usage"]["completion_tokens"] == 100
    assert answer["usage"]["total_tokens"] == 300
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(choice["token_ids"]) == 100
    assert all(-50 < value <= 0 for value in logprobs["token_logprobs"])
    assert all(len(position) >= 3 for position in logprobs["top_logprobs"])
    # Greedy: nothing is likelier than the token taken.
    for own, position in zip(
        logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert own == max(position.values())
    assert evicted_blocks(trace, answer) >= 5


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_streaming_equals_not_streaming(server, trace, endpoint):
    client = server.openai()
    text = bytes(random_prompt(220, 2, 26)).translate(
        bytes(range(97, 123)) + bytes(230)
    )
    extra = {"ignore_eos": True, "allowed_token_ids": TEXT_TOKENS}
    common = {"model": "tiny", "max_tokens": 90, "temperature": 0}
    if endpoint == "completions":
        create = client.completions.create
        common["prompt"] = text.decode()
    else:
        create = client.chat.completions.create
        common["messages"] = [{"role": "user", "content": text.decode()}]
    whole = create(**common, extra_body=extra)
    pieces, usage, stream_id = [], None, None
    options = {"include_usage": True}
    for chunk in create(
        **common, extra_body=extra, stream=True, stream_options=options
    ):
        stream_id = chunk.id
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.text if endpoint == "completions" else choice.delta.content
            pieces.append(piece or "")
    choice = whole.choices[0]
    answer = choice.text if endpoint == "completions" else choice.message.content
    assert len(answer) == 90
    assert "".join(pieces) == answer
    assert len(pieces) > 40
    assert usage == whole.usage and usage.completion_tokens == 90
    for request in (whole.id, stream_id):
        assert trace_of(trace, request)[-1]["evicted_blocks"] >= 3


def test_chat_returns_logprobs(server):
    answer = server.openai().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a" * 150}],
        max_tokens=40,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True, "allowed_token_ids": TEXT_TOKENS},
    )
    (choice,) = answer.choices
    assert len(choice.logprobs.content) == 40
    assert "".join(c.token for c in choice.logprobs.content) == choice.message.content
    assert all(len(c.top_logprobs) == 2 for c in choice.logprobs.content)


def test_four_sequences_of_one_seeded_request(server, trace):
    settings = {"n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 60}
    first = complete(server, random_prompt(150, 3), **settings)
    second = complete(server, random_prompt(150, 3), **settings)
    answers = [choice["token_ids"] for choice in first["choices"]]
    assert len(answers) == 4 and len(set(map(tuple, answers))) == 4
    assert answers == [choice["token_ids"] for choice in second["choices"]]
    lines = trace_of(trace, first["id"])
    assert len({line["req"] for line in lines if line["evicted_blocks"]}) == 4


def test_stop_string_ends_the_answer(server):
    settings = {"max_tokens": 120, "allowed_token_ids": TEXT_TOKENS}
    text = complete(server, random_prompt(200, 4, 94), **settings)["choices"][0]["text"]
    stop = text[80:84]
    assert text.find(stop) > 60
    answer = complete(server, random_prompt(200, 4, 94), stop=[stop], **settings)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == text[: text.find(stop)]
    server.wait_until_idle()


def test_structured_output(server):
    """The grammar is followed while the cache is evicted beneath it."""
    words = ["a" * 40 + "x", "a" * 40 + "y"]
    answer = complete(
        server,
        random_prompt(200, 5, 94),
        max_tokens=60,
        ignore_eos=False,
        structured_outputs={"choice": words},
    )
    assert answer["choices"][0]["text"] in words
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "no": {"type": "boolean"}},
        "required": ["yes", "no"],
        "additionalProperties": False,
    }
    chat = server.openai().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "z" * 150}],
        max_tokens=100,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
        # No white space among them, of which a random model could write any amount.
        extra_body={"allowed_token_ids": [*TEXT_TOKENS, EOS]},
    )
    assert chat.choices[0].finish_reason == "stop"
    assert set(json.loads(chat.choices[0].message.content)) == {"yes", "no"}


@pytest.mark.parametrize(
    "opt_out", [{"kv_policy": "full"}, {"kv_budget": 1.0}], ids=["policy", "budget"]
)
def test_a_request_opts_out(server, trace, opt_out):
    prompt = random_prompt(400, 6)
    evicting = complete(server, prompt, max_tokens=60)
    without = complete(server, prompt, max_tokens=60, vllm_xargs=opt_out)
    assert evicted_blocks(trace, evicting) > 0
    assert evicted_blocks(trace, without) == 0
    assert trace_of(trace, without["id"])[-1]["blocks_held"] == -(-459 // BLOCK_SIZE)
    assert token_ids(evicting) != token_ids(without)


def test_blocks_held_scale_with_the_budget(server, trace):
    """A27: the setting of a request reaches the engine."""
    outputs = set()
    for budget in (0.1, 0.5, 0.9):
        answer = complete(
            server,
            random_prompt(800, 7),
            max_tokens=100,
            vllm_xargs={"kv_budget": budget},
        )
        k = int(budget * 800)
        lines = trace_of(trace, answer["id"])
        after = lines[[bool(line["freed_blocks"]) for line in lines].index(True) :]
        assert lines[0]["blocks_held"] == 25
        assert len(after) > 40
        assert {line["k"] for line in after} == {k}
        held = {line["blocks_held"] for line in after}
        # Between k and k + block - 1 tokens, and the one that the step adds.
        assert min(held) >= -(-k // BLOCK_SIZE)
        assert max(held) <= -(-(k + BLOCK_SIZE) // BLOCK_SIZE)
        (first,) = [line["kept"] for line in after[:1]]
        sizes = {len(kept) for layer in first for kept in layer}
        assert len(sizes) == 1 and k <= sizes.pop() < k + BLOCK_SIZE
        outputs.add(tuple(token_ids(answer)))
    assert len(outputs) == 3


BAD = [
    *[("kv_budget", v) for v in ("-1", "0", "2", "1e309", "NaN", '"abc"', '""')],
    *[("kv_budget", v) for v in ("[]", "[1, 2]", "-0.5", '"0.5"', "true", "null")],
    ("kv_budget", json.dumps("x" * 2**20)),
    *[("kv_budget", v) for v in (str(2**31), str(2**64 - 1), str(-(2**63)))],
    ("kv_budget", json.dumps([0.5] * 2**18)),
    *[("kv_policy", v) for v in ('"nonsense"', "3", '""', "[]")],
    ("kv_policy", json.dumps("y" * 2**20)),
    ("kv_report", '"maybe"'),
    ("kv_foo", "1"),
    ("kv_sinks", "0"),
]


@pytest.mark.parametrize(
    ("key", "value"), BAD, ids=[f"{key}={value[:12]}" for key, value in BAD]
)
def test_malformed_setting_is_refused_by_name(server, key, value):
    """A40: 400 that names the parameter; the server takes the next request."""
    paths = {"/v1/completions": body_of(random_prompt(40, 8), 4)}
    paths["/v1/chat/completions"] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
    }
    for path, body in paths.items():
        for stream in (False, True):
            settings = json.dumps(body | {"stream": stream})
            content = f'{settings[:-1]}, "vllm_xargs": {{"{key}": {value}}}}}'
            answer = server.http.post(
                path,
                content=content,
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code == 400, answer.text[:1000]
            error = answer.json()["error"]
            assert key in error["message"]
            if value != "null":  # vLLM's own layer refuses that one
                assert error["param"] == f"vllm_xargs.{key}"
                assert len(answer.text) < 800, "the value is echoed in full"
    assert len(token_ids(complete(server, random_prompt(40, 8), max_tokens=2))) == 2


@pytest.mark.parametrize("value", ["9" * 400, "-" + "9" * 400])
def test_integer_beyond_64_bits_is_refused_in_short(server, value):
    """By vLLM itself, which does not say in which of the settings it is."""
    body = json.dumps(body_of(random_prompt(40, 8), 4))
    content = f'{body[:-1]}, "vllm_xargs": {{"kv_budget": {value}}}}}'
    headers = {"Content-Type": "application/json"}
    refused = server.http.post("/v1/completions", content=content, headers=headers)
    assert refused.status_code == 400
    assert len(refused.text) < 800


def test_a_megabyte_of_a_name_is_not_sent_back(server):
    body = body_of(random_prompt(40, 8), 4, vllm_xargs={"kv_" + "x" * 2**20: 1})
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("vllm_xargs.kv_xxx")
    assert len(refused.text) < 800


def test_no_text_of_a_user_is_logged(server, trace):
    """Not of prompts, answers or settings, good or bad; not in the trace either."""
    marker = "Marker0f51"
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{marker} " * 30}],
        "max_tokens": 20,
    }
    settings = [
        ({}, 200),
        ({"other": marker}, 200),
        ({"kv_budget": marker}, 400),
        ({"kv_policy": marker}, 400),
        ({f"kv_{marker}": 1}, 400),
    ]
    for xargs, status in settings:
        for stream in (False, True):
            body = chat | {"vllm_xargs": xargs, "stream": stream}
            answer = server.post("/v1/chat/completions", body)
            assert answer.status_code == status, answer.text[:500]
            body = body_of(f"{marker} " * 30, 20, vllm_xargs=xargs, stream=stream)
            assert server.post("/v1/completions", body).status_code == status
    server.wait_until_idle()
    log = server.log.read_text(errors="replace")
    assert "POST /v1/chat/completions" in log, "the log is written meanwhile"
    assert marker not in log
    assert marker not in trace.read_text()


def test_nothing_that_was_refused_left_a_mark(server, canary):
    canary()
    server.wait_until_idle()
    assert server.http.get("/health").status_code == 200


def test_prompt_and_answer_at_the_limit(server, trace):
    """A26: a bounded cache is not unbounded text."""
    body = body_of(random_prompt(MAX_MODEL_LEN + 1, 9), 1)
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 400
    assert str(MAX_MODEL_LEN) in refused.json()["error"]["message"]
    xargs = {"kv_budget": 0.25}
    asked = MAX_MODEL_LEN - 60
    body = body_of(random_prompt(asked, 9), vllm_xargs=xargs)
    refused = server.post("/v1/completions", body | {"max_tokens": 100_000})
    assert refused.status_code == 400
    assert "max_tokens" in refused.json()["error"]["message"]
    # One more than fits: the answer ends at the limit of logical tokens.
    answer = server.post("/v1/completions", body | {"max_tokens": 61}).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == 60
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    last = trace_of(trace, answer["id"])[-1]
    assert last["logical"] == MAX_MODEL_LEN - 1
    assert last["physical"] < 0.3 * MAX_MODEL_LEN


@pytest.mark.parametrize("stream", [True, False])
def test_client_gone_stops_generation_and_frees_blocks(server, stream):
    """A34: long before the tokens that were asked for.

    A server that is short of processor time notices late that a client has left. So
    the answer takes long, and of three clients one has to be seen leaving early.
    """
    prompts = [random_prompt(300, seed) for seed in range(10, 14)]
    body = body_of(prompts, 1500, stream=stream, n=8, temperature=1)
    before = server.metric("vllm:generation_tokens_total")
    for _ in range(3):
        with httpx.Client(base_url=server.url, timeout=60.0) as client:
            if stream:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for number, _ in enumerate(answer.iter_lines()):
                        if number == 20:
                            break
            else:
                gone = httpx.Timeout(60.0, read=0.2)
                with contextlib.suppress(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body, timeout=gone)
        server.wait_until_idle()
    generated = server.metric("vllm:generation_tokens_total") - before
    assert 0 < generated < 3 * 4 * 8 * 1500


def test_usage_gauge_is_a_share_of_the_pool(server, canary):
    """A41: polled while many requests evict; exact while one of them runs."""
    usage, stop = [], threading.Event()

    def poll():
        while not stop.is_set():
            usage.append(server.metric("vllm:kv_cache_usage_perc"))
            time.sleep(0.05)

    def ask(seed):
        xargs = {"kv_budget": 0.1 + 0.05 * (seed % 10)}
        prompt = random_prompt(100 + 25 * seed, seed)
        return complete(server, prompt, max_tokens=100, vllm_xargs=xargs)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(24)))
    finally:
        stop.set()
        poller.join()
    assert all(len(token_ids(answer)) == 100 for answer in answers)
    assert len(usage) >= 5 and max(usage) > 0
    assert min(usage) >= 0 and max(usage) <= 1
    server.wait_until_idle()
    held = {}
    for budget in (1.0, 0.25):
        body = body_of(random_prompt(800, 11), 900, stream=True)
        body["vllm_xargs"] = {"kv_budget": budget}
        text = server.metrics_while_streaming(body)
        share = metric_in(text, "vllm:kv_cache_usage_perc")
        held[budget] = share * (NUM_BLOCKS - 1)
    # What was freed inside the running request is free for others.
    assert 6.9 < held[0.25] < 8.1
    assert held[1.0] > 24.9
    canary()


def test_sigterm_leaves_no_process(server):
    """Last: stops the server that the tests above share."""
    parent = psutil.Process(server.process.pid)
    family = [parent, *parent.children(recursive=True)]
    assert len(family) >= 2, "an engine of its own"
    server.process.send_signal(signal.SIGTERM)
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert len(gone) == len(family)
