"""The demo model's tokenizer, and small ones of both supported kinds."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jaxserve.model.resolve import resolve_model
from jaxserve.text.tokenizer import Tokenizer

CORPUS = [
    "the cat sat on the mat, the end. Stop there",
    "naïve café déjà vu",
    "日本語の文字",
    "😀😁👩‍👧",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_folder(folder: Path, backend: Backend, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE, **config,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return folder


def byte_level_backend() -> Backend:
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken("<tool é>", normalized=False)])
    return backend


def sentencepiece_backend() -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted({char for text in CORPUS[:2] for char in text if char != " "})
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("n", "d"), ("t", "o")]
    pieces += [left + right for left, right in merges]
    backend = Backend(
        BPE(
            vocab={piece: id_ for id_, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_folder(tmp_path_factory.mktemp("byte_level"), byte_level_backend()))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_folder(tmp_path_factory.mktemp("sp"), sentencepiece_backend()))


@pytest.fixture(params=["demo", "byte_level", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A byte-level tokenizer's folder, to be changed at will."""
    return write_folder(tmp_path / "model", byte_level_backend())
