# SPDX-License-Identifier: Apache-2.0
"""An engine in this process that tests can step, look into and close again.

Sequential and simultaneous engines in one process work on CPU, so each test module
starts what it needs (about five seconds each) and shares it among its tests.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

FORCED_TOKENS = "forced_tokens"
"""Key of ``extra_args``: the tokens that the request has to generate."""


@dataclass
class Completion:
    """What one sequence of a request produced so far.

    Args:
        engine_id: the id under which scheduler, worker and trace know it.
        tokens: generated token ids.
        logprobs: per generated token, token id to raw log-probability.
        finish_reason: None while it runs.
    """

    engine_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""


@dataclass
class Request:
    """A request handed to :class:`Engine`; ``n`` completions, usually one.

    Args:
        num_cached_tokens: tokens of its prompt that a prefix cache had; known once it
            has generated a token.
    """

    prompt: list[int]
    engine_id: str
    completions: list[Completion]
    finished: bool = False
    num_cached_tokens: int | None = None

    @property
    def tokens(self) -> list[int]:
        return self._only.tokens

    @property
    def logprobs(self) -> list[dict[int, float]]:
        return self._only.logprobs

    @property
    def finish_reason(self) -> str | None:
        return self._only.finish_reason

    @property
    def _only(self) -> Completion:
        assert len(self.completions) == 1, "ask one of the completions"
        return self.completions[0]


class Engine:
    """vLLM's synchronous engine with scheduler and worker in this process.

    Args:
        model: model folder.
        policy: ``additional_config["keyformer"]``, or None for stock vLLM. A trace
            file is added when `trace` is given.
        trace: the trace file; read it with :meth:`trace_of`.
        num_blocks: blocks in the pool; None: what the cache space holds.
        eager: False compiles the model with torch.compile.
        forcing: whether requests may be made to generate given tokens.
        caching: whether the prefix cache is on; None: vLLM's default. Off unless asked
            for: what a request keeps depends on the prompt queries that it computed.
        settings: further ``EngineArgs``.
    """

    def __init__(
        self,
        model: Path | str,
        policy: Mapping[str, Any] | None = None,
        *,
        trace: Path | None = None,
        num_blocks: int | None = None,
        block_size: int = 32,
        dtype: str = "float32",
        eager: bool = True,
        forcing: bool = False,
        caching: bool | None = False,
        max_model_len: int = 2048,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        **settings: Any,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.trace_file = trace
        if policy is not None:
            keyformer = dict(policy)
            if trace is not None:
                keyformer["trace"] = str(trace)
            settings["additional_config"] = {"keyformer": keyformer}
        if forcing:
            settings["logits_processors"] = [_forced_tokens_processor()]
        self.block_size = block_size
        args = EngineArgs(
            model=str(model),
            dtype=dtype,
            block_size=block_size,
            num_gpu_blocks_override=num_blocks,
            enforce_eager=eager,
            enable_prefix_caching=caching,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_logprobs=-1,
            seed=0,
            **settings,
        )
        try:
            self._llm_engine = LLMEngine.from_engine_args(args)
        except BaseException:
            # A half-built engine would leave its process group to the next one.
            _forget_distributed_state()
            raise
        self._num_requests = 0
        self._live: dict[str, Request] = {}
        self._trace_offset = 0
        self._trace: dict[str, list[dict[str, Any]]] = {}

    def close(self) -> None:
        """Stop the engine. What it holds goes at the next garbage collection, which
        takes a second and is left to whoever closes the last engine."""
        # vLLM collects twice here, seconds for all that has been imported.
        with mock.patch.object(gc, "collect"):
            self._llm_engine.engine_core.shutdown()
        del self._llm_engine
        _forget_distributed_state()

    # Serving.

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        kv: Mapping[str, Any] | None = None,
        forced: Sequence[int] | None = None,
        logprobs: int | None = None,
        lora_request: Any = None,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Request:
        """Hand in a request; greedy and of exactly `max_tokens` unless told otherwise.

        Args:
            prompt: token ids.
            kv: its ``vllm_xargs``, for example ``{"kv_budget": 0.3}``.
            forced: tokens it has to generate, as many as `max_tokens`.
            logprobs: how many to return beside the sampled token's; -1: all.
            sampling: further ``SamplingParams``.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        extra: dict[str, Any] = dict(kv or {})
        if forced is not None:
            extra[FORCED_TOKENS] = list(forced)
            max_tokens = len(forced)
        sampling = {
            "temperature": 0.0,
            "ignore_eos": True,
            "detokenize": False,
        } | sampling
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            extra_args=extra or None,
            output_kind=RequestOutputKind.DELTA,
            **sampling,
        )
        given_id = request_id or f"r{self._num_requests}"
        self._num_requests += 1
        engine_id = self._llm_engine.add_request(
            given_id,
            TokensPrompt(prompt_token_ids=list(prompt)),
            params,
            lora_request=lora_request,
        )
        ids = [engine_id] if params.n == 1 else _child_ids(engine_id, params.n)
        request = Request(list(prompt), engine_id, [Completion(i) for i in ids])
        self._live[given_id] = request
        return request

    def step(self) -> None:
        """One scheduler step; harmless when there is nothing to do."""
        for output in self._llm_engine.step():
            request = self._live[output.request_id]
            request.num_cached_tokens = output.num_cached_tokens
            for delta in output.outputs:
                completion = request.completions[delta.index]
                completion.tokens.extend(delta.token_ids)
                completion.text += delta.text
                completion.finish_reason = delta.finish_reason
                completion.logprobs.extend(
                    {token: entry.logprob for token, entry in position.items()}
                    for position in delta.logprobs or ()
                )
            if output.finished:
                request.finished = True
                del self._live[output.request_id]

    @property
    def busy(self) -> bool:
        return self._llm_engine.has_unfinished_requests()

    def run(self, max_steps: int = 20_000) -> None:
        """Step until every request is finished; then once more, so that the worker
        hears of the last ones."""
        for _ in range(max_steps):
            if not self.busy:
                break
            self.step()
        else:
            raise AssertionError(f"still busy after {max_steps} steps")
        self.step()

    def generate(
        self, prompts: Sequence[Sequence[int]], **params: Any
    ) -> list[Request]:
        """Serve prompts as one batch, all with the same parameters."""
        requests = [self.add(prompt, **params) for prompt in prompts]
        self.run()
        return requests

    def abort(self, request: Request) -> None:
        """What a client that goes away does."""
        self._llm_engine.abort_request([request.engine_id], internal=True)
        request.finished = True
        self._live = {k: v for k, v in self._live.items() if v is not request}

    # Looking inside.

    @property
    def scheduler(self) -> Any:
        return self._llm_engine.engine_core.engine_core.scheduler

    @property
    def llm_engine(self) -> Any:
        return self._llm_engine

    @property
    def manager(self) -> Any:
        """The block manager of the only KV cache group."""
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return manager

    @property
    def block_pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def worker(self) -> Any:
        return (
            self._llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        )

    @property
    def model_runner(self) -> Any:
        return self.worker.model_runner

    def blocks_of(self, engine_id: str) -> int:
        """Blocks that a request really holds: those that are not the null block."""
        blocks = self.manager.req_to_blocks.get(engine_id, ())
        return sum(not block.is_null for block in blocks)

    def trace_of(self, request: Request | Completion) -> list[dict[str, Any]]:
        """The trace lines of one sequence, in step order."""
        self._read_trace()
        if isinstance(request, Request):
            request = request._only
        return self._trace.get(request.engine_id, [])

    def all_trace(self) -> list[dict[str, Any]]:
        """Every trace line so far, in the order in which they were written."""
        self._read_trace()
        lines = [line for lines in self._trace.values() for line in lines]
        return sorted(lines, key=lambda line: line["step"])

    def kept_sets(
        self, request: Request | Completion
    ) -> dict[int, list[list[list[int]]]]:
        """Per eviction: tokens computed by then -> layer -> KV head -> positions."""
        return {
            line["positions"][0]: line["kept"]
            for line in self.trace_of(request)
            if "kept" in line
        }

    def _read_trace(self) -> None:
        assert self.trace_file is not None, "this engine writes no trace"
        with open(self.trace_file, encoding="utf-8") as file:
            file.seek(self._trace_offset)
            for line in file:
                entry = json.loads(line)
                self._trace.setdefault(entry["req"], []).append(entry)
            self._trace_offset = file.tell()


