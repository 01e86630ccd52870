"""From the QKV projection to q and the cache in one pass: a program for each token and kv head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.triton_import import jax_triton, tl, triton


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
) -> tuple[Float[Array, "T K*G H"], Float[Array, "P K 2 S H"], Int32[Array, "T+1 K"]]:
    parts, num_tokens, num_kv_heads, group, head_dim = qkv.shape
    group -= 2
    heads = triton.next_power_of_2(group + 2)
    has_norms = q_norm is not None and k_norm is not None
    cache = jax.new_ref(kv_cache)
    # What is absent is never read; some array must stand in its place.
    q, counters = jax_triton.triton_call(
        qkv,
        qkv if bias is None else bias,
        q_norm if has_norms else cos,
        k_norm if has_norms else cos,
        cos,
        sin,
        kv_slots,
        cache,
        kernel=_rope_and_write_kv,
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, num_kv_heads * group, head_dim), kv_cache.dtype),
            jax.ShapeDtypeStruct((num_tokens + 1, num_kv_heads), jnp.int32),
        ),
        grid=(num_tokens, num_kv_heads),
        num_warps=1 if heads * head_dim <= 512 else 4,
        PARTS=parts,
        K=num_kv_heads,
        G=group,
        S=kv_cache.shape[3],
        HEADS=heads,
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        EPS=eps,
        HAS_BIAS=bias is not None,
        HAS_NORMS=has_norms,
    )
    return q, jax.freeze(cache), counters


@triton.jit
def _rope_and_write_kv(
    qkv,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    slots,
    cache,
    q,
    counters,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    kv_head = tl.program_id(1)
    operands = load_operands(
        bias, q_norm, k_norm, cos, sin, slots, token, head, kv_head,
        G, HALF, HALF_PAD, HAS_BIAS, HAS_NORMS,
    )  # fmt: skip
    turn_and_write(
        qkv, operands, cache, q, counters, token, tl.num_programs(0), head, kv_head,
        PARTS, K, G, S, HALF, HALF_PAD, EPS, HAS_BIAS, HAS_NORMS,
    )  # fmt: skip


@triton.jit
def load_operands(
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    slots,
    token,
    head,
    kv_head,
    G: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """What `turn_and_write` needs beside the projection."""
    pair = tl.arange(0, HALF_PAD)[None, :]
    in_half = pair < HALF
    slot = tl.load(slots + token)
    c = tl.load(cos + token * HALF + pair, mask=in_half)
    s = tl.load(sin + token * HALF + pair, mask=in_half)
    bias_first, bias_second = 0.0, 0.0
    if HAS_BIAS:
        place = bias + (kv_head * (G + 2) + head) * 2 * HALF + pair
        mask = (head < G + 2) & in_half
        bias_first = tl.load(place, mask=mask, other=0.0)
        bias_second = tl.load(place + HALF, mask=mask, other=0.0)
    norm_first, norm_second = 0.0, 0.0
    if HAS_NORMS:
        q_first = tl.load(q_norm + pair, mask=in_half)
        q_second = tl.load(q_norm + pair + HALF, mask=in_half)
        k_first = tl.load(k_norm + pair, mask=in_half)
        k_second = tl.load(k_norm + pair + HALF, mask=in_half)
        norm_first = tl.where(head < G, q_first, k_first)
        norm_second = tl.where(head < G, q_second, k_second)
    return slot, c, s, bias_first, bias_second, norm_first, norm_second


@triton.jit
def turn_and_write(
    qkv,
    operands,
    cache,
    q,
    counters,
    token,
    num_tokens,
    head,
    kv_head,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Heads [R, 1] of a token's kv head: its query heads, then its key and its value; others are
    left alone."""
    slot, c, s, bias_first, bias_second, norm_first, norm_second = operands
    H: tl.constexpr = 2 * HALF
    pair = tl.arange(0, HALF_PAD)[None, :]
    in_half = pair < HALF
    mask = (head < G + 2) & in_half

    # Past L1: each is read once, and maybe in the kernel that wrote it.
    part = qkv + ((token * K + kv_head) * (G + 2) + head) * H + pair
    first = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    second = tl.load(part + HALF, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    for _ in tl.static_range(PARTS - 1):
        part += tl.cast(num_tokens, tl.int64) * K * (G + 2) * H
        first += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        second += tl.load(part + HALF, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if HAS_BIAS:
        first += bias_first.to(tl.float32)
        second += bias_second.to(tl.float32)
    is_value = head == G + 1
    if HAS_NORMS:
        square = tl.sum(first * first + second * second, axis=1)[:, None] / H
        scale = tl.rsqrt(square + EPS)
        first *= tl.where(is_value, 1.0, scale * norm_first.to(tl.float32))
        second *= tl.where(is_value, 1.0, scale * norm_second.to(tl.float32))
    turned_first = tl.where(is_value, first, first * c - second * s)
    turned_second = tl.where(is_value, second, second * c + first * s)

    dtype: tl.constexpr = q.dtype.element_ty
    turned_first = turned_first.to(dtype)
    turned_second = turned_second.to(dtype)
    to_q = ((token * K + kv_head) * G + head) * H + pair
    tl.store(q + to_q, turned_first, mask=(head < G) & in_half)
    tl.store(q + to_q + HALF, turned_second, mask=(head < G) & in_half)
    page = (slot // S).to(tl.int64) * K + kv_head
    to_cache = ((page * 2 + head - G) * S + slot % S) * H + pair
    is_kv = (head >= G) & (head < G + 2)
    tl.store(cache + to_cache, turned_first, mask=is_kv & in_half)
    tl.store(cache + to_cache + HALF, turned_second, mask=is_kv & in_half)
    tl.store(counters + token * K + kv_head, 0)
    tl.store(counters + num_tokens * K + kv_head, 0, mask=token == 0)
