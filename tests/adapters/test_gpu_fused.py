# SPDX-License-Identifier: Apache-2.0
"""Which rows our kernel attends on a GPU, and what a captured graph reads of them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keyformer_vllm.adapters.gpu_metadata import GPUMetadataBuilder, _Queries
from keyformer_vllm.adapters.plan import RequestParams, StepPlan
from keyformer_vllm.adapters.request_table import RequestTable
from keyformer_vllm.config import KeyformerConfig

BLOCK, WIDTH, CAPACITY = 16, 6, 4


@dataclass
class StockMetadata:
    """What vLLM's kernel is given."""

    seq_lens: torch.Tensor


@dataclass
class Metadata(_Queries, StockMetadata):  # type: ignore[misc]
    pass


class StockBuilder:
    device = torch.device("cpu")
    kv_cache_spec = SimpleNamespace(block_size=BLOCK)
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=CAPACITY),
    )

    def build(self, _: int, common: Any, fast_build: bool) -> StockMetadata:
        return StockMetadata(common.seq_lens)


class Builder(GPUMetadataBuilder, StockBuilder):
    metadata_class = Metadata


class Runtime:
    """The part of ``WorkerRuntime`` that the builder reads."""

    score_mode = "fused"
    block_size = 16
    ring = None

    def __init__(self) -> None:
        self.config = KeyformerConfig(policy="keyformer", tau_init=1.0, tau_end=2.0)
        self.table = RequestTable()
        self.in_step = False
        self.ids: list[str] = []

    def arrive(
        self, request_id: str, *, computed: int, evicted: int, scores: bool = True
    ) -> None:
        params = RequestParams(
            tracked=scores,
            scores=scores,
            noise_key=7 + len(self.ids),
            num_prompt_tokens=20,
            max_tokens=40,
            first_scored=0,
            query_stride=1,
            uses_tau=True,
            run_size=1,
            random=False,
        )
        nothing = SimpleNamespace(finished_req_ids=set(), preempted_req_ids=None)
        self.table.update(nothing, StepPlan({request_id: params}))
        rows = self.table.rows_of([request_id])
        self.table.column("num_computed")[rows] = computed
        self.table.column("evicted_blocks")[rows] = evicted
        self.ids.append(request_id)

    def batch_request_ids(self, _: Any) -> list[str]:
        return self.ids

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def reset_slots(self, *_: Any) -> None:
        pass


@dataclass
class Common:
    """The part of vLLM's ``CommonAttentionMetadata`` that the builder reads."""

    block_table_tensor: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int = WIDTH * BLOCK
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None

    def replace(self, **changes: Any) -> "Common":
        return replace(self, **changes)


class Runner:
    """Buffers of vLLM's model runner, which live as long as it does."""

    starts = torch.zeros(CAPACITY + 1, dtype=torch.int32)
    positions = torch.zeros(64, dtype=torch.int64)

    def step(self, computed: list[int], new: list[int], num_reqs: int) -> Common:
        """A step of ``num_reqs`` requests, those without tokens being padding."""
        padding = [0] * (num_reqs - len(new))
        lengths = [a + b for a, b in zip(computed, new, strict=True)] + padding
        num_tokens = max(sum(new), num_reqs)
        starts = np.cumsum([0, *new, *padding])
        self.starts[: num_reqs + 1] = torch.from_numpy(starts)
        flat = [a + i for a, b in zip(computed, new, strict=True) for i in range(b)]
        self.positions[: len(flat)] = torch.tensor(flat, dtype=torch.int64)
        rows = torch.arange(num_reqs)[:, None] * 10 + torch.arange(WIDTH)
        return Common(
            rows.int(),
            torch.tensor(lengths, dtype=torch.int32),
            self.starts[: num_reqs + 1],
            torch.from_numpy(starts.astype(np.int32)),
            self.positions[:num_tokens],
            self.positions[:num_tokens],
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=max([1, *new]),
        )


@pytest.fixture
def started():
    runtime, builder = Runtime(), Builder()
    builder.bind(runtime)  # type: ignore[arg-type]
    return runtime, builder


def test_a_replay_reads_the_step_that_it_runs(started):
    """A graph holds the tensors of its capture; fresh ones would leave it there."""
    runtime, builder = started
    captured = builder.build(0, Runner().step([], [], CAPACITY)).own
    assert captured.tokens is None and not captured.batch.tau.any()
    runtime.arrive("a", computed=50, evicted=2)
    runtime.arrive("opted out", computed=37, evicted=0, scores=False)
    runtime.in_step = True
    own = builder.build(0, Runner().step([50, 37], [1, 1], CAPACITY)).own
    assert own.tokens is None, "one kernel for all rows of a graph"
    batch = captured.batch  # what a replay reads
    assert batch.block_table[0, : WIDTH - 2].tolist() == [2, 3, 4, 5]
    assert batch.block_table[1].tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.kv_lens.tolist() == [51 - 2 * BLOCK, 38, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert batch.positions[:2].tolist() == [50, 37]
    # 30 tokens after the prompt, of 40; the one that opted out scores nothing.
    assert batch.tau[0].item() == pytest.approx(1 + 31 / 40, abs=0.03)
    assert batch.tau[1:].tolist() == [0, 0, 0], "padding and opt-outs score nothing"
    assert batch.noise_keys.tolist() == [7, 8, 0, 0]
    # A shorter step leaves nothing of the longer one behind.
    runtime.ids.remove("a")
    builder.build(0, Runner().step([38], [1], CAPACITY))
    assert not batch.tau.any()
    assert batch.kv_lens.tolist() == [39, 0, 0, 0]


def test_one_token_rows_are_ours_beside_a_prompt_too(started):
    """Catches a kernel chosen by the neighbours, and a row that both kernels read."""
    runtime, builder = started
    runtime.arrive("prompt", computed=16, evicted=0)
    runtime.arrive("a", computed=50, evicted=2)
    runtime.arrive("opted out", computed=37, evicted=0, scores=False)
    runtime.in_step = True
    metadata = builder.build(0, Runner().step([16, 50, 37], [4, 1, 1], 3))
    own = metadata.own
    assert own.tokens.tolist() == [4, 5]
    assert own.batch.positions.tolist() == [50, 37]
    assert own.batch.kv_lens.tolist() == [51 - 2 * BLOCK, 38]
    assert own.batch.query_start_loc.tolist() == [0, 1, 2]
    assert own.batch.block_table[0, : WIDTH - 2].tolist() == [12, 13, 14, 15]
    assert own.batch.tau[0] > 1 and own.batch.tau[1] == 0
    assert metadata.seq_lens.tolist() == [20, 0, 0], "vLLM's kernel reads the prompt"
    # The prompt scores after attention, our rows while they attend.
    assert (metadata.scoring.tau > 0).tolist() == [True] * 4 + [False] * 2
    assert metadata.scoring.kv_lens.tolist() == [20, 51 - 2 * BLOCK, 38]


def test_a_step_of_prompts_alone_is_left_to_vllm(started):
    runtime, builder = started
    runtime.arrive("prompt", computed=16, evicted=0)
    runtime.in_step = True
    metadata = builder.build(0, Runner().step([16], [4], 1))
    assert metadata.own is None
    assert metadata.seq_lens.tolist() == [20]
