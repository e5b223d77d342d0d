"""The local engine: what it samples, what it reports, and that sharing changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.core.types import Finish, Sampling
from surefoot.engines.base import Sample, SampleRequest
from surefoot.engines.local import LocalEngine, draw
from surefoot.policy.forward import install
from surefoot.policy.scratch import build_scratch

STOP = 2


@pytest.fixture(scope="module")
def loaded() -> Any:
    model = build_scratch(seed=3)
    install(model.model)
    return model


def engine_of(loaded: Any, **options: Any) -> LocalEngine:
    return LocalEngine(loaded.model, context=options.pop("context", 512), **options)


def prompt(seed: int, length: int = 20, root: int = 8) -> Any:
    shared = np.random.default_rng(0).integers(3, 259, root)
    own = np.random.default_rng(seed).integers(3, 259, length)
    return np.concatenate([shared, own]).astype(np.int32)


def logprobs(loaded: Any, tokens: Any, temperature: float) -> torch.Tensor:
    """Reference: the plain transformers model on one sequence."""
    model = loaded.model
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens).long()[None]).logits[0] / temperature
    finally:
        install(model)
    return torch.log_softmax(logits, dim=-1)


async def converse(
    engine: LocalEngine, session: str, tokens: Any, *, turns: int, seed: int, sampling: Sampling
) -> tuple[Any, list[tuple[int, Sample]]]:
    """Several turns with an observation between them."""
    out = []
    for turn in range(turns):
        request = SampleRequest(session, tokens, sampling, (STOP,), seed * 100 + turn)
        sample = await engine.sample(request)
        out.append((len(tokens), sample))
        observation = np.array([5, 6, 7 + turn], np.int32)
        tokens = np.concatenate([tokens, sample.tokens, observation])
    engine.release(session)
    engine.leave()
    return tokens, out


def play(engine: LocalEngine, jobs: list[tuple[str, Any, int]], sampling: Sampling, turns: int = 3) -> Any:
    async def run() -> Any:
        for _ in jobs:
            engine.enter()
        talks = [
            converse(engine, name, tokens, turns=turns, seed=seed, sampling=sampling)
            for name, tokens, seed in jobs
        ]
        return await asyncio.gather(*talks)

    return asyncio.run(run())


JOBS = [(f"s{i:02d}", prompt(i // 4, 12 + i // 4), i // 2) for i in range(12)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reported_logprobs_are_those_of_the_sampled_distribution(loaded: Any, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_tokens=12)
    for tokens, turns in play(engine_of(loaded), JOBS, sampling):
        reference = logprobs(loaded, tokens, temperature)
        for start, sample in turns:
            rows = reference[start - 1 : start - 1 + len(sample.tokens)]
            expected = rows[torch.arange(len(rows)), torch.from_numpy(sample.tokens).long()].numpy()
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_same_seeds_give_the_same_bits_and_other_seeds_do_not(loaded: Any) -> None:
    sampling = Sampling(max_tokens=12)
    first, second = (play(engine_of(loaded), JOBS, sampling) for _ in range(2))
    for (a, turns_a), (b, turns_b) in zip(first, second, strict=True):
        assert (a == b).all()
        for (_, x), (_, y) in zip(turns_a, turns_b, strict=True):
            assert x.logprobs.tobytes() == y.logprobs.tobytes()
    other = play(engine_of(loaded), [(n, t, s + 50) for n, t, s in JOBS], sampling)
    assert any((a.shape != b.shape) or (a != b).any() for (a, _), (b, _) in zip(first, other, strict=True))


def test_sharing_prompts_and_rows_changes_no_sample(loaded: Any) -> None:
    """Alone in the batch or beside its twins, a session samples the same tokens."""
    sampling = Sampling(max_tokens=12)
    together = play(engine_of(loaded), JOBS, sampling)
    for job, (tokens, _) in zip(JOBS, together, strict=True):
        (alone, _), *_ = play(engine_of(loaded), [job], sampling)
        assert (alone == tokens).all()


def test_identical_contexts_are_computed_once(loaded: Any) -> None:
    """Eight members with equal seeds never part, so each step computes one row."""
    engine = engine_of(loaded)
    jobs = [(f"s{i}", prompt(1), 7) for i in range(8)]
    results = play(engine, jobs, Sampling(max_tokens=10), turns=1)
    assert len({tokens.tobytes() for tokens, _ in results}) == 1
    sampled = len(results[0][1][0][1].tokens)
    assert engine.rows_computed == sampled - 1
    assert engine.tokens_sampled == 8 * sampled


def test_second_turn_computes_only_what_is_new(loaded: Any) -> None:
    tokens = prompt(4)
    ((_, turns),) = play(engine_of(loaded), [("s", tokens, 1)], Sampling(max_tokens=6), turns=2)
    assert turns[0][1].prefilled == len(tokens) and turns[0][1].cached == 0
    # The last sampled token was never fed, and three observation tokens follow.
    assert turns[1][1].prefilled == 4
    assert turns[1][1].cached == turns[1][0] - 4


def test_a_late_prompt_takes_over_what_held_prompts_begin_with(loaded: Any) -> None:
    """Whatever they share with it: an opening, all of it, or more than all of it."""
    sampling = Sampling(max_tokens=6)
    held = prompt(1)
    late = [prompt(2), np.append(held, np.int32(9)), held[:-3], prompt(3)[8:]]

    async def run(engine: LocalEngine, prompts: list[Any]) -> list[Sample]:
        requests = [SampleRequest(f"s{i}", tokens, sampling, (), 10 + i) for i, tokens in enumerate(prompts)]
        return list(await asyncio.gather(*map(engine.sample, requests)))

    async def after(engine: LocalEngine) -> list[Sample]:
        await engine.sample(SampleRequest("held", held, sampling, (), 1))
        return await run(engine, late)

    found, alone = asyncio.run(after(engine_of(loaded))), asyncio.run(run(engine_of(loaded), late))
    assert [sample.cached for sample in found] == [8, len(held), len(held) - 4, 0]
    for tokens, ours, theirs in zip(late, found, alone, strict=True):
        assert ours.cached + ours.prefilled == len(tokens)
        assert (ours.tokens == theirs.tokens).all()
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_greedy_takes_the_likeliest_token_with_logprob_zero(loaded: Any) -> None:
    ((tokens, turns),) = play(engine_of(loaded), [("s", prompt(2), 1)], Sampling(0.0, max_tokens=8), turns=1)
    start, sample = turns[0]
    reference = logprobs(loaded, tokens, 1.0)
    best = reference[start - 1 : start - 1 + len(sample.tokens)].argmax(-1)
    assert best.tolist() == sample.tokens.tolist()
    assert (sample.logprobs == 0).all()


def test_top_k_and_top_p_stay_inside_their_support(loaded: Any) -> None:
    for sampling in (Sampling(top_k=3, max_tokens=10), Sampling(top_p=0.2, max_tokens=10)):
        for tokens, turns in play(engine_of(loaded), JOBS[:4], sampling, turns=1):
            reference = logprobs(loaded, tokens, 1.0)
            for start, sample in turns:
                for j, token in enumerate(sample.tokens):
                    row = reference[start - 1 + j]
                    rank = int((row > row[token]).sum())
                    mass_before = float(row[row > row[token]].exp().sum())
                    assert rank < 3 if sampling.top_k else mass_before < 0.2 + 1e-5


def test_frequencies_follow_the_distribution(loaded: Any) -> None:
    """Chi-square of 2,000 first tokens over the 10 likeliest classes and the rest."""
    tokens = prompt(9)
    engine = engine_of(loaded)
    jobs = [(f"s{i:04d}", tokens, i) for i in range(2000)]
    drawn = [int(turns[0][1].tokens[0]) for _, turns in play(engine, jobs, Sampling(max_tokens=1), turns=1)]
    p = logprobs(loaded, tokens, 1.0)[-1].exp().numpy()
    top = np.argsort(-p)[:10]
    counts = np.array([drawn.count(int(t)) for t in top] + [sum(d not in top for d in drawn)])
    expected = 2000 * np.append(p[top], 1 - p[top].sum())
    assert ((counts - expected) ** 2 / expected).sum() < 29.6  # 99.9% quantile at 10 degrees of freedom


def test_finish_reasons_are_typed(loaded: Any) -> None:
    ((_, turns),) = play(engine_of(loaded), [("s", prompt(1), 1)], Sampling(max_tokens=3), turns=1)
    assert turns[0][1].finish is Finish.LENGTH
    tight = engine_of(loaded, context=len(prompt(1)) + 2)
    ((_, turns),) = play(tight, [("s", prompt(1), 1)], Sampling(max_tokens=30), turns=1)
    assert turns[0][1].finish is Finish.CONTEXT and len(turns[0][1].tokens) == 2
    full = engine_of(loaded, context=len(prompt(1)))
    ((_, turns),) = play(full, [("s", prompt(1), 1)], Sampling(max_tokens=30), turns=1)
    assert turns[0][1].finish is Finish.CONTEXT and len(turns[0][1].tokens) == 0


def test_stop_token_is_part_of_the_sample(loaded: Any) -> None:
    everything = tuple(range(loaded.model.config.vocab_size))

    async def run() -> Sample:
        engine = engine_of(loaded)
        engine.enter()
        return await engine.sample(SampleRequest("s", prompt(1), Sampling(), everything, 1))

    sample = asyncio.run(run())
    assert sample.finish is Finish.STOP and len(sample.tokens) == 1


def test_empty_context_is_refused(loaded: Any) -> None:
    request = SampleRequest("s", np.zeros(0, np.int32), Sampling(), (STOP,), 1)
    with pytest.raises(DataError, match="context is empty"):
        asyncio.run(engine_of(loaded).sample(request))


def test_edited_history_is_computed_anew(loaded: Any) -> None:
    """A context that is not an extension of the cached one must not reuse its keys and values."""
    first, other = prompt(1), prompt(5, 30)

    async def run(contexts: list[Any]) -> Sample:
        engine = engine_of(loaded)
        engine.enter()
        sample = None
        for context in contexts:
            sample = await engine.sample(SampleRequest("s", context, Sampling(max_tokens=6), (STOP,), 3))
        assert sample is not None
        return sample

    edited, fresh = asyncio.run(run([first, other])), asyncio.run(run([other]))
    assert edited.tokens.tolist() == fresh.tokens.tolist()
    assert edited.cached == 0


def test_new_version_forgets_caches_and_labels_what_follows(loaded: Any) -> None:
    engine = engine_of(loaded)
    play(engine, JOBS[:2], Sampling(max_tokens=4), turns=1)
    engine.new_version(7)
    ((_, turns),) = play(engine, JOBS[:1], Sampling(max_tokens=4), turns=1)
    assert turns[0][1].version == 7


def test_a_failing_model_reaches_every_waiting_caller(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    engine = engine_of(loaded)
    monkeypatch.setattr(engine, "_prefill", broken)

    async def run() -> list[Any]:
        for _ in range(3):
            engine.enter()
        requests = [SampleRequest(f"s{i}", prompt(i), Sampling(), (STOP,), i) for i in range(3)]
        return await asyncio.gather(*(engine.sample(r) for r in requests), return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["out of memory"] * 3


def test_a_cancelled_request_does_not_stall_the_others(loaded: Any) -> None:
    async def run() -> Sample:
        engine = engine_of(loaded, deterministic=False)
        slow = asyncio.create_task(
            engine.sample(SampleRequest("a", prompt(1), Sampling(max_tokens=400), (), 1))
        )
        await asyncio.sleep(0)
        slow.cancel()
        return await engine.sample(SampleRequest("b", prompt(2), Sampling(max_tokens=5), (), 2))

    assert len(asyncio.run(run()).tokens) == 5


@pytest.mark.parametrize("vocabulary", [7, 256, 259, 1000])
def test_draws_are_those_of_the_inverse_cdf_and_never_outside_the_support(vocabulary: int) -> None:
    rng = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(3, vocabulary, generator=rng) * 4
    logits[1, vocabulary // 2 :] = float("-inf")
    logits[2, :-1] = float("-inf")
    ends = torch.tensor([0.0, 1e-300, 1 - 2**-53], dtype=torch.float64)
    uniforms = torch.cat([torch.rand(500, dtype=torch.float64, generator=rng), ends])
    logp = torch.log_softmax(logits.double(), dim=-1)
    for row in range(3):
        rows = torch.full((len(uniforms),), row)
        tokens, found = draw(logits.clone(), rows, uniforms)
        cdf = logp[row].exp().cumsum(0)
        wanted = torch.searchsorted(cdf, uniforms, right=True).clamp(max=vocabulary - 1)
        assert (tokens == wanted).double().mean() > 0.99  # float32 mass moves an edge now and then
        assert torch.isfinite(logp[row, tokens]).all()
        torch.testing.assert_close(found.double(), logp[row, tokens], atol=5e-6, rtol=0)
