"""Labels of axes: of operations on elements, and of those that move or reduce them."""

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.scans import split
from jaxmem.ir.types import Atom, JaxprEqn

Label = Hashable  # None: the axis cannot be cut


class Labels(NamedTuple):
    """The labels of every axis of every operand and of every output.

    Labels that no operand and no output has both of are independent: operand i of a
    barrier can be cut along any axis, or not at all, whatever the others are.

    Attributes:
      ins: one tuple an operand, with a label an axis.
      outs: the same for the outputs.
      combine: the binary operation of `lax` that combines the outputs of the parts
        where the label is in no output; empty where they cannot be combined. What a
        scatter adds to is the first of the terms: of one part, not of each.
    """

    ins: tuple[tuple[Label, ...], ...]
    outs: tuple[tuple[Label, ...], ...]
    combine: str = ""

    def axes(self, label: Label) -> tuple[int | None, ...]:
        """Of each operand, and each output behind them, the axis with a label."""
        sides = self.ins + self.outs
        return tuple(of.index(label) if label in of else None for of in sides)

    def tied(self, k: int, axis: int) -> frozenset[tuple[int, int]]:
        """Axes with the label of an axis of array `k`; empty where it has none."""
        sides = self.ins + self.outs
        label = sides[k][axis]
        every = ((m, d) for m, of in enumerate(sides) for d in range(len(of)))
        same = (at for at in every if sides[at[0]][at[1]] == label)
        return frozenset() if label is None else frozenset(same)


Rule = Callable[[Any, int], Labels | str]


def axes_of(atom: Atom) -> tuple[int, ...]:
    return tuple(range(atom.aval.ndim))


def no_labels(atom: Atom) -> tuple[Label, ...]:
    return (None,) * atom.aval.ndim


def elementwise(eqn: JaxprEqn, n: int) -> Labels:
    out = eqn.outvars[0].aval.shape

    def operand(atom: Atom) -> tuple[Label, ...]:
        shape = atom.aval.shape  # an axis of size one meets every part
        return tuple(None if s == 1 < out[d] else d for d, s in enumerate(shape))

    ins = tuple(map(operand, eqn.invars))
    return Labels(ins, tuple(map(axes_of, eqn.outvars)))


def is_plain_bitcast(eqn: JaxprEqn) -> bool:
    """Whether an operation reads the bits of each element as another type."""
    return (
        primitives.is_bitcast(eqn)
        and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    )


def bitcast(eqn: JaxprEqn, n: int) -> Labels | str:
    plain = is_plain_bitcast(eqn)
    return elementwise(eqn, n) if plain else "it changes the number of axes"


def each_alone(eqn: JaxprEqn, n: int) -> Labels:
    """Operand i gives output i, and has nothing to do with the others."""
    pairs = [[(i, d) for d in axes_of(v)] for i, v in enumerate(eqn.invars)]
    each = tuple(map(tuple, pairs))
    return Labels(each, each)


def is_to_memory(eqn: JaxprEqn) -> bool:
    """Whether it sends arrays to another memory of their device, and nothing else."""
    places = eqn.params.get("devices", ())
    sends = primitives.is_transfer(eqn)
    return sends and all(isinstance(place, jax.memory.Space) for place in places)


def device_put(eqn: JaxprEqn, n: int) -> Labels | str:
    return each_alone(eqn, n) if is_to_memory(eqn) else "it names a sharding"


def psum(eqn: JaxprEqn, n: int) -> Labels | str:
    named = all(isinstance(a, str) for a in eqn.params["axes"])
    if not named or eqn.params.get("axis_index_groups") is not None:
        return "it sums over more than named axes of the mesh"
    return each_alone(eqn, n)


def constraint(eqn: JaxprEqn, n: int) -> Labels:
    """A constraint holds for a part as it is where it names nothing for the axis."""
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None or eqn.params["layout"] is not None:
        return Labels((no_labels(eqn.invars[0]),), (no_labels(eqn.outvars[0]),))

    def names_none(axis: int) -> bool:
        is_open = axis in eqn.params["unconstrained_dims"]
        return is_open or axis >= len(spec) or spec[axis] is None

    free = tuple(d if names_none(d) else None for d in axes_of(eqn.invars[0]))
    return Labels((free,), (free,))


def iota(eqn: JaxprEqn, n: int) -> Labels:
    """Along the axis that it counts, each part has its own first number."""
    return Labels((), (axes_of(eqn.outvars[0]),))


def broadcast(eqn: JaxprEqn, n: int) -> Labels | str:
    if len(eqn.invars) > 1:
        return "its shape is not static"
    (operand,), out = eqn.invars, eqn.outvars[0].aval.shape
    places = zip(eqn.params["broadcast_dimensions"], operand.aval.shape, strict=True)
    ins = tuple(int(d) if out[d] == size else None for d, size in places)
    return Labels((ins,), (axes_of(eqn.outvars[0]),))


def reshape(eqn: JaxprEqn, n: int) -> Labels | str:
    if len(eqn.invars) > 1:
        return "its shape is not static"
    shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    # the order in which it reads the axes, where that is not their own
    order = eqn.params["dimensions"] or range(len(shape))
    old = tuple(shape[d] for d in order)
    ins: list[Label] = [None] * len(old)
    outs: list[Label] = [None] * len(new)
    # The view [before, n, rest]: of an array without elements, none tells the axes.
    at = {} if 0 in old else {math.prod(new[:j]): j for j in _cut_by(new, n)}
    for i in _cut_by(old, n):
        j = at.get(math.prod(old[:i]))
        # one part is the whole: any two axes would do, so only equal ones are the same
        if j is not None and outs[j] is None and (n > 1 or old[i] == new[j]):
            ins[order[i]] = outs[j] = i
    return Labels((tuple(ins),), (tuple(outs),))


