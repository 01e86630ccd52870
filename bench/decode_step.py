"""Time of one decode step by batch size, on random weights, with a check of the logits first.

    python bench/decode_step.py --model MODEL_FOLDER --batch 1 32 256 --output out.json

Every request has a prompt of `--prompt-len` random tokens and goes on without an end token, so that
contexts are alike. A step's time is the wall time of a run of steps in which every row decodes,
over their number. Each batch size is timed twice.
"""

import argparse
import os
import random
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from environment import describe, write_result

from jaxserve import SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine.batch_builder import BatchBuilder
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.engine import Engine
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.model.definition import ModelDefinition
from scheduler import Request, Scheduler, SchedulerConfig

SAMPLED = {
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 50,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
}
TOLERANCE = 4e-2
"""Of the logits in bfloat16: norm of the difference over the norm."""


def check_logits(engine: Engine) -> float:
    """The largest error of a prefill and three decode steps against plain JAX, same weights."""
    config = engine.model_config
    parts = engine._parts
    mesh = parts.replicated.mesh
    num_rows, size = 8, engine.config.block_size
    impl = "triton" if jax.default_backend() == "gpu" else "reference"
    packed, rng = [], random.Random(0)
    scheduler = Scheduler(SchedulerConfig(200, size, num_rows, 512, 512))
    states = {}
    for i in range(num_rows):
        ids = [rng.randrange(config.vocab_size) for _ in range(20 + 11 * i)]
        submission = engine.prepare(ids, SamplingParams(temperature=0, max_tokens=8), str(i))
        states[str(i)] = submission.states[0]
        scheduler.add(Request(str(i), ids, max_tokens=8))
    builder = BatchBuilder(num_rows, 32)
    for step in range(4):
        output = scheduler.schedule()
        num_tokens = 512 if step == 0 else num_rows
        layout = BatchLayout(Bucket(num_tokens, num_rows), 32, size)
        packed.append((layout, builder.build(output, states, layout)))
        scheduler.update(output, [7] * num_rows)

    def logits(impl: str) -> list[np.ndarray]:
        definition = ModelDefinition.create(
            config,
            tensor_parallel_size=1,
            dtype=parts.definition.dtype,
            attention_impl=impl,
        )
        caches = definition.init_kv_caches(200, size, mesh)

        def forward(layout, params, caches, packed):
            batch = layout.unpack(packed)
            model = definition.bind(params)
            token_ids = jnp.where(batch.token_ids < 0, 7, batch.token_ids)
            hidden, caches = model(token_ids, caches, batch.attention)
            return caches, model.logits(hidden[batch.last_tokens])

        results = []
        for layout, host in packed:
            step = jax.jit(
                jax.shard_map(
                    lambda *args, layout=layout: forward(layout, *args),
                    mesh=mesh,
                    in_specs=jax.sharding.PartitionSpec(),
                    out_specs=jax.sharding.PartitionSpec(),
                    check_vma=False,
                ),
                donate_argnums=1,
            )
            caches, out = step(parts.params, caches, host)
            results.append(np.asarray(out, np.float64))
        return results

    pairs = zip(logits(impl), logits("reference"), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def run(engine: Engine, batch: int, prompt_len: int, num_tokens: int, params: dict) -> float:
    """Milliseconds of one decode step."""
    rng = random.Random(batch)
    for i in range(batch):
        ids = [rng.randrange(engine.model_config.vocab_size) for _ in range(prompt_len)]
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=i, **params)
        engine.add(engine.prepare(ids, sampling))
    produced = dict.fromkeys(engine._states, 0)
    # All rows decode once every request has a few tokens.
    while min(produced.values()) < 16:
        engine.step()
        produced = {
            name: len(state.request.output_token_ids) for name, state in engine._states.items()
        }
    states = list(engine._states.values())
    num_before = sum(len(state.request.output_token_ids) for state in states)
    begin = time.perf_counter()
    while min(len(state.request.output_token_ids) for state in states) < num_tokens - 16:
        for _ in range(4):
            engine.step()
    seconds = time.perf_counter() - begin
    num_steps = (sum(len(s.request.output_token_ids) for s in states) - num_before) / batch
    while engine.has_unfinished:
        engine.step()
    return 1e3 * seconds / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt-len", type=int, default=704)
    parser.add_argument("--num-tokens", type=int, default=160)
    parser.add_argument("--num-scheduler-steps", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--cache", default=None)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    begin = time.perf_counter()
    engine = Engine(
        EngineConfig(
            model=args.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=args.max_num_seqs,
            num_scheduler_steps=args.num_scheduler_steps,
            enable_prefix_caching=False,
            compilation_cache_dir=args.cache,
        )
    )
    result = describe(threads=os.cpu_count() or 1) | {
        "benchmark": "decode_step",
        "gpu": jax.devices()[0].device_kind,
        "model": Path(args.model).name,
        "ready_s": round(time.perf_counter() - begin, 2),
        "startup_s": engine.startup_s,
        "temp_bytes": engine._parts.programs.temp_bytes,
        "num_blocks": engine.scheduler_config.num_blocks,
        "steps_per_dispatch": engine._parts.steps_per_dispatch,
        "several_steps_at": [b.num_rows for b in engine._parts.programs.decode_steps],
        "logits_error": check_logits(engine),
        "ms": {},
    }
    write_result(args.output, result)
    if not result["logits_error"] < TOLERANCE:
        raise SystemExit(f"the logits are off by {result['logits_error']:.3g}: nothing was timed")
    for name, params in (("greedy", {"temperature": 0}), ("sampled", SAMPLED)):
        if name == "sampled" and not args.sampled:
            continue
        for batch in args.batch:
            run(engine, batch, args.prompt_len, 64, params)
            times = [run(engine, batch, args.prompt_len, args.num_tokens, params) for _ in "ab"]
            spread = max(times) / min(times) - 1
            result["ms"][f"{name}-{batch}"] = {
                "passes": [round(t, 4) for t in times],
                "flagged": spread > 0.15,
            }
            write_result(args.output, result)
    engine.close()


if __name__ == "__main__":
    main()
