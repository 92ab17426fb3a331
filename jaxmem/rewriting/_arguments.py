"""The arrays handed to a lean function, made of the values that were found."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.rewriting._flat_graph import FlatValue, Frame
from jaxmem.rewriting._partial_match import Bound, Positions
from jaxmem.rewriting._pattern import ArrayExample


@dataclass(frozen=True)
class Term:
    """A value, where its dimensions are among those of the argument, and its sign."""

    value: FlatValue
    positions: Positions
    shape: tuple[int, ...]
    sign: int

    def build(self, x, dtype):
        """The array with the argument's dimensions; those that broadcast are 1."""
        x = jnp.asarray(x)  # what is known may be numpy's
        x = x if x.dtype == dtype else jax.lax.convert_element_type(x, dtype)
        placed = [(p, i) for i, p in enumerate(self.positions) if p is not None]
        order = [i for _, i in sorted(placed)]
        if order != sorted(order):
            rest = [i for i in range(len(self.positions)) if i not in order]
            x = jax.lax.transpose(x, (*rest, *order))
        x = x if x.shape == self.shape else jax.lax.reshape(x, self.shape)
        if self.sign == 1:
            return x
        return ~x if x.dtype == bool else -x


def _is_in_order(positions: Positions) -> bool:
    known = [p for p in positions if p is not None]
    return known == sorted(known)


@dataclass(frozen=True)
class Argument:
    """What a lean function is given: the sum of its parts; of masks, all at once."""

    parts: tuple[Term, ...]
    full: tuple[int, ...]
    dtype: Any

    def build(self, env: Mapping[FlatValue, Any]):
        """The array as the lean function takes it."""
        arrays = [part.build(env[part.value], self.dtype) for part in self.parts]
        join = jnp.logical_and if self.dtype == bool else jnp.add
        x = functools.reduce(join, arrays)
        return x if x.shape == self.full else jnp.broadcast_to(x, self.full)

    def in_order(self) -> bool:
        """Whether the dimensions are in the order of the argument's."""
        return all(_is_in_order(part.positions) for part in self.parts)


def argument_of(
    bound: Bound,
    spec: ArrayExample,
    sizes: tuple[int, ...],  # of its dimensions
    batch: int,
    frame: Frame,
    uncast,  # whether to take the value below a cast or a transposition
) -> Argument | None:
    """The argument for what an input stands for; None if not to be had in `frame`."""
    parts = [_part(b, sizes, frame, uncast) for b in (bound, *bound.further)]
    if None in parts:
        return None
    found = tuple(part for part in parts if part is not None)
    shape = tuple(map(max, zip(*(part.shape for part in found), strict=True)))
    frees = [free for _, free in spec.names(batch)]
    full = tuple(
        n if free else size for n, free, size in zip(shape, frees, sizes, strict=True)
    )
    dtypes = [part.value.dtype for part in found]
    with jax.numpy_dtype_promotion("standard"):  # the user's may be strict
        dtype = functools.reduce(jnp.promote_types, dtypes)
    return Argument(found, full, dtype)


def _part(b: Bound, sizes: tuple[int, ...], frame: Frame, uncast) -> Term | None:
    choices = [c for c in b.choices if _visible(c[0], frame)]
    if not choices:
        return None
    if uncast:
        value, positions = choices[-1]
        copy, places = b.choices[0]
        straight = len(positions) == len(sizes)
        straight &= all(p in (None, i) for i, p in enumerate(positions))
        if (value.dtype == copy.dtype and _is_in_order(places)) or not straight:
            return None
    else:
        value, positions = min(choices, key=functools.partial(_cost, rank=len(sizes)))
    shape = [1] * len(sizes)
    for n, p in zip(value.shape, positions, strict=True):
        if p is not None:
            shape[p] = n
    return Term(value, positions, tuple(shape), b.sign)


def _visible(value: FlatValue, frame: Frame) -> bool:
    if value.node is not None:
        return frame in value.node.frame.path() or value in frame.ins
    return value in frame.ins or value.known is not None


def _cost(choice: tuple[FlatValue, Positions], rank: int) -> tuple:
    value, positions = choice
    size = getattr(value.dtype, "itemsize", 1) * math.prod(value.shape)
    return size, positions != tuple(range(rank))
