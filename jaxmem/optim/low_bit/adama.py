"""AdamA whose moments are codes: a micro-batch's gradient goes into 8 or 4 bits.

The moments are rounded once a micro-batch, n times as often as Adam's. To the nearest,
what a micro-batch adds is lost where it is below half a code; so they are rounded
stochastically, unless the options say otherwise: the error of n roundings then is that
of a random walk, and their mean is right.
"""

import dataclasses
from typing import Any

from jaxtyping import PyTree

from jaxmem._checks import shown
from jaxmem.optim import _adama_rule
from jaxmem.optim._adama_rule import AdamARule, AdamAState
from jaxmem.optim.low_bit.low_bit import LowBit, as_low_bit
from jaxmem.optim.low_bit.moments import accumulated, applied, map_moments


def low_bit_of(bits: int | LowBit, rule: AdamARule, dtypes: tuple) -> LowBit:
    """The options of an AdamA with `bits`; ValueError for what excludes them."""
    how = as_low_bit(bits)
    if rule.axis_name:
        raise ValueError(
            f"axis_name={rule.axis_name!r} with bits={how.bits}: moments in codes are "
            "not summed over devices; reduce the gradients instead (jax.lax.pmean) and "
            "leave axis_name out"
        )
    if any(dtype is not None for dtype in dtypes):
        raise ValueError(
            f"mu_dtype={shown(dtypes[0])}, nu_dtype={shown(dtypes[1])} with "
            f"bits={how.bits}: codes have dtypes of their own; leave one of them out"
        )
    stochastic = True if how.stochastic is None else how.stochastic
    return dataclasses.replace(how, stochastic=stochastic)


def accumulate(
    how: LowBit, rule: AdamARule, grads: PyTree, state: AdamAState, *call: Any
) -> AdamAState:
    """`_adama_rule.accumulate`, `call` being its other arguments, on codes."""

    def leaf(path, g, m, v):
        def one(g, m, v):
            wide = state._replace(mu=m, nu=v)
            new = _adama_rule.accumulate(rule, g, wide, *call)
            return new.mu, new.nu

        counts = state.count, state.micro_step
        return None, *accumulated(how, one, path, counts, g, m, v)

    _, mu, nu = map_moments(leaf, grads, state.mu, state.nu)
    return state._replace(micro_step=state.micro_step + 1, mu=mu, nu=nu)


def apply(
    how: LowBit, rule: AdamARule, grads: PyTree, state: AdamAState
) -> tuple[PyTree, AdamAState]:
    """`_adama_rule.apply` on codes, which stay as they are."""

    def leaf(path, g, m, v):
        del path

        def one(g, m, v):
            return _adama_rule.apply(rule, g, state._replace(mu=m, nu=v))[0]

        return applied(how, one, g, m, v), None, None

    updates, _, _ = map_moments(leaf, grads, state.mu, state.nu)
    counted = _adama_rule.apply(rule, (), state._replace(mu=(), nu=()))[1]
    return updates, counted._replace(mu=state.mu, nu=state.nu)
