"""/v1/completions: the fake engine repeats the prompt, so every answer is known beforehand."""

import itertools

import pytest

BOS = "<|bos|>"
UNICODE = "é😀 漢字 hello"


def complete(server, **body):
    response = server.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    return response.json()


def by_index(events):
    """Choice index -> its chunks' choices."""
    found = {}
    for event in events:
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


def text_of(choices):
    return "".join(choice["text"] for choice in choices)


def test_an_answer_and_its_usage(fake):
    # <|bos|> is the output's first token, and is not shown.
    answer = complete(fake, model="fake", prompt="hello", max_tokens=5)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "hellohello",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 5, 7)


def test_sixteen_tokens_unless_asked(fake):
    assert complete(fake, prompt="ab")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "cd"], ["ab", "cd"]),
        ([10, 11], ["\x0a"]),
        ([[261, 71], [261, 72, 73]], ["hh", "ij"]),
    ],
    ids=["texts", "ids", "lists of ids"],
)
def test_prompts_of_every_kind(fake, prompt, texts):
    answer = complete(fake, prompt=prompt, max_tokens=4)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    many = isinstance(prompt[0], list | str)
    ids = prompt if many else [prompt]
    assert len(choices) == len(ids)
    if isinstance(prompt[0], str):
        assert [choice["text"] for choice in choices] == ["ab", "cd"]
    else:
        expected = [
            fake.post("/detokenize", tokens=(i * 4)[:4]).json()["prompt"].replace(BOS, "")
            for i in ids
        ]
        assert [choice["text"] for choice in choices] == expected


