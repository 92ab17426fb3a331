"""AdamA's arithmetic: a micro-batch into the moments, the moments into a step.

The functions are pure and elementwise on every leaf, so that they can run where the
gradient of a layer is computed.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem.optim.accumulation.devices import count_devices
from jaxmem.optim.accumulation.dtypes import accumulation_dtype
from jaxmem.optim.accumulation.states import accumulating_state

Mode = Literal["paper", "ema", "fractional"]
VScale = Literal["paper", "mean"]


@accumulating_state("mu", "nu")
class AdamAState(NamedTuple):
    """State of `scale_by_adama`.

    Attributes:
      count: int32[], mini-batches finished; in `mode="ema"` the micro-batches of them.
      micro_step: int32[], micro-batches in the current mini-batch; 0 between two.
      micro_batches: int32[], how many a mini-batch is made of.
      mu: first moment, shaped as the parameters.
      nu: second moment, shaped as the parameters.

    With an `axis_name`, `mu` and `nu` differ between devices within a mini-batch.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    micro_step: Int32[Array, ""]
    micro_batches: Int32[Array, ""]
    mu: PyTree
    nu: PyTree


@dataclass(frozen=True)
class AdamARule:
    """The hyperparameters of a step; numbers may be traced scalars."""

    # `axis_name` are the mesh axes whose devices have micro-batches of their own.

    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    eps_root: ArrayLike
    mode: Mode
    v_scale: VScale
    nesterov: bool
    axis_name: tuple[str, ...] = ()


def accumulate(
    rule: AdamARule,
    grads: PyTree,
    state: AdamAState,
    micro_batches: int | Int32[Array, ""],
    weight: ArrayLike | None = None,
    keep: ArrayLike | None = None,
) -> AdamAState:
    scale = _scale(rule, micro_batches, weight)
    m_decay, m_add = _factors(rule, rule.b1, state, micro_batches)
    copies = _copies_of_nu(rule)
    v_decay, v_add = _factors(rule, rule.b2, state, micro_batches, copies)

    def first(g, m):
        g = g.astype(accumulation_dtype(g, m))
        return _moved(m, _times(m_add, _times(scale, g)), m_decay, keep)

    def second(g, v):
        g = g.astype(accumulation_dtype(g, v))
        mean = rule.v_scale == "mean"
        square = _times(scale, jnp.square(g)) if mean else jnp.square(_times(scale, g))
        return _moved(v, _times(v_add, square), v_decay, keep)

    def untouched(v):
        return v if copies == 1 else _as(_at_first(state, copies), v.dtype) * v

    with jax.named_scope("jaxmem.adama.accumulate"):
        return state._replace(
            micro_step=state.micro_step + 1,
            mu=_map(lambda g, m: m if g is None else first(g, m), grads, state.mu),
            nu=_map(
                lambda g, v: untouched(v) if g is None else second(g, v),
                grads,
                state.nu,
            ),
        )


def apply(
    rule: AdamARule, grads: PyTree, state: AdamAState
) -> tuple[PyTree, AdamAState]:
    """The step that the moments make, and the state after this mini-batch."""
    # Of `grads` only the structure and the dtypes count, unless `rule.nesterov`.
    state = _reduced(rule, state)
    count = _advanced(rule, state)

    def widened(tree):
        cast = lambda x, m, v: None if x is None else x.astype(accumulation_dtype(m, v))
        return _map(cast, tree, state.mu, state.nu)

    with jax.named_scope("jaxmem.adama.apply"):
        mu, nu = widened(state.mu), widened(state.nu)
        mu_hat = _unbiased(mu, rule.b1, count)
        if rule.nesterov:
            mu_hat = _look_ahead(rule, mu, widened(grads), count)
        nu_hat = _unbiased(nu, rule.b2, count)
        updates = _map(lambda g, m, v: _ratio(rule, g, m, v), grads, mu_hat, nu_hat)
    return updates, state._replace(
        count=count, micro_step=jnp.zeros_like(state.micro_step)
    )


def _copies_of_nu(rule: AdamARule) -> int:
    """The factor of the old second moment, once a mini-batch, on each of M devices."""
    # `_reduced` divides the sum over the devices by M**2, since the gradients enter
    # with a factor of 1/M before they are squared. So each device multiplies the old
    # moment by M: the sum then has M**2 copies of it.
    return count_devices(rule.axis_name) if rule.v_scale == "paper" else 1


