"""`jaxserve generate` over the fake engine: inputs, flags, outputs, and what goes wrong."""

import json

import pytest

from jaxserve import SamplingParams, StructuredOutputsParams

MODEL = ("generate", "--model", "m")


def test_one_prompt(cli, engines):
    code, out, err = cli(*MODEL, "--prompt", "abc")
    assert (code, out) == (0, "cba\n")
    assert err.startswith("1 requests, 3 prompt tokens, 3 output tokens in ")
    assert err.endswith(" output tokens/s\n")
    assert engines[0].closed
    assert engines[0].calls == [(["abc"], [SamplingParams()], True)]


def test_quiet(cli, engines):
    assert cli(*MODEL, "--prompt", "abc", "--quiet") == (0, "cba\n", "")
    assert engines[0].calls[0][2] is False


def test_flags_become_fields(cli, engines):
    cli(
        *MODEL, "--prompt", "a", "--dtype", "float32", "--max-model-len", 64, "--block-size", 32,
        "--tensor-parallel-size", 2, "--no-enable-prefix-caching", "--gpu-memory-utilization", 0.5,
        "--temperature", 0.5, "--top-p", 0.9, "--top-k", -1, "--min-p", 0.1, "--max-tokens", 7,
        "--min-tokens", 2, "--n", 2, "--seed", 2**64 - 1, "--stop", "x", "y", "--stop", "z",
        "--stop-token-ids", 1, 2, "--ignore-eos", "--presence-penalty", -1.5,
        "--frequency-penalty", 1, "--repetition-penalty", 1.2, "--logprobs", 3,
        "--prompt-logprobs", 0, "--logit-bias", '{"5": -1.5}', "--allowed-token-ids", 5, 6,
        "--bad-words", "no", "--no-skip-special-tokens", "--include-stop-str-in-output",
        "--no-spaces-between-special-tokens", "--structured-outputs", '{"choice": ["a", "b"]}',
    )  # fmt: skip
    assert engines[0].model == "m"
    assert engines[0].fields == {
        "dtype": "float32", "max_model_len": 64, "block_size": 32, "tensor_parallel_size": 2,
        "enable_prefix_caching": False, "gpu_memory_utilization": 0.5,
    }  # fmt: skip
    assert engines[0].calls[0][1] == [
        SamplingParams(
            temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, max_tokens=7, min_tokens=2, n=2,
            seed=2**64 - 1, stop=["x", "y", "z"], stop_token_ids=[1, 2], ignore_eos=True,
            presence_penalty=-1.5, frequency_penalty=1, repetition_penalty=1.2, logprobs=3,
            prompt_logprobs=0, logit_bias={5: -1.5}, allowed_token_ids=[5, 6], bad_words=["no"],
            skip_special_tokens=False, include_stop_str_in_output=True,
            spaces_between_special_tokens=False,
            structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "max_tokens"),
    [((), None), (("--max-tokens", 9), 9), (("--max-tokens", "none"), None)],
)
def test_chat_runs_to_the_limit(cli, engines, flags, max_tokens):
    code, out, _ = cli(*MODEL, "--prompt", "hi", "--chat", *flags)
    assert (code, out) == (0, ";ih:u\n")
    assert engines[0].calls[0][1][0].max_tokens == max_tokens


def test_chat_template(cli, tmp_path):
    (tmp_path / "t.jinja").write_text("XY")
    flags = ("--chat", "--chat-template", tmp_path / "t.jinja")
    assert cli(*MODEL, "--prompt", "hi", *flags)[1] == "YX;ih:u\n"


LINES = (
    {"prompt": "one"},
    {"messages": [{"role": "user", "content": "two"}]},
    "",
    {"prompt_token_ids": [65, 66]},
    {
        "prompt": "é😀",
        "sampling_params": {
            "n": 2,
            "logit_bias": {"3": 1},
            "max_tokens": 3,
            "structured_outputs": {"json": {}},
        },
    },
)


def test_prompts_file_as_text(cli, engines, prompts_file):
    code, out, _ = cli(*MODEL, "--prompts-file", prompts_file(*LINES), "--temperature", 0)
    assert code == 0
    assert out.splitlines() == ["[1] eno", "[2] ;owt:u", "[4] BA", "[5.1] 😀é", "[5.2] 😀é"]
    prompts, params, _ = engines[0].calls[0]
    assert prompts == ["one", [ord(c) for c in "u:two;"], [65, 66], "é😀"]
    assert params == [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, max_tokens=None),
        SamplingParams(temperature=0),
        SamplingParams(
            temperature=0,
            n=2,
            logit_bias={3: 1},
            max_tokens=3,
            structured_outputs=StructuredOutputsParams(json={}),
        ),
    ]


def test_prompts_file_with_chat(cli, prompts_file):
    path = prompts_file({"prompt": "a"}, {"prompt_token_ids": [65]})
    assert cli(*MODEL, "--prompts-file", path, "--chat")[1] == "[1] ;a:u\n[2] A\n"


def test_json(cli, prompts_file):
    path = prompts_file(*LINES)
    code, out, _ = cli(*MODEL, "--prompts-file", path, "--json", "--logprobs", 1)
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [(r["index"], r["line"], r["outputs"][0]["text"]) for r in records] == [
        (0, 1, "eno"), (1, 2, ";owt:u"), (2, 4, "BA"), (3, 5, "😀é"),
    ]  # fmt: skip
    assert records[0]["prompt"] == "one"
    assert records[1]["messages"] == LINES[1]["messages"]
    assert records[2]["prompt_token_ids"] == [65, 66]
    assert len(records[3]["outputs"]) == 2
    assert records[0]["outputs"][0] == {
        "index": 0,
        "text": "eno",
        "token_ids": [101, 110, 111],
        "finish_reason": "stop",
        "stop_reason": None,
        "cumulative_logprob": -0.5,
        "logprobs": [[{"token_id": 65, "logprob": -0.5, "rank": 1, "decoded_token": "A"}]],
    }


