"""Streams against a naive reading of the whole, and faults that the same check must notice."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxserve.sampling_params import SamplingParams
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.stop_strings import StopSearch

GREEDY = SamplingParams(max_tokens=None)
PROPERTY = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def cut_character(data: bytes) -> bytes:
    """The bytes at the end that begin a character and do not complete it; half a surrogate is
    only known to be none when its third byte is there."""
    if re.search(rb"\xed[\xa0-\xbf]$", data):
        return data[-2:]
    for length in (3, 2, 1):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return data[-length:]
    return b""


def whole_texts(tokenizer, prompt, output, skip_special_tokens) -> list[str]:
    """The text after 0, 1, 2... output tokens, each read anew; the last with its incomplete end."""
    before = b"".join(tokenizer.shown_bytes(t, skip_special_tokens) for t in prompt)
    cut = cut_character(before)
    texts = []
    for end in range(len(output) + 1):
        data = cut + b"".join(tokenizer.shown_bytes(t, skip_special_tokens) for t in output[:end])
        if end < len(output):
            data = data[: len(data) - len(cut_character(data))]
        text = data.decode(errors="replace")
        text = text.removeprefix(cut.decode(errors="replace"))
        drops = tokenizer.drops_first_space and not before and text.startswith(" ")
        texts.append(text[1:] if drops else text)
    return texts


def expected(tokenizer, prompt, output, params) -> tuple[str, str | None]:
    """Text and stop string, searching after each character that a token completes."""
    texts = whole_texts(tokenizer, prompt, output, params.skip_special_tokens)
    searched_from = len(texts[min(params.min_tokens, len(output))])
    whole = texts[-1]
    for end in range(searched_from + 1, len(whole) + 1):
        for stop in sorted(params.stop, key=len, reverse=True):
            if whole[searched_from:end].endswith(stop):
                kept = end if params.include_stop_str_in_output else end - len(stop)
                return whole[:kept], stop
    return whole, None


def check_stream(tokenizer, prompt, output, params, cuts=None, kind=IncrementalDetokenizer):
    """Returns the deltas of a stream after checking all that it promises."""
    cuts = range(1, len(output)) if cuts is None else cuts
    bounds = [0, *sorted({c for c in cuts if c < len(output)}), len(output)]
    detokenizer = kind(tokenizer, prompt, params)
    text, stop = expected(tokenizer, prompt, output, params)
    certain = whole_texts(tokenizer, prompt, output, params.skip_special_tokens)
    deltas = []
    for begin, end in itertools.pairwise(bounds):
        deltas.append(detokenizer.push(output[begin:end], finished=end == len(output)))
        so_far = "".join(deltas)
        assert text.startswith(so_far)
        held = text[len(so_far) :] if stop is None else ""
        if end < len(output) and stop is None:
            behind = len(certain[end]) - len(so_far)
            assert 0 <= behind < max(map(len, params.stop), default=1)
            assert behind == 0 or any(s.startswith(held[:behind]) for s in params.stop)
    assert ("".join(deltas), detokenizer.stop_string) == (text, stop)
    assert detokenizer.push(output[:1], finished=True) == "" or stop is None
    return deltas


TEXTS = ["Hello, naïve café!", "日本語の文字", "a😀b👩‍👩‍👧‍👦c🇫🇷", "  two  spaces ", "x\ufffdy"]


@pytest.mark.parametrize("text", TEXTS)
def test_fault_7_text_streams_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    deltas = check_stream(tokenizer, ids[:1], ids[1:], GREEDY)
    assert "\ufffd" in text or all("\ufffd" not in delta for delta in deltas)
    # as the library reads the whole
    first, whole = (tokenizer._hf.decode(i, skip_special_tokens=True) for i in (ids[:1], ids))
    assert first + "".join(deltas) == whole or "\ufffd" in first


@pytest.mark.parametrize("num_prompt_tokens", range(1, 12))
def test_fault_7_prompt_cut_within_a_character(tokenizer, num_prompt_tokens):
    """The character appears once, after the token that completes it, and nothing else does."""
    ids = tokenizer.encode("z👩‍👧 日本")
    prompt, output = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
    before = b"".join(tokenizer.shown_bytes(i, True) for i in prompt).decode(errors="ignore")
    whole = " " * tokenizer.drops_first_space + "z👩‍👧 日本"
    left = whole[len(before) :] if before else "z👩‍👧 日本"
    assert "".join(check_stream(tokenizer, prompt, output, GREEDY)) == left


def test_a_cut_prompt_that_is_not_completed_leaves_nothing(byte_level):
    face = [byte_level._backend.token_to_id(piece) for piece in "ðŁĺ"]  # three bytes of four
    assert None not in face
    plain = byte_level.encode("ok")[1:]
    assert "".join(check_stream(byte_level, face, plain, GREEDY)) == "ok"
    assert check_stream(byte_level, face, [], GREEDY) == [""]


def test_invalid_bytes_at_the_end_appear_when_finished(byte_level):
    face = [byte_level._backend.token_to_id(piece) for piece in "ðŁĺ"]
    ok = byte_level.encode("ok")
    assert check_stream(byte_level, ok, face, GREEDY) == ["", "", "\ufffd"]
    assert "".join(check_stream(byte_level, ok, face[:1] * 3, GREEDY)) == "\ufffd" * 3


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "left", "found"),
    [
        ("one two three", "two", "one ", "two"),
        ("one two three", ["three", "o t"], "one tw", "o t"),
        ("abcabcabd", "abcabd", "abc", "abcabd"),
        ("aaaaab", "aab", "aaa", "aab"),
        ("xabcdx", ["abcd", "bc"], "xa", "bc"),
        ("xabcx", ["bc", "abc"], "x", "abc"),
        ("the en", "the end", "the en", None),
        ("the endless end.", "end.", "the endless ", "end."),
        ("a😀b", "😀", "a", "😀"),
        ("stop at once", "stop", "", "stop"),
        ("日本語の文字", "語の", "日本", "語の"),
    ],
)
def test_fault_8_stop_strings(tokenizer, text, stop, left, found, include):
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    ids = tokenizer.encode("q") + tokenizer.encode(text)
    prompt_end = len(tokenizer.encode("q"))
    output = [i for i in ids[prompt_end:] if i != tokenizer.bos_token_id]
    deltas = check_stream(tokenizer, ids[:prompt_end], output, params)
    space = " " * tokenizer.drops_first_space
    assert "".join(deltas) == space + left + (found or "") * include
    assert expected(tokenizer, ids[:prompt_end], output, params)[1] == found


def test_a_false_start_is_held_and_then_flushed(demo):
    output = [demo.encode(word)[0] for word in ("the", " end", " of", " the", " end")]
    deltas = check_stream(demo, [504], output, SamplingParams(stop=" end."))
    assert deltas == ["the", "", " end of", " the", " end"]


def test_tokens_after_the_stop_string_do_not_count(demo):
    ids = demo.encode("one two three four five")
    detokenizer = IncrementalDetokenizer(demo, [504], SamplingParams(stop="three"))
    assert detokenizer.push(ids, finished=False) == "one two "
    assert detokenizer.num_tokens == 3


@pytest.mark.parametrize(("min_tokens", "left"), [(0, ""), (1, " two "), (2, " two "), (3, None)])
def test_min_tokens_suppress_stop_strings(demo, min_tokens, left):
    ids = demo.encode("one two one four")
    params = SamplingParams(stop="one", min_tokens=min_tokens)
    text = "".join(check_stream(demo, [504], ids, params))
    assert text == ("one two one four" if left is None else "one" * bool(left) + left)


def test_special_tokens(byte_level):
    ids = byte_level.encode("a b")[1:]
    output = [ids[0], 2, *ids[1:], 1]
    skipped = check_stream(byte_level, [1], output, GREEDY)
    assert "".join(skipped) == "a b"
    shown = check_stream(byte_level, [1], output, SamplingParams(skip_special_tokens=False))
    assert "".join(shown) == "a</s> b<s>"
    tool = byte_level.encode("<tool é>")[1:]
    assert check_stream(byte_level, [1], tool, GREEDY) == ["<tool é>"]


def test_first_space(sentencepiece):
    """It is the encoding's own only where the text begins with the output."""
    the = sentencepiece.encode("the")
    assert check_stream(sentencepiece, the[:1], the[1:], GREEDY) == ["the"]
    assert check_stream(sentencepiece, the, the[1:], GREEDY) == [" the"]


