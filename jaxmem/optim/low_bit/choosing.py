"""Which code suits the moments of each leaf, measured on gradients."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32, PyTree

from jaxmem._checks import shown, wrong_type, wrong_value
from jaxmem.optim.low_bit.adam import scale_by_adam
from jaxmem.optim.low_bit.chosen import FLOAT32, ChosenCodes, LeafCode, name_of
from jaxmem.optim.low_bit.codes import FORMATS
from jaxmem.optim.low_bit.low_bit import EIGHT, LowBit, as_low_bit

# bitsandbytes' map of 8 bits is left out: what it rounds v to may be 0, and a step then
# is longer than any that so few gradients show
_MEASURED = {8: ("companding", "float8", "mxfp8"), 4: ("dynamic", "mxfp4", "nvfp4")}
_LEAST = 4  # steps: of one gradient over and over the moments, and their codes, stand
_STEPS = 64  # of Adam, whose second half counts
_ELEMENTS = 2**18  # of a leaf at most: whole rows, evenly spaced


def choose_codes(
    gradients: Sequence[PyTree],
    bits: int | LowBit = EIGHT,
    *,
    codes: Sequence[str] | None = None,
) -> ChosenCodes:
    """The code with the smallest error for each leaf, measured on gradients.

    Adam runs 64 steps on the gradients, over and over, with moments in each code and in
    float32. The error of a code is the mean, over the second half of the steps, of::

      norm(update - update in float32) / norm(update in float32)

    Of a leaf with more than 2^18 elements some rows are measured, evenly spaced among
    those whose gradient is not zero. Where
    magnitudes in a block are alike, arithmetic codes are nearest, where they differ by
    much, floats: `docs/optimizers/low_bit.md` has figures. Codes are a part of how a
    step is compiled, and of the state's dtypes, so the choice is made before: call it
    outside of `jax.jit`, and keep `dict(result)` with checkpoints.

    Args:
      gradients: a list of trees of gradients, of at least four batches. Those of a
        model that has been trained for some steps say more than those of a new one.
      bits: 8, 4, or a `LowBit` whose code is left open.
      codes: to choose from; by default all of these bits but "dynamic" with 8, whose
        longest steps a few gradients do not show.

    Returns:
      A `ChosenCodes`. Printed, it is a table of the errors. `adam`, `adamw`, `adama`,
      `lion` and `schedule_free` take it as `bits`, and `LowBit(8, code=...)` takes it
      beside other options. Leaves that `LowBit` keeps in float32 are so here.

    Raises:
      ValueError: fewer than four gradients; traced ones; trees that differ; a leaf
        whose gradients are not finite, or all zero: nothing can be measured of it; a
        code that is not one of these bits.
      TypeError: no list, other bits, a leaf that is no floating array.

    Source:
      This library.

    Example::

      keys = jax.random.split(jax.random.key(0), 8)
      normal = lambda key, p: jax.random.normal(key, p.shape)
      # of some batches, by jax.grad
      grads = [jax.tree.map(functools.partial(normal, key), params) for key in keys]
      chosen = jaxmem.optim.choose_codes(grads)
      print(chosen)
      tx = jaxmem.optim.adamw(3e-4, bits=chosen)
    """
    how = as_low_bit(bits)
    if how.bits == 32 or how.code is not None:
        raise wrong_value("bits", how, "8, 4, or a LowBit of these without a code")
    names = _checked_codes(codes, how.bits)
    leaves = []
    for path, *samples in _checked(gradients):
        leaves.append(_leaf(name_of(path), samples, how, names))
    return ChosenCodes(how.bits, tuple(leaves))


def _checked_codes(codes: Sequence[str] | None, bits: int) -> tuple[str, ...]:
    known = [code for b, code in FORMATS if b == bits]
    if codes is None:
        return _MEASURED[bits]
    if isinstance(codes, str) or not isinstance(codes, Sequence) or not codes:
        raise wrong_type("codes", codes, f"a list of some of {known}")
    for code in codes:
        if code not in known:
            raise wrong_value("codes", codes, f"with bits={bits} some of {known}")
    return tuple(codes)


def _checked(gradients: Any) -> list[tuple]:
    """(path, *arrays) of each leaf, or an error for what cannot be measured."""
    if not isinstance(gradients, list):
        raise wrong_type("gradients", gradients, "a list of trees, one a batch")
    if len(gradients) < _LEAST or not jax.tree.leaves(gradients[0]):
        raise wrong_value("gradients", gradients, f"of {_LEAST} batches or more")
    first = jax.tree.leaves_with_path(gradients[0])
    others = [jax.tree.leaves(tree) for tree in gradients]
    for i, (tree, found) in enumerate(zip(gradients, others, strict=True)):
        same = jax.tree.structure(tree) == jax.tree.structure(gradients[0])
        if not same or any(
            jnp.shape(x) != jnp.shape(y) for x, (_, y) in zip(found, first, strict=True)
        ):
            raise wrong_value(f"gradients[{i}]", tree, "as gradients[0] are")
    rows = zip(first, *others, strict=True)
    return [(path, *samples) for (path, _), *samples in rows]


def _leaf(name: str, samples: list[Any], how: LowBit, codes: Sequence[str]) -> LeafCode:
    for x in samples:
        _check_leaf(name, x)
    shape = samples[0].shape
    blocks = {code: replace(how, code=code).block_of(shape) for code in codes}
    fits = [code for code in codes if blocks[code] is not None]
    if not fits:
        few = math.prod(shape) < how.least_size
        size = f"fewer than {how.least_size:,} elements"
        why = size if few else f"no block divides its last axis, {shape[-1:]}"
        return LeafCode(name, FLOAT32, why=f"float32: {why}")
    rows = _rows(name, samples)
    options = {"least_size": 0, "by_rows": False, "on_host": False}
    errors = tuple(
        (code, float(_error(rows, replace(how, code=code, **options)))) for code in fits
    )
    known = [(error, code) for code, error in errors if math.isfinite(error)]
    if not known:
        raise ValueError(
            f"gradients: no code has an update that is finite for the leaf {name!r}, "
            f"{dict(errors)}; squares of gradients below 1e-22 or above 1e19 leave the "
            "range of float32: scale them"
        )
    return LeafCode(name, min(known)[1], errors)


def _check_leaf(name: str, x: Any) -> None:
    if isinstance(x, Tracer):
        raise ValueError(
            f"gradients: the leaf {name!r} is traced, {shown(x)}: codes are chosen "
            "before a step is compiled; call choose_codes outside of jax.jit, on arrays"
        )
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise wrong_type(f"gradients: the leaf {name!r}", x, "a real floating array")


def _rows(name: str, samples: Sequence[Any]) -> Float32[Array, "steps rows n"]:
    """At most so many elements of a leaf: rows that are not zero, evenly spaced."""
    flat = [jnp.asarray(x).reshape(-1, x.shape[-1]) for x in samples]
    if not all(bool(jnp.isfinite(x).all()) for x in flat):
        raise ValueError(f"gradients: those of the leaf {name!r} are not all finite")
    used = np.flatnonzero(np.logical_or.reduce([x.any(axis=1) for x in flat]))
    if not used.size:
        raise ValueError(
            f"gradients: those of the leaf {name!r} are all zero, which says nothing "
            "of a code; give those of later steps, or of the other leaves alone"
        )
    stride = -(-used.size * flat[0].shape[1] // _ELEMENTS)
    return jnp.stack([x[used[::stride]].astype(jnp.float32) for x in flat])


@functools.partial(jax.jit, static_argnames="how")
def _error(rows: Float32[Array, "steps rows n"], how: LowBit) -> Float32[Array, ""]:
    """How far the updates of Adam are from those with float32 moments."""
    tx: Any = scale_by_adam(bits=how)
    wide: Any = scale_by_adam(bits=32)

    def step(states, i):
        g = rows[i % rows.shape[0]]
        u, coded = tx.update(g, states[0])
        w, plain = wide.update(g, states[1])
        return (coded, plain), jnp.linalg.norm(u - w) / jnp.linalg.norm(w)

    states = tx.init(rows[0]), wide.init(rows[0])
    _, errors = jax.lax.scan(step, states, jnp.arange(_STEPS))
    return errors[_STEPS // 2 :].mean()
