"""Elementwise rules that keep one moment, in float32 or in codes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.low_bit.low_bit import LowBit, zeros
from jaxmem.optim.low_bit.moments import check_moments, map_moments, moved


def one_moment(
    who: str, how: LowBit, state_class: Any, rule: Callable[..., Any]
) -> optax.GradientTransformation:
    """The transformation of a rule.

    Args:
      who: the rule's name.
      how: the options of the moment.
      state_class: a NamedTuple of the count, int32[], and the moment, which is stored
        as a second one if its name is "nu".
      rule: `(t, g, m) -> (update, m)` with t the number of this step from 1 on and g
        and m in float32.
    """
    name = state_class._fields[1]
    which = (int(name == "nu"),)

    def init(params: PyTree) -> Any:
        return state_class(jnp.zeros((), jnp.int32), *zeros(how, params, which))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> Any:
        del params
        check_class(who, state, state_class)
        _, kept = state
        check_moments(how, updates, kept, names=(name,), which=which)
        count: Any = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)

        def of_leaf(g, m):
            u, m = rule(t, g.astype(jnp.float32), m)
            return u.astype(g.dtype), m

        def leaf(path, g, m):
            g = jnp.asarray(g)
            return moved(how, of_leaf, path, (count,), g, m, which=which)

        with jax.named_scope(f"jaxmem.{who}"):
            u, kept = map_moments(leaf, updates, kept)
        return u, state_class(count, kept)

    return held_by_keys(optax.GradientTransformation(init, update))
