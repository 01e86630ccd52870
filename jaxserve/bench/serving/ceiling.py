"""How many tokens a second the client can take, so that nobody takes its limit for the server's."""

import json
import subprocess
import sys

import numpy as np

from jaxserve.bench.serving.client import make_session
from jaxserve.bench.serving.load import run_load

_NUM_EVENTS = 40_000
_MOST_STREAMS = 256


async def measure_ceiling(concurrency: int) -> float:
    """Events a second from a server that computes nothing, on this machine, with as many streams at
    once, but at most 256."""
    num_streams = min(concurrency, _MOST_STREAMS)
    command = [sys.executable, "-m", "jaxserve.bench.serving.fake_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1/completions"
            num_tokens = _NUM_EVENTS // num_streams
            body = json.dumps({"max_tokens": num_tokens}).encode()
            async with make_session({}) as session:
                # The first round opens the connections.
                short = json.dumps({"max_tokens": 1}).encode()
                arrivals = np.zeros(num_streams)
                await run_load(session, url, [short] * num_streams, arrivals)
                load = await run_load(session, url, [body] * num_streams, arrivals)
        finally:
            server.terminate()
    return num_streams * num_tokens / load.duration_s
