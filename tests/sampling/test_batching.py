"""A row's token depends on that row alone; slots remember what was sampled and nothing else."""

import jax
import numpy as np
import pytest
from scipy import stats

from jaxserve.sampling import SamplingRows, new_slot_state, num_mask_words
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.sample_tokens import IN_OUTPUT

V = 61
KINDS = [
    {"temperature": 0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 7, "min_p": 0.01},
    {"temperature": 2.0, "presence_penalty": 1, "repetition_penalty": 1.5},
    {"temperature": 0, "frequency_penalty": 1, "logit_bias": {3: 5}},
    {"temperature": 1.0, "allowed_token_ids": list(range(20)), "logprobs": 3},
    {"temperature": 4.0, "min_tokens": 5},
]


def requests_and_logits(harness):
    rng = np.random.default_rng(11)
    requests = [
        harness.Request(
            SamplingParams(**kind),
            prompt=rng.integers(0, V, 5).tolist(),
            output=rng.integers(0, V, i % 4).tolist(),
            stop_token_ids=[1, 2],
            key=tuple(rng.integers(0, 2**32, 2).tolist()),
        )
        for i, kind in enumerate(KINDS)
    ]
    return requests, (3 * rng.normal(size=(len(KINDS), V))).astype(np.float32)


def test_alone_together_and_shuffled(harness):
    requests, logits = requests_and_logits(harness)
    together = harness.run(requests, logits)[0].tolist()
    for i, request in enumerate(requests):
        for place in (0, 3, 7):
            alone = harness.run([request], logits[i : i + 1], slots=[place + 2], places=[place])
            assert alone[0].tolist() == [together[i]]
    order = np.random.default_rng(1).permutation(len(requests))
    shuffled = harness.run(
        [requests[i] for i in order], logits[order], slots=[(3 * i) % 11 for i in range(8)]
    )
    assert shuffled[0].tolist() == [together[i] for i in order]


@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_other_batch_sizes(harness, num_rows):
    requests, logits = requests_and_logits(harness)
    together = harness.run(requests, logits)[0].tolist()
    step = jax.jit(harness.sample)
    for start in range(0, len(requests), num_rows):
        part = requests[start : start + num_rows]
        slots = list(range(len(part)))
        padded = np.zeros((num_rows, V), np.float32)
        padded[: len(part)] = logits[start : start + num_rows]
        rows = harness.rows(part, slots, num_rows)
        masks = harness.masks(part, num_rows)
        out, _ = step(padded, rows, harness.state(part, slots), masks)
        assert out[: len(part)].tolist() == together[start : start + num_rows]


def test_slots_remember_the_token(harness):
    requests, logits = requests_and_logits(harness)
    slots = [4, 2, 9, 7, 1, 10, 3, 5]
    out, after, before = harness.run(requests, logits, slots=slots)
    for token, slot in zip(out, slots, strict=True):
        assert after.last_token[slot] == token
        counted = after.output_counts[slot] - before.output_counts[slot]
        assert counted.tolist() == np.eye(V, dtype=int)[token].tolist()
        flagged = np.where(np.arange(V) == token, IN_OUTPUT, 0)
        assert (after.token_flags[slot] == (before.token_flags[slot] | flagged)).all()
        assert after.recent_tokens[slot].tolist() == [*before.recent_tokens[slot][1:], token]
    untouched = [slot for slot in range(11) if slot not in slots]
    before = jax.device_get(before)
    for name, new, old in zip(after._fields, after, before, strict=True):
        assert (new[untouched] == old[untouched]).all(), name
        if name in ("logit_bias", "bad_words"):
            assert (new == old).all(), name


def test_rows_that_do_not_sample_leave_no_trace(harness):
    """Padding rows aim at slot 0, and prefill rows at their own slot: neither is written."""
    requests, logits = requests_and_logits(harness)
    state = harness.state(requests, list(range(8)))
    rows = harness.rows(requests, list(range(8)))
    rows = rows._replace(samples=np.arange(8) == 5)
    out, after = harness.step(logits, rows, state, harness.masks(requests))
    assert out[5] == harness.expected_token(requests[5], logits[5])
    for new, old in zip(after, state, strict=True):
        others = np.arange(len(old)) != 5
        assert (np.asarray(new)[others] == np.asarray(old)[others]).all()


