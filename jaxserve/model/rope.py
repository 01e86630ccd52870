"""Rotary position embedding (RoFormer, arXiv:2104.09864) and its extensions to long contexts.

Half rotation as in the Hugging Face checkpoints: dimension i turns with dimension i + H/2.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    """Multiplies cos and sin; None: follows from the factor and the two mscales."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Round the ends of the blend to whole dimensions."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | None


class RopeAngles(NamedTuple):
    """Of each flat token, for all layers of a step."""

    cos: Float32[Array, "T H//2"]
    sin: Float32[Array, "T H//2"]


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling
) -> tuple[np.ndarray, float]:
    """Radians a position of each pair of dimensions, float32 [H/2], and the factor of cos and sin.

    The operations are in float32 and in transformers' order, so that both round alike.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    match scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling():
            return frequencies / np.float32(scaling.factor), 1.0
        case Llama3Scaling():
            return _llama3(frequencies, scaling), 1.0
        case YarnScaling():
            return _yarn(frequencies, theta, scaling), _yarn_attention_factor(scaling)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.original_max_position_embeddings * frequencies / np.float32(2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
    return (kept * frequencies + (1 - kept) * frequencies / scaling.factor).astype(np.float32)


def _yarn(frequencies: np.ndarray, theta: float, scaling: YarnScaling) -> np.ndarray:
    pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / times
        return pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    span = high - low or 0.001
    stretched = np.clip((np.arange(pairs, dtype=np.float32) - low) / span, 0, 1)
    return (frequencies / scaling.factor * stretched + frequencies * (1 - stretched)).astype(
        np.float32
    )


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def rope_angles(
    positions: Int32[Array, "T"], head_dim: int, theta: float, scaling: RopeScaling
) -> RopeAngles:
    """Once a step: the rotation of every token."""
    frequencies, factor = inverse_frequencies(head_dim, theta, scaling)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return RopeAngles(jnp.cos(angles) * factor, jnp.sin(angles) * factor)
