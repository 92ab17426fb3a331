"""What `save=` means for an activation: a word, a number of bits, or "auto"."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmem._checks import check_int, wrong_type, wrong_value
from jaxmem.ops.codes.packing import MOST_BITS
from jaxmem.ops.common.lean import lean, of_input
from jaxmem.ops.few_bit.derivative import as_bits, coded
from jaxmem.ops.few_bit.tables import shipped
from jaxmem.ops.marks import marked

Op = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Forms:
    """One activation, in the forms that `save` chooses from."""

    name: str  # of the op, with its parameters
    exact: Mapping[str, Op]  # by what they keep; "input" is one of them
    coded: Callable[[int], Op]  # makes the form that keeps a code of some bits
    free_bits: int | None = None  # in which the derivative is exact

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
        return jax.jvp(value, (x,), (jnp.ones_like(x),))[1]

    return lean(name, value, slope, of_input)


@dataclass(frozen=True, eq=False)
class AutoSave:
    """The forms of a call with `save="auto"`, each with the word for what it keeps."""

    name: str
    shared: tuple[Op, str]  # where the next operation keeps the output anyway
    alone: tuple[Op, str]


# Bounded: a slope or a factor may be another one in each call of a long-lived process.
@functools.lru_cache(maxsize=1024)
def _marked(forms: Forms, bits: int | None) -> Op:
    word = "input" if bits is None else f"{bits} bits"
    alone = forms.exact["input"] if bits is None else forms.coded(bits)
    name = f"jaxmem_auto_{forms.name}_{word.replace(' ', '_')}"
    shared = forms.exact[forms.shared], forms.shared

    def op(x):
        return forms.exact["input"](x)

    # An op cannot see who reads its output, so "auto" marks its call: the rewriter puts
    # one of the two forms there, and an unreplaced call keeps its input, right
    # anywhere.
    call = marked(name, op, AutoSave(forms.name, shared, (alone, word)))

    def scoped(x):
        with jax.named_scope(f"jaxmem.{forms.name}"):
            return call(x)

    return scoped
