"""Log-probabilities of answers and prompts through LLM."""

import pytest

from jaxserve import SamplingParams
from jaxserve.engine.logprobs import LOGPROBS_TILES


def test_logprobs_are_the_raw_distribution(llm, prompts):
    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    (output,) = llm.generate(prompts[2], params, use_tqdm=False)
    completion = output.outputs[0]
    assert len(completion.logprobs) == 5
    for token, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        assert candidates[token].rank == 1
        assert len(candidates) == 3
        assert max(c.logprob for c in candidates.values()) == candidates[token].logprob
    total = sum(
        c[t].logprob for t, c in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompts[2])


def test_fault_12_prompt_logprobs_whatever_chunks_and_cache(make_llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    chosen = [p for p in prompts if len(p) > 40][:4]

    def measure(llm):
        outputs = llm.generate(chosen, params, use_tqdm=False)
        return [[{} if c is None else c for c in o.prompt_logprobs] for o in outputs]

    # More positions in a step than one tile holds.
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": max(LOGPROBS_TILES) + 6}
    whole = measure(make_llm(**sizes, enable_prefix_caching=False))
    chunked = make_llm()
    for measured in (measure(chunked), measure(chunked)):
        for ours, theirs in zip(measured, whole, strict=True):
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs, strict=True):
                assert a.keys() == b.keys()
                for token in a:
                    assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)
                    assert a[token].rank == b[token].rank


def test_prompt_logprobs_agree_with_output_logprobs(llm, prompts):
    """A token that was generated and the same token given as prompt have the same probability."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    (first,) = llm.generate(prompts[4], params, use_tqdm=False)
    generated = first.outputs[0]
    whole = prompts[4] + generated.token_ids
    (second,) = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    for i, token in enumerate(generated.token_ids):
        again = second.prompt_logprobs[len(prompts[4]) + i][token]
        assert again.logprob == pytest.approx(generated.logprobs[i][token].logprob, abs=1e-4)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_prompt_of_one_token_has_nothing_to_score(llm, logprobs):
    params = SamplingParams(max_tokens=2, n=2, prompt_logprobs=0, logprobs=logprobs)
    (output,) = llm.generate([[5]], params, use_tqdm=False)
    assert output.prompt_logprobs == [None]