def test_json_of_prompt_logprobs(cli):
    _, out, _ = cli(*MODEL, "--prompt", "ab", "--json", "--logprobs", 1, "--prompt-logprobs", 1)
    first, second = json.loads(out)["prompt_logprobs"]
    assert first is None
    assert second == [{"token_id": 65, "logprob": -0.5, "rank": 1, "decoded_token": "A"}]


BAD_LINES = [
    ("not json", "not JSON: "),
    ([1], "must be a JSON object"),
    ({}, "must have one of prompt, messages, prompt_token_ids, got 0"),
    ({"prompt": "a", "messages": []}, "got 2"),
    ({"promt": "a"}, "unknown 'promt'"),
    ({"prompt": 5}, "prompt must be a string"),
    ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list of integers"),
    ({"prompt_token_ids": [1, "a"]}, "prompt_token_ids must be a list of integers"),
    ({"messages": [{"content": "a"}]}, "must have a 'role'"),
    ({"prompt": "a", "sampling_params": 5}, "sampling_params must be a JSON object"),
    ({"prompt": "a", "sampling_params": {"topp": 1}}, "sampling_params has no 'topp'"),
    ({"prompt": "a", "sampling_params": {"top_p": 2}}, "top_p must be"),
    ({"prompt": "a", "sampling_params": {"stop": 5}}, "stop must be"),
    ({"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias must have token"),
    ({"prompt": "a", "sampling_params": {"structured_outputs": 5}}, "structured_outputs must be"),
    ({"prompt": "a", "sampling_params": {"structured_outputs": {"re": 1}}}, "an object with json"),
    ({"prompt": "a", "sampling_params": {"structured_outputs": {}}}, "must have exactly one"),
    ({"prompt": "bad"}, "the prompt is bad"),
]


@pytest.mark.parametrize(("line", "error"), BAD_LINES)
def test_one_bad_line_loses_no_other(cli, prompts_file, line, error):
    path = prompts_file({"prompt": "one"}, line, {"prompt": "two"})
    code, out, err = cli(*MODEL, "--prompts-file", path, "--quiet")
    assert code == 1
    assert out.splitlines() == ["[1] eno", "[3] owt"]
    assert err.startswith(f"jaxserve: error: {path} line 2: ")
    assert error in err
    assert err.count("\n") == 1


def test_error_records_stand_in_their_place(cli, prompts_file):
    lines = [{"prompt": "one"}, *(line for line, _ in BAD_LINES), {"prompt": "two"}]
    code, out, err = cli(*MODEL, "--prompts-file", prompts_file(*lines), "--json", "--quiet")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [r["line"] for r in records] == list(range(1, len(lines) + 1))
    assert ["error" in r for r in records] == [False, *[True] * len(BAD_LINES), False]
    assert err.count("\n") == len(BAD_LINES)


def test_a_line_that_is_not_utf8_is_one_bad_line(cli, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n{"prompt": \xff}\n')
    code, out, err = cli(*MODEL, "--prompts-file", path, "--quiet")
    assert (code, out) == (1, "[1] eno\n")
    assert "line 2: not JSON" in err


def test_no_good_line_needs_no_engine(cli, engines, prompts_file):
    code, out, _ = cli(*MODEL, "--prompts-file", prompts_file("x", "y"), "--quiet")
    assert (code, out, engines) == (1, "", [])


@pytest.mark.parametrize("lines", [(), ("", " ")], ids=["empty", "blank"])
def test_a_file_without_requests(cli, engines, prompts_file, lines):
    path = prompts_file(*lines)
    error = f"jaxserve: error: --prompts-file {path} must hold at least one request\n"
    assert cli(*MODEL, "--prompts-file", path) == (2, "", error)
    assert engines == []


@pytest.mark.parametrize("flags", [(), ("--quiet",)])
def test_one_refused_prompt(cli, flags):
    assert cli(*MODEL, "--prompt", "bad", *flags) == (
        1, "", "jaxserve: error: the prompt is bad\n",
    )  # fmt: skip


def test_output_file(cli, prompts_file, tmp_path):
    target = tmp_path / "out.jsonl"
    code, out, _ = cli(*MODEL, "--prompts-file", prompts_file(*LINES), "--output-file", target)
    assert (code, out) == (0, "")
    assert len(target.read_text().splitlines()) == 4
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_an_interrupted_output_file_leaves_nothing(cli, tmp_path):
    code, _, _ = cli(*MODEL, "--prompt", "interrupt", "--output-file", tmp_path / "out.jsonl")
    assert code == 130
    assert list(tmp_path.iterdir()) == []


def test_an_output_file_that_cannot_be_written(cli, engines, tmp_path):
    for path in (tmp_path, tmp_path / "no" / "out"):
        code, out, err = cli(*MODEL, "--prompt", "a", "--output-file", path)
        assert (code, out) == (2, "")
        assert "must name a file in a folder that exists" in err
    assert engines == []


def test_messages_without_a_tokenizer(cli, prompts_file):
    path = prompts_file(LINES[1], {"prompt_token_ids": [65]})
    code, out, err = cli(*MODEL, "--prompts-file", path, "--skip-tokenizer-init", "--quiet")
    assert (code, out) == (1, "[2] A\n")
    assert "chat needs a tokenizer" in err
