"""Random numbers of `jax.random`, made inside Triton kernels."""

from pallas_kernels.triton_import import tl, triton


@triton.jit
def gumbel(key, token):
    """`jax.random.gumbel` at these places of its vector, up to the rounding of logarithms."""
    count = token.to(tl.uint32)
    first, second = threefry(key[0], key[1], tl.zeros_like(count), count)
    one_to_two = ((first ^ second) >> 9) | 0x3F800000
    uniform = one_to_two.to(tl.float32, bitcast=True) - 1.0
    uniform = tl.maximum(uniform, 2.0**-126)
    return -_log(-_log(uniform))


@triton.jit
def _log(x):
    """The natural logarithm of normal numbers, with a small relative error next to 1 too, as
    the GPU's own has not: x = m * 2**e and log m = 2 artanh((m - 1) / (m + 1))."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # so that m is from sqrt(1/2) to sqrt(2)
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))
    return exponent.to(tl.float32) * 0.6931471805599453 + 2.0 * (s + s * series)


@triton.jit
def threefry(key0, key1, x0, x1):
    """Threefry-2x32 of 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
    3")."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0 += key0
    x1 += key1
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0 += key1
    x1 += key2 + 1
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0 += key2
    x1 += key0 + 2
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0 += key0
    x1 += key1 + 3
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0 += key1
    x1 += key2 + 4
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    return x0 + key2, x1 + key0 + 5


@triton.jit
def _four_rounds(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0, x1 = _round(x0, x1, A)
    x0, x1 = _round(x0, x1, B)
    x0, x1 = _round(x0, x1, C)
    return _round(x0, x1, D)


@triton.jit
def _round(x0, x1, TURN: tl.constexpr):
    x0 += x1
    return x0, ((x1 << TURN) | (x1 >> (32 - TURN))) ^ x0