@contextmanager
def open_engine(*args: Any, **settings: Any) -> Iterator[Engine]:
    """An :class:`Engine` that is closed at the end, whatever happens."""
    engine = Engine(*args, **settings)
    try:
        yield engine
    finally:
        engine.close()
        gc.collect()


def random_prompt(length: int, seed: int, vocab_size: int = 256) -> list[int]:
    """Token ids drawn uniformly; the same for the same arguments."""
    import random

    generator = random.Random(f"{length}/{seed}")
    return [generator.randrange(vocab_size) for _ in range(length)]


def _forget_distributed_state() -> None:
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()


def _child_ids(engine_id: str, n: int) -> list[str]:
    """How vLLM names the sequences of a request with n > 1 (``ParentRequest``)."""
    return [f"{index}_{engine_id}" for index in range(n)]


def _forced_tokens_processor() -> type:
    """A logits processor that leaves each request only its next forced token.

    Raw log-probabilities, which requests ask for, are taken before it.
    """
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class ForcedTokens(LogitsProcessor):
        def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
            self._forced: dict[int, tuple[list[int], list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self._forced, batch_update, self._entry)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            for row, (tokens, generated) in self._forced.items():
                if len(generated) < len(tokens):
                    logits[row].fill_(-torch.inf)
                    logits[row, tokens[len(generated)]] = 0.0
            return logits

        @staticmethod
        def _entry(params: Any, prompt: Any, generated: list[int]) -> Any:
            tokens = (params.extra_args or {}).get(FORCED_TOKENS)
            return None if tokens is None else (tokens, generated)

    return ForcedTokens
