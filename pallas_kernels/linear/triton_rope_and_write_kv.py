"""The QKV projection of a single token, with the rotation and the cache's update, in one kernel.

The last program to finish its share of a kv head's rows adds up their parts, turns them, and
writes q and the cache.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.linear.triton_kernel import multiply, tile_sizes
from pallas_kernels.linear.tuning import Tiling
from pallas_kernels.rope_and_write_kv.triton_kernel import load_operands, turn_and_write
from pallas_kernels.triton_import import jax_triton, tl, triton


def linear_rope_and_write_kv(
    x: Float[Array, "1 I"],
    weight: Float[Array, "K G+2 H I"],
    bias: Float[Array, "K G+2 H"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    cos: Float32[Array, "1 H//2"],
    sin: Float32[Array, "1 H//2"],
    kv_cache: Float[Array, "P K 2 S H"],
    kv_slots: Int32[Array, "1"],
    arrived: Int32[Array, "C"],
    *,
    eps: float,
    tiling: Tiling,
) -> tuple[
    Float[Array, "1 K*G H"], Float[Array, "P K 2 S H"], Int32[Array, "2 K"], Int32[Array, "C"]
]:
    """A tile's rows are of one kv head."""
    num_kv_heads, group, head_dim, _ = weight.shape
    group -= 2
    out_size = num_kv_heads * (group + 2) * head_dim
    has_norms = q_norm is not None and k_norm is not None
    cache, counters = jax.new_ref(kv_cache), jax.new_ref(arrived)
    # What is absent is never read; some array must stand in its place.
    q, attention_counters, _ = jax_triton.triton_call(
        x,
        weight,
        weight if bias is None else bias,
        q_norm if has_norms else cos,
        k_norm if has_norms else cos,
        cos,
        sin,
        kv_slots,
        cache,
        counters,
        kernel=_linear_rope_and_write_kv,
        out_type=(
            jax.ShapeDtypeStruct((1, num_kv_heads * group, head_dim), kv_cache.dtype),
            jax.ShapeDtypeStruct((2, num_kv_heads), jnp.int32),
            jax.ShapeDtypeStruct(
                (tiling.splits, out_size),
                jnp.float32 if tiling.splits > 1 else x.dtype,
            ),
        ),
        grid=(out_size // tiling.tile_out, tiling.splits),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        K=num_kv_heads,
        G=group,
        S=kv_cache.shape[3],
        I=x.shape[1],
        HEADS=triton.next_power_of_2(group + 2),
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        SPLITS=tiling.splits,
        EPS=eps,
        HAS_BIAS=bias is not None,
        HAS_NORMS=has_norms,
        **tile_sizes(x, tiling),
    )
    return q, jax.freeze(cache), attention_counters, jax.freeze(counters)


@triton.jit
def _linear_rope_and_write_kv(
    x,
    weight,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    slots,
    cache,
    arrived,
    q,
    counters,
    parts,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    SHARE: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`arrived` counts for each kv head the programs that have left their part of its rows."""
    HEAD_ROWS: tl.constexpr = (G + 2) * 2 * HALF
    HEAD_TILES: tl.constexpr = HEAD_ROWS // TILE_O
    tile = tl.program_id(0)
    token = tl.arange(0, TILE_T)
    row = tile * TILE_O + tl.arange(0, TILE_O)
    product = multiply(
        x, weight, 1, token, row, K * HEAD_ROWS, I, False, SHARE, TILE_T, TILE_O, TILE_I, PRECISION
    )
    part = tl.program_id(1) + token
    target = parts + part[:, None] * (K * HEAD_ROWS) + row[None, :]
    tl.store(target, product.to(parts.dtype.element_ty), mask=(token < 1)[:, None])
    kv_head = tile // HEAD_TILES
    head = tl.arange(0, HEADS)[:, None]
    # By each, so that the last need not wait for them.
    operands = load_operands(
        bias, q_norm, k_norm, cos, sin, slots, 0, head, kv_head,
        G, HALF, HALF_PAD, HAS_BIAS, HAS_NORMS,
    )  # fmt: skip
    tl.debug_barrier()  # The whole program's stores, before one thread announces them.
    if tl.atomic_add(arrived + kv_head, 1, sem="acq_rel") != HEAD_TILES * SPLITS - 1:
        return
    tl.store(arrived + kv_head, 0)
    turn_and_write(
        parts, operands, cache, q, counters, 0, 1, head, kv_head,
        SPLITS, K, G, S, HALF, HALF_PAD, EPS, HAS_BIAS, HAS_NORMS,
    )  # fmt: skip