@st.composite
def streams(draw, tokenizer):
    words = [
        tokenizer.encode(t) for t in ("the end", "stop there", "naïve 😀", "日本語", "a b a b")
    ]
    token = st.integers(0, min(tokenizer.vocab_size, 400) + 2)
    part = st.one_of(st.lists(token, max_size=5), st.sampled_from(words))
    tokens = st.lists(part, max_size=5).map(lambda parts: list(itertools.chain(*parts)))
    stop = st.one_of(
        st.sampled_from(
            ["the", "the end", "end", "e", " b a", "語", "😀", "st", "op th", "\ufffd"]
        ),
        st.text("theaondbspr ", min_size=1, max_size=4),
    )
    params = SamplingParams(
        stop=draw(st.lists(stop, max_size=3)),
        include_stop_str_in_output=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 6)),
        skip_special_tokens=draw(st.booleans()),
    )
    output = draw(tokens)
    cuts = draw(st.none() | st.sets(st.integers(1, max(1, len(output)))))
    return draw(tokens), output, params, cuts


@given(data=st.data())
@PROPERTY
def test_any_stream(tokenizer, data):
    check_stream(tokenizer, *data.draw(streams(tokenizer)))


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
@PROPERTY
@example(pieces=["aab", "aab", "aaa"], stops=["aabaaa"])
def test_stop_search_is_blind_to_pieces(pieces, stops):
    whole = "".join(pieces)
    first = min((whole.find(s) + len(s) for s in stops if s in whole), default=None)
    search, seen = StopSearch(stops), ""
    for piece in pieces:
        if match := search.feed(piece):
            assert len(seen) + match.end == first
            found = [s for s in stops if whole[:first].endswith(s)]
            assert match.stop_string == max(found, key=len)
            return
        seen += piece
        assert search.num_open == max(
            n for s in stops for n in range(len(s)) if seen.endswith(s[:n])
        )
    assert first is None


