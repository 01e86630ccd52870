"""Every parameter, alone and mixed, against the float64 twin; and faults that it must notice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import token_logprobs
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.sample_tokens import reference, truncation

V = 61
TOKENS = st.lists(st.integers(0, V - 1), max_size=6)


def logits_of(seed: int, num: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(num, V)) * scale).astype(np.float32)


ALONE = {
    "greedy": {"temperature": 0},
    "nearly greedy": {"temperature": 1e-6},
    "cold": {"temperature": 1e-5},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 100},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k over the vocabulary": {"top_k": 2**31 - 1},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-30},
    "top_p just under one": {"top_p": 0.999},
    "top_k, top_p": {"top_k": 12, "top_p": 0.6, "temperature": 1.3},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "min_p, top_k, top_p": {"min_p": 0.01, "top_k": 9, "top_p": 0.9},
    "presence": {"presence_penalty": 2, "temperature": 0},
    "frequency": {"frequency_penalty": 2, "temperature": 0},
    "negative penalties": {"frequency_penalty": -2, "presence_penalty": -1, "temperature": 0},
    "repetition": {"repetition_penalty": 3, "temperature": 0},
    "repetition under one": {"repetition_penalty": 0.2, "temperature": 0},
    "bias up": {"logit_bias": {7: 100}, "temperature": 0},
    "bias": {"logit_bias": {i: 2.0 * (i % 5) for i in range(40)}},
    "allowed": {"allowed_token_ids": [3, 50]},
    "allowed, biased": {"allowed_token_ids": [3, 50], "logit_bias": {3: 4, 9: 100}},
    "min_tokens": {"min_tokens": 9, "temperature": 0},
}


@pytest.mark.parametrize("name", ALONE)
def test_each_parameter(harness, name):
    logits = logits_of(hash_of(name), harness.num_rows)
    best = np.argsort(-logits, axis=1)
    requests = [
        harness.Request(
            SamplingParams(**ALONE[name]),
            prompt=[4, int(best[i, 1])],
            output=[int(best[i, 0])] * (1 + i % 3) + [int(best[i, 2])],
            stop_token_ids=[int(best[i, 0])],
            key=(i, 77),
        )
        for i in range(harness.num_rows)
    ]
    harness.check_tokens(requests, logits)


def hash_of(name: str) -> int:
    return list(ALONE).index(name)


@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_bad_words(harness, length):
    """The last token is banned exactly where the ones before it are the most recent ones."""
    logits = logits_of(length, 4)
    best = logits.argmax(axis=1)
    prefix = [(5 * i) % V for i in range(length - 1)]
    histories = [
        ([9], prefix),
        ([9, *prefix], []),
        ([9, *prefix[: length // 2]], prefix[length // 2 :]),
        ([9], [*prefix, 60]),
    ]
    requests = [
        harness.Request(
            SamplingParams(temperature=0, bad_words=["x"]),
            prompt=prompt,
            output=output,
            bad_words=[[*prefix, int(token)], [58, 59, int(token)]],
        )
        for (prompt, output), token in zip(histories, best, strict=True)
    ]
    got = harness.run(requests, logits)[0]
    harness.check_tokens(requests, logits)
    assert (got != best).tolist() == [True, True, True, length == 1]


@st.composite
def random_params(draw):
    maybe = lambda values: draw(st.one_of(st.none(), values))  # noqa: E731
    chosen = {
        "temperature": maybe(st.sampled_from([0, 0.3, 1.0, 2.5])),
        "top_k": maybe(st.integers(1, V + 2)),
        "top_p": maybe(st.floats(0.05, 0.99)),
        "min_p": maybe(st.floats(0.001, 0.5)),
        "presence_penalty": maybe(st.floats(-2, 2)),
        "frequency_penalty": maybe(st.floats(-2, 2)),
        "repetition_penalty": maybe(st.floats(0.5, 2)),
        "logit_bias": maybe(st.dictionaries(st.integers(0, V - 1), st.floats(-9, 9), max_size=5)),
        "allowed_token_ids": maybe(st.lists(st.integers(0, V - 1), min_size=2, max_size=30)),
        "min_tokens": maybe(st.integers(0, 4)),
    }
    return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_mixtures(harness, data):
    logits = logits_of(data.draw(st.integers(0, 10**6)), harness.num_rows)
    requests = [
        harness.Request(
            data.draw(random_params()),
            prompt=data.draw(TOKENS),
            output=data.draw(TOKENS),
            stop_token_ids=data.draw(TOKENS),
            key=(data.draw(st.integers(0, 2**32 - 1)), i),
            grammar=data.draw(st.none() | st.sets(st.integers(0, V - 1), min_size=1)),
        )
        for i in range(data.draw(st.integers(1, harness.num_rows)))
    ]
    harness.check_tokens(requests, logits[: len(requests)])


def check_faults_show(harness) -> None:
    """Batches that lean on everything that the planted faults below break."""
    for seed in range(4):
        check_batch_for_faults(harness, seed)


def check_batch_for_faults(harness, seed: int) -> None:
    logits = logits_of(seed, 8, scale=1.5)
    best = np.argsort(-logits, axis=1)
    logits[[0, 1], best[:2, 0]] = logits[[0, 1], best[:2, 1]] + 0.1  # a close second
    requests = [
        harness.Request(SamplingParams(top_p=0.05), key=(1, seed)),
        harness.Request(SamplingParams(top_p=0.05), key=(2, seed)),
        harness.Request(
            SamplingParams(frequency_penalty=2, temperature=0),
            prompt=[int(best[2, 0])],
            output=[int(best[2, 1])] * (seed % 2) + [int(best[2, 0])] * (seed // 2),
        ),
        harness.Request(SamplingParams(temperature=3), output=[1], key=(3, 1)),
        harness.Request(SamplingParams(temperature=3), key=(4, 1)),
        harness.Request(SamplingParams(temperature=0, logit_bias={int(best[5, 9]): 50})),
        harness.Request(SamplingParams(temperature=9, top_p=0.3), output=[2, 2], key=(5, seed)),
        harness.Request(SamplingParams(temperature=2, min_p=0.3), output=[2], key=(6, seed)),
    ]
    harness.check_tokens(requests, logits)
    for request, row in zip(requests[:4], best, strict=False):
        request.grammar = {int(token) for token in row[3:9]}
    harness.check_tokens(requests, logits)


def one_more(keep):
    def faulty(scores, limit):
        kept = keep(scores, limit)
        following = jnp.max(jnp.where(kept, -jnp.inf, scores), axis=-1, keepdims=True)
        return kept | (scores == following)

    return faulty


def count_prompts(penalise):
    def faulty(logits, rows, state):
        counts = state.output_counts + (state.token_flags & 1).astype(jnp.int32)
        return penalise(logits, rows, state._replace(output_counts=counts))

    return faulty


def change_masks(change):
    return lambda ban: lambda raw, rows, state, masks: ban(raw, rows, state, change(masks))


def shift_one_token(masks):
    carried = jnp.roll(masks, 1, axis=1).view(jnp.uint32) >> 31
    return (masks << 1) | carried.view(jnp.int32)


FAULTS = {
    "mask shifted by one token": ("_ban", change_masks(shift_one_token)),
    "mask of the second row not applied": ("_ban", change_masks(lambda m: m.at[1].set(-1))),
    "masks of other rows": ("_ban", change_masks(lambda m: jnp.roll(m, 1, axis=0))),
    "top_p one token too many": ("keep_top_p", lambda _: one_more(truncation.keep_top_p)),
    "top_k for top_p": ("keep_top_p", lambda _: lambda s, p: truncation.keep_top_k(s, p * 0 + 9)),
    "penalties count the prompt": ("_penalise", count_prompts),
    "bias after the argmax": ("_ban", lambda _: lambda logits, *_: logits),
    "no penalties": ("_penalise", lambda _: lambda logits, *_: logits),
    "key not folded": (
        "_perturb",
        lambda f: lambda x, r, m: f(x, r._replace(output_index=r.output_index * 0), m),
    ),
    "seed ignored": ("_perturb", lambda f: lambda x, r, m: f(x, r._replace(seed=r.seed * 0), m)),
    "min_p ignored": ("_perturb", lambda f: lambda x, r, m: f(x, r._replace(min_p=r.min_p * 0), m)),
}


def test_the_batch_for_faults(fresh_harness):
    check_faults_show(fresh_harness)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_fail(fresh_harness, monkeypatch, name):
    part, plant = FAULTS[name]
    monkeypatch.setattr(reference, part, plant(getattr(reference, part)))
    with pytest.raises(AssertionError):
        check_faults_show(fresh_harness)


def test_ties_are_kept(harness):
    """Equal probabilities share the cut's fate."""
    scores = np.zeros((2, V), np.float32)
    scores[:, 4:] = -1
    scores[:, 20:] = -5
    kept = truncation.keep_top_k(scores, np.array([2, 5], np.uint32))
    assert np.sum(kept, axis=-1).tolist() == [4, 20]
    kept = truncation.keep_top_p(scores, np.array([0.01, 0.6], np.float32))
    assert np.sum(kept, axis=-1).tolist() == [4, 20]