def test_a_sequence_equals_its_recomputation(harness):
    """Slots carried from step to step give what slots built from the whole history give, as when
    a preempted request resumes."""
    params = SamplingParams(
        temperature=1.5, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2,
        top_p=0.95, bad_words=["x"], min_tokens=3,
    )  # fmt: skip
    request = harness.Request(
        params, stop_token_ids=list(range(10)), bad_words=[[7, 8], [30]], key=(5, 6)
    )
    rng = np.random.default_rng(2)
    state = harness.state([request], [0])
    for _ in range(25):
        logits = np.zeros((harness.num_rows, V), np.float32)
        logits[0] = 2 * rng.normal(size=V)
        token = harness.run([request], logits[:1])[0][0]
        assert token == harness.expected_token(request, logits[0])
        rows, masks = harness.rows([request], [0]), harness.masks([request])
        out, state = harness.step(logits, rows, state, masks)
        assert out[0] == token
        request.output.append(int(token))


def draws(
    harness, params: dict[str, float], logits: np.ndarray, num: int, same_key: bool
) -> np.ndarray:
    """`num` draws from one distribution in one call: a key each, or one key and `num` indices."""
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**32, (num, 2), np.uint32)
    rows = {
        "slots": np.zeros(num, np.int32),
        "samples": np.ones(num, bool),
        "seed": np.where(same_key, seeds[:1], seeds),
        "output_index": np.arange(num, dtype=np.int32) * same_key,
        "top_k": np.full(num, params.get("top_k", 0), np.int32),
    }
    for name in ("has_bias", "has_bad_words", "has_grammar", "mask_stop_tokens"):
        rows[name] = np.zeros(num, bool)
    neutral = {"temperature": 1, "top_p": 1, "min_p": 0, "presence_penalty": 0}
    neutral |= {"frequency_penalty": 0, "repetition_penalty": 1}
    for name, value in neutral.items():
        rows[name] = np.full(num, params.get(name, value), np.float32)
    out, _ = jax.jit(harness.sample)(
        np.broadcast_to(logits, (num, len(logits))),
        SamplingRows(**rows),
        new_slot_state(1, len(logits)),
        np.zeros((num, num_mask_words(len(logits))), np.int32),
    )
    return np.asarray(out)


@pytest.mark.parametrize(
    ("params", "same_key"),
    [
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.6, "top_p": 0.8}, False),
        ({"temperature": 1.7, "top_k": 6}, True),
        ({"temperature": 2.0, "top_k": 9, "top_p": 0.8, "min_p": 0.05}, False),
    ],
)
def test_draws_follow_the_distribution(harness, params, same_key):
    num = 20_000
    logits = (1.5 * np.random.default_rng(3).normal(size=24)).astype(np.float32)
    p = harness.expected_probabilities(harness.Request(SamplingParams(**params)), logits)
    counts = np.bincount(draws(harness, params, logits, num, same_key), minlength=len(p))
    assert (counts[p == 0] == 0).all()
    kept = p > 0
    assert stats.chisquare(counts[kept], num * p[kept] / p[kept].sum()).pvalue > 0.001
    wrong = np.where(kept, p ** (1 / 1.1), 0)  # the check sees a temperature that is 10% off
    assert stats.chisquare(counts[kept], num * wrong[kept] / wrong.sum()).pvalue < 1e-6


def test_sampling_inside_shard_map(harness):
    requests, logits = requests_and_logits(harness)
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    step = jax.jit(
        jax.shard_map(
            harness.sample,
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    slots = list(range(8))
    rows, state = harness.rows(requests, slots), harness.state(requests, slots)
    out, _ = step(logits, rows, state, harness.masks(requests))
    assert out.tolist() == harness.run(requests, logits)[0].tolist()
