# SPDX-License-Identifier: Apache-2.0
"""The tiny models must be able to show a fault; these tests check that they can."""

from __future__ import annotations

import pytest
import torch

from tests.models import REFUSED, SERVABLE, VOCAB_SIZE


def _logprobs(model, tokens, mask=None):
    with torch.inference_mode():
        logits = model(tokens, attention_mask=mask).logits
    return logits[0, -1].log_softmax(-1)


# BLOOM derives positions from the mask: a masked key would move the others. What it
# makes of a missing key is checked in e2e/test_masked_reference.py.
@pytest.fixture(scope="module", params=[kind for kind in SERVABLE if kind != "bloom"])
def model(request, tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        tiny_model(request.param), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (1, 200), generator=generator)


@pytest.mark.slow
def test_one_missing_key_shows(model, tokens):
    """Most single keys, when masked, move some logprob by far more than a tolerance."""
    full = _logprobs(model, tokens)
    moved = 0
    for position in range(0, 190, 10):
        mask = torch.ones_like(tokens)
        mask[0, position] = 0
        # Masked keys must not shift the positions of the others.
        positions = torch.arange(tokens.shape[1])[None]
        with torch.inference_mode():
            logits = model(tokens, attention_mask=mask, position_ids=positions).logits
        change = (logits[0, -1].log_softmax(-1) - full).abs().max()
        moved += bool(change > 1e-3)
    assert moved >= 15, f"only {moved} of 19 keys matter"


@pytest.mark.slow
def test_logits_are_neither_flat_nor_certain(model, tokens):
    entropy = torch.distributions.Categorical(logits=_logprobs(model, tokens)).entropy()
    assert 0.5 < entropy < torch.log(torch.tensor(float(VOCAB_SIZE))) - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_models_carry_no_weights(kind, tiny_model):
    folder = tiny_model(kind)
    assert (folder / "config.json").is_file()
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.slow
def test_tokenizer_gives_any_text_back(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama-4-2"))
    text = "Lighthouse, 1759: « é » \U0001f4a1\n\ttab"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(text).input_ids) == len(text.encode())
