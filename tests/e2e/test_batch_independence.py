# SPDX-License-Identifier: Apache-2.0
"""A request's tokens and kept sets are its own: they do not depend on its company."""

from __future__ import annotations

import random

import pytest

from keyformer_vllm.config import KeyformerConfig
from tests.e2e.conftest import POLICY
from tests.engine import Engine, Request, random_prompt
from tests.hf_reference import HFReference, oracle_request
from tests.invariants import assert_idle, assert_pool_consistent

TIE = 1e-5
KIND = "llama-9-3"

OTHERS = [
    {},
    {"kv_policy": "full"},
    {"kv_policy": "h2o", "kv_budget": 0.3},
    {"kv_budget": 1.0},
    {"kv_policy": "random", "kv_budget": 0.7},
    {"kv_policy": "streaming", "kv_budget": 24},
]


@pytest.fixture(scope="module")
def engine(start_engine):
    # No prompt is cut here: stock vLLM's CPU engine dies of a prompt in chunks whose
    # request samples with a seed. Chunks are for greedy requests, below.
    return start_engine(KIND, max_num_batched_tokens=8192)


@pytest.fixture(scope="module")
def reference(tiny_model):
    return HFReference(tiny_model(KIND))


class Subject:
    """One request that can be served again and again."""

    def __init__(self, number: int, greedy: bool = False) -> None:
        generator = random.Random(number)
        self.prompt = random_prompt(generator.randint(40, 200), number)
        self.kv = {"kv_budget": generator.choice([0.3, 0.4, 0.6])}
        self.sampling = {} if greedy else {"temperature": 1.0, "seed": number}
        self.max_tokens = generator.randint(50, 90)

    def add(self, engine: Engine) -> Request:
        return engine.add(
            self.prompt, max_tokens=self.max_tokens, kv=self.kv, **self.sampling
        )

    def assert_same(
        self,
        reference: HFReference,
        one: tuple[Engine, Request],
        two: tuple[Engine, Request],
        policy: dict[str, object] = POLICY,
    ) -> None:
        """Same tokens; same kept sets, or sets that differ in proven ties only."""
        assert one[1].tokens == two[1].tokens
        kept = [engine.kept_sets(request) for engine, request in (one, two)]
        assert kept[0] and list(kept[0]) == list(kept[1])
        if kept[0] == kept[1]:
            return
        config = KeyformerConfig.from_mapping(policy).with_request(self.kv)
        for (engine, request), sets in zip((one, two), kept, strict=True):
            asked = oracle_request(
                config,
                len(self.prompt),
                self.max_tokens,
                interval=engine.block_size,
                request_seed=self.sampling.get("seed", 0),
            )
            differences = reference.follow(self.prompt, request.tokens, asked, sets)
            assert all(entry.gap <= TIE for entry in differences), differences


def add_mates(
    engine: Engine, number: int, generator: random.Random, greedy: bool = False
) -> None:
    """Hand in other requests: some seeded, some not, with other policies or none."""
    samplings = [{}, {"temperature": 1.0}, {"temperature": 0.8, "seed": 5}]
    for _ in range(number):
        sampling = {} if greedy else generator.choice(samplings)
        engine.add(
            random_prompt(generator.randint(1, 250), generator.randrange(10**6)),
            max_tokens=generator.randint(1, 60),
            kv=generator.choice(OTHERS),
            **sampling,
        )


