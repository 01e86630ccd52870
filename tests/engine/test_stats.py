"""What an engine counts of its steps."""

from jaxserve import SamplingParams
from jaxserve.engine.stats import STEP_KINDS

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def num_gaps(stats):
    return sum(sum(histogram.counts) for histogram in stats.steps.host_gap_s.values())


def test_fault_18_a_step_is_launched_before_the_last_one_is_read(llm, prompts):
    """A gap is observed where a step is in flight at the launch: at each but the first."""
    before = llm.stats()
    llm.generate(prompts[:6], GREEDY, use_tqdm=False)
    after = llm.stats()
    num_steps = after.num_steps - before.num_steps
    assert num_steps > 24
    assert num_gaps(after) - num_gaps(before) == num_steps - 1


def test_steps_and_their_gaps_are_told_by_kind(make_llm):
    """A prompt of 40 tokens is read 16 at a time. Nothing is in flight at the first launch."""
    llm = make_llm(enable_prefix_caching=False)
    before = llm.stats().steps
    llm.generate(list(range(3, 43)), GREEDY, use_tqdm=False)
    after = llm.stats().steps
    counts = {
        kind: tuple(
            sum(figure(after)[kind].counts) - sum(figure(before)[kind].counts)
            for figure in (lambda steps: steps.step_time_s, lambda steps: steps.host_gap_s)
        )
        for kind in STEP_KINDS
    }
    assert counts == {"decode": (23, 23), "prefill": (3, 2), "mixed": (0, 0)}
