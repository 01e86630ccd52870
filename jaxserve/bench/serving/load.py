"""Sends requests as they arrive, and keeps what became of them."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import aiohttp
import numpy as np
from tqdm.auto import tqdm

from jaxserve.bench.serving.client import Outcome, send


@dataclass(frozen=True)
class Load:
    """One run's outcomes, in the order of arrival."""

    outcomes: list[Outcome]
    duration_s: float
    """From the first arrival to the last answer."""
    client_busy: float
    """Share of that which this process spent computing."""


async def run_load(
    session: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[bytes],
    arrivals_s: np.ndarray,
    max_concurrency: int | None = None,
    *,
    show_progress: bool = False,
) -> Load:
    """Send each body at its time, or as soon after that as `max_concurrency` lets it."""
    gate = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    failed = 0
    begin, cpu_begin = time.perf_counter(), time.process_time()
    with tqdm(
        total=len(bodies), unit="request", disable=not show_progress, dynamic_ncols=True
    ) as progress:

        async def one(body: bytes) -> Outcome:
            nonlocal failed
            async with gate:
                outcome = await send(session, url, body)
            if outcome.error is not None:
                failed += 1
                progress.set_postfix_str(f"{failed} failed", refresh=False)
            progress.update()
            return outcome

        tasks = []
        async with asyncio.TaskGroup() as group:
            for body, arrival_s in zip(bodies, arrivals_s, strict=True):
                wait_s = begin + arrival_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(group.create_task(one(body)))
    duration_s = time.perf_counter() - begin
    busy = (time.process_time() - cpu_begin) / duration_s
    return Load([task.result() for task in tasks], duration_s, round(busy, 3))
