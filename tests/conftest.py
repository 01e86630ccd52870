"""Four CPU devices to shard over; the GPU suite (`-m gpu`) alone sees the GPU as well."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Before JAX is first imported, which reads both.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=4".strip()
    if not _runs_on_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name in ("gpu", "clients"):
            if name in item.keywords and config.option.markexpr.strip() != name:
                item.add_marker(pytest.mark.skip(reason=f"runs with -m {name}"))


def _runs_on_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr.strip() == "gpu"
