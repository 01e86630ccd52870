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
) -> tuple[Float[Array, "T K*G H"], Float[Array, "P K 2 S H"], Int32[Array, "T K"]]:
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
            jax.ShapeDtypeStruct((num_tokens, num_kv_heads), jnp.int32),
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
    turn_and_write(
        qkv, bias, q_norm, k_norm, cos, sin, slots, cache, q, counters,
        tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, HEADS)[:, None],
        tl.program_id(1), PARTS, K, G, S, HALF, HALF_PAD, EPS, HAS_BIAS, HAS_NORMS,
    )  # fmt: skip


@triton.jit
def turn_and_write(
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
    """Heads [R, 1] of one kv head, all of one token or each of its own ([R, 1]): its query heads,
    then its key and its value; others are left alone."""
    H: tl.constexpr = 2 * HALF
    in_tokens = token < num_tokens
    slot = tl.load(slots + token, mask=in_tokens)
    pair = tl.arange(0, HALF_PAD)[None, :]
    in_half = (pair < HALF) & in_tokens
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
        place = (kv_head * (G + 2) + head) * H + pair
        first += tl.load(bias + place, mask=mask, other=0.0).to(tl.float32)
        second += tl.load(bias + place + HALF, mask=mask, other=0.0).to(tl.float32)
    is_value = head == G + 1
    if HAS_NORMS:
        square = tl.sum(first * first + second * second, axis=1)[:, None] / H
        scale = tl.rsqrt(square + EPS)
        q_first = tl.load(q_norm + pair, mask=pair < HALF).to(tl.float32)
        q_second = tl.load(q_norm + pair + HALF, mask=pair < HALF).to(tl.float32)
        k_first = tl.load(k_norm + pair, mask=pair < HALF).to(tl.float32)
        k_second = tl.load(k_norm + pair + HALF, mask=pair < HALF).to(tl.float32)
        first *= tl.where(is_value, 1.0, scale * tl.where(head < G, q_first, k_first))
        second *= tl.where(is_value, 1.0, scale * tl.where(head < G, q_second, k_second))

    c = tl.load(cos + token * HALF + pair, mask=in_half)
    s = tl.load(sin + token * HALF + pair, mask=in_half)
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
    tl.store(counters + token * K + kv_head, 0, mask=in_tokens)