def test_fault_7_stream_equals_whole(fake, events):
    body = {"prompt": UNICODE, "max_tokens": 3 * 15}
    chunks = events(fake, "/v1/completions", **body)
    whole = complete(fake, **body)
    assert text_of(by_index(chunks)[0]) == whole["choices"][0]["text"]
    assert "\N{REPLACEMENT CHARACTER}" not in whole["choices"][0]["text"]
    reasons = [choice["finish_reason"] for choice in by_index(chunks)[0]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_fault_7_a_prompt_cut_within_a_character(fake, events):
    """The prompt ends with the first byte of a character, which the output completes."""
    first, *rest = fake.post("/tokenize", prompt="😀", add_special_tokens=False).json()["tokens"]
    body = {"prompt": [*rest, first], "max_tokens": 3 + 4 * 5}
    chunks = by_index(events(fake, "/v1/completions", **body))[0]
    assert text_of(chunks) == "😀" * 6
    assert complete(fake, **body)["choices"][0]["text"] == "😀" * 6


def test_usage_in_a_stream(fake, events):
    body = {"prompt": ["ab", "abcd"], "max_tokens": 7, "n": 2}
    *chunks, last = events(fake, "/v1/completions", **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 3 + 5
    assert last["usage"]["completion_tokens"] == 4 * 7

    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(fake, "/v1/completions", **body, stream_options=options)
    for index, prompt_tokens in enumerate((3, 3, 5, 5)):
        usages = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        assert {usage["prompt_tokens"] for usage in usages} == {prompt_tokens}
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 7
    assert last["usage"]["completion_tokens"] == 4 * 7


def test_fault_8_no_part_of_a_stop_string(fake, events):
    # "hel" is a false start of "helmet".
    body = {"prompt": "abc hel met helmet xyz", "max_tokens": 60, "stop": ["zebra", "helmet"]}
    for include in (False, True):
        chunks = by_index(
            events(fake, "/v1/completions", **body, include_stop_str_in_output=include)
        )[0]
        assert text_of(chunks) == "abc hel met " + ("helmet" if include else "")
        assert chunks[-1]["finish_reason"] == "stop"
        assert chunks[-1]["stop_reason"] == "helmet"
    whole = complete(fake, **body)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("abc hel met ", "stop")


def test_fault_8_a_false_start_is_flushed(fake, events):
    chunks = by_index(events(fake, "/v1/completions", prompt="ab", max_tokens=2, stop="abX"))[0]
    assert text_of(chunks) == "a"
    assert chunks[-1]["finish_reason"] == "length"


def test_stop_token_ids_and_end_of_sequence(fake):
    tokens = fake.post("/tokenize", prompt="abcd").json()["tokens"]
    choice = complete(fake, prompt="abcd", stop_token_ids=[tokens[3]])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "ab",
        "stop",
        tokens[3],
    )
    choice = complete(fake, prompt="ab<|eos|>cd", max_tokens=9)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", None)
    choice = complete(fake, prompt="ab<|eos|>cd", max_tokens=6, ignore_eos=True)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    choice = complete(fake, prompt="ab<|eos|>", max_tokens=6, min_tokens=5)["choices"][0]
    assert choice["text"] == "abab"[: len(choice["text"])]
    assert choice["finish_reason"] == "length"


def test_special_tokens_are_shown_if_asked(fake):
    choice = complete(fake, prompt="ab", max_tokens=3, skip_special_tokens=False)["choices"][0]
    assert choice["text"] == BOS + "ab"
    assert complete(fake, prompt="ab", max_tokens=3, add_special_tokens=False)["choices"][0][
        "text"
    ] == ("aba")


def check_offsets(logprobs, text):
    """Every token that is a whole text of its own stands where its offset says."""
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if token != BOS and "\N{REPLACEMENT CHARACTER}" not in token:
            assert text[offset : offset + len(token)] == token


def joined(choices):
    """The log-probabilities of all of a choice's chunks."""
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            found[name] += values
    return found


@pytest.mark.parametrize("prompt", ["hello there", UNICODE, [261, 71, 260, 72]])
@pytest.mark.parametrize("echo", [False, True])
def test_fault_13_text_offsets(fake, events, prompt, echo):
    body = {"prompt": prompt, "max_tokens": 30, "echo": echo, "logprobs": 2}
    whole = complete(fake, **body)["choices"][0]
    check_offsets(whole["logprobs"], whole["text"])
    assert len(whole["logprobs"]["tokens"]) == len(whole["logprobs"]["token_logprobs"])
    if echo:
        assert whole["logprobs"]["token_logprobs"][0] is None
        assert whole["logprobs"]["top_logprobs"][0] is None
        if isinstance(prompt, str):
            assert whole["text"].startswith(prompt)
    assert all(isinstance(x, float) for x in whole["logprobs"]["token_logprobs"][1:])
    assert all(1 <= len(top) <= 2 for top in whole["logprobs"]["top_logprobs"][1:])

    chunks = by_index(events(fake, "/v1/completions", **body))[0]
    assert text_of(chunks) == whole["text"]
    assert joined(chunks) == whole["logprobs"]
    assert chunks[-1]["finish_reason"] == "length"


def test_fault_13_two_answers_with_logprobs_streamed(fake, events):
    for echo in (False, True):
        body = {"prompt": "hello", "n": 2, "max_tokens": 9, "logprobs": 1, "echo": echo}
        chunks = by_index(events(fake, "/v1/completions", **body))
        whole = complete(fake, **body)["choices"]
        assert sorted(chunks) == [0, 1]
        for index, choices in chunks.items():
            assert text_of(choices) == whole[index]["text"]
            assert joined(choices) == whole[index]["logprobs"]
            assert [c["finish_reason"] for c in choices][-1] == "length"


def test_a_long_prompt_echoed_in_a_stream(fake, events):
    # Longer than a step's token budget: the prompt's log-probabilities come in parts.
    body = {"prompt": [71 + i % 20 for i in range(300)], "max_tokens": 3, "echo": True}
    chunks = by_index(events(fake, "/v1/completions", **body, logprobs=0, n=2))
    for choices in chunks.values():
        assert len(joined(choices)["tokens"]) == 303
        check_offsets(joined(choices), text_of(choices))


def test_scoring_without_an_answer(fake, events):
    body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = complete(fake, **body)
    choice = answer["choices"][0]
    assert choice["text"] == "hello"
    assert choice["logprobs"]["tokens"] == [BOS, "hello"]
    assert answer["usage"]["completion_tokens"] == 0
    chunks = by_index(events(fake, "/v1/completions", **body))[0]
    assert text_of(chunks) == "hello"
    assert joined(chunks) == choice["logprobs"]


def test_prompt_logprobs(fake):
    choice = complete(fake, prompt="hello", prompt_logprobs=2)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    (token, entry), other = second.items()
    assert entry["decoded_token"] == "hello"
    assert entry["rank"] == 1
    assert other[1]["rank"] == 2
    assert int(token) == fake.post("/tokenize", prompt="hello").json()["tokens"][1]


def test_many_at_once_are_not_mixed_up(fake):
    import concurrent.futures

    prompts = [f"{i} {chr(97 + i % 26)}" for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: complete(fake, prompt=p, max_tokens=40), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        repeated = "".join(itertools.islice(itertools.cycle(prompt), 60))
        assert repeated.startswith(answer["choices"][0]["text"])
        assert len(answer["choices"][0]["text"]) >= 30
    assert len({answer["id"] for answer in answers}) == len(answers)
