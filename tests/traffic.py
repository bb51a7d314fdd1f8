# SPDX-License-Identifier: Apache-2.0
"""Random requests for a server over HTTP, and what each of them has to be answered.

Pure: the same arguments give the same requests. Whether an answer is right is said
here as well, by :func:`problem_with`, from the request alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engine import random_prompt

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB_SIZE = 256
"""Prompts are drawn from the bytes; the models' special tokens lie above them."""
TEXT_TOKENS = list(range(94))
"""Tokens of printable ASCII: what a stop string is looked for in."""
STOP_TOKENS = list(range(100, 140))
POLICIES = ("keyformer", "h2o", "streaming", "window", "key-only", "random", "full")
GOOD_BUDGETS = (0.01, 0.2, 0.5, 0.7, 0.99, 1.0, 16, 64, 300, 10_000)
BAD_SETTINGS: tuple[tuple[str, str], ...] = (
    *[("kv_budget", v) for v in ("0", "-1", "2", "1.5", "NaN", "1e309", "Infinity")],
    *[("kv_budget", v) for v in ('"0.5"', "[0.5]", "true", str(2**63 - 1))],
    ("kv_budget", json.dumps("x" * 2**20)),
    *[("kv_policy", v) for v in ('"off"', '""', "1", '["h2o"]')],
    ("kv_report", '"yes"'),
    *[("kv_sinks", "0"), ("kv_seed", "1"), ("kv_", "1"), ("kv_budgets", "0.5")],
)
"""Name and JSON text of ``vllm_xargs`` that a server with a policy refuses, if its
``kv_min_tokens`` is above 2."""
BAD_PARAMETERS: tuple[tuple[str, Any], ...] = (
    *[("temperature", -1), ("top_p", 0), ("top_p", 2), ("n", 0), ("max_tokens", -1)],
    *[("logprobs", 10_000), ("max_tokens", "many"), ("temperature", "hot")],
)
"""Parameters of completions that vLLM itself refuses."""


@dataclass(frozen=True)
class Ask:
    """One request and what has to become of it.

    Args:
        number: its place in the traffic, from 0.
        path: of the endpoint.
        body: the request, but for `raw`.
        raw: settings of ``vllm_xargs`` as JSON text, for values that Python's JSON
            has no word for.
        refused: what the error has to name; None: the request is served.
        param: ``error.param`` of the refusal, where it is ours to say.
        num_prompt_tokens: of all prompts together, as ``usage`` has to count them.
        num_choices: sequences of the answer.
        max_tokens: most tokens of a sequence; exactly so many without a stop.
        leave_after: lines of the stream that the client waits for before it hangs
            up; None: it stays.
        pause: seconds until the request after it is sent; 0 within a burst.
    """

    number: int
    path: str
    body: Mapping[str, Any]
    raw: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None
    param: str | None = None
    num_prompt_tokens: int = 0
    num_choices: int = 1
    max_tokens: int = 0
    leave_after: int | None = None
    pause: float = 0.0

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    def content(self) -> bytes:
        """The request as it is sent."""
        text = json.dumps(dict(self.body))
        if self.raw:
            settings = ", ".join(f"{json.dumps(k)}: {v}" for k, v in self.raw.items())
            text = f'{text[:-1]}, "vllm_xargs": {{{settings}}}}}'
        return text.encode()


@dataclass
class Answer:
    """What came back: of a stream, its pieces put together.

    Args:
        status: HTTP status.
        error: ``error`` of a refusal, or one sent in mid-stream; else None.
        tokens: token ids of each choice.
        text: of each choice.
        finish: ``finish_reason`` of each choice.
        stop: ``stop_reason`` of each choice.
        num_logprobs: entries of each choice's log-probabilities.
        usage: as sent; empty when it was not asked for.
        report: ``kv_report``, or None.
        complete: whether a stream said that it is done.
    """

    status: int
    error: Mapping[str, Any] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str | None] = field(default_factory=dict)
    stop: dict[int, Any] = field(default_factory=dict)
    num_logprobs: dict[int, int] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    report: Mapping[str, int] | None = None
    complete: bool = False

    def take(self, message: Mapping[str, Any]) -> None:
        """Add a chunk of a stream, or all of an answer that is not streamed."""
        self.error = message.get("error") or self.error
        self.usage = message.get("usage") or self.usage
        params = message.get("kv_transfer_params") or {}
        self.report = params.get("kv_report", self.report)
        for choice in message.get("choices", ()):
            index = choice["index"]
            said = choice.get("message") or choice.get("delta") or choice
            text = said.get("content") or said.get("text") or ""
            self.text[index] = self.text.get(index, "") + text
            self.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
            self.finish[index] = choice.get("finish_reason") or self.finish.get(index)
            self.stop[index] = choice.get("stop_reason", self.stop.get(index))
            logprobs = choice.get("logprobs") or {}
            count = len(logprobs.get("content") or logprobs.get("tokens") or ())
            self.num_logprobs[index] = self.num_logprobs.get(index, 0) + count


