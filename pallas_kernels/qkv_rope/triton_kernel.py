"""Sum of parts, bias, head norms and rotation in one pass: a program for each token and kv head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.triton_import import jax_triton, tl, triton


def qkv_rope(
    qkv: Float[Array, "S T K G+2 H"],
    bias: Float[Array, "K G+2 H"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    cos: Float32[Array, "T H//2"],
    sin: Float32[Array, "T H//2"],
    *,
    eps: float,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "T K*G H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    parts, num_tokens, num_kv_heads, group, head_dim = qkv.shape
    group -= 2
    q = jax.ShapeDtypeStruct((num_tokens, num_kv_heads * group, head_dim), dtype)
    kv = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_dim), dtype)
    heads = triton.next_power_of_2(group + 2)
    has_norms = q_norm is not None and k_norm is not None
    # What is absent is never read; some array must stand in its place.
    return jax_triton.triton_call(
        qkv,
        qkv if bias is None else bias,
        q_norm if has_norms else cos,
        k_norm if has_norms else cos,
        cos,
        sin,
        kernel=_qkv_rope,
        out_type=(q, kv, kv),
        grid=(num_tokens, num_kv_heads),
        num_warps=1 if heads * head_dim <= 512 else 4,
        S=parts,
        K=num_kv_heads,
        G=group,
        HEADS=heads,
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        EPS=eps,
        HAS_BIAS=bias is not None,
        HAS_NORMS=has_norms,
    )


@triton.jit
def _qkv_rope(
    qkv,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    q,
    k,
    v,
    S: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    H: tl.constexpr = 2 * HALF
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    in_half = pair < HALF
    mask = (head < G + 2) & in_half

    source = ((token * K + kv_head) * (G + 2) + head) * H + pair
    first = tl.load(qkv + source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv + source + HALF, mask=mask, other=0.0).to(tl.float32)
    part = qkv + source
    for _ in tl.static_range(S - 1):
        part += tl.num_programs(0).to(tl.int64) * K * (G + 2) * H
        first += tl.load(part, mask=mask, other=0.0).to(tl.float32)
        second += tl.load(part + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        place = (kv_head * (G + 2) + head) * H + pair
        first += tl.load(bias + place, mask=mask, other=0.0).to(tl.float32)
        second += tl.load(bias + place + HALF, mask=mask, other=0.0).to(tl.float32)
    is_value = head == G + 1
    if HAS_NORMS:
        square = tl.sum(first * first + second * second, axis=1)[:, None] / H
        scale = tl.rsqrt(square + EPS)
        q_first = tl.load(q_norm + pair, mask=in_half).to(tl.float32)
        q_second = tl.load(q_norm + pair + HALF, mask=in_half).to(tl.float32)
        k_first = tl.load(k_norm + pair, mask=in_half).to(tl.float32)
        k_second = tl.load(k_norm + pair + HALF, mask=in_half).to(tl.float32)
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
    to_kv = (token * K + kv_head) * H + pair + head * 0
    tl.store(k + to_kv, turned_first, mask=(head == G) & in_half)
    tl.store(k + to_kv + HALF, turned_second, mask=(head == G) & in_half)
    tl.store(v + to_kv, turned_first, mask=is_value & in_half)
    tl.store(v + to_kv + HALF, turned_second, mask=is_value & in_half)
