"""Sums over rows in two steps, where one would leave most of a GPU idle.

XLA:GPU sums 32 columns in one block of threads, 32 rows at a time, and makes two steps
only of more than 4,096 rows. The gradient of a bias or of a norm's scale over fewer
tokens is then done by a few processors, each of which waits for its loads. (Profiles of
an H200 have 0.12 to 0.15 ms for a sum of [4096, 1024], which takes 0.02 to read.) Here
the rows are summed in groups first, side by side; a barrier keeps XLA from putting both
steps together again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxmem import _compat
from jaxmem.chips import is_gpu, rates_of
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.scans import barrier
from jaxmem.ir.shards import InputShardings, Shardings
from jaxmem.scheduling._choice import Choice, Index
from jaxmem.scheduling._pass import Level, has_level
from jaxmem.scheduling._searched import Searched, SearchedStep
from jaxmem.scheduling.plan.rows import Description

_MOST = 4096  # rows: of more XLA makes two steps itself
_SIDE = 32  # columns of a block of threads, and rows that it takes at once
_LEAST = 8 * _SIDE  # rows: fewer are soon done
_BLOCKS = 4  # for each processor, with which all of them are busy
# Of the sums outside of loops, that may be left as they are: parts take a few bytes.
_LEFT = (0.25, 0.5)


@dataclass(frozen=True)
class TwoStepSums:
    """Whether sums over rows are done in two steps where that is faster."""

    name: ClassVar[str] = "two_step_sums"
    enabled: bool = True
    # how many sums outside of loops are left as they are: the first ones, which come
    # where most is kept for the backward pass
    left: Index = 0


@dataclass(frozen=True)
class Split:
    """How the rows of a sum are put into groups.

    Attributes:
      shape: of the operand, one of its axes perhaps in two.
      first: the axes of this shape that are summed in each group.
      then: those that the groups are along, once the others are gone.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    then: tuple[int, ...]


# id of an equation -> the split of its sum, or its new bodies
Found = dict[int, Split | list[Any]]


class SumInTwoSteps(Searched[TwoStepSums, Found]):
    """Each such sum becomes two, also those in the bodies of loops."""

    config = TwoStepSums
    orders = True

    def analyse(self, level: Level, config: TwoStepSums) -> Iterator[Found]:
        if not config.enabled or not level.compared or not is_gpu(level.target):
            return
        processors = rates_of(level.target).processors
        found = _found(level.jaxpr, level.shardings, processors)
        if level.loop is None:
            for key in _own(found)[: config.left]:
                del found[key]
        if found:
            yield found

    def apply(self, level: Level, rewrite: Found) -> Any:
        return _rewritten(level.jaxpr, rewrite)

    def describe(self, rewrite: Found, target: str) -> Description:
        note = "sums over rows are done in two steps, which keep more of the GPU busy"
        return Description(notes=(note,))

    def undone(self, step: SearchedStep, choice: Choice) -> Iterator[TwoStepSums]:
        made = step.traced.rewritten(choice)
        if not made.did(TwoStepSums):
            return
        done = (found for one, found in made.records[0].rewrites if one is self)
        count = sum(len(_own(found)) for found in done)
        for share in _LEFT:
            if left := round(share * count):
                yield TwoStepSums(left=left)
        yield TwoStepSums(enabled=False)


def _own(found: Found) -> list[int]:
    """The sums of a list of equations itself, in its order."""
    return [key for key, made in found.items() if isinstance(made, Split)]


def _found(closed, given: InputShardings | None, processors: int) -> Found:
    """What changes in a list of equations, and in the bodies that no pass enters."""
    eqns = jaxprs.split(closed)[0].eqns
    if not any(map(primitives.is_reduce_sum, jaxprs.walk(closed))):
        return {}
    shardings = shardings_in(closed, given)
    found: Found = {}
    for eqn in eqns:
        if primitives.is_reduce_sum(eqn):
            split = split_of(eqn, shardings, processors)
            found |= {} if split is None else {id(eqn): split}
        elif _is_entered(eqn):
            old, inside = jaxprs.bodies(eqn), shardings.body(eqn)
            new = [_body(body, inside, processors) for body in old]
            if any(a is not b for a, b in zip(old, new, strict=True)):
                found[id(eqn)] = new
    return found


def _is_entered(eqn) -> bool:
    held = primitives.is_loop, primitives.is_branch, primitives.is_remat
    return any(is_kind(eqn) for is_kind in held) and not has_level(eqn)


def _body(body, given: InputShardings | None, processors: int) -> Any:
    found = _found(body, given, processors)
    return _rewritten(body, found) if found else body


def _rewritten(closed, found: Found) -> Any:
    def rule(eqn, args: list) -> list[Any] | None:
        made = found.get(id(eqn))
        if isinstance(made, Split):
            return [_compat.in_context_of(eqn, partial(_summed, made), *args)]
        return None if made is None else jaxprs.rebind(eqn, args, made)

    return jaxprs.rewritten(closed, rule)


def _summed(split: Split, x: Any) -> Any:
    """The sum of 16-bit numbers is rounded once, at the end."""
    wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32
    rows = x.reshape(split.shape).astype(wide)
    (parts,) = barrier([rows.sum(split.first)])
    return parts.sum(split.then).astype(x.dtype)


def split_of(eqn, shardings: Shardings, processors: int) -> Split | None:
    """How to split a sum so that all processors have work; None where they have."""
    v, axes = eqn.invars[0], sorted(eqn.params["axes"])
    shape = v.aval.shape
    if not axes or not v.aval.size or v.aval.weak_type:
        return None
    if not jnp.issubdtype(v.aval.dtype, jnp.floating):
        return None
    if jaxprs.is_explicit(eqn.params.get("out_sharding")):
        return None
    first, last = axes[0], axes[-1]
    sizes = [n // shardings.count(v, axis) for axis, n in enumerate(shape)]
    rows, columns = math.prod(sizes[first : last + 1]), math.prod(sizes[last + 1 :])
    together = axes == list(range(first, last + 1))
    if not together or columns < 2 or not _LEAST <= rows <= _MOST:
        return None
    blocks = math.prod(sizes[:first]) * math.ceil(columns / _SIDE)
    groups = min(rows // _SIDE, math.ceil(_BLOCKS * processors / blocks))
    whole, parts = _in_groups(sizes[first : last + 1], groups)
    axis = first + whole
    # devices would send what each of the groups gives
    if any(shardings.count(v, a) > 1 for a in range(axis, last + 1)):
        return None
    if math.prod(sizes[first:axis]) * parts < 2:
        return None
    count = whole + (parts > 1)
    cut = (parts, shape[axis] // parts) if parts > 1 else ()
    new = (*shape[:axis], *cut, *shape[axis + bool(cut) :])
    summed = range(first + count, last + 1 + bool(cut))
    return Split(new, tuple(summed), tuple(range(first, first + count)))


def _in_groups(sizes: list[int], groups: int) -> tuple[int, int]:
    """How many axes are along groups as they are, and in how many parts the next is."""
    whole = 0
    while whole < len(sizes) - 1 and sizes[whole] <= groups:
        groups //= sizes[whole]
        whole += 1
    return whole, next(n for n in range(groups, 0, -1) if sizes[whole] % n == 0)
