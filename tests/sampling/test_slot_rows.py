"""The host's part: what a slot is loaded with, and what is refused before it gets there."""

import numpy as np
import pytest

from jaxserve.sampling import check_token_ids, needs_slot_state, slot_rows
from jaxserve.sampling_params import SamplingParams

V = 50


def test_rows_of_a_resumed_request():
    params = SamplingParams(
        logit_bias={3: 2.5, 4: -1}, allowed_token_ids=[3, 5, 6], bad_words=["a"]
    )
    bias, flags, counts, recent, words = slot_rows(
        params, list(range(10, 30)), [7, 7, 8], [2, 12], [[6], [9, 9], [1, 2, 3]], V
    )
    assert {i: b for i, b in enumerate(bias.tolist()) if b != -np.inf} == {3: 2.5, 5: 0}
    assert np.flatnonzero(flags & 1).tolist() == list(range(10, 30))
    assert np.flatnonzero(flags & 2).tolist() == [2, 12]
    assert np.flatnonzero(flags & 4).tolist() == [7, 8]
    assert {i: c for i, c in enumerate(counts.tolist()) if c} == {7: 2, 8: 1}
    assert recent.tolist() == [*range(18, 30), 7, 7, 8]
    assert words[:2, -3:].tolist() == [[-1, 9, 9], [1, 2, 3]]
    assert (words[2:] == -1).all()


def test_a_short_history_is_padded_in_front():
    recent = slot_rows(SamplingParams(), [4], [], [], [], V)[3]
    assert recent.tolist() == [-1] * 14 + [4]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
    ],
)
def test_needs_slot_state(kwargs):
    assert needs_slot_state(SamplingParams(**kwargs))


def test_needs_no_slot_state():
    params = SamplingParams(temperature=0.5, top_p=0.5, top_k=4, min_p=0.1, seed=1, logprobs=3)
    assert not needs_slot_state(params)


@pytest.mark.parametrize("token", [V, 2**31])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", lambda t: {t: 1.0}),
        ("allowed_token_ids", lambda t: [1, t]),
        ("stop_token_ids", lambda t: [t]),
    ],
)
def test_token_ids_outside_the_vocabulary(name, value, token):
    params = SamplingParams(**{name: value(token)})
    with pytest.raises(ValueError, match=f"{name} must name token ids from 0 to 49, got {token}"):
        check_token_ids(params, [], V)


def test_bad_words_over_the_limits():
    params = SamplingParams(bad_words=["a"])
    check_token_ids(params, [[1] * 16, *[[1]] * 200, *[[1, 2]] * 63], V)
    with pytest.raises(ValueError, match="at most 16 tokens each, got one of 17"):
        check_token_ids(params, [[1] * 17], V)
    with pytest.raises(ValueError, match="at most 64 sequences"):
        check_token_ids(params, [[1, 2]] * 65, V)
