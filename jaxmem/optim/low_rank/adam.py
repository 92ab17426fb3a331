"""Adam in float32, with eps added after the bias correction or before it.

The AdamW in the references of GaLore, APOLLO and Fira adds eps to the square root of
the second moment as it is; corrected, that is an eps of 1 / sqrt(1 - b2^t) times as
much, 31.6 at the first step.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32, PyTree

from jaxmem._checks import check_scalar
from jaxmem.optim._by_keys import held_by_keys

EpsPlacement = Literal["optax", "reference"]


class LowRankAdamState(NamedTuple):
    """State of the Adam that GaLore runs by default.

    Attributes:
      count: int32[], steps.
      mu: first moment, float32, shaped as the updates.
      nu: second moment, float32, shaped as the updates.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree
    nu: PyTree


class AdamRule(NamedTuple):
    """Hyperparameters; numbers or traced scalars."""

    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike

    def checked(self) -> "AdamRule":
        """The same, or an error that names what is out of range."""
        decay = {"at_least": 0, "below": 1}
        return AdamRule(
            check_scalar("b1", self.b1, **decay),
            check_scalar("b2", self.b2, **decay),
            check_scalar("eps", self.eps, at_least=0),
        )

    def moments(self, g, m, v) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
        """Both moments with one more gradient in them."""
        return _averaged(self.b1, m, g), _averaged(self.b2, v, g * g)

    def ratio(self, m, v) -> Float32[Array, "..."]:
        """m / (sqrt(v) + eps), both moments as they are."""
        return m / (jnp.sqrt(v) + jnp.float32(self.eps))

    def correction(self, count: Int32[Array, ""]) -> Float32[Array, ""]:
        """What the ratio is multiplied by for the bias of both moments, at a step."""
        return self.corrections(count, "reference")[0]

    def corrections(
        self, count: Int32[Array, ""], eps_placement: EpsPlacement
    ) -> tuple[Any, Any]:
        """Factors of the ratio, and of the second moment in it."""
        t = count.astype(jnp.float32)
        first, second = (_one_minus_power(b, t) for b in (self.b1, self.b2))
        if eps_placement == "reference":
            return jnp.sqrt(second) / first, 1.0
        return 1 / first, 1 / second


# 1 - b of a Python number is taken in its precision: in float32 1 - 0.999 has lost four
# digits.


def _averaged(b: Any, old, new):
    """b old + (1 - b) new."""
    if isinstance(b, int | float):
        return float(b) * old + float(1 - b) * new
    return b.astype(jnp.float32) * old + (1 - b).astype(jnp.float32) * new


def _one_minus_power(b: Any, t: Float32[Array, ""]) -> Float32[Array, ""]:
    """1 - b^t."""
    if isinstance(b, int | float):
        return -jnp.expm1(t * (math.log(b) if b > 0 else -math.inf))
    return -jnp.expm1(t * jnp.log(b.astype(jnp.float32)))


def adam(rule: AdamRule, eps_placement: EpsPlacement) -> optax.GradientTransformation:
    """Adam as an inner transformation, in float32 under any promotion of dtypes."""

    def init(params: PyTree) -> LowRankAdamState:
        zero = lambda p: jnp.zeros_like(p, dtype=jnp.float32)
        zeros = lambda: jax.tree.map(zero, params)
        return LowRankAdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, LowRankAdamState]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        outside, inside = rule.corrections(count, eps_placement)
        leaves, tree = jax.tree.flatten(updates)
        old = [tree.flatten_up_to(x) for x in (state.mu, state.nu)]
        new = [rule.moments(*x) for x in zip(leaves, *old, strict=True)]
        steps = [outside * rule.ratio(m, inside * v) for m, v in new]
        mu, nu = (tree.unflatten([pair[i] for pair in new]) for i in (0, 1))
        return tree.unflatten(steps), LowRankAdamState(count, mu, nu)

    return held_by_keys(optax.GradientTransformation(init, update))
