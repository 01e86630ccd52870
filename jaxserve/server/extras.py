"""What needs packages that a plain installation leaves out."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.server.tracing import Tracer


def import_extra(module: str, option: str, extra: str) -> ModuleType:
    """The module, which imports packages of the optional dependencies `extra`. RuntimeError, in one
    line, if they are not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{option} needs the package {error.name}: pip install 'jaxserve[{extra}]'"
        ) from error


def make_tracer(endpoint: str | None) -> "Tracer | None":
    """None without an endpoint. RuntimeError if the packages it needs are not installed."""
    if endpoint is None:
        return None
    return import_extra("jaxserve.server.tracing", "--otlp-endpoint", "otel").Tracer(endpoint)
