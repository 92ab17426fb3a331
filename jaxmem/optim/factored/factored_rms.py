"""Division by the root of a factored second moment whose decay grows with the steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import check_bool, check_int
from jaxmem._paths import check_selection
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.factored import moments
from jaxmem.optim.factored.arguments import number
from jaxmem.optim.factored.leaves import check_real, layer_axes, map_leaves

WHO = "the factored root mean square"


class FactoredRmsState(NamedTuple):
    """State of `scale_by_factored_rms`, in float32 or wider."""

    # finished steps; a tuple has a method of this name
    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    nu: PyTree  # `FactoredMoment` of a matrix; else of the parameter's shape


def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: ArrayLike = 0.8,
    step_offset: ArrayLike = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: ArrayLike = 1e-30,
    *,
    stacked: Any = None,
) -> optax.GradientTransformation:
    """Divides updates by the root of a factored second moment, as Adafactor does.

    With t = max(finished steps - step_offset, 0) + 1, `b = 1 - t ** -decay_rate`, and
    R and C the means of a matrix over its columns and rows::

      R, C <- b (R, C) + (1 - b) means(g^2 + epsilon)
      update = g rsqrt(R / mean(R)) rsqrt(C)^T

    and `v <- b v + (1 - b) (g^2 + epsilon)`, `update = g rsqrt(v)` for vectors and
    small matrices. At step 1, b = 0: where g^2 is of rank one the update is the sign of
    g, up to epsilon. State: `4 (m + n)` bytes for a matrix [m, n], 4 bytes a parameter
    for what is not factored, 4 bytes.

    This is `optax.scale_by_factored_rms` but for three things. A leaf of stacked layers
    has factors a layer, however many layers there are. The state of bfloat16 parameters
    is float32. A `step_offset` beyond the finished steps is not NaN. A gradient that is
    not finite stays in the state: leave such steps out, as `jaxmem.microbatch(...,
    skip_nonfinite=True)` or `optax.apply_if_finite` do.

    Args:
      factored: False: no moment is factored.
      decay_rate: exponent of the decay, more than 0.
      step_offset: steps that were finished before t counts.
      min_dim_size_to_factor: both sizes of a matrix must reach it.
      epsilon: added to g^2.
      stacked: which leaves have layers along axis 0, see `scale_by_came`; `False`: no
        leaf has, which gives optax's factors for any leaf.

    Returns:
      An `optax.GradientTransformation` with a `FactoredRmsState`. It needs no
      parameters; updates have the gradients' dtypes.

    Raises:
      ValueError: an argument out of range; from `update`, a state of other parameters.
      TypeError: an argument of another kind, parameters that are no real floats.

    Source:
      Shazeer and Stern, "Adafactor" (2018), arXiv 1804.04235, algorithms 4 and 5.

    Example::

      tx = optax.chain(
          jaxmem.optim.scale_by_factored_rms(stacked="layers"), optax.scale(-1e-3)
      )
    """
    factored = check_bool("factored", factored)
    exponent = number("decay_rate", decay_rate, above=0)
    offset = number("step_offset", step_offset)
    least = check_int("min_dim_size_to_factor", min_dim_size_to_factor, 0)
    epsilon = number("epsilon", epsilon, at_least=0)
    check_selection("stacked", stacked)

    def all_axes(tree):
        given = zip(jax.tree.leaves(tree), layer_axes(WHO, stacked, tree), strict=True)
        axes = (moments.matrix_axes(x.shape, k, least) for x, k in given)
        return (a if factored else None for a in axes)

    def init(params):
        check_real(WHO, params)
        axes = all_axes(params)
        start = lambda path, p: (moments.zeros(p, next(axes)),)
        (nu,) = map_leaves(WHO, 1, start, params)
        return FactoredRmsState(jnp.zeros((), jnp.int32), nu)

    def update(updates, state, params=None):
        del params
        check_class(WHO, state, FactoredRmsState)
        axes, add = all_axes(updates), _weight(state.count, offset, exponent)
        step = lambda *leaf: _step(add, epsilon, next(axes), *leaf)
        with jax.named_scope("jaxmem.scale_by_factored_rms"):
            new, nu = map_leaves(WHO, 2, step, updates, state.nu)
        return new, FactoredRmsState(jnp.asarray(optax.safe_increment(state.count)), nu)

    return held_by_keys(optax.GradientTransformation(init, update))


def _weight(count, offset, exponent):
    """1 - b: what the gradient at hand weighs."""
    t = jnp.maximum(count.astype(jnp.float32) - offset, 0.0) + 1.0
    return t**-exponent


def _step(add, epsilon, axes, path: str, g, nu):
    moments.check_moment(WHO, path, nu, g, axes)
    x = g.astype(jax.tree.leaves(nu)[0].dtype)
    add = add.astype(x.dtype)
    nu = moments.averaged(nu, jnp.square(x) + epsilon, 1 - add, add, axes)
    return moments.divided_by_root(x, nu, axes).astype(g.dtype), nu
