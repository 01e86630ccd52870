"""The one place that imports triton and jax-triton, which only GPU installs have."""

from importlib import metadata


def _found(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


try:
    # jax-triton 0.4 needs this name, new in triton 3.7. Without it its own import passes, and
    # only lowering fails, with a message about something else.
    import jax_triton
    import triton
    import triton.language as tl
    from triton.backends.nvidia.driver import TMA_TF32 as _TMA_TF32  # noqa: F401
except ImportError as error:
    raise ImportError(
        "impl='triton' needs jax-triton >= 0.4.1 and triton >= 3.7, but found "
        f"{_found('jax-triton')} and {_found('triton')}: pip install 'jaxserve[cuda13]'"
    ) from error

__all__ = ["jax_triton", "tl", "triton"]
