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

A mask of a matrix product's size can do with less: `kept` compares one multiply and an
add with a threshold, of two words a row and one a column that are mixed as well:

    a = mix(mix(row ^ k0) + k1) | 1        b = mix(mix(row + k1) ^ k0)
    c = mix(mix(column ^ ~k1) + k0)
    kept = a * c + b >= threshold

Any two of its elements are as good as independent, so that a sum over the mask has the
variance that it has with independent elements. More than two are not always: there are
rows whose odd factors have a ratio of small numbers, and triples of columns whose
words' differences have one, about one in 2**31 for each such ratio. Only the comparison
is random: the low bits of a c + b are not.

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
    """The word of each column, for `kept`; uint32, of the shape of `column`."""
    return mix(mix(column ^ ~seed[1]) + seed[0])


def kept(rows, column, rate: float):
    """A mask, True with probability `1 - rate`, from `mask_rows` and `mask_column`.

    The rate is applied to within 2**-33; the words broadcast.
    """
    factor, term = rows
    return factor * column + term >= threshold(rate)


def threshold(rate: float) -> np.uint32:
    """Bits below this are dropped: the rate, to 2**-32."""
    return np.uint32(min(round(rate * 2**32), 2**32 - 1))