def make_traffic(seed: int, count: int, max_model_len: int) -> Iterator[Ask]:
    """Random requests, one in eight of them to be refused.

    Args:
        seed: of everything that is drawn.
        count: number of requests.
        max_model_len: the server's; no request needs more blocks than these tokens.
    """
    rng = random.Random(seed)
    in_burst = 0
    for number in range(count):
        if in_burst == 0:
            # Half of the time single requests, half of the time bursts.
            in_burst = rng.choice((1, 1, 1, 4, 12))
        in_burst -= 1
        pause = 0.0 if in_burst else rng.choice((0.0, 0.02, 0.1))
        if rng.random() < 1 / 8:
            yield _bad(rng, number, max_model_len, pause)
        else:
            yield _good(rng, number, max_model_len, pause)


def problem_with(ask: Ask, answer: Answer) -> str | None:
    """What is wrong with an answer; None when it is what the request has to get."""
    if ask.refused is not None:
        return _problem_with_refusal(ask, answer)
    if answer.status != 200 or answer.error:
        return f"status {answer.status}, {answer.error}"
    if ask.leave_after is not None and not answer.complete:
        return None
    if not answer.complete:
        return "the stream broke off"
    if sorted(answer.finish) != list(range(ask.num_choices)):
        return f"choices {sorted(answer.finish)} of {ask.num_choices}"
    for index in answer.finish:
        problem = _problem_with_choice(ask, answer, index)
        if problem is not None:
            return f"choice {index}: {problem}"
    if answer.usage:
        num_new = sum(map(len, answer.tokens.values()))
        counts = [answer.usage[f"{kind}_tokens"] for kind in ("prompt", "completion")]
        if counts != [ask.num_prompt_tokens, num_new]:
            return f"usage {counts}, expected {[ask.num_prompt_tokens, num_new]}"
    elif not ask.streams:
        return "no usage"
    return _problem_with_report(ask, answer)


def _problem_with_refusal(ask: Ask, answer: Answer) -> str | None:
    if answer.status != 400 or not answer.error:
        return f"status {answer.status} instead of a refusal, {answer.error}"
    error = answer.error
    if ask.refused not in error["message"] and ask.refused != error["param"]:
        return f"the refusal does not name {ask.refused}: {str(error)[:300]}"
    if ask.param is not None and error["param"] != ask.param:
        return f"param {error['param']!r}, expected {ask.param!r}"
    if ask.param is not None and len(str(error)) > 800:
        return f"the value is sent back: {len(str(error))} characters"
    return None


def _problem_with_choice(ask: Ask, answer: Answer, index: int) -> str | None:
    tokens, text = answer.tokens[index], answer.text[index]
    finish, reason = answer.finish[index], answer.stop[index]
    stop = ask.body.get("stop")
    stop_ids = set(ask.body.get("stop_token_ids", ()))
    if finish == "length":
        if len(tokens) != ask.max_tokens:
            return f"{len(tokens)} tokens of {ask.max_tokens}"
        if stop_ids.intersection(tokens) or (stop and stop in text):
            return "ran over its stop"
    elif finish == "stop":
        if not 1 <= len(tokens) <= ask.max_tokens:
            return f"stopped after {len(tokens)} tokens of {ask.max_tokens}"
        by_string = stop is not None and reason == stop and stop not in text
        by_token = reason in stop_ids and tokens.index(reason) == len(tokens) - 1
        if not (by_string or by_token):
            return f"stopped without a reason: {reason!r}"
    else:
        return f"finish_reason {finish!r}"
    wants = ask.body.get("logprobs") not in (None, False)
    # What a stop string ends has entries for the tokens that are shown.
    if wants and finish == "length" and answer.num_logprobs[index] != len(tokens):
        return f"{answer.num_logprobs[index]} logprobs of {len(tokens)} tokens"
    if not wants and answer.num_logprobs[index]:
        return "log-probabilities that nobody asked for"
    return None


def _problem_with_report(ask: Ask, answer: Answer) -> str | None:
    xargs = ask.body.get("vllm_xargs") or {}
    if not xargs.get("kv_report"):
        return None if answer.report is None else "a report that nobody asked for"
    if answer.report is None:
        return "no report"
    report = answer.report
    if min(report.values()) < 0 or (report["evicted_tokens"] > 0) != (
        report["evictions"] > 0
    ):
        return f"impossible report {report}"
    opted_out = xargs.get("kv_policy") == "full" or xargs.get("kv_budget") == 1.0
    if opted_out and report["evictions"]:
        return f"evicted although it opted out: {report}"
    return None