def test_nothing_left_and_extreme_logits(harness):
    logits = logits_of(0, 6)
    logits[1] = -np.inf
    logits[1, 17] = -1e30
    logits[2] = 3e38 * np.sign(logits[2])
    logits[3] = -3e38
    logits[4] = 0
    hot = {"temperature": 1e-5, "top_p": 0.5, "top_k": 3, "min_p": 0.5}
    requests = [
        harness.Request(SamplingParams(allowed_token_ids=[5], **hot), bad_words=[[5]]),
        *(harness.Request(SamplingParams(**hot)) for _ in range(4)),
        harness.Request(SamplingParams(allowed_token_ids=[5], temperature=0), bad_words=[[5]]),
    ]
    got = harness.run(requests, logits)[0]
    assert got[0] == got[5] == 0
    assert got[1] == 17
    assert logits[2, got[2]] > 0
    assert ((got >= 0) & (got < V)).all()


def test_a_grammar_comes_before_what_leaves_it_no_token(harness):
    logits = logits_of(7, 4)
    grammar = {3, 32, 60}
    best = max(grammar, key=lambda token: logits[0, token])
    logits[:] = logits[0]
    requests = [
        harness.Request(SamplingParams(temperature=0, **fields), grammar=grammar, **others)
        for fields, others in (
            ({"allowed_token_ids": [5, 6]}, {}),
            ({"min_tokens": 2}, {"stop_token_ids": [3, 32, 60]}),
            ({"bad_words": ["x"]}, {"bad_words": [[3], [32], [60]]}),
            ({"allowed_token_ids": [5, best]}, {}),
        )
    ]
    assert harness.run(requests, logits)[0].tolist() == [best] * 4
    harness.check_tokens(requests, logits)