class ByToken(IncrementalDetokenizer):
    """Each token decoded alone."""

    def _read(self, data, final=False):
        return data.decode(errors="replace")


class LeaksPrompt(IncrementalDetokenizer):
    def __init__(self, *args):
        super().__init__(*args)
        self._cut = ""


class ForgetsPrompt(IncrementalDetokenizer):
    def __init__(self, tokenizer, prompt, params):
        super().__init__(tokenizer, [], params)


class HoldsNothing(IncrementalDetokenizer):
    def _release(self, text):
        delta = super()._release(text)
        delta, self._held = delta + self._held, ""
        return delta


class NeverFlushes(IncrementalDetokenizer):
    def push(self, token_ids, finished):
        return super().push(token_ids, False)


class IgnoresMinTokens(IncrementalDetokenizer):
    def __init__(self, tokenizer, prompt, params):
        super().__init__(tokenizer, prompt, replace(params, min_tokens=0))


@pytest.mark.parametrize(
    "fault", [ByToken, LeaksPrompt, ForgetsPrompt, HoldsNothing, NeverFlushes, IgnoresMinTokens]
)
def test_planted_faults_fail(byte_level, sentencepiece, fault):
    stops = [
        SamplingParams(stop=["end.", "the"], min_tokens=1),
        SamplingParams(stop=["end en", "the"]),
        GREEDY,
    ]
    face = [byte_level._backend.token_to_id(piece) for piece in "ðŁĺ"]

    def cases(kind):
        for tokenizer in (byte_level, sentencepiece):
            ids = tokenizer.encode("the 😀 end en of en")
            for cut, params in itertools.product((1, 2, 3, 4, 5), stops):
                check_stream(tokenizer, ids[:cut], ids[cut:], params, kind=kind)
        check_stream(byte_level, face, byte_level.encode("ok the"), stops[0], kind=kind)

    cases(IncrementalDetokenizer)
    with pytest.raises(AssertionError):
        cases(fault)


def test_time_grows_with_the_tokens_only(demo, monkeypatch):
    """Every token's bytes are asked for once, and the prompt's only at its end."""
    asked = []
    shown_bytes = demo.shown_bytes
    monkeypatch.setattr(demo, "shown_bytes", lambda t, s: asked.append(t) or shown_bytes(t, s))
    ids = demo.encode("and so on ") * 100
    detokenizer = IncrementalDetokenizer(demo, ids, GREEDY)
    assert len(asked) <= 4
    asked.clear()
    for token in ids:
        detokenizer.push([token], finished=False)
    assert asked == ids