def _reduced(rule: AdamARule, state: AdamAState) -> AdamAState:
    """The moments over all devices, from those of each; reduced in their own dtypes."""
    names = rule.axis_name
    if not names:
        return state
    devices = count_devices(names)
    with jax.named_scope("jaxmem.adama.reduce"):
        mu, nu = jax.lax.psum((state.mu, state.nu), names)
        squares = devices * _copies_of_nu(rule)
        return state._replace(
            mu=jax.tree.map(lambda m: m / devices, mu),
            nu=jax.tree.map(lambda v: v / squares, nu),
        )


def _at_first(state: AdamAState, factor):
    """`factor` at the first micro-batch of a mini-batch, else 1."""
    return jnp.where(state.micro_step == 0, factor, 1.0)


def _factors(rule: AdamARule, beta, state: AdamAState, n, copies: int = 1):
    """(decay, add) of a micro-batch: moment <- decay * moment + add * gradient."""
    if rule.mode == "ema":
        return beta, 1 - beta
    if rule.mode == "fractional":
        return _root(beta, n)
    # A scalar factor of the first micro-batch, not a pass over the moments before it:
    # XLA would keep both versions of the moments.
    return _at_first(state, copies * beta), 1 - beta


def _root(beta, n):
    """(b, 1 - b) of b = beta ** (1/n)."""
    if isinstance(beta, int | float) and isinstance(n, int):
        decay = beta ** (1.0 / n)
        return decay, 1 - decay
    exponent = jnp.log(jnp.asarray(beta, float)) / jnp.asarray(n, float)
    # 1 - b would lose all but a few digits of float32
    return jnp.exp(exponent), -jnp.expm1(exponent)


def _scale(rule: AdamARule, n, weight):
    """What a micro-batch's gradient is multiplied by."""
    if weight is not None and not isinstance(weight, int | float):
        weight = jnp.asarray(weight, float)
    number = n if isinstance(n, int) else jnp.asarray(n, float)
    if rule.mode == "paper":
        return 1.0 / number if weight is None else weight
    return 1.0 if weight is None else weight * number


def _advanced(rule: AdamARule, state: AdamAState):
    """The number that bias correction goes by, after this mini-batch."""
    if rule.mode != "ema":
        return optax.safe_increment(state.count)
    top = jnp.iinfo(jnp.int32).max
    return jnp.where(
        state.count > top - state.micro_step, top, state.count + state.micro_step
    )


def _look_ahead(rule: AdamARule, mu, grads, count):
    """Nesterov's first moment (Dozat 2016), as `optax.scale_by_adam` has it."""
    return _map(
        lambda m, g: None if m is None else _times(rule.b1, m) + _times(1 - rule.b1, g),
        _unbiased(mu, rule.b1, optax.safe_increment(count)),
        _unbiased(grads, rule.b1, count),
    )


@functools.partial(jax.jit, inline=True)  # as optax has it, for the same bits
def _unbiased(moment, beta, count):
    """`optax.tree.bias_correction`, which does not run under strict promotion."""
    correction = 1 - jax.lax.pow(jnp.asarray(beta, float), count)
    return jax.tree.map(lambda x: x / correction.astype(x.dtype), moment)


def _ratio(rule: AdamARule, g, m, v):
    if g is None:
        return None
    eps_root, eps = _as(rule.eps_root, v.dtype), _as(rule.eps, v.dtype)
    return (m / (jnp.sqrt(v + eps_root) + eps)).astype(g.dtype)


def _moved(moment, increment, decay, keep):
    if keep is not None:  # applies to the increment, which may be NaN if it is dropped
        increment = jnp.where(keep, increment, jnp.zeros_like(increment))
    decayed = _as(decay, increment.dtype) * moment.astype(increment.dtype)
    return (increment + decayed).astype(moment.dtype)


def _as(number, dtype):
    """A Python number as it is, a scalar array in this dtype."""
    return float(number) if isinstance(number, int | float) else number.astype(dtype)


def _times(factor, x):
    return (
        x if isinstance(factor, float) and factor == 1.0 else _as(factor, x.dtype) * x
    )


def _map(fn, *trees) -> Any:
    """`jax.tree.map` in which None, the gradient of what has none, is a leaf."""
    return jax.tree.map(fn, *trees, is_leaf=lambda x: x is None)
