"""The check that goes before timing: it passes for what is right, and fails for a wrong token."""

import pytest

from jaxserve import LLM
from jaxserve.bench.shapes import write_shape
from jaxserve.bench.workloads import make_requests

REQUESTS = make_requests([(3, 20), (5, 17), (1, 12)], 1024, seed=1)


@pytest.fixture
def check_logits(script, monkeypatch):
    module = script("bench", "check_logits")
    small = {"attention_impl": "reference", "max_num_seqs": 1, "max_num_batched_tokens": 1}
    monkeypatch.setattr(module, "REFERENCE", small)
    return module


@pytest.fixture
def fields(tmp_path):
    return {
        "model": str(write_shape("tiny", tmp_path)), "load_format": "dummy", "dtype": "float32",
        "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 32,
        "max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 8, "num_scheduler_steps": 8,
        "kv_cache_memory_bytes": 1 << 20, "compilation_cache_dir": "",
    }  # fmt: skip


def test_right_and_wrong_answers(check_logits, fields, monkeypatch):
    found = {}
    for name in ("single_steps", "several_steps"):
        run = getattr(check_logits, name)
        monkeypatch.setattr(
            check_logits, name, lambda *args, name=name, run=run: found.setdefault(name, run(*args))
        )
    result = check_logits.check(REQUESTS, fields)
    assert result["passed"], result
    assert (result["num_answers"], result["answers_that_differ"], result["max_lag"]) == (3, 0, 0)
    assert result["num_positions"] == sum(len(r.prompt_token_ids) + r.output_len - 1
                                          for r in REQUESTS)  # fmt: skip

    wrong = [list(ids) for ids in found["several_steps"]]
    wrong[1][9] = (wrong[1][9] + 1) % 1024
    monkeypatch.setattr(check_logits, "several_steps", lambda *args: wrong)
    result = check_logits.check(REQUESTS, fields)
    assert not result["passed"]
    assert result["answers_that_differ"] == 1
    assert result["max_lag"] > 0.1
    assert result["max_difference"] < 1e-3


def test_single_steps_are_no_comparison(check_logits, fields):
    with (
        LLM(**fields | {"num_scheduler_steps": 1}) as llm,
        pytest.raises(RuntimeError, match=r'pass --options .{"num_scheduler_steps": 4}'),
    ):
        check_logits.several_steps(llm, REQUESTS)


def test_up_to_the_first_difference(check_logits):
    parted = check_logits.up_to_first_difference
    assert parted([1, 2, 3, 4], [1, 2, 3, 4]) == []
    assert parted([1, 2, 3, 4], [1, 2, 5, 6]) == [[1, 2, 3], [1, 2, 5]]
