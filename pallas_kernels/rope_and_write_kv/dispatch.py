"""The entry point of what lies between the QKV projection and attention."""

from typing import Literal

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.rope_and_write_kv import reference


def rope_and_write_kv(
    qkv: Float[Array, "parts T K G+2 H"],
    bias: Float[Array, "K G+2 H"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    cos: Float32[Array, "T H//2"],
    sin: Float32[Array, "T H//2"],
    kv_cache: Float[Array, "P K 2 S H"],
    kv_slots: Int32[Array, "T"],
    *,
    eps: float,
    impl: Literal["reference", "triton"],
) -> tuple[Float[Array, "T K*G H"], Float[Array, "P K 2 S H"], Int32[Array, "T+1 K"]]:
    """Make q, k and v of their projection, and write k and v into the paged cache.

    The projection comes in parts that are yet to be added up, and without its bias. Of each kv
    head it holds the G query heads, the key and the value. q's and k's heads are normed (root mean
    square with `eps`; both or neither) and turned (dimension i with i + H/2) in float32; q has the
    cache's dtype.

    Token t's key and value go to kv_slots[t] = block * S + offset. Only padding tokens may share a
    slot; theirs lie in block 0, which no request owns.

    Returns q, the updated cache, and zeros for `paged_attention` to count with; when the caller
    donates `kv_cache` it is updated in place. `impl`: "reference" is plain JAX; "triton" reads and
    writes each element once, on an NVIDIA GPU. Raises ValueError for another `impl` and for shapes
    that disagree.
    """
    _check(qkv, kv_cache, kv_slots)
    arrays = (qkv, bias, q_norm, k_norm, cos, sin, kv_cache, kv_slots)
    if impl == "reference":
        return reference.rope_and_write_kv(*arrays, eps=eps)
    if impl == "triton":
        # Imported here so that machines without a GPU need no triton.
        from pallas_kernels.rope_and_write_kv import triton_kernel

        return triton_kernel.rope_and_write_kv(*arrays, eps=eps)
    raise ValueError(f"impl={impl!r} is unknown: choose 'reference' or 'triton'")


def _check(qkv, kv_cache, kv_slots) -> None:
    _, num_tokens, num_kv_heads, _, head_dim = qkv.shape
    num_blocks, _, _, block_size, _ = kv_cache.shape
    cache_shape = (num_blocks, num_kv_heads, 2, block_size, head_dim)
    if kv_cache.shape != cache_shape or kv_slots.shape != (num_tokens,):
        raise ValueError(
            f"shapes disagree: qkv {qkv.shape}, kv_cache {kv_cache.shape}, kv_slots "
            f"{kv_slots.shape}; expected (parts, T, K, G + 2, H), (P, K, 2, S, H), (T,)"
        )
