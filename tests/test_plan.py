# SPDX-License-Identifier: Apache-2.0
"""`python -m keyformer_vllm plan`."""

from __future__ import annotations

import json

import pytest

from keyformer_vllm.__main__ import main

ARGUMENTS = ["plan", "--prompt-len", "2048", "--new-tokens", "512", "--blocks", "321"]


def facts(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, int]:
    assert main([*ARGUMENTS, "--json", *more]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_figures(capsys):
    assert facts(capsys, "--budget", "0.25") == {
        "budget_in_tokens": 512,
        "blocks_of_a_prompt": 64,
        "blocks_held_while_decoding": 17,
        "blocks_held_at_the_end_without_eviction": 80,
        "requests_running": 16,
        "requests_running_without_eviction": 4,
    }


def test_a_cap_that_costs_something_is_named(capsys):
    found = facts(capsys, "--budget", "0.25", "--max-num-seqs", "3")
    assert found["requests_running"] == found["requests_running_without_eviction"] == 3
    assert found["max_num_seqs_to_raise_to"] == 16
    assert "max_num_seqs_to_raise_to" not in facts(capsys, "--max-num-seqs", "64")


def test_settings_count(capsys):
    assert facts(capsys, "--policy", "full")["requests_running"] == 4
    assert facts(capsys, "--min-tokens", "1500")["budget_in_tokens"] == 1500
    grows = facts(capsys, "--budget-base", "sequence")
    assert grows["budget_in_tokens"] == 2559 // 2
    assert facts(capsys, "--block-size", "128")["blocks_of_a_prompt"] == 16


def test_table_has_a_line_for_each_figure(capsys):
    assert main(ARGUMENTS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[0].split() == ["budget", "in", "tokens", "1024"]


def test_a_budget_no_server_would_take_is_refused_in_one_line(capsys):
    assert main([*ARGUMENTS, "--budget", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "kv_budget=3" in captured.err


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_length_must_be_a_positive_integer(capsys, value):
    with pytest.raises(SystemExit) as caught:
        main([*ARGUMENTS, "--prompt-len", value])
    assert caught.value.code == 2
    assert "--prompt-len" in capsys.readouterr().err
