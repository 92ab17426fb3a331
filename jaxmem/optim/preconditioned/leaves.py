"""Rules of matrices, a matrix of a leaf at a time: what their transformations share.

A leaf of no matrices is updated elementwise. The matrices of a stack [layers, m, n] are
done in a loop, one after another: their products are there one at a time, and
`jaxmem.schedule` moves the rule of a layer into the backward scan.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree, UInt32

from jaxmem._checks import check_choice, wrong_value
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim.factored.leaves import check_real, map_leaves
from jaxmem.optim.low_bit.codes import pack, unpack
from jaxmem.optim.low_bit.low_bit import LowBit, one_code, zeros_of
from jaxmem.optim.low_bit.moments import is_codes
from jaxmem.optim.low_bit.random import counter_bits, mix, uniform
from jaxmem.optim.low_rank.checks import check_state
from jaxmem.optim.low_rank.noise import seeds_of
from jaxmem.optim.low_rank.zeros import zeros_along
from jaxmem.optim.orthogonal.matrices import (
    MatrixAxes,
    axes_of_leaves,
    check_axes_of,
)
from jaxmem.optim.orthogonal.sharded import over_batch
from jaxmem.optim.preconditioned.symmetric import PreconditionerDType, Zeros

_NUMBERS = "weight_dimension_numbers"
_MOMENTS = (0, 1)  # the first two fields of a leaf, and what they are of `LowBit`


class MatrixRule(Protocol):
    """What is done to each matrix."""

    @property
    def how(self) -> LowBit:
        """The codes of moments."""
        ...

    @property
    def dtype(self) -> PreconditionerDType:
        """Of what is kept beside the moments; all but float32 is rounded."""
        ...

    def has_moments(self, matrix: bool) -> tuple[bool, bool]:
        """Which of the first and the second moment of a leaf have its shape."""
        ...

    @property
    def kept(self) -> Callable[..., tuple[Any, ...]]:
        """`(m, n, side)`: zeros of what is kept of a matrix beside its moments.

        `side("left")` makes zeros that run along the rows, "right" along the columns.
        """
        ...

    @property
    def matrix(self) -> Callable[..., tuple[Any, ...]]:
        """`(count, seed, g, *fields)`: update and fields of one matrix.

        Of any array, elementwise, where `kept` has nothing.
        """
        ...


class MatrixLeaves(NamedTuple):
    """Which leaves are matrices, as users say it; see `muon`."""

    who: str
    numbers: Any
    stacked: Any

    def axes(self, tree: PyTree) -> list[MatrixAxes | None]:
        """Of each leaf; None for one of no matrices, or without elements."""
        found = axes_of_leaves(tree, self.numbers, self.stacked, self.who, _NUMBERS)
        sizes = [x.size for x in jax.tree.leaves(tree)]
        return [a if size else None for a, size in zip(found, sizes, strict=True)]


def checked_leaves(who: str, numbers: Any, stacked: Any) -> MatrixLeaves:
    """The arguments, or an error that names the wrong one."""
    check_axes_of(numbers, stacked, _NUMBERS)
    return MatrixLeaves(who, numbers, stacked)


def checked_codes(bits: Any) -> LowBit:
    """The options of the moments."""
    how = one_code(bits)
    if how.on_host:
        raise wrong_value("bits", how, "not on_host (see jaxmem.optim.on_host)")
    return how


def checked_dtype(preconditioner_dtype: Any) -> PreconditionerDType:
    """How what is kept beside the moments is stored."""
    kinds = get_args(PreconditionerDType)
    return check_choice("preconditioner_dtype", preconditioner_dtype, kinds)


def of_matrices(
    rule: MatrixRule, leaves: MatrixLeaves, state_class: Any
) -> optax.GradientTransformation:
    """The transformation of a rule.

    Args:
      rule: of one matrix.
      leaves: which leaves have matrices.
      state_class: a NamedTuple of the count of steps, int32[], and of trees: both
        moments, of the parameters' shapes, and what the rule keeps.
    """
    who, names = leaves.who, state_class._fields[1:]

    def init(params: PyTree) -> Any:
        check_real(who, params)
        named, tree = jax.tree_util.tree_flatten_with_path(params)
        pairs = zip(named, leaves.axes(params), strict=True)
        made = [_init(rule, path, p, axes, len(names)) for (path, p), axes in pairs]
        trees = (tree.unflatten([x[i] for x in made]) for i in range(len(names)))
        return state_class(jnp.zeros((), jnp.int32), *trees)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> Any:
        del params
        check_state(who, init, updates, state)
        axes = iter(leaves.axes(updates))

        def leaf(path, g, *fields):
            return _update(rule, next(axes), path, state.count, g, fields)

        with jax.named_scope(f"jaxmem.{who}"):
            u, *kept = map_leaves(who, 1 + len(names), leaf, updates, *state[1:])
        count: Any = optax.safe_increment(state.count)
        return u, state_class(count, *kept)

    return held_by_keys(optax.GradientTransformation(init, update))


def _init(rule: MatrixRule, path, p, axes: MatrixAxes | None, fields: int) -> tuple:
    """The fields of a new leaf."""
    pairs = zip(_MOMENTS, rule.has_moments(axes is not None), strict=True)
    made = [zeros_of(rule.how, i, path, p) if has else None for i, has in pairs]
    if axes is None:
        return (*made, *[None] * (fields - len(made)))
    batch = tuple(p.shape[d] for d in axes.batch)

    def side(which: str) -> Zeros:
        along = axes.rows if which == "left" else axes.columns
        first = along[0] if len(along) == 1 else None  # merged axes are not one

        def zeros(shape, dtype):
            # the last axes are the matrix's; before them are the blocks'
            runs = (None,) * len(shape) if len(shape) != 2 else (first, None)
            return zeros_along(p, (*batch, *shape), dtype, (*axes.batch, *runs))

        return zeros

    return (*made, *rule.kept(*axes.sizes(p.shape), side))


def _update(
    rule: MatrixRule, axes: MatrixAxes | None, path: str, count, g, fields
) -> tuple:
    """(update, *fields) of a leaf."""
    batch = () if axes is None else tuple(g.shape[d] for d in axes.batch)
    seeds = seeds_of(rule.how.seed, path, count, batch) if _draws(rule) else None
    if axes is None or not axes.leading:
        return _of_array(rule, axes, count, seeds, g, *fields)
    of_one = lambda seed, g, *own: _of_array(rule, axes.of_one, count, seed, g, *own)
    return over_batch(of_one, len(axes.batch))(seeds, g, *fields)


def _of_array(
    rule: MatrixRule, axes: MatrixAxes | None, count, seeds, g: Array, *fields: Any
) -> tuple:
    """(update, *fields) of an array, with its moments out of their codes and back."""
    stored, kept = fields[: len(_MOMENTS)], fields[len(_MOMENTS) :]
    moments = [_unpacked(rule.how, i, x) for i, x in zip(_MOMENTS, stored, strict=True)]
    arrays = g.astype(jnp.float32), *moments
    matrix = lambda seed, *own: rule.matrix(count, seed, *own)
    if axes is None:
        done = matrix(seeds, *arrays, *kept)
    else:
        turned = jax.tree.map(axes.matrices, arrays)
        done = over_batch(matrix, len(axes.batch))(seeds, *turned, *kept)
    results, kept = done[: len(arrays)], done[len(arrays) :]
    if axes is not None:
        results = jax.tree.map(lambda x: axes.leaf(x, g.shape), results)
    u, *moments = results
    seed = None if seeds is None else seeds.reshape(-1)[0]
    packed = [
        _packed(rule.how, i, old, new, seed)
        for i, old, new in zip(_MOMENTS, stored, moments, strict=True)
    ]
    return u.astype(g.dtype), *packed, *kept


def _unpacked(how: LowBit, which: int, stored):
    if not is_codes(stored):
        return stored
    assert how.formats is not None
    return unpack(how.formats[which], stored)


def _packed(how: LowBit, which: int, like, x, seed: UInt32[Array, ""] | None):
    if not is_codes(like):
        return x
    assert how.formats is not None
    draw = None
    if how.draws(which):
        draw = uniform(counter_bits(drawn(seed, which), x.shape))
    return pack(how.formats[which], x.shape[-1] // like.scale.shape[-1], x, draw)


def _draws(rule: MatrixRule) -> bool:
    """Whether something is rounded stochastically, so that matrices need seeds."""
    return rule.dtype != "float32" or any(map(rule.how.draws, _MOMENTS))


def drawn(seed: Any, which: int) -> Any:
    """A seed of its own, uint32[], for each thing that is rounded of a matrix; None
    where nothing is."""
    return None if seed is None else mix(seed + jnp.uint32(which))
