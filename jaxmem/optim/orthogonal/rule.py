"""Momentum and its orthogonalisation, leaf by leaf: the state and update of Muon."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.tree_util import keystr
from jaxtyping import Array, Float, Int32, PyTree

from jaxmem._checks import shown
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.low_bit.codes import MomentCodes, pack, shapes, unpack
from jaxmem.optim.low_bit.low_bit import LowBit, zeros_of
from jaxmem.optim.low_bit.moments import is_codes
from jaxmem.optim.orthogonal.matrices import MatrixAxes
from jaxmem.optim.orthogonal.newton_schulz import NewtonSchulz
from jaxmem.optim.orthogonal.sharded import (
    names_of,
    on_shards,
    over_batch,
    sides_over_mesh,
)


class MuonState(NamedTuple):
    """State of the matrices.

    Attributes:
      count: int32[], steps.
      mu: momentum: `MomentCodes` a leaf, or an array.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree


class MuonLeaf(NamedTuple):
    """A leaf of matrices: their axes, and how it is sharded where that is known."""

    axes: MatrixAxes
    sharding: NamedSharding | None


class MuonRule(NamedTuple):
    """What is done to each matrix; see `muon` for the arguments.

    Attributes:
      how: the codes of the momentum.
      mu_dtype: its dtype without codes; None for that of the parameter.
      deal: whether the matrices of a sharded stack are dealt over the devices.
    """

    iterations: NewtonSchulz
    beta: Any
    how: LowBit
    mu_dtype: Any
    nesterov: bool
    adaptive: bool
    consistent_rms: Any
    deal: bool

    def init(self, path: Any, p: Any) -> Any:
        """The momentum of a new parameter."""
        if self.how.bits != 32:
            return zeros_of(self.how, 0, path, p)
        return jnp.zeros_like(p, dtype=self.mu_dtype)

    def update(
        self, leaf: MuonLeaf, count: Any, g: Array, stored: Any
    ) -> tuple[Array, Any]:
        """The update of a leaf and its new momentum."""
        axes, sharding = leaf
        cut = _are_cut(sharding, axes)
        at_once = self.deal or _batch_is_cut(sharding, axes) or not axes.batch
        if (cut and at_once) or not axes.leading:
            # all matrices at once, up to the iterations
            m = self._momentum(g, stored)
            x = self._ahead(count, m, g)
            return self._orthogonal(leaf, x), self._stored(m, stored)
        one = MuonLeaf(axes.of_one, _of_one(sharding, axes))
        over = lambda fn, *stacks: over_batch(fn, len(axes.batch))(*stacks)
        if self._kept_as_computed(g, stored):
            # elementwise on the whole stack, which is then updated in place
            m = self._momentum(g, stored)
            of = lambda m, g: self._orthogonal(one, self._ahead(count, m, g))
            return over(of, m, g), m

        def of_codes(g, stored):
            m = self._momentum(g, stored)
            u = self._orthogonal(one, self._ahead(count, m, g))
            return u, self._stored(m, stored)

        return over(of_codes, g, stored)

    def matrix(
        self, x: Float[Array, "m n"], axes: tuple[str, ...] = (), wide: Any = None
    ) -> Float[Array, "m n"]:
        """The update of one matrix.

        Args:
          x: its momentum, or this device's part of its larger side.
          axes: names of the mesh axes over which that side is sharded.
          wide: whether that side is the columns, where the shape does not say.
        """
        wide = x.shape[0] <= x.shape[1] if wide is None else wide
        u = self.iterations(x, wide, axes)
        if self.adaptive:
            dual = jnp.sum(x * u)
            u = (jax.lax.psum(dual, axes) if axes else dual) * u
        return u

    def _kept_as_computed(self, g, stored) -> bool:
        """Whether the momentum is kept without a rounding that the update is before."""
        return not is_codes(stored) and _wider(g, stored) == stored.dtype

    def _momentum(self, g, stored):
        m = stored
        if is_codes(stored):
            assert self.how.formats is not None
            m = unpack(self.how.formats[0], stored)
        dtype = _wider(g, m)
        keep, add = (_as(x, dtype) for x in (self.beta, 1 - self.beta))
        return add * g.astype(dtype) + keep * m.astype(dtype)

    def _stored(self, m, like):
        if not is_codes(like):
            return m.astype(like.dtype)
        assert self.how.formats is not None
        return pack(self.how.formats[0], m.shape[-1] // like.scale.shape[-1], m)

    def _ahead(self, count, m, g):
        """The momentum that is orthogonalised, its start at zero made up for."""
        t = count.astype(jnp.float32)
        by = lambda x, t: x / (1 - self.beta**t).astype(x.dtype)
        if not self.nesterov:
            return by(m, t)
        # each corrected as optax has it, a sum of them in the wider dtype
        old, new = by(m, t + 1), by(g, t).astype(m.dtype)
        keep, add = (_as(x, m.dtype) for x in (self.beta, 1 - self.beta))
        return keep * old + add * new

    def _orthogonal(self, leaf: MuonLeaf, x):
        axes, sharding = leaf
        rows, columns = axes.sizes(x.shape)
        if sharding is not None and _are_cut(sharding, axes):
            u = on_shards(self.matrix, x, axes, sharding, self.iterations.gram)
        else:
            done = over_batch(self.matrix, len(axes.batch))(axes.matrices(x))
            u = axes.leaf(done, x.shape)
        if self.consistent_rms is None:
            return math.sqrt(max(1.0, columns / rows)) * u
        return _as(math.sqrt(max(rows, columns)) * self.consistent_rms, u.dtype) * u


def of_matrices(
    rule: MuonRule, leaves: Mapping[str, MuonLeaf]
) -> optax.GradientTransformation:
    """The transformation of the leaves with these paths; there are no others."""

    def init(params: PyTree) -> Any:
        mu = jax.tree_util.tree_map_with_path(rule.init, params)
        return MuonState(jnp.zeros((), jnp.int32), mu)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> Any:
        del params
        check_class("muon", state, MuonState)
        given, tree = jax.tree_util.tree_flatten_with_path(updates)
        try:
            kept = tree.flatten_up_to(state.mu)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"updates={shown(updates)}: not of the structure of the parameters "
                f"that the state was made for: {error}"
            ) from None
        count: Any = optax.safe_increment(state.count)
        done = []
        for (path, g), stored in zip(given, kept, strict=True):
            _check_momentum(rule.how, keystr(path), g, stored)
            done.append(rule.update(leaves[keystr(path)], count, g, stored))
        u, mu = (tree.unflatten([x[i] for x in done]) for i in (0, 1))
        return u, MuonState(count, mu)

    return held_by_keys(optax.GradientTransformation(init, update))


