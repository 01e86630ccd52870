"""What a start costs when the same one has been done before."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import jax
from jaxserve import LLM

counts = {"hits": 0, "misses": 0}
def count(event, **kwargs):
    if event.startswith("/jax/compilation_cache/cache_"):
        counts[event.rpartition("_")[2]] += 1
jax.monitoring.register_event_listener(count)
with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    llm.generate([[3, 4, 5]], use_tqdm=False)
print(json.dumps(counts))
"""
FIELDS = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
FIELDS |= {"max_num_seqs": 2, "max_num_batched_tokens": 4, "kv_cache_memory_bytes": 1 << 20}


def start(folder, cache):
    """Compilation cache hits and misses of a process that starts an engine."""
    fields = json.dumps(FIELDS | {"compilation_cache_dir": str(cache)})
    command = [sys.executable, "-c", SCRIPT, str(folder), fields]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_fault_1_a_warm_start_compiles_nothing(tiny_folder, tmp_path):
    cold = start(tiny_folder, tmp_path)
    assert cold["misses"] > 3
    assert start(tiny_folder, tmp_path) == {"hits": cold["hits"] + cold["misses"], "misses": 0}
