"""Grammars through LLM: every text fits its own, whatever it is batched with.

The model is random, so that nothing but the masks makes its texts fit; its tokens are single bytes.
"""

import contextlib
import json
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxserve import LLM, RequestErrors, SamplingParams, StructuredOutputsParams
from jaxserve.engine.grammar_masks import GrammarMasks

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        "n": {"type": "integer", "minimum": -50, "maximum": 50},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}
EOS = 257


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Four slots, and a pool for fewer: requests that run together preempt each other."""
    folder = tmp_path_factory.mktemp("bytes")
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 260, "max_position_embeddings": 128,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": EOS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    block_bytes = 2 * 8 * 16 * 4
    with LLM(
        str(folder), load_format="dummy", dtype="float32", max_num_seqs=4, max_num_batched_tokens=4,
        block_size=8, kv_cache_memory_bytes=21 * block_bytes, compilation_cache_dir="",
    ) as llm:  # fmt: skip
        yield llm


def params(structure, **fields):
    structure = StructuredOutputsParams(**structure)
    return SamplingParams(
        **{"max_tokens": 100, "seed": 1, "structured_outputs": structure} | fields
    )


def fits_schema(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FREE = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
MIXED = [
    (params({"json": SCHEMA, "disable_any_whitespace": True}), fits_schema),
    (FREE, lambda text: True),
    (params({"regex": "(ab|cd){5,20}"}), re.compile("(ab|cd){5,20}").fullmatch),
    (params({"choice": ["yes", "no", "ja😀"]}, temperature=0), {"yes", "no", "ja😀"}.__contains__),
    (
        params({"json": SCHEMA, "disable_any_whitespace": True}, seed=2, temperature=0),
        fits_schema,
    ),
    (
        params({"grammar": 'start: "(" start ")" | WORD\nWORD: /[x-z]{20,30}/'}),
        re.compile(r"\(*[x-z]{20,30}\)*").fullmatch,
    ),
    (SamplingParams(max_tokens=50, temperature=0, ignore_eos=True), lambda text: True),
    (params({"json": SCHEMA, "disable_any_whitespace": True}, seed=3), fits_schema),
]
PROMPT = "some words to begin with"


def texts(llm, many, prompt=PROMPT):
    outputs = llm.generate([prompt] * len(many), many, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def solo(llm):
    return [texts(llm, [one])[0] for one, _ in MIXED]


def test_each_fits_its_grammar(llm, solo):
    for text, (one, fits) in zip(solo, MIXED, strict=True):
        assert fits(text), (one, text)


def test_mixed_batches_preemption_and_prefix_cache_change_nothing(llm, solo, compilations):
    before = llm.stats()
    assert texts(llm, [one for one, _ in MIXED] * 2) == solo * 2
    after = llm.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.prefix_cache.num_hit_tokens > before.prefix_cache.num_hit_tokens
    assert after.kv_usage == 0
    assert compilations == []


def skip_newest(monkeypatch):
    monkeypatch.setattr(GrammarMasks, "_newest_tokens", lambda *args: [])


def change_masks(change):
    def plant(monkeypatch):
        fill = GrammarMasks.fill
        monkeypatch.setattr(
            GrammarMasks,
            "fill",
            lambda *args: None if (masks := fill(*args)) is None else change(masks),
        )

    return plant


def open_second_row(masks):
    masks[1:2] = -1
    return masks


def shift_one_token(masks):
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return np.packbits(np.roll(bits, 1, axis=1), axis=1, bitorder="little").view(np.int32)


FAULTS = {
    "matchers not advanced": skip_newest,
    "second row without a mask": change_masks(open_second_row),
    "masks shifted by one token": change_masks(shift_one_token),
    "masks of other rows": change_masks(lambda masks: np.roll(masks, 1, axis=0)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_show(llm, monkeypatch, solo, name):
    FAULTS[name](monkeypatch)
    constrained = [0, 2, 4, 5]
    with contextlib.suppress(RequestErrors):  # grammars that fail at a token show it as well
        assert texts(llm, [MIXED[i][0] for i in constrained]) != [solo[i] for i in constrained]


def test_n_answers(llm):
    one = params({"json": SCHEMA, "disable_any_whitespace": True}, n=3)
    (output,) = llm.generate(PROMPT, one, use_tqdm=False)
    answers = [answer.text for answer in output.outputs]
    assert all(map(fits_schema, answers))
    assert len(set(answers)) == 3


def answer(llm, structure, **fields):
    (output,) = llm.generate(PROMPT, params(structure, **fields), use_tqdm=False)
    return output.outputs[0]


def test_it_ends_where_the_grammar_ends(llm):
    short = answer(llm, {"regex": "[ab]{7}"})
    assert (len(short.text), short.finish_reason, short.stop_reason) == (7, "stop", None)
    assert short.token_ids[7:] == [EOS]
    cut = answer(llm, {"regex": "[ab]{7}"}, max_tokens=7)
    assert (cut.text, cut.finish_reason) == (short.text, "length")


@pytest.mark.parametrize("later", [{"min_tokens": 30}, {"ignore_eos": True}])
def test_the_end_is_put_off_as_far_as_the_grammar_allows(llm, later):
    # So many samples that one of them would end early, were it not held back.
    longer = answer(llm, {"regex": "[ab]{0,60}"}, logit_bias={EOS: 100}, **later)
    assert len(longer.text) == (30 if "min_tokens" in later else 60)
    assert re.fullmatch("[ab]*", longer.text)
    assert (longer.finish_reason, longer.token_ids[-1]) == ("stop", EOS)
    whole = answer(llm, {"choice": ["abc"]}, **later)
    assert (whole.text, whole.finish_reason) == ("abc", "stop")


def test_stop_strings_end_it_earlier(llm):
    cut = answer(llm, {"choice": ["one, two, three"]}, stop=["two"])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("one, ", "stop", "two")


def test_other_limits_hold_inside_the_grammar(llm):
    a, b = (llm.tokenizer.encode(char)[0] for char in "ab")
    pattern = {"regex": "[a-d]{9}"}
    assert answer(llm, pattern, allowed_token_ids=[a, EOS]).text == "a" * 9
    assert set(answer(llm, pattern, bad_words=["a", "b", "c"]).text) == {"d"}
    assert answer(llm, pattern, logit_bias={b: 100}).text == "b" * 9
    # Where they leave nothing, the grammar comes first.
    assert answer(llm, {"choice": ["abc"]}, allowed_token_ids=[a], bad_words=["b"]).text == "abc"


def test_logprobs_are_of_the_raw_distribution(llm):
    given = answer(llm, {"choice": ["abcd"]}, logprobs=1)
    prompt = llm.tokenizer.encode(PROMPT) + given.token_ids[:-1]
    scored = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    known = scored[0].prompt_logprobs[-4:]
    for token, ours, theirs in zip(given.token_ids, given.logprobs, known, strict=False):
        assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
        assert max(entry.logprob for entry in ours.values()) >= ours[token].logprob


def test_refused_grammars_do_not_stop_the_others(llm):
    good = params({"choice": ["yes"]})
    bad = params({"json": {"enum": []}})
    with pytest.raises(RequestErrors) as caught:
        llm.generate([PROMPT] * 3, [good, bad, good], use_tqdm=False)
    assert caught.value.errors == {
        1: "the JSON schema cannot be used: Unsatisfiable schema: anyOf is empty"
    }
    assert [output and output.outputs[0].text for output in caught.value.outputs] == [
        "yes", None, "yes",
    ]  # fmt: skip


def test_a_matcher_that_fails_ends_its_request_alone(llm, caplog):
    engine = llm.engine
    failing = engine.prepare(PROMPT, params({"choice": ["yes"]}))
    failing.states[0].matcher.consume_token(EOS)
    assert failing.states[0].matcher.is_error()
    other = engine.prepare(PROMPT, params({"choice": ["no"]}))
    outputs = {s.output.request_id: s.output for s in (failing, other)}
    for submission in (failing, other):
        engine.add(submission)
    while engine.has_unfinished:
        for delta in engine.step():
            outputs[delta.request_id].apply(delta)
    failed = failing.output.outputs[0]
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert failed.stop_reason.startswith("the grammar failed: ")
    assert other.output.outputs[0].text == "no"
    assert "grammar failed" in caplog.text
    assert llm.stats().kv_usage == 0


def test_aborted_midway(llm):
    engine = llm.engine
    submission = engine.prepare(PROMPT, params({"regex": "[ab]{90}"}))
    engine.add(submission)
    for _ in range(8):
        engine.step()
    (delta,) = engine.abort(submission.output.request_id)
    assert delta.finish_reason == "abort"
    while engine.has_unfinished:
        engine.step()
    assert answer(llm, {"choice": ["next"]}).text == "next"
    assert llm.stats().kv_usage == 0


def test_an_ambiguous_grammar_ends_alone(llm):
    """Sooner with more answers, as their masks are made in the same step."""
    ambiguous = {"grammar": 'start: start start | "a"'}
    good = params({"choice": ["yes"]})
    alone, several = (params(ambiguous, n=n, min_tokens=80, max_tokens=80) for n in (1, 8))
    with pytest.raises(RequestErrors) as caught:
        llm.generate([PROMPT] * 3, [good, several, alone], use_tqdm=False)
    (text,) = caught.value.errors.values()
    assert list(caught.value.errors) == [1]
    assert text.startswith("the grammar failed: ")
    assert [output and output.outputs[0].text for output in caught.value.outputs] == [
        "yes", None, "a" * 80,
    ]  # fmt: skip
    assert llm.stats().kv_usage == 0


def test_without_a_tokenizer(make_llm):
    with pytest.raises(RequestErrors, match="structured_outputs needs a tokenizer"):
        make_llm().generate([[5]], params({"regex": "a"}), use_tqdm=False)


def test_a_grammar_that_outgrows_its_limits(llm):
    """Its parser's states multiply with the text, so that only following it shows it."""
    (a,) = llm.tokenizer.encode("a")
    bad = params({"regex": "(.{0,1000}a){0,1000}b"}, logit_bias={a: 100})
    good = params({"choice": ["yes"]})
    with pytest.raises(RequestErrors, match="1 of 3 requests failed: request 1: ") as caught:
        llm.generate([PROMPT] * 3, [good, bad, good], use_tqdm=False)
    assert caught.value.errors[1].startswith("the grammar failed: ")
    assert "\n" not in caught.value.errors[1]
    assert [output and output.outputs[0].text for output in caught.value.outputs] == [
        "yes", None, "yes",
    ]  # fmt: skip
    assert llm.stats().kv_usage == 0