def _wider(g: Any, m: Any) -> Any:
    """The dtype of a sum of both."""
    return jnp.promote_types(g.dtype, m.dtype)


def _as(number: Any, dtype: Any) -> Any:
    """A Python number as it is, a scalar array in this dtype."""
    return number if isinstance(number, int | float) else number.astype(dtype)


def _are_cut(sharding: NamedSharding | None, axes: MatrixAxes) -> bool:
    """Whether a leaf is spread over devices."""
    if sharding is None:
        return False
    return _batch_is_cut(sharding, axes) or any(sides_over_mesh(sharding, axes))


def _batch_is_cut(sharding: NamedSharding | None, axes: MatrixAxes) -> bool:
    return sharding is not None and any(names_of(sharding, d) for d in axes.batch)


def _of_one(sharding: NamedSharding | None, axes: MatrixAxes) -> NamedSharding | None:
    """The sharding of one matrix of a stack."""
    if sharding is None:
        return None
    spec = jax.sharding.PartitionSpec(*sharding.spec[len(axes.batch) :])
    return NamedSharding(sharding.mesh, spec)


def _check_momentum(how: LowBit, path: str, g: Any, stored: Any) -> None:
    """ValueError for a momentum of another parameter or of other options."""
    block = None if how.bits == 32 else how.block_of(g.shape)
    wanted, kept = [g.shape], [getattr(stored, "shape", None)]
    if block is not None:
        assert how.formats is not None
        shapes_of = lambda codes: [x.shape for x in jax.tree.leaves(codes)]
        wanted = shapes_of(shapes(how.formats[0], block, g.shape))
        kept = shapes_of(stored) if isinstance(stored, MomentCodes) else kept
    if kept != wanted:
        raise ValueError(
            f"state.mu{path}={shown(stored)}: for a gradient of shape {g.shape} with "
            f"{how} there are arrays of {wanted}; the state is one of other "
            "parameters or other options"
        )
