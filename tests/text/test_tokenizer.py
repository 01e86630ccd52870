"""Encoding, decoding, chat templates, and what is refused."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer

from jaxserve.text.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox. It's  two  spaces , and\n\ttabs\r\n",
    "naïve café déjà vu",
    "日本語の文字、中文、한국어",
    "😀 👩‍👩‍👧‍👦 🇫🇷 e\u0301",
    " leading and trailing ",
    "def f(x):\n    return x  # comment .\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    shown = b"".join(tokenizer.shown_bytes(i, True) for i in ids).decode()
    assert shown.removeprefix(" " * tokenizer.drops_first_space) == text


@given(text=st.text(max_size=30))
@settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_decodes_as_transformers_does(tokenizer, text):
    ids = tokenizer.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == tokenizer._hf.decode(ids, skip_special_tokens=skip)


def test_encodes_as_transformers_does(folder):
    reference = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert Tokenizer(folder).encode(text) == reference(text)["input_ids"]


def test_bos_exactly_once(byte_level, sentencepiece):
    for tokenizer in (byte_level, sentencepiece):
        bos = tokenizer.bos_token_id
        assert tokenizer.encode("the cat").count(bos) == 1
        assert tokenizer.encode("<s>the cat").count(bos) == 1
        assert tokenizer.encode("<s>the cat")[0] == bos
        chat = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
        assert chat[0] == bos
        assert chat.count(bos) == 1


def test_the_demo_model_adds_no_bos(demo):
    assert demo.encode("The") == [504]
    assert demo.encode("<|im_start|>user") == [1, 4093]


def test_chat(demo):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert demo.render_chat(messages) == expected
    assert demo.decode(demo.encode_chat(messages), skip_special_tokens=False) == expected
    without = demo.render_chat(messages, add_generation_prompt=False)
    assert without + "<|im_start|>assistant\n" == expected
    assert demo.render_chat(messages, chat_template="{{ messages[1].content }}!") == "Hi!"


def test_chat_template_gets_tools_and_text_parts(byte_level):
    template = "{{ tools[0].name }}|{% for m in messages %}{{ m.content }}|{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    rendered = byte_level.render_chat(
        [{"role": "user", "content": parts}, call], tools=[{"name": "f"}], chat_template=template
    )
    assert rendered == "f|a\nb||"


def test_chat_template_gets_variables_but_not_the_calls_own(byte_level):
    messages = [{"role": "user", "content": "a"}]
    template = "{{ messages[0].content }}{{ color }}{{ bos_token }}"
    rendered = byte_level.render_chat(messages, chat_template=template, variables={"color": "red"})
    assert rendered == "ared<s>"
    for name in ("chat_template", "tools", "tokenize", "messages", "conversation", "self"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs must not set {name}"):
            byte_level.render_chat(messages, variables={"color": "red", name: "x"})
    deep = []
    for _ in range(10**5):
        deep = [deep]
    with pytest.raises(ValueError, match="cannot take the messages"):
        byte_level.render_chat(messages, variables={"color": deep})


def test_special_tokens_by_their_text(byte_level):
    assert byte_level.is_special("</s>")
    assert not any(map(byte_level.is_special, ("<tool é>", "a", "<think>")))


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "at least one message"),
        ("hello", "messages must be a list, got str"),
        ({"role": "user", "content": "a"}, "messages must be a list, got dict"),
        (["hello"], r"messages\[0\] must be a mapping"),
        ([{"content": "a"}], r"messages\[0\] must have a 'role'"),
        ([{"role": 3, "content": "a"}], r"messages\[0\] must have a 'role'"),
        ([{"role": "user"}], r"messages\[0\] must have a 'content'"),
        ([{"role": "user", "content": 5}], r"messages\[0\] must have a 'content'"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"\['content'\]\[0\] must be"),
        ([{"role": "user", "content": ["a"]}], r"\['content'\]\[0\] must be"),
    ],
)
def test_malformed_messages(byte_level, messages, error):
    with pytest.raises(ValueError, match=error):
        byte_level.encode_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{% if %}",
        "{{ messages[0].x + 'a' }}",
        "{{ 1 / (messages | length - 1) }}",
    ],
)
def test_a_template_that_fails(byte_level, template):
    error = r"^the chat template cannot take the messages: "
    with pytest.raises(ValueError, match=error) as caught:
        byte_level.encode_chat([{"role": "user", "content": "a"}], chat_template=template)
    assert "\n" not in str(caught.value)


def test_no_chat_template(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "a"}])


def test_eos_token_ids_come_from_three_files(folder):
    assert Tokenizer(folder).eos_token_ids == {2}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert Tokenizer(folder).eos_token_ids == {2, 5, 7, 9}


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 99]) == ""
    assert tokenizer.token_text(tokenizer.vocab_size) == ""


def test_token_text_keeps_spaces_and_special_tokens(byte_level, sentencepiece):
    for tokenizer in (byte_level, sentencepiece):
        texts = [tokenizer.token_text(i) for i in tokenizer.encode("the the")]
        assert texts[0] == "<s>"
        assert texts[-1] == " the"
        assert texts.count(" the") == 1 + tokenizer.drops_first_space
    tool = byte_level.encode("a<tool é>")[-1]
    assert byte_level.token_text(tool) == byte_level.decode([tool]) == "<tool é>"


def test_bad_words_are_banned_at_the_start_and_after_a_space(demo, sentencepiece):
    assert demo.encode_bad_word("the") == [demo.encode("the"), demo.encode(" the")]
    assert demo.encode_bad_word(" xyzzy") == [demo.encode("xyzzy"), demo.encode(" xyzzy")]
    assert len(sentencepiece.encode_bad_word("the")) == 1  # the space is a token of its own


def test_text_that_is_not_unicode(byte_level):
    messages = [{"role": "user", "content": "a\ud800"}]
    for encode in (byte_level.encode, byte_level.encode_bad_word):
        with pytest.raises(ValueError, match=r"not Unicode: character 1 is '\\ud800'"):
            encode("a\ud800")
    with pytest.raises(ValueError, match="not Unicode"):
        byte_level.encode_chat(messages)


def test_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"^no tokenizer in .*: none of tokenizer.json, "):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="cannot be loaded: ") as caught:
        Tokenizer(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder()]
)
def test_other_kinds_are_refused(folder, decoder):
    backend = Backend(BPE(vocab={"<s>": 0, "</s>": 1, "<unk>": 2}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"decoder .* is not supported; supported are byte-level"):
        Tokenizer(folder)


def test_loading_says_nothing(folder):
    """In particular, that PyTorch is missing is no news."""
    program = f"from jaxserve.text.tokenizer import Tokenizer; Tokenizer({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
