"""The demo model through LLM: transformers' tokens, whatever the batch, the pool or the mesh."""

import json
import random
from pathlib import Path

import jsonschema
import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "model" / "goldens_smollm2" / "greedy.json").read_text()
)["items"]
FIELDS = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 64}
BLOCK_BYTES = 30 * 3 * 2 * 16 * 64 * 4
"""Layers x kv heads x (K, V) x block_size x head_dim x float32."""
MARGIN = 1e-3
"""Below this the reference's two best tokens are as good as equal."""


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m", kv_cache_memory_bytes=400 << 20, **FIELDS) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts():
    """Sixty-four prompts of 1 to 60 tokens; a third begin with the same words."""
    rng = random.Random(0)
    ids = [token for golden in GOLDENS for token in golden["prompt_token_ids"]]
    shared = ids[200:240]
    made = []
    for i in range(64):
        start = rng.randrange(len(ids) - 60)
        prompt = ids[start : start + rng.randint(1, 60)]
        made.append((shared + prompt)[:60] if i % 3 == 0 else prompt)
    return made


def check_against_goldens(llm, goldens):
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)
    prompts = [golden["prompt_token_ids"] for golden in goldens]
    compared = 0
    for golden, output in zip(goldens, llm.generate(prompts, params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        assert len(completion.token_ids) == len(golden["token_ids"]) == 64
        for i, (ours, theirs) in enumerate(
            zip(completion.token_ids, golden["token_ids"], strict=True)
        ):
            if golden["margins"][i] <= MARGIN and ours != theirs:
                break  # a tie went the other way: the texts part here
            assert ours == theirs, (golden["prompt"], i)
            logprob = completion.logprobs[i][ours].logprob
            assert logprob == pytest.approx(golden["logprobs"][i], abs=1e-3)
            compared += 1
    assert compared > 0.95 * 64 * len(goldens)


def test_greedy_tokens_and_logprobs_equal_transformers(llm):
    check_against_goldens(llm, GOLDENS)


def test_prompts_are_tokenised_as_the_goldens(llm):
    for golden in GOLDENS:
        if "messages" not in golden:
            assert llm.tokenizer.encode(golden["prompt"]) == golden["prompt_token_ids"]


def test_fault_12_prompt_logprobs_equal_transformers(llm):
    """What transformers generated, given as a prompt, in chunks and with the same in the cache."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    goldens = [GOLDENS[i] for i in (4, 30, 32)]
    prompts = [golden["prompt_token_ids"] + golden["token_ids"] for golden in goldens]
    assert all(len(prompt) > FIELDS["max_num_batched_tokens"] for prompt in prompts)
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for golden, output in zip(goldens, outputs, strict=True):
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        scored = zip(golden["token_ids"], output.prompt_logprobs[-64:], strict=True)
        ours = [candidates[token].logprob for token, candidates in scored]
        assert ours == pytest.approx(golden["logprobs"], abs=1e-3)


def test_three_devices_equal_transformers():
    fields = FIELDS | {"max_num_batched_tokens": 16, "kv_cache_memory_bytes": 100 << 20}
    with LLM("smollm2-135m", tensor_parallel_size=3, **fields) as llm:
        check_against_goldens(llm, GOLDENS[:8])


def test_fault_5_batch_pool_and_cache_change_nothing(llm, prompts):
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def tokens(outputs):
        return [output.outputs[0].token_ids for output in outputs]

    assert llm.reset_prefix_cache()
    together = tokens(llm.generate(prompts, greedy, use_tqdm=False))
    hits = llm.stats().prefix_cache.num_hit_tokens
    assert tokens(llm.generate(prompts, greedy, use_tqdm=False)) == together, "warm cache"
    assert llm.stats().prefix_cache.num_hit_tokens > hits
    assert llm.reset_prefix_cache()
    alone = [tokens(llm.generate(ids, greedy, use_tqdm=False))[0] for ids in prompts]
    assert alone == together

    order = random.Random(1).sample(range(64), 64)
    fields = FIELDS | {"max_model_len": 256, "kv_cache_memory_bytes": 40 * BLOCK_BYTES}
    with LLM("smollm2-135m", **fields) as small:
        outputs = small.generate([prompts[i] for i in order], greedy, use_tqdm=False)
        assert small.stats().num_preemptions > 0
        assert small.stats().kv_usage == 0
    assert tokens(outputs) == [together[i] for i in order]


def test_fault_2_five_hundred_mixed_requests_compile_nothing(llm, compilations):
    rng = random.Random(2)
    ids = [token for golden in GOLDENS for token in golden["prompt_token_ids"]]
    prompts, params = [], []
    for i in range(500):
        start = rng.randrange(len(ids) - 40)
        prompts.append(ids[start : start + rng.randint(1, 40)])
        params.append(
            SamplingParams(
                max_tokens=rng.randint(1, 12),
                temperature=i % 2,
                top_p=0.9,
                frequency_penalty=0.1 * (i % 5 == 0),
                logprobs=2 if i % 7 == 0 else None,
            )
        )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert compilations == []
    assert all(output.finished for output in outputs)
    assert llm.stats().kv_usage == 0


def test_a_chat_about_france(llm):
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=32),
        use_tqdm=False,
    )
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "population": {"type": "integer", "minimum": 1, "maximum": 99999999},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "integer", "maximum": 999, "minimum": 0}, {"type": "null"}]},
    {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "next": {"$ref": "#/$defs/n"}},
        "required": ["day", "next"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    },
]


def test_answers_that_schemas_validate(llm):
    params = [
        SamplingParams(
            temperature=0.8,
            seed=seed,
            max_tokens=100,
            structured_outputs=StructuredOutputsParams(json=schema, whitespace_pattern=" ?"),
        )
        for seed, schema in enumerate(SCHEMAS * 2)
    ]
    outputs = llm.generate(["Some data as JSON: "] * len(params), params, use_tqdm=False)
    for output, schema in zip(outputs, SCHEMAS * 2, strict=True):
        assert output.outputs[0].finish_reason == "stop", output.outputs[0].text
        jsonschema.validate(json.loads(output.outputs[0].text), schema)


def test_a_text_stops_before_its_stop_string(llm):
    (output,) = llm.generate(
        "The capital of France is",
        SamplingParams(temperature=0, max_tokens=32, stop=["The Paris", "\n\n"]),
        use_tqdm=False,
    )
    completion = output.outputs[0]
    assert completion.text == " Paris."
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "\n\n")