def _cut_by(shape: tuple[int, ...], n: int) -> list[int]:
    return [d for d, size in enumerate(shape) if size % n == 0]


def squeeze(eqn: JaxprEqn, n: int) -> Labels:
    gone = eqn.params["dimensions"]
    free = tuple(None if d in gone else d for d in axes_of(eqn.invars[0]))
    return Labels((free,), (tuple(d for d in free if d is not None),))


def transpose(eqn: JaxprEqn, n: int) -> Labels:
    outs = tuple(int(d) for d in eqn.params["permutation"])
    return Labels((axes_of(eqn.invars[0]),), (outs,))


def reduction(eqn: JaxprEqn, n: int) -> Labels:
    combine, over = primitives.of(eqn).combine, eqn.params["axes"]
    every = axes_of(eqn.invars[0])
    ins = tuple(d if combine or d not in over else None for d in every)
    return Labels((ins,), (tuple(d for d in every if d not in over),), combine)


def along(parameter: str) -> Rule:
    """Operations along the axes that a parameter names; all others are batch axes."""

    def rule(eqn: JaxprEqn, n: int) -> Labels:
        over = eqn.params[parameter]
        if not isinstance(over, tuple):  # some are of numpy, some count from the end
            over = (int(over) % eqn.invars[0].aval.ndim,)
        free = lambda v: tuple(None if d in over else d for d in axes_of(v))
        return Labels(tuple(map(free, eqn.invars)), tuple(map(free, eqn.outvars)))

    return rule


def tile(eqn: JaxprEqn, n: int) -> Labels:
    """Copies of an array side by side; along the other axes nothing happens."""
    free = tuple(
        d if count == 1 else None for d, count in enumerate(eqn.params["reps"])
    )
    return Labels((free,), (free,))


def stack(eqn: JaxprEqn, n: int) -> Labels:
    """Arrays side by side along a new axis."""
    axis, each = eqn.params["axis"], axes_of(eqn.invars[0])
    out = (*each[:axis], None, *each[axis:])
    return Labels((each,) * len(eqn.invars), (out,))


def unstack(eqn: JaxprEqn, n: int) -> Labels:
    axis, every = eqn.params["axis"], axes_of(eqn.invars[0])
    free = tuple(None if d == axis else d for d in every)
    each = tuple(d for d in every if d != axis)
    return Labels((free,), (each,) * len(eqn.outvars))


def sliced(eqn: JaxprEqn, n: int) -> Labels:
    """Slices of which some axes are taken whole."""
    pairs = zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)
    free = tuple(d if old == new else None for d, (old, new) in enumerate(pairs))
    # A step of -1 gives as many elements, in another order; `lax.slice` has none such.
    return Labels((free, *map(no_labels, eqn.invars[1:])), (free,))


def updated(eqn: JaxprEqn, n: int) -> Labels:
    """An array with a slice written into it; where the slice has the whole axis."""
    array, new, *starts = eqn.invars
    pairs = zip(array.aval.shape, new.aval.shape, strict=True)
    free = tuple(d if old == size else None for d, (old, size) in enumerate(pairs))
    return Labels((free, free, *map(no_labels, starts)), (free,))


def pad(eqn: JaxprEqn, n: int) -> Labels:
    padded = eqn.params["padding_config"]
    free = tuple(None if any(p) else d for d, p in enumerate(padded))
    return Labels((free, ()), (free,))


def loop(eqn: JaxprEqn, n: int) -> Labels | str:
    """A scan in which no iteration needs another: `lax.map`."""
    constants, carried, xs = split(eqn, eqn.invars)
    if carried:
        return "it carries something from one iteration to the next"
    stack = lambda v: (0, *no_labels(v)[1:])
    ins = (*map(no_labels, constants), *map(stack, xs))
    return Labels(ins, tuple(map(stack, eqn.outvars)))


# -- random keys and bits

OTHER_GENERATOR = "its generator is not known to make the bits of a part by themselves"
NOT_PARTITIONABLE = "without `jax_threefry_partitionable` all its bits are made at once"


def _are_threefry(eqn: JaxprEqn) -> bool:
    atoms = [*eqn.invars, *eqn.outvars]
    is_key = lambda v: jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
    return all(_compat.is_threefry(v.aval) for v in atoms if is_key(v))


def random_keys(eqn: JaxprEqn, n: int) -> Labels | str:
    """What each key gives, or is made of: its words, new keys, a seed."""
    if not _are_threefry(eqn):
        return OTHER_GENERATOR
    if eqn.primitive.name == "random_fold_in":
        return elementwise(eqn, n)
    atoms = eqn.invars[0], eqn.outvars[0]
    rank = min(v.aval.ndim for v in atoms)  # behind these are words, or the new keys
    each = tuple((*range(rank), *no_labels(v)[rank:]) for v in atoms)
    return Labels(each[:1], each[1:])


def draws_by_place(eqn: JaxprEqn) -> bool:
    """Whether the bits of a `random_bits` are those of its key and of their places."""
    return _are_threefry(eqn) and _compat.is_partitionable(eqn)


def random_bits(eqn: JaxprEqn, n: int) -> Labels | str:
    """The bits of a part of the keys; and of the places, where each has its own."""
    if not _are_threefry(eqn):
        return OTHER_GENERATOR
    keys, every = axes_of(eqn.invars[0]), axes_of(eqn.outvars[0])
    if draws_by_place(eqn):
        return Labels((keys,), (every,))
    if not keys:
        return NOT_PARTITIONABLE
    return Labels((keys,), (keys + (None,) * (len(every) - len(keys)),))
