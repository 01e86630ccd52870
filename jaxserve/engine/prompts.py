"""Prompts as callers give them."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or a mapping with "prompt" or "prompt_token_ids"."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """(text, token ids) of a prompt; the text is None if ids came in."""
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        elif "prompt" in prompt:
            prompt = prompt["prompt"]
        else:
            raise ValueError(
                "a prompt given as a mapping needs 'prompt' or 'prompt_token_ids', got the "
                f"keys {sorted(map(str, prompt))}"
            )
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this engine has no tokenizer: give prompt token ids")
        if not prompt:
            raise ValueError("the prompt is empty")
        return prompt, tokenizer.encode(prompt)
    if not isinstance(prompt, Sequence | np.ndarray):
        raise ValueError(f"a prompt must be a string or token ids, got {type(prompt).__name__}")
    return None, list(prompt)


def check_prompt(ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """ValueError, in one line, if a model of that size cannot take the ids."""
    if len(ids) == 0:
        raise ValueError("the prompt is empty")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(f"prompt token ids must be integers, got {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt token id {token} is outside the vocabulary (0 to {vocab_size - 1})"
            )
    if len(ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but max_model_len={max_model_len} leaves "
            f"room for at most {max_model_len - 1} and one output token"
        )
