"""Clients that users have, unchanged, against a server. Run by `make clients`."""

import itertools
import json
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams

pytestmark = [pytest.mark.clients, pytest.mark.timeout(2400)]
TASK = Path(__file__).parent / "scripts" / "lm_eval" / "capitals.jsonl"


@pytest.mark.parametrize("environment", ["main", "clients"])
def test_openai(run_client, environment):
    """The newest, and the one that other clients hold back."""
    run_client("openai_client.py", environment, timeout_s=600)


@pytest.mark.parametrize(
    ("script", "timeout_s"),
    [
        ("openai_client.mjs", 600),
        ("ai_sdk_client.mjs", 600),
        ("litellm_client.py", 600),
        ("llm_client.py", 600),
        ("instructor_client.py", 600),
        ("langchain_client.py", 1800),
        ("schemathesis_client.py", 1800),
        ("aiperf_client.py", 600),
        ("metrics_client.py", 60),
    ],
)
def test_client(run_client, script, timeout_s):
    run_client(script, timeout_s=timeout_s)


def test_lm_eval_scores_as_the_library_does(run_client):
    figures = run_client("lm_eval_client.py", timeout_s=600)["figures"]
    docs = [json.loads(line) for line in TASK.read_text().splitlines()]
    with LLM("smollm2-135m", max_model_len=2048, max_num_batched_tokens=64) as llm:
        texts = [f"The capital of {d['country']} is" for d in docs]
        starts = [len(llm.tokenizer.encode(text)) for text in texts]
        prompts = [f"{t} {city}" for t, d in zip(texts, docs, strict=True) for city in d["cities"]]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = iter(llm.generate(prompts, params, use_tqdm=False))
    num_right = 0
    for doc, start in zip(docs, starts, strict=True):
        scores = []
        for output in itertools.islice(outputs, len(doc["cities"])):
            tokens = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
            scores.append(sum(entry[token].logprob for token, entry in tokens[start:]))
        assert figures["loglikelihoods"][doc["country"]] == pytest.approx(scores, abs=1e-3)
        num_right += scores.index(max(scores)) == doc["label"]
    assert figures["acc"] == num_right / len(docs)
