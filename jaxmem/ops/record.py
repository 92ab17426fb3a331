"""One record an op: what the other parts of the library are made from.

The rewriter's library comes from the formulas of the records, the tables of
`jaxmem.substitute` from their Flax layers, the battery of tests and the table of what
ops save from their references and from what they say they keep.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmem.ops.codes import Quantization, coded_activation
from jaxmem.ops.codes.packing import packed_codes_nbytes

Save = str | int | Quantization


@dataclass(frozen=True)
class Saving:
    """What the caller of the rewriter wants lean functions to keep."""

    activations: Save = "input"  # a word, the bits of a code, or how to store codes
    norms: str = "input"  # or "output"

    def quantized(self) -> bool:
        """Whether activations keep codes of their input, for the next layer too."""
        return isinstance(self.activations, Quantization)


def unchanged(lean: Callable, saving: Saving) -> Callable:
    """The lean function of an op that has one form, or whose default is best."""
    return lean


def by_codes(lean: Callable, saving: Saving) -> Callable:
    """The lean function, keeping codes of its arrays that the next layer reads too."""
    how = saving.activations
    if not isinstance(how, Quantization):
        return lean

    def coded(*xs, **scalars):
        return coded_activation(_bound(lean, **scalars), how, len(xs))(*xs)

    return coded


def by_word(lean: Callable, saving: Saving) -> Callable:
    """The lean function with `save` as wanted: a word, bits or codes."""
    if saving.quantized():
        return by_codes(lean, saving)
    return functools.partial(lean, save=saving.activations)


@functools.lru_cache(maxsize=1024)
def _bound(op: Callable, **scalars: float) -> Callable:
    # One and the same for equal numbers: codes are shared by the function.
    return functools.partial(op, **scalars)


@dataclass(frozen=True, eq=False)
class Formula:
    """One way to write an op; most fields are those of `jaxmem.rewriting.Pattern`."""

    plain: Callable[..., jax.Array]
    examples: tuple[str, ...] = ("*batch",)
    scalars: tuple[str, ...] = ()
    when: Callable[..., bool] | None = None
    uncast: tuple[int, ...] = ()
    params: tuple[str, ...] = ()
    typed: bool = False
    gate: "Formula | None" = None
    lean: Callable[..., jax.Array] | None = None  # None: the record's op
    name: str | None = None  # of the pattern; None: that of the op
    parts: int = 0  # of a family those with more are looked for first


@dataclass(frozen=True)
class Layers:
    """The Flax layers that run on an op, by the names of their classes."""

    linen: tuple[str, ...] = ()
    nnx: tuple[str, ...] = ()  # in `flax.nnx`, and in `jaxmem.nn.nnx`
    words: bool = False  # whether they take `save="input"` and `save="output"`
    bits: bool = False  # whether they take bits or a `Quantization` as `save`


@dataclass(frozen=True)
class KeptByForm:
    """What an elementwise op keeps beyond its arguments, for one form of `save`."""

    output: bool = False
    bits: int = 0  # packed, an element
    # Of the derivative, by the name of the dtype; 0 where it is not named.
    error: Mapping[str, float] = field(default_factory=dict)

    def nbytes(self, x: Any) -> int:
        """Bytes for an input like `x`."""
        output = x.size * x.dtype.itemsize if self.output else 0
        return output + packed_codes_nbytes(x.shape, self.bits)


@dataclass(frozen=True, eq=False)
class OpRecord:
    """All that the library knows of an op."""

    op: Callable[..., Any]  # its docstring says in `Saves:` what is kept
    formulas: tuple[Formula, ...] = ()  # what the rewriter recognises
    # Makes the lean function from the one of a formula and what is wanted.
    saving: Callable[[Callable, Saving], Callable] = unchanged
    layers: Layers = Layers()
    reference: Callable[..., Any] | None = None  # in plain JAX, of the first arguments
    # Of an elementwise op, what it keeps for each value of `save`.
    residuals: Mapping[str, KeptByForm] = field(default_factory=dict)
    family: str | None = None  # of ops whose formulas contain one another
    chips: tuple[str, ...] = ("TPU", "GPU")  # that a Pallas kernel is for, if any is

    @property
    def name(self) -> str:
        """That of the op."""
        return self.op.__name__

    @property
    def kernels(self) -> tuple[str, ...]:
        """The chips on which a Pallas kernel may compute it."""
        by_choice = "implementation" in inspect.signature(self.op).parameters
        return self.chips if by_choice else ()

    @property
    def saves(self) -> str:
        """The `Saves:` section of the docstring, as one line."""
        _, _, after = inspect.cleandoc(self.op.__doc__ or "").partition("Saves:\n")
        lines = []
        for line in after.splitlines():
            if line and not line.startswith(" "):  # the next section
                break
            lines.append(line.strip())
        return " ".join(filter(None, lines))
