"""A batch of requests through the jitted `sample`, and a naive float64 twin of it."""

from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.sampling import (
    SamplingRows,
    load_slot,
    needs_slot_state,
    new_slot_state,
    sample,
    slot_rows,
)
from jaxserve.sampling_params import SamplingParams

VOCAB_SIZE = 61
NUM_ROWS = 8
load = jax.jit(load_slot)


@dataclass
class Request:
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    key: tuple[int, int] = (0, 0)
    grammar: set[int] | None = None
    """The tokens that it allows here."""


def expected_logits(request: Request, logits: np.ndarray) -> np.ndarray:
    """Before temperature; float64, one token at a time."""
    params, out = request.params, logits.astype(np.float64)
    history = request.prompt + request.output
    for token in range(len(out)):
        out[token] += (params.logit_bias or {}).get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -np.inf
        if len(request.output) < params.min_tokens and token in request.stop_token_ids:
            out[token] = -np.inf
        for word in request.bad_words:
            prefix = word[:-1]
            if token == word[-1] and history[len(history) - len(prefix) :] == prefix:
                out[token] = -np.inf
    if request.grammar is not None:
        denied = [token for token in range(len(out)) if token not in request.grammar]
        if np.isneginf(np.delete(out, denied)).all():
            out = logits.astype(np.float64)
        out[denied] = -np.inf
    for token in range(len(out)):
        if token in history:
            factor = np.float64(np.float32(params.repetition_penalty))
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        count = request.output.count(token)
        out[token] -= np.float32(params.frequency_penalty) * count
        out[token] -= np.float32(params.presence_penalty) * (count > 0)
    return out


def expected_probabilities(request: Request, logits: np.ndarray) -> np.ndarray:
    """The distribution that is drawn from; one-hot where greedy."""
    params, scores = request.params, expected_logits(request, logits)
    if params.greedy:
        return np.eye(len(scores))[np.argmax(scores)]
    if np.isneginf(scores.max()):
        return np.eye(len(scores))[0]
    scores = scores / np.float64(np.float32(params.temperature))
    p = np.exp(scores - scores.max())
    p[p < np.float32(params.min_p) * p.max()] = 0
    if params.top_k > 0:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0
    p /= p.sum()
    if params.top_p < 1:
        more_likely = np.array([p[p > q].sum() for q in p])
        p[more_likely >= np.float32(params.top_p)] = 0
    return p / p.sum()


def noise(request: Request, vocab_size: int) -> np.ndarray:
    key = jax.random.wrap_key_data(np.array(request.key, np.uint32), impl="threefry2x32")
    return np.asarray(
        jax.random.gumbel(jax.random.fold_in(key, len(request.output)), (vocab_size,))
    ).astype(np.float64)


def expected_token(request: Request, logits: np.ndarray) -> int:
    p = expected_probabilities(request, logits)
    if request.params.greedy:
        return int(np.argmax(p))
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(p) + noise(request, len(p))))


class Harness:
    """Rows of requests in slots of your choice; the rest are padding rows, aimed at slot 0 as a
    careless batch builder might."""

    Request = Request
    vocab_size, num_rows = VOCAB_SIZE, NUM_ROWS
    expected_probabilities = staticmethod(expected_probabilities)
    expected_token = staticmethod(expected_token)

    def __init__(self, impl):
        # A function of its own, so that a harness made for a planted fault is traced anew.
        self.sample = partial(sample, impl=impl)
        self.step = jax.jit(self.sample)

    def state(self, requests, slots, num_slots=NUM_ROWS + 3, vocab_size=VOCAB_SIZE):
        state = new_slot_state(num_slots, vocab_size)
        rng = np.random.default_rng(9)
        state = jax.tree.map(  # an earlier request's leavings
            lambda a: rng.integers(1, 9, a.shape).astype(a.dtype), state
        )
        for request, slot in zip(requests, slots, strict=True):
            if needs_slot_state(request.params):
                rows = slot_rows(
                    request.params,
                    request.prompt,
                    request.output,
                    request.stop_token_ids,
                    request.bad_words,
                    vocab_size,
                )
                state = load(state, slot, *rows)
        return state

    def rows(self, requests, slots, num_rows=NUM_ROWS, places=None) -> SamplingRows:
        places = np.arange(len(requests)) if places is None else np.asarray(places)

        def column(values, neutral, dtype, shape=()):
            out = np.full((num_rows, *shape), neutral, dtype)
            out[places] = np.array(values, dtype)
            return out

        p = [r.params for r in requests]
        return SamplingRows(
            slots=column(slots, 0, np.int32),
            samples=column([True] * len(p), False, bool),
            temperature=column([q.temperature for q in p], 0, np.float32),
            top_p=column([q.top_p for q in p], 1, np.float32),
            top_k=column([max(q.top_k, 0) for q in p], 0, np.int32),
            min_p=column([q.min_p for q in p], 0, np.float32),
            presence_penalty=column([q.presence_penalty for q in p], 0, np.float32),
            frequency_penalty=column([q.frequency_penalty for q in p], 0, np.float32),
            repetition_penalty=column([q.repetition_penalty for q in p], 1, np.float32),
            seed=column([r.key for r in requests], 0, np.uint32, (2,)),
            output_index=column([len(r.output) for r in requests], 0, np.int32),
            has_bias=column(
                [
                    bool(q.logit_bias)
                    or q.allowed_token_ids is not None
                    or any(len(w) == 1 for w in r.bad_words)
                    for q, r in zip(p, requests, strict=True)
                ],
                False,
                bool,
            ),
            has_bad_words=column(
                [any(len(w) > 1 for w in r.bad_words) for r in requests], False, bool
            ),
            has_grammar=column([r.grammar is not None for r in requests], False, bool),
            mask_stop_tokens=column(
                [len(r.output) < r.params.min_tokens for r in requests], False, bool
            ),
        )

    def masks(self, requests, num_rows=NUM_ROWS, places=None, vocab_size=VOCAB_SIZE):
        """Token t is bit t % 32 of word t // 32; rows without a grammar hold anything."""
        words = -(-vocab_size // 32)
        masks = np.full((num_rows, words), 0x5A5A5A5A, np.uint32)
        places = np.arange(len(requests)) if places is None else places
        for request, place in zip(requests, places, strict=True):
            if request.grammar is not None:
                masks[place] = 0
                for token in request.grammar:
                    masks[place, token // 32] |= np.uint32(1 << token % 32)
        return masks.view(np.int32)

    def run(self, requests, logits, slots=None, places=None):
        """Token ids and state; row i of `logits` is request i's."""
        slots = list(range(len(requests))) if slots is None else slots
        places = np.arange(len(requests)) if places is None else np.asarray(places)
        padded = np.full((NUM_ROWS, logits.shape[1]), 7, np.float32)
        padded[places] = logits
        state = self.state(requests, slots, vocab_size=logits.shape[1])
        rows = self.rows(requests, slots, places=places)
        masks = self.masks(requests, places=places, vocab_size=logits.shape[1])
        token_ids, new_state = jax.device_get(self.step(padded, rows, state, masks))
        return token_ids[places], new_state, state

    def check_tokens(self, requests, logits) -> None:
        got = self.run(requests, logits)[0].tolist()
        assert got == [expected_token(r, row) for r, row in zip(requests, logits, strict=True)]


@pytest.fixture(scope="session")
def harness():
    return Harness("triton" if jax.default_backend() == "gpu" else "reference")


@pytest.fixture
def fresh_harness():
    """Not compiled yet, so that a patched part of the reference is seen."""
    return Harness("reference")
