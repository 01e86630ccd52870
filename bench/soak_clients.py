"""The soak's clients: some behave, some leave, some ask for what cannot be."""

import asyncio
import collections
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from loopback import Exchange, Server, ask, events

MAX_MODEL_LEN = 256
MAX_REQUEST_BYTES = 100_000
PATIENCE_S = 300
"""A client that waits longer than this hangs."""
RETRY_S = 1
"""What the server asks for when its queue is full."""
SUBJECTS = (
    "the sea", "an old bridge", "two brothers", "prime numbers", "bread", "a long winter",
    "the first train", "clocks",
)  # fmt: skip
OPENINGS = ("Write about {}.", "Once upon a time, {}", "Question: what is {}?\nAnswer:")


def greedy_bodies() -> list[tuple[str, dict]]:
    """Requests whose answer is known once it was given alone."""
    bodies = []
    for i, subject in enumerate(SUBJECTS):
        for j, opening in enumerate(OPENINGS):
            body = {"temperature": 0, "max_tokens": 32 + 16 * ((i + j) % 4), "ignore_eos": j == 1}
            text = opening.format(subject)
            if j == 0:
                message = {"role": "user", "content": text}
                bodies.append(("/v1/chat/completions", body | {"messages": [message]}))
            else:
                bodies.append(("/v1/completions", body | {"prompt": text}))
    return bodies


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed_text(body: bytes) -> str:
    choices = [choice for event in events(body) for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


class Clients:
    """Clients of one server, and what they saw."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.address = server.address
        self.rng = random.Random(seed)
        self.bodies = greedy_bodies()
        self.solo: list[str] = []
        self.kinds: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self.num_compared = 0

    async def learn(self) -> None:
        """Every greedy request alone."""
        for path, body in self.bodies:
            status, answer = await ask(self.address, path, body)
            self.check(status == 200, f"{path} alone: {status}")
            self.solo.append(text_of(json.loads(answer)["choices"][0]))

    def check(self, condition: bool, failure: str) -> None:
        if not condition:
            self.failures.append(failure[:500])

    async def answered(self, path: str, body: Any, method: str = "POST") -> bytes | None:
        """The answer to a good request; None if the queue is full, which is documented."""
        status, answer = await ask(self.address, path, body, method)
        self.statuses[str(status)] += 1
        if status == 503 and b"the queue is full" in answer:
            await asyncio.sleep(RETRY_S)
            return None
        self.check(status == 200, f"status {status}: {answer[:300]!r}")
        return answer if status == 200 else None

    # Clients that behave.

    async def whole(self) -> None:
        i = self.rng.randrange(len(self.bodies))
        path, body = self.bodies[i]
        if answer := await self.answered(path, body):
            self.compare(i, text_of(json.loads(answer)["choices"][0]))

    async def stream(self) -> None:
        i = self.rng.randrange(len(self.bodies))
        path, body = self.bodies[i]
        if answer := await self.answered(path, body | {"stream": True}):
            self.compare(i, streamed_text(answer))

    async def several_prompts(self) -> None:
        """Those that differ in the prompt alone, in one request."""
        groups = collections.defaultdict(list)
        for i, (_, body) in enumerate(self.bodies):
            if "prompt" in body:
                groups[body["max_tokens"], body["ignore_eos"]].append(i)
        alike = self.rng.choice(list(groups.values()))[: self.rng.randrange(2, 5)]
        prompts = [self.bodies[i][1]["prompt"] for i in alike]
        body = self.bodies[alike[0]][1] | {"prompt": prompts, "n": 2}
        if answer := await self.answered("/v1/completions", body):
            for choice in json.loads(answer)["choices"]:
                self.compare(alike[choice["index"] // 2], choice["text"])

    def compare(self, i: int, text: str) -> None:
        self.num_compared += 1
        self.check(text == self.solo[i], f"request {i}: {text!r} instead of {self.solo[i]!r}")

    async def sampled(self) -> None:
        rng = self.rng
        extra = rng.choice(
            [
                {"n": 3, "top_p": 0.9, "logprobs": 2},
                {"stop": ["the", "\n"], "top_k": 20},
                {"echo": True, "logprobs": 3, "max_tokens": 8},
                {"prompt_logprobs": 1, "max_tokens": 4},
                {"presence_penalty": 1.0, "repetition_penalty": 1.2, "bad_words": [" the"]},
                {"logit_bias": {"42": 5.0}, "min_tokens": 5, "seed": rng.randrange(99)},
            ]
        )
        body = {"prompt": f"{rng.random()} {rng.choice(SUBJECTS)}", "max_tokens": 24} | extra
        await self.answered("/v1/completions", body)

    async def long_prompt(self) -> None:
        tokens = [self.rng.randrange(1000, 40_000) for _ in range(self.rng.randrange(150, 250))]
        body = {"prompt": tokens, "max_tokens": 100, "ignore_eos": True}
        await self.answered("/v1/completions", body)

    async def probe(self) -> None:
        path, method, body = self.rng.choice(
            [
                ("/health", "GET", b""),
                ("/metrics", "GET", b""),
                ("/load", "GET", b""),
                ("/v1/models", "GET", b""),
                ("/openapi.json", "GET", b""),
                ("/tokenize", "POST", {"prompt": "some words " * self.rng.randrange(1, 50)}),
                ("/detokenize", "POST", {"tokens": [self.rng.randrange(49152)] * 5}),
                ("/reset_prefix_cache", "POST", b""),
            ]
        )
        await self.answered(path, body, method)

    # Clients that leave.

    async def leave_midway(self) -> None:
        path, body = self.rng.choice(self.bodies)
        long = {"max_tokens": 120, "ignore_eos": True, "stream": True, "n": self.rng.choice([1, 2])}
        async with Exchange(self.address, path, body | long) as exchange:
            await exchange.send()
            data = b""
            for _ in range(self.rng.randrange(1, 12)):
                data += await exchange.read_some()
        first = data.split(b"\r\n", 1)[0]
        self.check(first[9:12] in (b"200", b"503"), f"a stream that was left: {first!r}")

    async def leave_before_the_answer(self) -> None:
        path, body = self.rng.choice(self.bodies)
        stream = self.rng.random() < 0.5
        async with Exchange(self.address, path, body | {"stream": stream}) as exchange:
            await exchange.send()
            await asyncio.sleep(self.rng.random() * 0.5)

    async def leave_within_the_request(self) -> None:
        path, body = self.rng.choice(self.bodies)
        async with Exchange(self.address, path, body) as exchange:
            await exchange.send(self.rng.randrange(len(exchange.request)))
            await asyncio.sleep(self.rng.random() * 0.2)

    # Clients that ask for what cannot be.

    async def impossible(self) -> None:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        text = {"prompt": "hi", "max_tokens": 4}
        path, body, status = self.rng.choice(
            [
                ("/v1/completions", b"{", 400),
                ("/v1/completions", self.rng.randbytes(300), 400),
                ("/v1/completions", b'{"prompt": ' + b"[" * 5000, 400),
                ("/v1/completions", {**text, "prompt": [[]]}, 400),
                ("/v1/completions", {**text, "prompt": "long " * 2000}, 400),
                ("/v1/completions", {**text, "prompt": [5] * MAX_MODEL_LEN}, 400),
                ("/v1/completions", {**text, "prompt": [10**6]}, 400),
                ("/v1/completions", {**text, "prompt": ["x"] * 1025}, 400),
                ("/v1/completions", {**text, "n": 10**6}, 400),
                ("/v1/completions", {**text, "temperature": "hot"}, 400),
                ("/v1/completions", {**text, "logit_bias": {"999999": 1}}, 400),
                ("/v1/completions", {**text, "stop_token_ids": [2**31]}, 400),
                ("/v1/completions", {**text, "logprobs": 500}, 400),
                ("/v1/completions", {**text, "model": "another"}, 404),
                ("/v1/completions", {**text, "prompt": "x" * MAX_REQUEST_BYTES}, 413),
                ("/v1/chat/completions", {**chat, "messages": []}, 400),
                ("/v1/chat/completions", {**chat, "top_logprobs": 3}, 400),
                ("/v1/nothing", text, 404),
                ("/detokenize", {"tokens": [49152]}, 400),
            ]
        )
        got, answer = await ask(self.address, path, body)
        self.statuses[str(got)] += 1
        self.check(got == status, f"{path} {str(body)[:80]}: {got} instead of {status}")
        self.check("error" in json.loads(answer), f"{path}: no error in {answer[:100]!r}")

    async def no_http(self) -> None:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(self.rng.choice([b"\x16\x03\x01\x02", b"GARBAGE\r\n\r\n", b"\x00" * 5000]))
        await writer.drain()
        # A TLS greeting looks like the beginning of a line: no answer comes.
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(1000), 1)
        writer.transport.abort()

    # All of them.

    def behaviours(self) -> dict[Callable[[], Awaitable[None]], int]:
        return {
            self.whole: 8,
            self.stream: 12,
            self.several_prompts: 3,
            self.sampled: 6,
            self.long_prompt: 2,
            self.probe: 6,
            self.leave_midway: 6,
            self.leave_before_the_answer: 4,
            self.leave_within_the_request: 2,
            self.impossible: 10,
            self.no_http: 2,
        }

    async def _client(self, until_s: float) -> None:
        behaviours = self.behaviours()
        while time.monotonic() < until_s and self.server.process.poll() is None:
            (behave,) = self.rng.choices(list(behaviours), list(behaviours.values()))
            self.kinds[behave.__name__] += 1
            try:
                await asyncio.wait_for(behave(), PATIENCE_S)
            except TimeoutError:
                self.failures.append(f"{behave.__name__}: no end after {PATIENCE_S} s")
            except (OSError, ValueError, LookupError, asyncio.IncompleteReadError) as error:
                self.failures.append(f"{behave.__name__}: {type(error).__name__}: {error}")

    async def run(self, num_clients: int, until_s: float) -> None:
        """So many at a time, each doing one thing after the other."""
        await asyncio.gather(*(self._client(until_s) for _ in range(num_clients)))
