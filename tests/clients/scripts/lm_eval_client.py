"""lm-eval's local-completions on a small task: the cities of `lm_eval/capitals.jsonl`."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # before the import

from harness import FIGURES, HERE, MODEL, MODEL_FOLDER, URL, run
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def check_capitals():
    os.chdir(HERE / "lm_eval")
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{URL}/v1/completions",
            "tokenizer": MODEL_FOLDER,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_retries": 1,
        },
        tasks=["capitals"],
        # Reading the thousands of tasks that lm-eval brings along takes minutes.
        task_manager=TaskManager(include_path=".", include_defaults=False),
    )
    FIGURES["acc"] = results["results"]["capitals"]["acc,none"]
    FIGURES["loglikelihoods"] = {
        sample["doc"]["country"]: [answer[0] for answer in sample["filtered_resps"]]
        for sample in results["samples"]["capitals"]
    }
    assert FIGURES["acc"] > 0.3


run(globals(), "lm_eval")
