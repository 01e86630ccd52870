"""What the server may be told."""

import math

import pytest

from jaxserve.server.config import ServerConfig


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("shutdown_timeout", (-1, math.nan, math.inf), "at least 0"),
        ("engine_stall_timeout", (0, -1, math.nan, math.inf), "over 0"),
    ],
)
def test_impossible_times(name, values, allowed):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name} must be {allowed}, got {value}$"):
            ServerConfig(**{name: value})


def test_no_time_to_shut_down():
    assert ServerConfig(shutdown_timeout=0).shutdown_timeout == 0
