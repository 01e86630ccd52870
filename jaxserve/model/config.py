"""What a model is: the options of a Hugging Face config.json that bear on inference, checked.

`ModelConfig.from_hf` refuses every option that is not built, so that no model runs with other
mathematics than it was trained with.
"""

from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.model.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_NEUTRAL = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "num_experts": (),
    "num_local_experts": (),
}
"""Options that would change the mathematics, with the values that are built; None always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model's architecture. Raises ValueError naming the option and what is supported."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases of QKV and O, for the architectures that make them optional."""
    sliding_windows: tuple[int | None, ...]
    """Of each layer: how many of the newest tokens, itself included, a token sees; None: all."""
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    dtype: Literal["float32", "bfloat16", "float16"] | None
    """What the weights were stored in, where config.json tells."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"architecture {self.architecture!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.head_dim % 16:
            raise ValueError(f"head_dim must be a multiple of 16, got {self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"sliding_windows must name each of {self.num_layers} layers, "
                f"got {len(self.sliding_windows)}"
            )

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> "ModelConfig":
        """Read a config.json, as transformers 4 or 5 writes it."""
        architecture = _architecture(hf)
        for name, values in _NEUTRAL.items():
            _refuse_unless(name, hf.get(name), values)
        num_heads = _required(hf, "num_attention_heads")
        num_layers = _required(hf, "num_hidden_layers")
        hidden_size = _required(hf, "hidden_size")
        max_position_embeddings = _required(hf, "max_position_embeddings")
        theta, scaling = _read_rope(hf, max_position_embeddings)
        return cls(
            architecture=architecture,
            vocab_size=_required(hf, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(hf, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads") or num_heads,
            head_dim=hf.get("head_dim") or _default_head_dim(architecture, hidden_size, num_heads),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            attention_bias=hf.get("attention_bias") or False,
            sliding_windows=_read_windows(architecture, hf, num_layers),
            bos_token_ids=_token_ids(hf.get("bos_token_id")),
            eos_token_ids=_token_ids(hf.get("eos_token_id")),
            dtype=_read_dtype(hf),
        )


def _required(options: dict[str, Any], name: str) -> Any:
    if options.get(name) is None:
        raise ValueError(f"the model's config has no {name!r}")
    return options[name]


def _refuse_unless(name: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value is not None and value not in supported:
        allowed = " or ".join(repr(v) for v in supported or (None,))
        raise ValueError(f"{name}={value!r} is not supported; supported: {allowed}")


def _architecture(hf: dict[str, Any]) -> str:
    names = hf.get("architectures") or []
    if len(names) != 1:
        raise ValueError(
            f"the model's config must name one architecture, got {names!r}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return names[0]


def _default_head_dim(architecture: str, hidden_size: int, num_heads: int) -> int:
    if architecture == "Qwen3ForCausalLM":
        return 128
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads where head_dim is not given, "
            f"got {hidden_size} and {num_heads}"
        )
    return hidden_size // num_heads


def _read_rope(hf: dict[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling]:
    options = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in options.values()):
        raise ValueError(
            f"rope_parameters of their own for {', '.join(options)} are not supported; "
            f"supported: one set for all layers"
        )
    _refuse_unless("partial_rotary_factor", options.get("partial_rotary_factor"), (1.0,))
    theta = float(options.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
    kind = options.get("rope_type") or options.get("type") or "default"
    original_max = (
        hf.get("original_max_position_embeddings")
        or options.get("original_max_position_embeddings")
        or max_position_embeddings
    )
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearScaling(_required(options, "factor"))
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            low_to_high = (_required(options, name) for name in names)
            return theta, Llama3Scaling(*low_to_high, original_max)
        case "yarn":
            truncate = options.get("truncate")
            return theta, YarnScaling(
                factor=options.get("factor") or max_position_embeddings / original_max,
                original_max_position_embeddings=original_max,
                attention_factor=options.get("attention_factor"),
                beta_fast=options.get("beta_fast") or 32.0,
                beta_slow=options.get("beta_slow") or 1.0,
                mscale=options.get("mscale"),
                mscale_all_dim=options.get("mscale_all_dim"),
                truncate=True if truncate is None else truncate,
            )
    raise ValueError(
        f"rope_type={kind!r} is not supported; supported: default, linear, llama3, yarn"
    )


def _read_windows(architecture: str, hf: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = hf.get("sliding_window", 4096)  # transformers' own value where the key is missing
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if architecture == "LlamaForCausalLM" or not hf.get("use_sliding_window"):
        return (None,) * num_layers
    first = hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    for kind in kinds:
        _refuse_unless("layer_types", kind, ("full_attention", "sliding_attention"))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_dtype(hf: dict[str, Any]) -> Any:
    name = hf.get("dtype") or hf.get("torch_dtype")
    name = name.removeprefix("torch.") if name else None
    _refuse_unless("dtype", name, ("float32", "bfloat16", "float16"))
    return name
