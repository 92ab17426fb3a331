"""AdamA whose moments are codes: a micro-batch's gradient goes into 8 or 4 bits.

The moments are rounded once a micro-batch, n times as often as Adam's. To the nearest,
what a micro-batch adds is lost where it is below half a code; so they are rounded
stochastically, unless the options say otherwise: the error of n roundings then is that
of a random walk, and their mean is right.

Micro-batches of several devices (`axis_name`) go into codes on each device. At the end
of the mini-batch they are unpacked, summed in float32, and packed once more.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import PyTree

from jaxmem._checks import shown
from jaxmem.optim import _adama_rule
from jaxmem.optim._adama_rule import AdamARule, AdamAState
from jaxmem.optim.low_bit.low_bit import Bits, LowBit, as_low_bit
from jaxmem.optim.low_bit.moments import accumulated, applied, map_moments, moved


def low_bit_of(bits: Bits, rule: AdamARule, dtypes: tuple) -> LowBit:
    """The options of an AdamA with `bits`; ValueError for what excludes them."""
    how = as_low_bit(bits, stochastic=True)
    if rule.axis_name and how.on_host:
        raise ValueError(
            f"axis_name={rule.axis_name!r} with LowBit(on_host=True): the devices of a "
            "shard_map sum moments in their own memory; leave one of them out"
        )
    if any(dtype is not None for dtype in dtypes):
        raise ValueError(
            f"mu_dtype={shown(dtypes[0])}, nu_dtype={shown(dtypes[1])} with "
            f"bits={how.bits}: codes have dtypes of their own; leave one of them out"
        )
    return how


def accumulate(
    how: LowBit, rule: AdamARule, grads: PyTree, state: AdamAState, *call: Any
) -> AdamAState:
    """`_adama_rule.accumulate`, `call` being its other arguments, on codes."""

    def leaf(path, g, m, v):
        def one(g, m, v):
            wide = state._replace(mu=m, nu=v)
            new = _adama_rule.accumulate(rule, g, wide, *call)
            return new.mu, new.nu

        counts = state.count, state.micro_step, *_device(rule)
        return None, *accumulated(how, one, path, counts, g, m, v)

    _, mu, nu = map_moments(leaf, grads, state.mu, state.nu)
    return state._replace(micro_step=state.micro_step + 1, mu=mu, nu=nu)


def apply(
    how: LowBit, rule: AdamARule, grads: PyTree, state: AdamAState
) -> tuple[PyTree, AdamAState]:
    """`_adama_rule.apply` on codes, which stay as they are on one device."""
    if rule.axis_name:
        return _apply_reduced(how, rule, grads, state)

    def leaf(path, g, m, v):
        def one(g, m, v):
            return _adama_rule.apply(rule, g, state._replace(mu=m, nu=v))[0]

        return applied(how, one, path, g, m, v), None, None

    updates, _, _ = map_moments(leaf, grads, state.mu, state.nu)
    return updates, _counted(rule, state)._replace(mu=state.mu, nu=state.nu)


def _apply_reduced(
    how: LowBit, rule: AdamARule, grads: PyTree, state: AdamAState
) -> tuple[PyTree, AdamAState]:
    """The moments of all devices are summed in float32, a leaf at a time, and rounded.

    The update is made of the sums before they are rounded.
    """
    # a loop over chunks carries moments of one type, and the sums have another
    how = dataclasses.replace(how, by_rows=False)

    def leaf(path, g, m, v):
        def one(g, m, v):
            update, new = _adama_rule.apply(rule, g, state._replace(mu=m, nu=v))
            return update, new.mu, new.nu

        return moved(how, one, path, (state.count, state.micro_step), g, m, v)

    updates, mu, nu = map_moments(leaf, grads, state.mu, state.nu)
    return updates, _counted(rule, state)._replace(mu=mu, nu=nu)


def _counted(rule: AdamARule, state: AdamAState) -> AdamAState:
    return _adama_rule.apply(rule, (), state._replace(mu=(), nu=()))[1]


def _device(rule: AdamARule) -> list[Any]:
    """Which device this is: each rounds with numbers of its own."""
    return [jax.lax.axis_index(rule.axis_name)] if rule.axis_name else []
