"""The document at /openapi.json: what the routes say, and what only the served model can."""

import copy
from typing import Any

from jaxserve.engine.messages import EngineInfo
from jaxserve.server.protocol.requests import MAX_SEED

_TOKEN_FIELDS = ("prompt", "tokens", "stop_token_ids", "allowed_token_ids")
_LOGPROB_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs")


def with_limits(document: dict[str, Any], info: EngineInfo) -> dict[str, Any]:
    """A copy whose request bodies have this model's vocabulary and this server's limits."""
    document = copy.deepcopy(document)
    maximum = dict.fromkeys(_TOKEN_FIELDS, info.vocab_size - 1)
    maximum |= dict.fromkeys(_LOGPROB_FIELDS, info.max_logprobs)
    maximum["seed"] = MAX_SEED  # FastAPI makes a float of it, which is more
    for name, schema in document["components"]["schemas"].items():
        if not name.endswith("Request"):
            continue
        for field, value in schema["properties"].items():
            if field in maximum:
                _limit_integers(value, maximum[field])
            if field == "priority" and info.scheduling_policy != "priority":
                integer = next(o for o in value["anyOf"] if o["type"] == "integer")
                integer["minimum"] = integer["maximum"] = 0
            if field == "logit_bias":
                keys = {"pattern": decimals_up_to(info.vocab_size - 1)}
                _mapping_of(value)["propertyNames"] = keys
    return document


def decimals_up_to(limit: int) -> str:
    """A regular expression of the integers from 0 to `limit`, without leading zeros."""
    digits = str(limit)
    parts = [r"0"]
    if len(digits) > 1:
        parts.append(rf"[1-9][0-9]{{0,{len(digits) - 2}}}")
    for i, digit in enumerate(digits):
        least = 1 if i == 0 else 0
        if int(digit) > least:
            rest = len(digits) - i - 1
            parts.append(rf"{digits[:i]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    parts.append(digits)
    return f"^({'|'.join(parts)})$"


def _limit_integers(schema: dict[str, Any], maximum: int) -> None:
    for option in schema.get("anyOf", [schema]):
        if option.get("type") == "integer":
            option["maximum"] = maximum
        elif "items" in option:
            _limit_integers(option["items"], maximum)


def _mapping_of(schema: dict[str, Any]) -> dict[str, Any]:
    return next(option for option in schema["anyOf"] if option.get("type") == "object")
