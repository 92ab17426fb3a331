"""Elementwise work of a kernel: what the CUDA cores or a TPU's vector unit do.

Counted by the instructions that an operation becomes on an NVIDIA GPU: `tanh` is a
rational polynomial, `erf` two of them, a division a reciprocal and its correction.
Integers count apart, since random bits are all integer work.
"""

from jaxmem.cost.kernel import Arithmetic
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of

# opcode -> (instructions of plain arithmetic, of the special function unit)
_COSTS = {
    "tanh": (20, 1),
    "erf": (66, 2),
    "erf-inv": (40, 2),
    "exponential": (3, 1),
    "exponential-minus-one": (14, 1),
    "log": (8, 1),
    "log-plus-one": (14, 1),
    "logistic": (6, 2),
    "power": (20, 2),
    "sine": (20, 1),
    "cosine": (20, 1),
    "tan": (30, 2),
    "atan2": (30, 1),
    "cbrt": (12, 2),
    "sqrt": (4, 1),
    "rsqrt": (3, 1),
    "divide": (6, 1),
    "remainder": (12, 1),
}
_SHIFTS = ("shift-left", "shift-right-logical")
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast broadcast iota reshape copy"
    " slice dynamic-slice dynamic-update-slice transpose gather concatenate pad fusion"
    " dot convolution custom-call call reverse while conditional after-all".split()
)
_WORD, _WORD_SHIFTS = 60, 40  # of a random word: twenty rounds of three and two
_REDUCTIONS = frozenset("reduce reduce-window scatter select-and-scatter".split())


def arithmetic_of(hlo: Hlo, made: Instruction) -> Arithmetic:
    """The elementwise work of an instruction, that inside of a fusion too."""
    if made.opcode in ("fusion", "call"):
        inner = (one for called in made.called for one in hlo.body(called))
        return sum((arithmetic_of(hlo, one) for one in inner), Arithmetic())
    if made.opcode in _FREE:
        return Arithmetic()
    if made.opcode in ("rng-bit-generator", "rng"):
        words = sum(a.elements for a in arrays_of(made.shape))
        return Arithmetic(integer=_WORD * words, shifts=_WORD_SHIFTS * words)
    read = made.opcode in _REDUCTIONS and made.operands
    arrays = arrays_of(hlo.shape_of(made.operands[0]) if read else made.shape)
    count = arrays[0].elements if arrays else 0
    if made.opcode in _SHIFTS:
        return Arithmetic(shifts=count)
    plain, special = _COSTS.get(made.opcode, (1, 0))
    if arrays and arrays[0].dtype[:1] in ("u", "s") or not arrays:
        return Arithmetic(integer=plain * count, special=special * count)
    return Arithmetic(plain * count, 0.0, special * count)
