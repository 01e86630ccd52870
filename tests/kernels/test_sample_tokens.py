"""The sampling kernels against their reference: the same tokens and the same memory of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sample_tokens import (
    IN_OUTPUT,
    NO_TOKEN,
    SamplingRows,
    SlotState,
    num_mask_words,
    sample_tokens,
)

NUM_WORDS, WORD_LENGTH = 4, 8
NEUTRAL = {
    "samples": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "has_bias": False,
    "has_bad_words": False,
    "has_grammar": False,
    "mask_stop_tokens": False,
}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": -0.7, "repetition_penalty": 1.3}
BANS = {"has_bias": True, "has_bad_words": True, "mask_stop_tokens": True}
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, **PENALTIES},
    {"temperature": 0.0, **BANS},
    {"temperature": 0.0, "has_grammar": True},
    {},
    {"temperature": 3.0},
    {"temperature": 0.01, "frequency_penalty": -2.0},
    {"temperature": 0.7, **PENALTIES, **BANS, "has_grammar": True},
    {"min_p": 0.05, "mask_stop_tokens": True},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 2, "temperature": 5.0},
    {"top_k": 17, "temperature": 2.0, "repetition_penalty": 1.3},
    {"top_k": 40, "min_p": 0.02, "temperature": 2.0},
    {"top_k": 50, "top_p": 0.9, **PENALTIES},
    {"top_k": 50, "top_p": 0.4, "temperature": 4.0, **BANS, "has_grammar": True},
    {"top_k": 128, "top_p": 1e-30},
    {"top_k": 150, "temperature": 9.0},
    {"top_k": 2**31 - 1},
    {"top_k": 2**31 - 1, "top_p": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_p": 1e-30},
    {"top_p": 0.7, "min_p": 0.001},
    {"top_p": 0.5, "temperature": 5.0, **PENALTIES, **BANS, "has_grammar": True},
    {"samples": False, "top_k": 5, **PENALTIES},
    {"samples": False, "top_p": 0.5},
]


def make_rows(kinds: list[dict]) -> SamplingRows:
    """Each row with a slot and a key of its own."""
    rng = np.random.default_rng(2)
    num = len(kinds)
    columns = {
        name: np.array([{**NEUTRAL, **kind}[name] for kind in kinds], np.asarray(neutral).dtype)
        for name, neutral in NEUTRAL.items()
    }
    columns = {
        name: column.astype({"f": np.float32, "i": np.int32}.get(column.dtype.kind, bool))
        for name, column in columns.items()
    }
    return jax.tree.map(
        jnp.asarray,
        SamplingRows(
            slots=rng.permutation(num + 2)[:num].astype(np.int32),
            seed=rng.integers(0, 2**32, (num, 2), np.uint32),
            output_index=rng.integers(0, 1000, num).astype(np.int32),
            **columns,
        ),
    )


def make_state(num_slots: int, vocab_size: int) -> SlotState:
    rng = np.random.default_rng(3)
    shape = (num_slots, vocab_size)
    counts = np.where(rng.random(shape) < 0.2, rng.integers(1, 4, shape), 0)
    flags = rng.integers(0, IN_OUTPUT, shape) | np.where(counts > 0, IN_OUTPUT, 0)
    bias = rng.normal(size=shape)
    bias[rng.random(shape) < 0.3] = -np.inf
    # Words of tokens that are recent now and then, and that are often the best.
    words = rng.integers(0, min(vocab_size, 2), (num_slots, NUM_WORDS, WORD_LENGTH))
    words[:, ::2, : WORD_LENGTH - 3] = NO_TOKEN
    words[:, 1] = NO_TOKEN
    recent = rng.integers(0, min(vocab_size, 2), (num_slots, WORD_LENGTH - 1))
    return SlotState(
        last_token=jnp.zeros(num_slots, jnp.int32),
        logit_bias=jnp.asarray(bias, jnp.float32),
        token_flags=jnp.asarray(flags, jnp.uint8),
        output_counts=jnp.asarray(counts, jnp.int32),
        recent_tokens=jnp.asarray(recent, jnp.int32),
        bad_words=jnp.asarray(words, jnp.int32),
    )


def make_masks(num_rows: int, vocab_size: int) -> jax.Array:
    rng = np.random.default_rng(4)
    shape = (num_rows, num_mask_words(vocab_size))
    return jnp.asarray(rng.integers(-(2**31), 2**31, shape).astype(np.int32))


def make_logits(num_rows: int, vocab_size: int, scale: float) -> np.ndarray:
    logits = np.random.default_rng(5).normal(size=(num_rows, vocab_size)) * scale
    logits[:, :2] += 2 * scale  # so that the bad words' tokens matter
    return logits.astype(np.float32)


@pytest.fixture(autouse=True)
def small_cuts(request, monkeypatch):
    """Two programs, not more, draw together from a whole row: interpreted ones are slow."""
    if "by_triton" in request.fixturenames:
        from pallas_kernels.sample_tokens import triton_kernel

        monkeypatch.setattr(triton_kernel, "MAX_PROGRAMS", 2 * len(KINDS))


def check(by_triton, logits, rows, state, masks) -> np.ndarray:
    found, after = by_triton(sample_tokens)(logits, rows, state, masks)
    expected, remembered = sample_tokens(logits, rows, state, masks, impl="reference")
    samples = np.asarray(rows.samples)
    assert found.dtype == expected.dtype
    assert found[samples].tolist() == expected[samples].tolist()
    for name, ours, theirs in zip(after._fields, after, remembered, strict=True):
        assert ours.dtype == theirs.dtype
        assert (np.asarray(ours) == np.asarray(theirs)).all(), name
    return np.asarray(found)


@pytest.mark.parametrize(
    ("vocab_size", "scale"), [(1, 1.0), (61, 3.0), (300, 0.3), (2100, 0.3), (2100, 3.0)]
)
def test_every_kind_of_row(by_triton, vocab_size, scale):
    rows, num = make_rows(KINDS), len(KINDS)
    logits = make_logits(num, vocab_size, scale)
    check(
        by_triton,
        jnp.asarray(logits),
        rows,
        make_state(num + 2, vocab_size),
        make_masks(num, vocab_size),
    )


def test_a_nucleus_is_drawn_from_as_often_as_its_tokens_are_likely(by_triton):
    """Where the first draw is often outside."""
    num, vocab_size = 20, 300
    rows = make_rows([{"top_p": 0.2}] * 16 + [{"top_p": 0.3, "min_p": 0.8}] * 4)
    arguments = rows, make_state(num + 2, vocab_size), make_masks(num, vocab_size)
    logits = make_logits(num, vocab_size, 0.1)
    found = check(by_triton, jnp.asarray(logits), *arguments)
    ranks = (logits > np.take_along_axis(logits, found[:, None], axis=1)).sum(1)
    assert len(set(ranks.tolist())) > 8


def test_top_k_finds_its_tokens_in_any_block(by_triton):
    """As far as a draw of nearly equal ones shows it."""
    kinds = [{"top_k": top_k, "temperature": 50.0} for top_k in range(1, 17)]
    num, vocab_size = len(kinds), 2100
    check(
        by_triton,
        jnp.asarray(make_logits(num, vocab_size, 3.0)),
        make_rows(kinds),
        make_state(num + 2, vocab_size),
        make_masks(num, vocab_size),
    )


def test_ties(by_triton):
    """Logits of few values: cuts keep all that tie, and the argmax is the lowest id."""
    num, vocab_size = len(KINDS), 400
    logits = np.round(make_logits(num, vocab_size, 1.0))
    arguments = make_rows(KINDS), make_state(num + 2, vocab_size), make_masks(num, vocab_size)
    check(by_triton, jnp.asarray(logits), *arguments)
    found = check(by_triton, jnp.zeros((num, vocab_size), jnp.float32), *arguments)
    assert found[0] == 0


def test_half_precision_logits(by_triton):
    num, vocab_size = len(KINDS), 333
    logits = jnp.asarray(make_logits(num, vocab_size, 2.0), jnp.float16)
    arguments = make_rows(KINDS), make_state(num + 2, vocab_size), make_masks(num, vocab_size)
    check(by_triton, logits, *arguments)


def test_masked_logits(by_triton):
    """Rows of -inf alone, of one token, of few and of as good as infinite ones."""
    num, vocab_size = len(KINDS), 260
    arguments = make_rows(KINDS), make_state(num + 2, vocab_size), make_masks(num, vocab_size)
    logits = make_logits(num, vocab_size, 2.0)
    logits[:, 5:] = -np.inf
    check(by_triton, jnp.asarray(logits), *arguments)
    logits[:, :5] = -np.inf
    logits[:, 259] = -1e30
    check(by_triton, jnp.asarray(logits), *arguments)
    logits[:] = -np.inf
    assert (check(by_triton, jnp.asarray(logits), *arguments) == 0).all()
    logits = np.random.default_rng(6).choice([-3e38, 3e38], (num, vocab_size)).astype(np.float32)
    check(by_triton, jnp.asarray(logits), *arguments)


def test_a_grammar_stands_where_other_bans_leave_nothing(by_triton):
    kinds = [{**kind, "has_grammar": True, "has_bias": True} for kind in KINDS]
    num, vocab_size = len(kinds), 300
    state = make_state(num + 2, vocab_size)
    state = state._replace(logit_bias=jnp.full_like(state.logit_bias, -jnp.inf))
    masks = np.zeros((num, num_mask_words(vocab_size)), np.int32)
    masks[:, 8] = 0b1011 << 7
    found = check(
        by_triton,
        jnp.asarray(make_logits(num, vocab_size, 1.0)),
        make_rows(kinds),
        state,
        jnp.asarray(masks),
    )
    samples = [kind.get("samples", True) for kind in kinds]
    assert set(found[samples].tolist()) <= {263, 264, 266}


def test_noise_is_jax_random_gumbel(by_triton):
    """Where logits say nothing, the noise alone decides."""
    num, vocab_size = 4, 1501
    rows = make_rows([{}] * num)
    found, _ = by_triton(sample_tokens)(
        jnp.zeros((num, vocab_size), jnp.float32),
        rows,
        make_state(num + 2, vocab_size),
        make_masks(num, vocab_size),
    )

    def best(seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
        return jnp.argmax(jax.random.gumbel(key, (vocab_size,)))

    assert found.tolist() == jax.vmap(best)(rows.seed, rows.output_index).tolist()


def test_a_row_does_not_depend_on_its_batch(by_triton):
    num, vocab_size = len(KINDS), 200
    rows, state = make_rows(KINDS), make_state(num + 2, vocab_size)
    logits, masks = jnp.asarray(make_logits(num, vocab_size, 2.0)), make_masks(num, vocab_size)
    call = by_triton(sample_tokens)
    together, _ = call(logits, rows, state, masks)
    for part in ([7], [14, 16, 4]):
        index = jnp.array(part)
        some = jax.tree.map(lambda x, index=index: x[index], (logits, rows, masks))
        alone, _ = call(some[0], some[1], state, some[2])
        assert alone.tolist() == together[index].tolist()


def test_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match="impl='cuda' is unknown: choose 'reference' or 'triton'"):
        sample_tokens(jnp.zeros((1, 4)), None, None, None, impl="cuda")
