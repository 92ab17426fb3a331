"""Adam with moments in codes, in numpy float64: tables, nearest codes, Adam.

Both sides round to codes. Float32 falls on the other side of a rounding here and there:
that moves a first moment by a code, at most 2/127 of its group's largest, which decays
to ten times as much over all steps, and the root of a second one by 1/255 (coarser with
4 bits). With updates of up to 3 where the moment is largest and parameters that move by
some 20 updates, one such rounding of each kind is `10 * 2/127 * 3 / 20 + 1/255 * 3`.
"""

import ml_dtypes
import numpy as np

from jaxmem.optim import LowBit, adam, adama, adamw
from tests.optim.cases.case import LR, Case
from tests.optim.reference import adama_leaf

B1, B2, EPS = 0.9, 0.999, 1e-8
ONE_CODE = 10 * 2 / 127 * 3 / 20 + 3 / 255
# stochastic: each of 50 roundings is off by half a code (standard deviation), ten times
# as much over all steps; four of them
ALL_CODES = 4 * 50**0.5 * 10 * (1 / 127) * 2 / 20

TORCHAO = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875)


def dynamic_table(signed):
    """bitsandbytes' map: midpoints of 2**i cells of [0.1, 1], in decades."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6)
        values += [*middles, *(-middles if signed else ())]
    return np.sort(values)


def four_bit_table(signed):
    sizes = np.array(TORCHAO)
    return np.array([*-sizes[::-1], 0, *sizes, 1]) if signed else np.arange(1, 17) / 16


def nearest(table, y):
    middles = (table[1:] + table[:-1]) / 2
    return table[np.searchsorted(middles, y)]


def up_to_bfloat16(x):
    """x * (1 + 2**-8) to eight significant bits."""
    fraction, exponent = np.frexp(x * (1 + 2.0**-8))
    return np.ldexp(np.round(fraction * 256) / 256, exponent)


def companded_first(m):
    scale = up_to_bfloat16(np.maximum(abs(m).max(-1, keepdims=True), 1e-30))
    y = m / scale
    z = np.floor(127 * 2 * y / (1 + abs(y)) + 0.5) / 127
    return scale * z / (2 - abs(z))


def companded_second(v):
    root = np.sqrt(v)
    scale = up_to_bfloat16(np.maximum(root.max(-1, keepdims=True), 1e-30))
    code = np.clip(np.floor(255 * root / scale + 0.5), 2, 255)
    return (scale * code / 255) ** 2


def float8(y):
    """Sizes of at most 1, as numbers of float8_e4m3fn."""
    return (448 * y).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 448


def float8_first(m):
    scale = np.maximum(abs(m).max(-1, keepdims=True), 1e-30)
    return scale * float8(m / scale)


def float8_second(v):
    root = np.sqrt(v)
    scale = np.maximum(root.max(-1, keepdims=True), 1e-30)
    return (scale * np.maximum(float8(root / scale), 2.0**-9 / 448)) ** 2


def mx(dtype, top, largest, up=False, positive=False):
    """Blocks of an MX format: the OCP's rule, or the next exponent where it clips."""

    def rounded(x):
        size = np.maximum(abs(x).max(-1, keepdims=True), 1e-30)
        scale = 2.0 ** (np.floor(np.log2(size)) - top)
        scale = np.where(up & (size > largest * scale), 2 * scale, scale)
        return scale * elements(x / scale, dtype, largest, positive)

    return rounded


def elements(y, dtype, largest, positive):
    """Clipped to the largest number; second moments to the smallest, too."""
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal) if positive else -largest
    return np.clip(y, least, largest).astype(dtype).astype(np.float64)


def nvfp4(positive):
    def rounded(x):
        size = abs(x).max(-1, keepdims=True)
        tensor = max(size.max(), 1e-30) / (6 * 448)
        scale = elements(size / 6 / tensor, E4M3, 448, positive=True)
        return tensor * scale * elements(x / tensor / scale, E2M1, 6, positive)

    return rounded


def from_table(table):
    def rounded(x):
        scale = np.maximum(abs(x).max(-1, keepdims=True), 1e-30)
        return scale * nearest(table, x / scale)

    return rounded


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
E2M1 = ml_dtypes.float4_e2m1fn
# (bits, code) -> the rounding of first and of second moments to the nearest
MICROSCALED = {
    (8, "mxfp8"): (mx(E4M3, 8, 448), mx(E5M2, 15, 57344, True, True)),
    (4, "mxfp4"): (mx(E2M1, 2, 6, True), mx(E2M1, 2, 6, True, True)),
    (4, "nvfp4"): (nvfp4(False), nvfp4(True)),
}


def reference(first, second, decay=0.0, block=32):
    def run(path, p, grads):
        m, v = np.zeros_like(p), np.zeros_like(p)
        grouped = lambda fn, x: fn(x.reshape(-1, block)).reshape(x.shape)
        for t, g in enumerate(grads, 1):
            m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
            u = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
            p = p - LR * (u + decay * p)
            m, v = grouped(first, m), grouped(second, v)
        return p

    return run


def adama_reference(path, p, grads):
    return adama_leaf(p, grads[:, None], lr=LR)[0]


def every(bits, code=None):
    return LowBit(bits, code=code, block=32, least_size=0)


COMPANDED = companded_first, companded_second
DYNAMIC = from_table(dynamic_table(True)), from_table(dynamic_table(False))
FOUR = from_table(four_bit_table(True)), from_table(four_bit_table(False))

CASES = [
    Case(
        "adam_8_bits",
        lambda lr=LR: adam(lr, bits=every(8)),
        reference(*COMPANDED),
        rtol=ONE_CODE,
    ),
    Case(
        "adama_8_bits",
        lambda lr=LR: adama(lr, bits=every(8)),
        adama_reference,
        rtol=ALL_CODES,
        microbatch="other",
    ),
]

# of which `test_low_bit` runs a part of the battery
OTHERS = [
    Case(
        "adamw_dynamic",
        lambda lr=LR: adamw(lr, weight_decay=0.1, bits=every(8, "dynamic")),
        reference(*DYNAMIC, decay=0.1),
        rtol=ONE_CODE,
        needs_params=True,
    ),
    Case(
        "adam_float8",
        lambda lr=LR: adam(lr, bits=every(8, "float8")),
        reference(float8_first, float8_second),
        # the widest gap is 32 of 448, of the first moment and of the second one's root
        rtol=10 / 14 * 3 / 20 + 3 / 14,
    ),
    Case(
        "adam_4_bits",
        lambda lr=LR: adam(lr, bits=every(4)),
        reference(*FOUR),
        # the widest gaps are 16 and 8 times those of 8 bits
        rtol=16 * ONE_CODE,
    ),
    *(
        Case(
            f"adam_{code}",
            lambda lr=LR, bits=bits, code=code: adam(
                lr, bits=LowBit(bits, code=code, least_size=0, stochastic=False)
            ),
            reference(*rounding, block=16 if code == "nvfp4" else 32),
            # the widest gap is 32 of 256 or 2 of 4, and of roots 1/8 or 1/5
            rtol=10 / 8 * 3 / 20 + 3 / 8 if bits == 8 else 10 / 2 * 3 / 20 + 3 / 5,
        )
        for (bits, code), rounding in MICROSCALED.items()
    ),
]
