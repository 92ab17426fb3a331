"""What `save=` means for an activation: a word, a number of bits, or "auto".

An op cannot see who reads its output. So "auto" leaves a mark in the traced function,
a `jax.jit` whose name is in `MARKS`, which `jaxmem.rewriting.auto_save` (and with it
`rewrite` and `substitute`) replaces by one of two forms. A mark that nobody replaces
keeps the input, which is right anywhere.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array

from jaxmem._checks import check_int, wrong_type, wrong_value
from jaxmem.ops._elementwise import lean, of_input
from jaxmem.ops._fewbit import MOST_BITS, as_bits, coded
from jaxmem.ops._fewbit_shipped import shipped

Op = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Forms:
    """One activation, in the forms that `save` chooses from.

    Attributes:
      name: of the op, with its parameters.
      exact: the forms that keep an array, by the word for it; "input" is one of them.
      coded: makes the form that keeps the code of some bits.
      free_bits: the bits in which the derivative is exact, if there are such.
    """

    name: str
    exact: Mapping[str, Op]
    coded: Callable[[int], Op]
    free_bits: int | None = None

    @property
    def shared(self) -> str:
        """What is kept where the next operation keeps the output anyway."""
        return "output" if "output" in self.exact else "input"

    def op(self, save: str | int, bits: int | None = None) -> Op:
        """The form for what the user said."""
        if save == "auto":
            bits = self.free_bits if bits is None else as_bits(self.name, bits)
            return _marked(self, bits)
        if bits is not None:
            raise ValueError(
                f'{self.name}: bits={bits!r} goes with save="auto"; for a code of so '
                f"many bits everywhere say save={bits!r}"
            )
        if isinstance(save, str) and save in self.exact:
            return self.exact[save]
        words = ", ".join(f'"{word}"' for word in [*self.exact, "auto"])
        allowed = f"{words} or a number of bits from 1 to {MOST_BITS}"
        try:
            return self.coded(check_int("save", save, 1, MOST_BITS))
        except (TypeError, ValueError) as error:
            value = isinstance(save, str) or isinstance(error, ValueError)
            wrong = wrong_value if value else wrong_type
            raise wrong(f"{self.name}: save", save, allowed) from None


def forms(name: str, value: Callable, exact: Mapping[str, Op], table: str) -> Forms:
    """The forms of an activation with a shipped table."""

    def make(bits: int) -> Op:
        return coded(name, value, *shipped(table, bits))

    return Forms(table, exact, make)


def of_any_input(name: str, value: Callable) -> Op:
    """The form that keeps its input; the derivative is JAX's own."""

    def slope(x):
        return jax.jvp(value, (x,), (jax.numpy.ones_like(x),))[1]

    return lean(name, value, slope, of_input)


@dataclass(frozen=True)
class Mark:
    """What a mark stands for: a form for each case, and the words for what it keeps."""

    name: str
    shared: tuple[Op, str]
    alone: tuple[Op, str]


MARKS: dict[str, Mark] = {}


@functools.cache
def _marked(forms: Forms, bits: int | None) -> Op:
    word = "input" if bits is None else f"{bits} bits"
    alone = forms.exact["input"] if bits is None else forms.coded(bits)
    name = f"jaxmem_auto_{forms.name}_{word.replace(' ', '_')}"
    shared = forms.exact[forms.shared], forms.shared
    MARKS[name] = Mark(forms.name, shared, (alone, word))

    def op(x):
        return forms.exact["input"](x)

    op.__name__ = op.__qualname__ = name
    marked: Any = jax.jit(op)

    def scoped(x):
        with jax.named_scope(f"jaxmem.{forms.name}"):
            return marked(x)

    return scoped
