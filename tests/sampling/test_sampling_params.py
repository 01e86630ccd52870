"""Impossible values are refused, by name, with what is allowed."""

import math

import numpy as np
import pytest
from pydantic import BaseModel

from jaxserve.sampling_params import MAX_GRAMMAR_BYTES, SamplingParams, StructuredOutputsParams

REFUSED = {
    "n": (0, 129, 1.0, True, "2"),
    "temperature": (-0.1, 100.1, math.nan, math.inf, "hot", None),
    "top_p": (0, -1, 1.01, math.nan),
    "top_k": (-2, 2**31, 1.5),
    "min_p": (-0.1, 1.1),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "repetition_penalty": (0, -1, 101),
    "seed": (-1, 2**64, 0.5),
    "stop": ("", ["a", ""], [1], 5),
    "stop_token_ids": ([-1], ["a"], 5),
    "max_tokens": (0, -1, 1.5),
    "min_tokens": (-1, 17),
    "logprobs": (-1, 0.5),
    "prompt_logprobs": (-1,),
    "logit_bias": ({-1: 1.0}, {"a": 1.0}, {1: 101}, {1: math.nan}, [1]),
    "allowed_token_ids": ([], [-1]),
    "bad_words": ("word", [""], [1], 5),
    "structured_outputs": ("json", {"regex": "a"}),
}


def nested(depth):
    return {"items": nested(depth - 1)} if depth else {}


REFUSED_STRUCTURES = {
    "structured_outputs": ({}, {"regex": "a", "choice": ["b"]}, {"json_object": False}),
    "json": ({"json": "{"}, {"json": "[]"}, {"json": True}, {"json": {"const": math.nan}},
             {"json": {"const": {1}}}, {"json": nested(64)}, {"json": "[" * 10**5},
             {"json": '{"const": "\\ud800"}'}, {"json": "{" + " " * MAX_GRAMMAR_BYTES + "}"}),
    "regex": ({"regex": ""}, {"regex": 5}, {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)},
              {"regex": "\ud800"}),
    "choice": ({"choice": "yes"}, {"choice": []}, {"choice": [""]}, {"choice": [1]},
               {"choice": ["é" * 2**10] * 65}),
    "grammar": ({"grammar": ""}, {"grammar": ["start: A"]}),
    "json_object": ({"json_object": 1},),
    "disable_any_whitespace": ({"json": {}, "disable_any_whitespace": "yes"},
                               {"choice": ["a"], "disable_any_whitespace": True}),
    "whitespace_pattern": ({"json": {}, "whitespace_pattern": ""},
                           {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
                           {"regex": "a", "whitespace_pattern": " "}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in REFUSED.items() for v in vs])
def test_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be"):
        SamplingParams(**{name: value})


def test_accepted_limits():
    SamplingParams(
        n=128, temperature=100, top_p=1, top_k=-1, min_p=1, seed=2**64 - 1, max_tokens=None,
        min_tokens=10**6, presence_penalty=-2, frequency_penalty=2, logit_bias={0: -100, 5: 100},
    )  # fmt: skip
    numpy = SamplingParams(
        top_k=np.int64(3), temperature=np.float32(0.5), stop_token_ids=[np.int32(2)]
    )
    assert numpy.stop_token_ids == (2,)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=None).stop == ()


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy == greedy


@pytest.mark.parametrize(
    ("name", "fields"), [(n, f) for n, many in REFUSED_STRUCTURES.items() for f in many]
)
def test_refused_structures(name, fields):
    with pytest.raises(ValueError, match=rf"^{name} (must|and|needs)"):
        StructuredOutputsParams(**fields)


def test_a_pydantic_model_is_told_how_it_becomes_a_schema():
    class City(BaseModel):
        name: str

    with pytest.raises(ValueError, match=r"^json must be .*model_json_schema\(\)\), got <class "):
        StructuredOutputsParams(json=City)
    assert '"name"' in StructuredOutputsParams(json=City.model_json_schema()).json


def test_a_schema_is_kept_as_text_in_its_own_order():
    schema = {"properties": {"b": {}, "ä": {"enum": ["x y", 1]}}}
    params = StructuredOutputsParams(json=schema)
    assert params.json == '{"properties":{"b":{},"ä":{"enum":["x y",1]}}}'
    assert StructuredOutputsParams(json=params.json) == params
    assert StructuredOutputsParams(json=nested(63)).json is not None
    assert hash(StructuredOutputsParams(choice=["a", "b"])) != hash(params)