def test_greedy_takes_the_lowest_id_of_a_tie(harness):
    logits = logits_of(1, 2)
    logits[:, [8, 30]] = 50
    requests = [harness.Request(SamplingParams(temperature=0)) for _ in range(2)]
    requests.append(harness.Request(SamplingParams(temperature=1)))
    rows = np.concatenate([logits, logits_of(2, 1)])
    assert harness.run(requests[:2], logits)[0].tolist() == [8, 8]
    assert harness.run(requests, rows)[0].tolist()[:2] == [8, 8]


def test_token_logprobs():
    logits = logits_of(3, 4)
    tokens = np.array([11, 0, 60, 7], np.int32)
    out = jax.jit(token_logprobs, static_argnums=2)(logits, tokens, 5)
    raw = logits.astype(np.float64)
    raw -= np.log(np.exp(raw).sum(axis=1, keepdims=True))
    order = np.argsort(-raw, axis=1, kind="stable")
    for i, token in enumerate(tokens):
        np.testing.assert_allclose(out.logprobs[i], raw[i, token], atol=1e-5)
        assert out.ranks[i] == 1 + order[i].tolist().index(token)
        assert out.top_token_ids[i].tolist() == order[i, :5].tolist()
        np.testing.assert_allclose(out.top_logprobs[i], raw[i, order[i, :5]], atol=1e-5)


def test_token_logprobs_without_candidates():
    logits = logits_of(6, 3)
    tokens = np.array([0, 5, 60], np.int32)
    logprobs, ranks, top_ids, top = jax.jit(token_logprobs, static_argnums=2)(logits, tokens, 0)
    assert top_ids.shape == top.shape == (3, 0)
    expected = jax.nn.log_softmax(logits)[np.arange(3), tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)
    assert ranks.tolist() == (1 + (logits > logits[np.arange(3), tokens][:, None]).sum(1)).tolist()
