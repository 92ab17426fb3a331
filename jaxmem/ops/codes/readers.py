"""Functions that read codes, marked until it is known with whom they share them.

A layer cannot see that its input is made by an activation written without a module. So
its call is marked, and run anew once the whole function is traced, where the codes of
the activation before it are found.
"""

import contextvars
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array

from jaxmem._contexts import set_within
from jaxmem.ops.codes.quantization import Quantization
from jaxmem.ops.codes.stored import (
    Rng,
    Stored,
    StoredCodes,
    codes_of,
    linearized_at,
    remember,
    remembered,
    seed_of,
)
from jaxmem.ops.marks import marked

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class CodeReader:
    """A marked call that `jaxmem.rewriting` runs anew, and its number of arguments."""

    run: Callable
    arity: int


_marking: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxmem_marking", default=False
)


def marking() -> AbstractContextManager[None]:
    """Inside, what stores codes leaves a mark, to find out later what it can share."""
    return set_within(_marking, True)


def _marked(kind: str, fn: Callable, arity: int) -> Callable:
    return marked(f"jaxmem_{kind}_{next(_numbers)}", fn, CodeReader(fn, arity))


def read_from_codes(
    fn: Callable[..., Any],
    x: Any,
    quantization: Quantization | None,
    rng: Rng,
    *others: Array,
    markable: bool = True,  # a mark lives as long as `fn`
) -> Any:
    """`fn(x, *others)`, with the codes of a `Stored`, or those of a `quantization`."""
    if isinstance(x, Stored):
        return _read(fn, x.codes, x.value, *others)
    if quantization is None:
        return fn(x, *others)
    seed = seed_of(rng)
    if markable and _marking.get() and remembered(x, quantization) is None:
        seeds = () if seed is None else (seed,)
        reader = _reader(fn, quantization, len(seeds), len(others))
        return reader(x, *seeds, *others)
    return _read(fn, codes_of(x, quantization, seed), x, *others)


def _read(
    fn: Callable[..., Any], kept: StoredCodes | None, x: Array, *others: Array
) -> Any:
    return linearized_at(fn, (x, *others), (kept, *(None for _ in others)))


# Bounded, with room for every kind of layer in a model.
@functools.lru_cache(maxsize=1024)
def _reader(
    fn: Callable, quantization: Quantization, seeds: int, others: int
) -> Callable:
    def read(x, *rest):
        seed = rest[0] if seeds else None
        return _read(fn, codes_of(x, quantization, seed), x, *rest[seeds:])

    return _marked("reads_codes", read, 1 + seeds + others)


@functools.lru_cache(maxsize=1024)
def coded_activation(
    fn: Callable, quantization: Quantization, arity: int = 1
) -> Callable:
    """The elementwise `fn` of `arity` arrays of one shape, keeping codes of these.

    It is marked: a function that stores its output next finds these codes for it.
    """

    def activation(*xs):
        with jax.named_scope("jaxmem.coded_activation"):
            kept = [codes_of(x, quantization) for x in xs]
            y = linearized_at(fn, xs, kept)
        direct = [k for k in kept if k is not None and k.function is None]
        if len(direct) == len(xs):
            remember(y, replace(direct[0], function=fn, partners=tuple(direct[1:])))
        return y

    return _marked("coded_activation", activation, arity)
