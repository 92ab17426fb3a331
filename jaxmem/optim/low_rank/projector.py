"""A leaf's projectors: when they are made anew, and how they are kept.

One refresh is a `lax.cond` whose predicate is one number for the whole leaf, computed
from the state alone: so `jaxmem.schedule` can move it, with the gradient that it reads,
into the backward scan over layers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxmem._checks import check_bool, check_choice, check_int, shown
from jaxmem.optim.low_rank import lazy
from jaxmem.optim.low_rank.lazy import LazyState
from jaxmem.optim.low_rank.noise import seeds_of
from jaxmem.optim.low_rank.sides import Projection, Side, Vectors, length, sides_of
from jaxmem.optim.low_rank.stored import (
    ProjectorDType,
    StoredAs,
    empty,
    load,
    store,
    stored_as,
    why_not,
)
from jaxmem.optim.low_rank.subspace import Subspace, left_vectors
from jaxmem.optim.low_rank.zeros import zeros_along


class ProjectorState(NamedTuple):
    """What is kept of a leaf's projectors.

    Attributes:
      left: [..., rank, m] as stored, or None.
      right: [..., rank, n] as stored, or None.
      refresh_at: the number of steps after which the next gradient makes them anew:
        int32[], with lazy subspaces int32[...], one a matrix.
      lazy: of lazy subspaces, else None.
    """

    left: Any
    right: Any
    refresh_at: Int32[Array, "*batch"] | None  # None inside of a refresh alone
    lazy: LazyState | None


@dataclass(frozen=True)
class ProjectorRule:
    """How projectors are made, for all leaves.

    The attributes are arguments of `scale_by_galore`.
    """

    projection: Projection
    rank: int
    gap: int
    subspace: Subspace
    iterations: int
    dtype: ProjectorDType
    lazy: bool
    seed: int

    def checked(self) -> "ProjectorRule":
        """Errors for arguments out of their ranges; numbers as Python has them."""
        return ProjectorRule(
            check_choice("projection", self.projection, get_args(Projection)),
            check_int("rank", self.rank, 1),
            check_int("gap", self.gap, 1, 2**29),
            check_choice("subspace", self.subspace, get_args(Subspace)),
            check_int("iterations", self.iterations, 1),
            check_choice("projector_dtype", self.dtype, get_args(ProjectorDType)),
            check_bool("lazy", self.lazy),
            check_int("seed", self.seed),
        )

    def init(self, p, path: str) -> ProjectorState:
        """Projectors of zeros, before the first gradient."""
        *batch, m, n = p.shape
        sides = sides_of(self.projection, m, n)
        for side in sides:
            self._check_stored(p, side, path)
        shape = tuple(batch) if self.lazy else ()
        made = {side: self._empty(p, side) for side in sides}
        return ProjectorState(
            made.get("left"),
            made.get("right"),
            jnp.zeros(shape, jnp.int32),
            lazy.init(shape, self.gap) if self.lazy else None,
        )

    def vectors(self, state: ProjectorState, shape: tuple[int, ...]) -> Vectors:
        """The projectors for gradients of this shape, in float32."""
        one = lambda x, side: None if x is None else load(x, length(side, shape))
        return Vectors(one(state.left, "left"), one(state.right, "right"))

    def refreshed(
        self,
        g: Array,
        state: ProjectorState,
        count: Int32[Array, ""],
        path: str,
        keep: Bool[Array, ""] | bool | None = None,
        axes: tuple[str, ...] = (),
    ) -> ProjectorState:
        """The state with projectors of `g`, if they are due.

        Args:
          g: the gradient.
          state: until now.
          count: steps finished.
          path: of the leaf.
          keep: if it is False, `g` counts for nothing.
          axes: mesh axes whose devices have gradients of their own; the projectors are
            those of the mean of all that are kept.
        """
        assert state.refresh_at is not None
        due = count >= state.refresh_at
        if keep is not None:
            due = due & _any_keeps(keep, axes)
        batch = g.shape[:-2]
        seeds = seeds_of(self.seed, path, count, batch)

        def renew(g, seeds, due, state):
            return self._renewed(_over_devices(g, keep, axes), seeds, due, state)

        def stay(g, seeds, due, state):
            return state

        # what is no array of layers stays outside of the branches
        old = state._replace(refresh_at=None)
        new = lax.cond(jnp.any(due), renew, stay, g, seeds, due, old)
        gap = self.gap if new.lazy is None else new.lazy.gap
        at = jnp.where(due, count + gap, state.refresh_at)
        return new._replace(refresh_at=at)

    def _renewed(self, g, seeds, due, state: ProjectorState):
        g = g.astype(jnp.float32)
        now, old = {}, self.vectors(state, g.shape)
        for side, matrix in (("left", g), ("right", g.mT)):
            before = getattr(old, side)
            if before is not None:
                now[side] = left_vectors(
                    matrix, before, seeds, self.subspace, self.iterations
                )
        kept = {side: store(x, self._kind(state, side)) for side, x in now.items()}
        after = lazy.advanced(state.lazy, now, old) if self.lazy else None
        new = ProjectorState(kept.get("left"), kept.get("right"), None, after)
        if not self.lazy:
            return new
        return jax.tree.map(lambda new, old: _where(due, new, old), new, state)

    def _check_stored(self, p, side: Side, path: str) -> None:
        if reason := why_not(length(side, p.shape), self.dtype):
            raise ValueError(
                f"projector_dtype={self.dtype!r} for the leaf {path}, {shown(p)}: "
                f"{reason}; use 'int8', or leave it out with projected=..."
            )

    def _empty(self, p, side: Side):
        axis = p.ndim - (2 if side == "left" else 1)
        batch = tuple(range(p.ndim - 2))

        def zeros(shape, dtype):
            coded = (None,) * (len(shape) - p.ndim)  # within a group
            return zeros_along(p, shape, dtype, (*batch, None, axis, *coded))

        shape = (*p.shape[:-2], self.rank, length(side, p.shape))
        return empty(shape, stored_as(self.dtype, p.dtype), zeros)

    def _kind(self, state: ProjectorState, side: Side) -> StoredAs:
        """How a projector is stored; the state has the dtype of the gradients."""
        if self.dtype != "gradient":
            return self.dtype
        return stored_as(self.dtype, getattr(state, side).dtype)


def _any_keeps(keep, axes: tuple[str, ...]):
    """Whether one of the devices does."""
    if not axes:
        return keep
    return lax.psum(jnp.asarray(keep, jnp.int32), axes) > 0


def _over_devices(g, keep, axes: tuple[str, ...]):
    """The sum of what devices keep; singular vectors do not depend on its length."""
    if not axes:
        return g
    g = g.astype(jnp.float32)
    if keep is not None:  # NaN times 0 is NaN
        g = jnp.where(keep, g, jnp.zeros_like(g))
    return lax.psum(g, axes)


def _where(due, new, old):
    """`new` for the matrices that are due."""
    return jnp.where(due.reshape(due.shape + (1,) * (new.ndim - due.ndim)), new, old)
