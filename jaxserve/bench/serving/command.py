"""`jaxserve bench serve`: from the flags to tables, files and the exit code."""

import json
import math
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from jaxserve.bench.environment import describe
from jaxserve.bench.serving.ceiling import measure_ceiling
from jaxserve.bench.serving.client import connection_error, error_text, make_session, send
from jaxserve.bench.serving.config import ServingBenchConfig
from jaxserve.bench.serving.load import run_load
from jaxserve.bench.serving.metrics import summarise, table
from jaxserve.bench.serving.requests import arrival_times, make_bodies, make_lengths

BUSY = 0.7
"""Share of a run that the client may spend computing and not be suspected."""


def run(config: ServingBenchConfig) -> int:
    """1 if any request has failed. Raises ValueError or OSError, in one line, if nothing ran."""
    return uvloop.run(_run(config))


async def _run(config: ServingBenchConfig) -> int:
    lengths = make_lengths(config)
    base_url = config.base_url.rstrip("/")
    url = base_url + config.endpoint
    async with make_session(_headers(config)) as session:
        model = config.model or await _first_model(session, base_url)
        bodies = make_bodies(config, model, lengths)
        await _warm_up(session, url, (bodies * config.num_warmups)[: config.num_warmups])
        about = describe() | _settings(config, model)
        runs = []
        for rate in config.rates:
            load = await run_load(
                session,
                url,
                bodies,
                arrival_times(len(bodies), rate, config.burstiness, config.seed),
                config.max_concurrency,
                show_progress=not config.disable_tqdm,
            )
            result = {"request_rate": "inf" if math.isinf(rate) else rate} | summarise(
                load, config.percentile_metrics.split(","), config.percentiles, config.bounds_ms
            )
            runs.append(result)
            print(table(result) + "\n", flush=True)
            for error, count in result["errors"].items():
                print(f"jaxserve: error: {count} failed: {error}", file=sys.stderr)
    ceiling = await measure_ceiling(max(run["max_concurrent_requests"] for run in runs))
    about["client_ceiling_tokens_per_s"] = round(ceiling, 1)
    print(f"{'The client itself can take (tokens/s)':<56}{ceiling:>14,.2f}")
    if max(run["client_busy"] for run in runs) > BUSY:
        print(
            f"jaxserve: warning: the client was busy over {BUSY:.0%} of the time, so it may have "
            "been the bottleneck: run several, or give it a machine of its own", file=sys.stderr,
        )  # fmt: skip
    _write(config, model, about, runs)
    return 1 if any(run["failed"] for run in runs) else 0


def _headers(config: ServingBenchConfig) -> dict[str, str]:
    key = config.api_key
    if config.api_key_file is not None:
        key = (Path(config.api_key_file).read_text().splitlines() or [""])[0].strip()
        if not key:
            raise ValueError(f"{config.api_key_file} begins with no key")
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """What the server lists; ValueError in one line where it cannot be asked."""
    try:
        async with session.get(f"{base_url}/v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise ValueError(
                    f"{base_url}/v1/models: HTTP {response.status}: {error_text(body)}"
                )
            return json.loads(body)["data"][0]["id"]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ValueError(f"cannot reach {base_url}: {connection_error(error)}") from error
    except (json.JSONDecodeError, LookupError, TypeError) as error:
        raise ValueError(f"{base_url}/v1/models lists no model: name it with --model") from error


async def _warm_up(session: aiohttp.ClientSession, url: str, bodies: list[bytes]) -> None:
    for body in bodies:
        outcome = await send(session, url, body)
        if outcome.error is not None:
            raise ValueError(f"a request to {url} before the first run failed: {outcome.error}")


def _settings(config: ServingBenchConfig, model: str) -> dict[str, Any]:
    return {
        "endpoint_type": "openai-chat" if config.is_chat else "openai",
        "model_id": model,
        "dataset_name": Path(config.dataset_name).name,
        "num_prompts": config.num_prompts,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        "ignore_eos": config.ignore_eos,
        "goodput": config.bounds_ms,
        "seed": config.seed,
    }


def _write(
    config: ServingBenchConfig, model: str, about: dict[str, Any], runs: list[dict[str, Any]]
) -> None:
    """One run is one flat object, as vLLM writes it; a sweep has its runs in a list."""
    if config.save_result or config.result_file is not None:
        moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        name = re.sub(r"[^\w.-]", "_", Path(model).name)
        path = Path(config.result_file or f"openai-{name}-{moment}.json")
        result = about | (runs[0] if len(runs) == 1 else {"sweep": runs})
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {path}")
    if config.plot is not None:
        from jaxserve.bench.serving.plot import plot_sweep

        plot_sweep(runs, Path(config.plot))
        print(f"plotted: {config.plot}")
