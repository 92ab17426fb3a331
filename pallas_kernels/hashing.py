"""Counter-based random bits: a key and a position give 32 bits, and nothing is stored.

Forward and backward pass, and every block of a blockwise op, compute the bits they need
from their position, so a dropout mask is never saved. A position is a row and a column,
each below 2**32. A row has two words and a column one, all well mixed with the key
(which is cheap, since they are vectors). An element costs two multiplies, two
xor-shifts, an xor and an add, all on uint32, which XLA, Pallas TPU and Pallas GPU
compute alike:

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b
             x ^= x >> 16
    a = mix(mix(row ^ k0) + k1)            b = mix(mix(row + k1) ^ k0)
    c = mix(mix(column ^ ~k1) + k0)
    bits = mix(a ^ c) with b added before its second multiply

A mask of a matrix product's size can do with less: `kept` draws an element from half a
word, and a word takes one multiply and an add, of two words a row and one for each pair
of columns:

    a = mix(mix(row ^ k0) + k1) | 1        b = mix(mix(row + k1) ^ k0)
    c = mask_column(column)                of column // 2
    half = a * c + b, shifted right by 16 bits for an odd column; its 15 low bits
    kept = half >= threshold

Over all keys any two elements are as good as independent, so that a sum over the mask
has the variance that it has with independent elements. Those of two rows are, since b
is mixed well. Those of one row differ by a (c - c'), whose 15 low bits depend on the 15
low bits of c - c': `mask_column` gives it as many trailing zeros as the difference of
the pairs' numbers has. So only even columns whose distance is a multiple of 2**12 are
less independent, and alike where it is one of 2**16. With one key, more than two
elements are not always independent: rows whose factors have a ratio of small numbers in
their 15 low bits, about one pair of 2**14, have related masks in their even columns.

GPUs compare both halves of a word in one instruction, as float16 without their signs.

The constants are from Wellons, "Prospecting for Hash Functions" (2018), who measured
the bias of each output bit. The generator is made for masks: it is not
cryptographic, and bits of it are not those of `jax.random`.
"""

import numpy as np

_MULTIPLY_1 = np.uint32(0x7FEB352D)
_MULTIPLY_2 = np.uint32(0x846CA68B)


def _fold(x, shift: int):
    return x ^ (x >> np.uint32(shift))


def _start_of_mix(x):
    """`mix` without its last fold, which undoes itself."""
    return _fold(_fold(x, 16) * _MULTIPLY_1, 15) * _MULTIPLY_2


def mix(x):
    """A bijection of uint32."""
    return _fold(_start_of_mix(x), 16)


def row_words(seed, row):
    """The two words of each row, for `bits_of`; uint32, of the shape of `row`."""
    k0, k1 = seed[0], seed[1]
    a = _start_of_mix(mix(row ^ k0) + k1)
    return a, mix(mix(row + k1) ^ k0) * _MULTIPLY_2


def column_word(seed, column):
    """The word of each column, for `bits_of`; uint32, of the shape of `column`."""
    return _start_of_mix(mix(column ^ ~seed[1]) + seed[0])


def bits_of(words, column):
    """Bits at each position, from `row_words` and `column_word`, which broadcast."""
    # The first fold of a ^ c is that of each word, and b times the second factor is
    # added after the multiply: both are computed once for each vector.
    a, b = words
    return _fold(_fold((a ^ column) * _MULTIPLY_1, 15) * _MULTIPLY_2 + b, 16)


def random_bits(seed, row, column):
    """Bits at each position; `row` and `column` are uint32 and broadcast."""
    return bits_of(row_words(seed, row), column_word(seed, column))


def mask_rows(seed, row):
    """The two words of each row, for `kept`; uint32, of the shape of `row`."""
    k0, k1 = seed[0], seed[1]
    return mix(mix(row ^ k0) + k1) | np.uint32(1), mix(mix(row + k1) ^ k0)


def mask_column(seed, column):
    """The word of each column, for `kept`; uint32, of the shape of `column`.

    Two neighbours from an even column on have one.
    """
    x = column >> np.uint32(1)
    for word in (seed[1], seed[0], seed[1], seed[0]):
        x = x ^ word
        # A bijection modulo each power of two, as are the other steps.
        x = x * (x + x + np.uint32(1))
        x = x ^ (x << np.uint32(4))
    return x


def half_of(column):
    """By how many bits `kept` shifts a column's half up to the top; uint32."""
    return np.uint32(17) - ((column & np.uint32(1)) << np.uint32(4))


def kept(rows, word, half, rate: float):
    """A mask, True with probability `1 - rate`, which is a multiple of 2**-15.

    From `mask_rows`, `mask_column` and `half_of`, which broadcast.
    """
    factor, term = rows
    return ((factor * word + term) << half) >= np.uint32(half_threshold(rate) << 17)


def random_mask(seed, row, column, rate: float):
    """`kept` at each position; `row` and `column` are uint32 and broadcast."""
    word, half = mask_column(seed, column), half_of(column)
    return kept(mask_rows(seed, row), word, half, rate)


def half_threshold(rate: float) -> int:
    """A half below this is dropped: the rate, of 2**15."""
    return round(rate * 2**15)


def rounded_rate(rate: float) -> float:
    """The nearest rate that `kept` has: one that is neither 0 nor 1 stays so."""
    return min(max(half_threshold(rate), 1), 2**15 - 1) / 2**15 if rate else 0.0


def threshold(rate: float) -> np.uint32:
    """Bits below this are dropped: the rate, to 2**-32."""
    return np.uint32(min(round(rate * 2**32), 2**32 - 1))
