"""Tokenizers rebuilt from GGUF metadata, read back as a user of the folder reads them."""

import itertools
from functools import partial

import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxserve.model.errors import ModelError
from jaxserve.model.folders import make_folder
from jaxserve.model.gguf import convert_gguf


@pytest.fixture
def load(tmp_path, write_gguf):
    """The tokenizer of a model with this GGUF tokenizer metadata."""

    def load(metadata, **options):
        write_gguf(tmp_path / "m.gguf", tokenizer=metadata, **options)
        fill = partial(convert_gguf, tmp_path / "m.gguf")
        return AutoTokenizer.from_pretrained(make_folder(tmp_path / "model", fill))

    return load


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "hello 12345", ["hello", "Ġ", "123", "4", "5"]),
        ("smollm", "hello 12345", ["hello", "Ġ", "1", "2", "3", "4", "5"]),
        ("qwen2", "hello 12345", ["hello", "Ġ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "hello 12345123", ["hello", "Ġ", "123", "4", "5", "1", "2", "3"]),
        ("llama-bpe", "hello hello", ["hello", "Ġhello"]),
        # No merge makes it, but Llama 3 takes a word of its vocabulary whole.
        ("llama-bpe", "world", ["world"]),
        ("smollm", "world", ["w", "o", "r", "l", "d"]),
    ],
)
def test_text_is_split_as_the_model_was_trained(pre, text, pieces, load, byte_level_vocabulary):
    tokenizer = load({**byte_level_vocabulary, "pre": pre})
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


def test_missing_pre_tokenizer_means_gpt2(load, byte_level_vocabulary):
    assert load(byte_level_vocabulary).tokenize("12") == ["12"]


def test_unknown_pre_tokenizer_is_refused(load, byte_level_vocabulary):
    with pytest.raises(ModelError, match="'tekken' is not supported; supported are gpt-2, smollm"):
        load({**byte_level_vocabulary, "pre": "tekken"})


def test_qwen2_normalises_and_others_do_not(load, byte_level_vocabulary):
    decomposed = "e\u0301"
    tokenizer = load({**byte_level_vocabulary, "pre": "qwen2"})
    assert tokenizer.decode(tokenizer.encode(decomposed)) == "\u00e9"


def test_others_do_not_normalise(load, byte_level_vocabulary):
    tokenizer = load({**byte_level_vocabulary, "pre": "smollm"})
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "e\u0301"


def test_added_tokens_stay_whole(load, byte_level_vocabulary):
    tokenizer = load({**byte_level_vocabulary, "pre": "smollm"})
    ids = tokenizer.encode("<|bos|>hello<think>hello<|eos|>", add_special_tokens=False)
    expected = ["<|bos|>", "hello", "<think>", "hello", "<|eos|>"]
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert ids[0] == byte_level_vocabulary["bos_token_id"]
    # Control tokens are special, user-defined ones are text.
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<think>hello"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|eos|>")
    assert len(tokenizer) == len(byte_level_vocabulary["tokens"])


@pytest.mark.parametrize(
    ("options", "adds"),
    [
        ({"pre": "smollm"}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "smollm", "add_bos_token": True}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_bos_is_added_once_or_not(options, adds, load, byte_level_vocabulary):
    tokenizer = load({**byte_level_vocabulary, **options})
    bos = byte_level_vocabulary["bos_token_id"]
    assert tokenizer.encode("hello").count(bos) == int(adds)


def test_chat_template_is_kept(load, byte_level_vocabulary):
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    tokenizer = load({**byte_level_vocabulary, "pre": "smollm"}, chat_template=template)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hé"}], tokenize=False)
    assert text == "[user] hé\n"


@pytest.fixture(scope="session")
def sentencepiece():
    pieces = ["▁", "a", "b", "c", "d", "ab", "bc", "abc", "cd", "▁a", "▁ab", "abcd", "dd"]
    rng = np.random.default_rng(5)
    scores = [-float(rank) for rank in rng.permutation(len(pieces))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + scores,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def merge_by_score(text, tokens, scores):
    """SentencePiece's BPE by its definition: join the best-scoring neighbours, leftmost first."""
    score = dict(zip(tokens[259:], scores[259:], strict=True))
    pieces = list(text)
    while True:
        joins = [
            (-score[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in score
        ]
        if not joins:
            return pieces
        i = min(joins)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_sentencepiece_merges_by_score(load, sentencepiece):
    tokenizer = load(sentencepiece)
    rng = np.random.default_rng(6)
    for _ in range(300):
        text = "".join(rng.choice(list("aabbccdd "), rng.integers(1, 20)))
        expected = merge_by_score(
            "▁" + text.replace(" ", "▁"), sentencepiece["tokens"], sentencepiece["scores"]
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == expected, text


def test_sentencepiece_falls_back_to_bytes_and_back(load, sentencepiece):
    tokenizer = load(sentencepiece)
    ids = tokenizer.encode("ab é🎉 ab")
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert 3 + "é".encode()[0] in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab é🎉 ab"


def test_sentencepiece_without_space_prefix(load, sentencepiece):
    tokenizer = load({**sentencepiece, "add_space_prefix": False})
    assert "".join(tokenizer.tokenize("ab")) == "ab"


def test_sentencepiece_space_prefix_after_special_tokens(load, sentencepiece):
    tokenizer = load(sentencepiece)
    pieces = tokenizer.tokenize("<s>ab</s>ab")
    assert "".join(pieces) == "<s>▁ab</s>▁ab"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("merges"), "merges is missing"),
        (lambda m: m.pop("model"), "model is missing"),
        (lambda m: m.update(model="bert"), "'bert' is not supported; supported are gpt2, llama"),
        (lambda m: m.update(merges=["q zz"]), "vocabulary and merges disagree"),
        (lambda m: m.update(token_type=[1]), "have 1 token types"),
        (lambda m: m.update(bos_token_id=10**6), "bos_token_id 1000000 is outside"),
    ],
)
def test_bad_metadata_is_named(change, message, load, byte_level_vocabulary):
    metadata = {**byte_level_vocabulary, "pre": "smollm"}
    change(metadata)
    with pytest.raises(ModelError, match=message):
        load(metadata)
