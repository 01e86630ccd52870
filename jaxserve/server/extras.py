"""What needs packages that a plain installation leaves out."""

import importlib
from types import ModuleType


def import_extra(module: str, option: str, extra: str) -> ModuleType:
    """The module, which imports packages of the optional dependencies `extra`. RuntimeError, in one
    line, if they are not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"{option} needs the package {error.name}: pip install 'jaxserve[{extra}]'"
        ) from error
