"""Master weights of 24 or 32 bits: bfloat16 parameters and a correction beside them."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float32, Int32, Integer, PyTree

from jaxmem._checks import check_bool, check_int, shown, wrong_value
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim._state_class import check_class
from jaxmem.optim.low_bit import bfloat16
from jaxmem.optim.low_bit.random import counter_bits, seed_of, uniform

_DTYPES = {8: jnp.int8, 16: jnp.int16}


class SplitMasterState(NamedTuple):
    """State of `split_master`.

    Attributes:
      count: int32[], steps; what is drawn depends on it.
      correction: int8 or int16, of the parameters' shapes, in units of half the
        distance of neighbouring bfloat16 numbers over 127 or 32,767; None where they
        are of another dtype.
      inner: that of the transformation inside.
    """

    ledger_parts = {"correction": "masters"}  # what `jaxmem.ledger` calls it
    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    correction: PyTree
    inner: Any


def split_master(
    tx: optax.GradientTransformation,
    bits: Literal[8, 16] = 8,
    *,
    stochastic: bool = True,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Master weights that are the bfloat16 parameters and a correction of 8 or 16 bits.

    The parameter is the master weight rounded to bfloat16, so it tells half of it; the
    correction is the rest, in codes::

      w = p + c / C * half_unit(p) + u              C = 127 or 32,767
      p <- bf16(w),  c <- round(C (w - p) / half_unit(p))

    with `half_unit(p)` half the distance of neighbouring bfloat16 numbers at p. The
    updates that come out are the differences of p, in float32; `optax.apply_updates`
    adds them to exactly the new p.

    **State**: 1 or 2 bytes a parameter, 3 or 4 with the parameter (6 for bfloat16
    parameters with a float32 master).

    **Error**: w is off by at most 2**-8 / C of its size after a step (half of that to
    the nearest, where what is smaller is lost each time; stochastically nothing is, on
    average).

    Args:
      tx: any transformation whose updates are to be added, learning rate included. It
        sees bfloat16 gradients in float32, and the master weights as parameters.
      bits: of the correction, 8 or 16.
      stochastic: round the correction stochastically, rather than to the nearest.
      seed: from 0 to 2**32 - 1.

    Returns:
      A transformation whose `update` needs the parameters. Leaves that are not bfloat16
      are updated as `tx` says.

    Raises:
      TypeError: `tx` is no transformation.
      ValueError: other bits; from `init`, parameters of which none is bfloat16; from
        `update`, missing parameters, or a correction of other bits or shapes.

    Source:
      FlashOptim, arXiv 2602.23349, section 3; stochastic rounding of the correction is
      not in it.

    Example::

      tx = jaxmem.optim.split_master(jaxmem.optim.adamw(3e-4, bits=8))  # 5.1 bytes
      params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
      state = tx.init(params)
    """
    name, seed = "split_master", bfloat16.check_seed(seed)
    if check_int("bits", bits) not in _DTYPES:
        raise wrong_value("bits", bits, "8 or 16")
    dtype, draws = _DTYPES[bits], check_bool("stochastic", stochastic)
    tx = bfloat16.checked(name, tx)

    def init(params: PyTree) -> Any:
        bfloat16.check_narrow(name, params)
        zeros = lambda p: (
            jnp.zeros_like(p, dtype=dtype) if bfloat16.is_narrow(p) else None
        )
        correction = jax.tree.map(zeros, params)
        inner = tx.init(bfloat16.widened(params))
        return SplitMasterState(jnp.zeros((), jnp.int32), correction, inner)

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> Any:
        check_class(name, state, SplitMasterState)
        params = bfloat16.required(name, params)
        _check_correction(params, state.correction, dtype)
        merge = lambda _, p, c: (p if c is None else merged(p, c),)
        (master,) = bfloat16.map_leaves(merge, 1, params, state.correction)
        updates = bfloat16.widened(updates)
        updates, inner = tx.update(updates, state.inner, master, **extra)

        def stepped(path, u, p, c):
            if u is None or c is None:
                return u, c
            draw = None
            if draws:
                draw = counter_bits(seed_of(path, seed, state.count), p.shape)
            return split(p, merged(p, c) + u.astype(jnp.float32), dtype, draw)

        with jax.named_scope("jaxmem.split_master"):
            updates, correction = bfloat16.map_leaves(
                stepped, 2, updates, params, state.correction
            )
        count: Any = optax.safe_increment(state.count)
        return updates, SplitMasterState(count, correction, inner)

    return held_by_keys(optax.GradientTransformationExtraArgs(init, update))


def merged(p: BFloat16[Array, "*s"], c: Integer[Array, "*s"]) -> Float32[Array, "*s"]:
    """The master weight of a parameter and its correction."""
    wide = p.astype(jnp.float32)
    codes = c.astype(jnp.float32) / jnp.iinfo(c.dtype).max
    return wide + codes * bfloat16.half_unit(wide)


def split(
    p: BFloat16[Array, "*s"], w: Float32[Array, "*s"], dtype: Any, bits: Any = None
) -> tuple[Float32[Array, "*s"], Integer[Array, "*s"]]:
    """The update of a parameter, in float32, and the correction of a master weight.

    Args:
      p: the parameter as it is.
      w: the new master weight.
      dtype: of the correction.
      bits: uint32, random bits to round it by; None rounds to the nearest.
    """
    update, new = bfloat16.difference(p, bfloat16.nearest(w))
    top = jnp.iinfo(dtype).max
    codes = jnp.clip((w - new) / bfloat16.half_unit(new), -1.0, 1.0) * top
    codes = jnp.floor(codes + (0.5 if bits is None else uniform(bits)))
    return update, jnp.clip(codes, -top, top).astype(dtype)


def _check_correction(params: PyTree, correction: PyTree, dtype: Any) -> None:
    def check(path, p, c):
        wanted = (p.shape, jnp.dtype(dtype)) if bfloat16.is_narrow(p) else None
        given = None if c is None else (c.shape, c.dtype)
        if given != wanted:
            raise ValueError(
                f"state.correction{jax.tree_util.keystr(path)}={shown(c)}: for "
                f"params={shown(p)} it is {wanted}; the state is one of other "
                "parameters or other bits"
            )
        return ()

    bfloat16.map_leaves(check, 0, params, correction)