def serve_among(
    engine: Engine,
    subjects: list[Subject],
    batch: int,
    seed: int,
    greedy: bool = False,
) -> list[Request]:
    """Serve the subjects in a batch of that size whose members arrive at random."""
    generator = random.Random(seed)
    mates = batch - len(subjects)
    add_mates(engine, mates // 2, generator, greedy)
    served = []
    for subject in subjects:
        for _ in range(generator.randint(0, 6)):
            engine.step()
        served.append(subject.add(engine))
        add_mates(engine, (mates - mates // 2) // len(subjects), generator, greedy)
    assert_pool_consistent(engine)
    engine.run()
    assert_idle(engine)
    return served


def serve_alone(engine: Engine, subject: Subject) -> Request:
    request = subject.add(engine)
    engine.run()
    return request


@pytest.fixture(scope="module")
def alone(engine):
    """Ten subjects, half of them greedy, and what each gave alone."""
    subjects = [Subject(number, greedy=number < 5) for number in range(10)]
    return [(subject, serve_alone(engine, subject)) for subject in subjects]


@pytest.mark.parametrize("batch", [8, 40])
def test_alone_and_in_a_batch(engine, reference, alone, batch):
    """Catches scores summed over the batch (A21), rows of another request read for
    one's own, noise from a shared generator, and seeds that others reset (A47)."""
    for group in range(0, len(alone), 5):
        members = alone[group : group + 5]
        subjects = [subject for subject, _ in members]
        for (subject, before), request in zip(
            members,
            serve_among(engine, subjects, batch, seed=batch + group),
            strict=True,
        ):
            subject.assert_same(reference, (engine, before), (engine, request))


def test_other_chunk_size(start_engine, reference, engine, alone):
    """Catches scores that depend on where a prompt was cut, and an eviction while
    the prompt is still being computed."""
    other = start_engine(KIND, max_num_batched_tokens=48, max_num_seqs=16)
    subjects = [subject for subject, _ in alone[:5]]
    served = serve_among(other, subjects, 12, seed=3, greedy=True)
    for (subject, before), request in zip(alone, served, strict=False):
        subject.assert_same(reference, (engine, before), (other, request))
        chunks = [x for x in other.trace_of(request) if x["phase"] == "prefill"]
        assert len(chunks) > 1 or len(subject.prompt) <= 48


def test_compact_positions(start_engine, tiny_model):
    """Catches places that follow another request of the batch."""
    policy = POLICY | {"positions": "compact"}
    engine = start_engine("bloom", policy, max_num_batched_tokens=8192)
    reference = HFReference(tiny_model("bloom"))
    subjects = [Subject(number) for number in range(20, 25)]
    alone = [serve_alone(engine, subject) for subject in subjects]
    served = serve_among(engine, subjects, 20, seed=4)
    for subject, before, request in zip(subjects, alone, served, strict=True):
        one, two = (engine, before), (engine, request)
        subject.assert_same(reference, one, two, policy)


def test_pairs_of_equal_length(engine):
    """A21: a prompt of one repeated word beside a random one, 20 pairs."""
    for number in range(20):
        length = 60 + 7 * number
        repeated = [65 + number] * length
        varied = random_prompt(length, number)
        alone = [engine.add(repeated, max_tokens=10)]
        engine.run()
        alone.append(engine.add(varied, max_tokens=10))
        engine.run()
        pair = [engine.add(repeated, max_tokens=10), engine.add(varied, max_tokens=10)]
        engine.run()
        for one, two in zip(alone, pair, strict=True):
            assert one.tokens == two.tokens
            assert engine.kept_sets(one) == engine.kept_sets(two) != {}


def test_seeded_request_among_others_ten_times(engine):
    """A47: seed 42, budget 0.4; mates seeded and not; ten repeats, one result."""
    prompt = random_prompt(150, 9)
    asked = {"temperature": 1.0, "seed": 42, "kv": {"kv_budget": 0.4}}
    results = []
    for repeat in range(10):
        generator = random.Random(repeat)
        add_mates(engine, repeat % 4, generator)
        request = engine.add(prompt, max_tokens=50, **asked)
        add_mates(engine, (repeat + 1) % 4, generator)
        engine.run()
        results.append((request.tokens, engine.kept_sets(request)))
    assert all(result == results[0] for result in results)
    assert results[0][1]


def test_siblings_equal_their_own_requests(engine):
    """A14: n = 4 over one prompt; each sibling equals a request with its seed."""
    prompt = random_prompt(200, 10)
    parent = engine.add(prompt, max_tokens=60, n=4, temperature=1.0, seed=100)
    engine.run()
    tokens = {tuple(completion.tokens) for completion in parent.completions}
    assert len(tokens) == 4
    for index, completion in enumerate(parent.completions):
        single = engine.add(prompt, max_tokens=60, temperature=1.0, seed=100 + index)
        engine.run()
        assert single.tokens == completion.tokens
        assert engine.kept_sets(single) == engine.kept_sets(completion) != {}
    assert_idle(engine, [completion.engine_id for completion in parent.completions])
