# SPDX-License-Identifier: Apache-2.0
"""Simulated ranks keep what one process keeps, whatever they share out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from keyformer_vllm import __version__
from keyformer_vllm.adapters import engine_args, ranks
from keyformer_vllm.adapters.ranks import HeadShare
from keyformer_vllm.config import VERSION_KEY, KVPolicyError
from tests.adapters import rank_driver
from tests.conftest import ROOT


def share_of(tp_rank, tp_size, num_query_heads, num_kv_heads, totals):
    return HeadShare.of_rank(
        tp_rank,
        tp_size,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        total_query_heads=totals[0],
        total_kv_heads=totals[1],
    )


def test_heads_are_shared_out_in_the_order_of_ranks():
    assert share_of(0, 1, 9, 3, (9, 3)) == HeadShare(0, 0, 1)
    assert share_of(1, 2, 4, 2, (8, 4)) == HeadShare(4, 2, 1)
    assert share_of(1, 2, 2, 1, (4, 1)) == HeadShare(2, 0, 2)
    shares = [share_of(rank, 4, 2, 1, (8, 2)) for rank in range(4)]
    assert [share.first_query_head for share in shares] == [0, 2, 4, 6]
    assert [share.first_kv_head for share in shares] == [0, 0, 1, 1]
    assert {share.num_replicas for share in shares} == {2}


@pytest.mark.parametrize(
    ("tp_size", "num_query_heads", "num_kv_heads", "totals"),
    [
        (2, 4, 2, (4, 2)),  # every rank holds all heads
        (2, 2, 2, (4, 2)),  # every rank holds all KV heads
        (3, 2, 1, (6, 2)),  # three ranks for two KV heads
    ],
)
def test_other_ways_to_share_out_are_refused(
    tp_size, num_query_heads, num_kv_heads, totals
):
    with pytest.raises(RuntimeError, match="shared out evenly among ranks"):
        share_of(0, tp_size, num_query_heads, num_kv_heads, totals)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What four processes found, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    files = [folder / f"{rank}.json" for rank in range(rank_driver.WORLD_SIZE)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                rank_driver.__name__,
                str(rank),
                str(folder / "store"),
                str(file),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("name", rank_driver.CASES)
def test_ranks_keep_what_one_process_keeps(results, name, random):
    """Catches replicas that keep different tokens, scores counted twice in the second
    eviction, and noise or draws keyed by a head's or layer's place in its rank."""
    _, _, total_kv_heads = rank_driver.CASES[name]
    single = rank_driver.keep(
        total_kv_heads,
        HeadShare(0, 0, 1),
        rank_driver.NUM_QUERY_HEADS,
        range(rank_driver.NUM_LAYERS),
        random,
        None,
    )
    covered = set()
    for found in (result[name] for result in results):
        start, stop = found["layers"]
        for first, expected in zip(found["kept"][str(random)], single, strict=True):
            for layer, requests in zip(range(start, stop), first, strict=True):
                for request, heads in enumerate(requests):
                    for offset, positions in enumerate(heads):
                        kv_head = found["kv_head"] + offset
                        assert positions == expected[layer][request][kv_head]
                        covered.add((layer, kv_head))
    assert len(covered) == rank_driver.NUM_LAYERS * total_kv_heads


def test_a_rank_that_differs_is_named_on_every_rank(results):
    assert {result["refused"] for result in results} == {
        "ranks disagree on a number: rank 0 has 5, rank 2 has 6"
    }


def vllm_config(version=__version__):
    return SimpleNamespace(additional_config={VERSION_KEY: version})


def test_a_worker_needs_the_plugin_and_the_front_end_s_version(monkeypatch):
    engine_args.install()
    ranks.check_worker(vllm_config(), 1)
    with pytest.raises(KVPolicyError, match=r"rank 1 on node .* the front end 9\.9;"):
        ranks.check_worker(vllm_config("9.9"), 1)
    monkeypatch.setattr(engine_args, "is_installed", lambda: False)
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(KVPolicyError, match="VLLM_PLUGINS='another' there must list"):
        ranks.check_worker(vllm_config(), 3)