def _good(rng: random.Random, number: int, longest: int, pause: float) -> Ask:
    body: dict[str, Any] = {"model": "tiny", "ignore_eos": True}
    body["return_token_ids"] = True
    max_tokens = rng.choice((1, 2, 40, 90, 200))
    prompt_tokens = rng.randint(1, rng.choice((8, 64, 200, longest - 1)))
    # vLLM ends an answer at the limit of the model, where it does not refuse it.
    max_tokens = min(max_tokens, longest - prompt_tokens)
    body["max_tokens"] = max_tokens
    _draw_sampling(rng, body)
    xargs = _draw_settings(rng)
    streams = rng.random() < 0.5
    leave_after = None
    if streams:
        body["stream"] = True
        xargs.pop("kv_report", None)  # refused: chunks have no field for it
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.3:
            leave_after = rng.randint(0, 12)
    if xargs:
        body["vllm_xargs"] = xargs
    num_prompts, path = 1, COMPLETIONS
    seed = rng.randint(0, 9)
    template = len("user: \nassistant: ")
    if rng.random() < 0.3 and prompt_tokens > template:
        path = CHAT
        text = bytes(97 + t for t in random_prompt(prompt_tokens - template, seed, 26))
        body["messages"] = [{"role": "user", "content": text.decode()}]
        if "logprobs" in body:
            body["top_logprobs"] = body.pop("logprobs")
            body["logprobs"] = True
    elif rng.random() < 0.1:
        num_prompts = 2
        body["prompt"] = [random_prompt(prompt_tokens, seed + i, 256) for i in (0, 1)]
    else:
        body["prompt"] = random_prompt(prompt_tokens, seed)
    return Ask(
        number,
        path,
        body,
        num_prompt_tokens=num_prompts * prompt_tokens,
        num_choices=num_prompts * body.get("n", 1),
        max_tokens=max_tokens,
        leave_after=leave_after,
        pause=pause,
    )


def _draw_sampling(rng: random.Random, body: dict[str, Any]) -> None:
    # vLLM 0.32 stops on CPU at a request that samples with a seed and whose prompt
    # comes in chunks, with or without a policy.
    if rng.random() < 0.5:
        body["temperature"] = 0
        body["seed"] = rng.randint(0, 2**31)
    else:
        body["temperature"] = rng.choice((0.5, 1.0))
        n = rng.choice((1, 1, 1, 2, 3))
        if n > 1:
            body["n"] = n
    kind = rng.random()
    if kind < 0.15:
        body["stop"] = chr(rng.randint(97, 122))
        body["allowed_token_ids"] = TEXT_TOKENS
    elif kind < 0.3:
        body["stop_token_ids"] = STOP_TOKENS
    if rng.random() < 0.25:
        body["logprobs"] = rng.choice((1, 5))


def _draw_settings(rng: random.Random) -> dict[str, Any]:
    xargs: dict[str, Any] = {}
    if rng.random() < 0.4:
        xargs["kv_policy"] = rng.choice(POLICIES)
    if rng.random() < 0.5:
        xargs["kv_budget"] = rng.choice(GOOD_BUDGETS)
    if rng.random() < 0.2:
        xargs["kv_report"] = True
    return xargs


def _bad(rng: random.Random, number: int, longest: int, pause: float) -> Ask:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4}
    body["stream"] = rng.random() < 0.5
    kind = rng.choice(("setting", "setting", "parameter", "report", "length"))
    if kind == "length":
        name, tokens = rng.choice((("prompt", longest + 1), ("max_tokens", 8)))
        body["prompt"] = random_prompt(tokens, rng.randint(0, 9))
        if name == "max_tokens":
            body[name] = 100 * longest
        return Ask(number, COMPLETIONS, body, refused=str(longest), pause=pause)
    if kind == "parameter":
        body["prompt"] = random_prompt(rng.randint(1, 200), rng.randint(0, 9))
        name, value = rng.choice(BAD_PARAMETERS)
        body[name] = value
        return Ask(number, COMPLETIONS, body, refused=name, pause=pause)
    path = rng.choice((COMPLETIONS, CHAT))
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = random_prompt(rng.randint(1, 200), rng.randint(0, 9))
    if kind == "report":
        body["stream"] = True
        name, text = "kv_report", "true"
    else:
        name, text = rng.choice(BAD_SETTINGS)
    return Ask(
        number,
        path,
        body,
        raw={name: text},
        refused=name,
        param=f"vllm_xargs.{name}",
        pause=pause,
    )


def parse_stream(lines: Sequence[str], answer: Answer) -> None:
    """Put the lines of a server-sent stream together.

    Args:
        answer: mutated.
    """
    for line in lines:
        if line == "data: [DONE]":
            answer.complete = True
        elif line.startswith("data: "):
            answer.take(json.loads(line.removeprefix("data: ")))
