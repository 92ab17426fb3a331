"""The records of the norms: how people write them, with the scale and the bias after.

The statistics are written in three ways, and their places vary: layer and RMS norm take
them over the last axis, batch norm over all but the channels, or is given them.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem.ops.norms.batch_norm import batch_norm
from jaxmem.ops.norms.dropout_add_norm import (
    dropout_add_layer_norm,
    dropout_add_rms_norm,
)
from jaxmem.ops.norms.group_norm import group_norm
from jaxmem.ops.norms.inplace_abn import inplace_abn
from jaxmem.ops.norms.layer_norm import layer_norm, rms_norm
from jaxmem.ops.norms.ms_norm import ms_layer_norm, ms_rms_norm
from jaxmem.ops.record import Formula, Layers, OpRecord, Saving

FORMS = ("fast", "fast_unclipped", "two_pass")
AFFINE = ((True, True), (True, False), (False, True), (False, False))


def _is_small(epsilon: float) -> bool:
    return 0 <= epsilon < 0.1


@dataclass(frozen=True)
class NormFormula:
    """One way to write a norm."""

    variance: str | None  # of `FORMS`; None for an RMS norm, and where it is given
    scaled: bool
    biased: bool
    shifted: bool = False  # the scale is stored less one

    def split(self, affine):
        """(scale, bias) of the arrays given, None for what is not there."""
        rest = iter(affine)
        scale = next(rest) if self.scaled else None
        return scale, next(rest) if self.biased else None

    def apply(self, y, affine, axis: int = -1):
        """Scale and bias, which run along `axis`."""
        shape = [1] * y.ndim
        shape[axis] = -1
        scale, bias = (p if p is None else p.reshape(shape) for p in self.split(affine))
        if scale is not None:
            y = y * (1 + scale if self.shifted else scale)
        return y if bias is None else y + bias


def _moments(x, axes, form: str):
    mean = x.mean(axes, keepdims=True)
    if form == "two_pass":
        return mean, jnp.square(x - mean).mean(axes, keepdims=True)
    fast = jnp.square(x).mean(axes, keepdims=True) - jnp.square(mean)
    return mean, fast if form == "fast_unclipped" else jnp.maximum(0, fast)


def _plain_norm(form: NormFormula, x, *affine, epsilon):
    if form.variance is None:
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)
    else:
        mean, variance = _moments(x, -1, form.variance)
        y = (x - mean) * jax.lax.rsqrt(variance + epsilon)
    return form.apply(y, affine)


def _lean_norm(form: NormFormula, x, *affine, epsilon, save, dtype):
    scale, bias = form.split(affine)
    if form.shifted:
        assert scale is not None
        scale = scale.astype(jnp.promote_types(scale.dtype, jnp.float32)) + 1
    options = {"epsilon": epsilon, "save": save, "dtype": dtype}
    if form.variance is None:
        return rms_norm(x, scale, **options)
    fast = form.variance != "two_pass"
    return layer_norm(x, scale, bias, use_fast_variance=fast, **options)


@functools.cache
def _gate(centred: bool, scaled: bool, biased: bool, shifted: bool) -> Formula:
    """The norms of these parts, whatever their statistics are."""
    form = NormFormula(None, scaled, biased, shifted)
    count = scaled + biased

    def plain(x, *given, epsilon):
        affine, (var, *mean) = given[:count], given[count:]
        x = x - mean[0] if centred else x
        return form.apply(x * jax.lax.rsqrt(var + epsilon), affine)

    examples = ("*batch n", *["n"] * count, *["*batch n"] * (1 + centred))
    return Formula(plain, examples=examples, scalars=("epsilon",))


def _norm_formulas(variances, affine) -> tuple[Formula, ...]:
    """Of a norm over the last axis."""
    forms = [NormFormula(v, *parts) for v in variances for parts in affine]
    return tuple(
        Formula(
            functools.partial(_plain_norm, form),
            lean=functools.partial(_lean_norm, form),
            examples=("*batch n", *["n"] * (form.scaled + form.biased)),
            scalars=("epsilon",),
            when=_is_small,
            typed=True,
            parts=form.scaled + form.biased + form.shifted,
            gate=_gate(
                form.variance is not None, form.scaled, form.biased, form.shifted
            ),
        )
        for form in forms
    )


def _by_norm_word(lean: Callable, saving: Saving) -> Callable:
    return functools.partial(lean, save=saving.norms)


def _plain_batch_norm(form: NormFormula, axis: int, x, *affine, epsilon):
    axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    assert form.variance is not None
    mean, variance = _moments(x, axes, form.variance)
    return form.apply((x - mean) * jax.lax.rsqrt(variance + epsilon), affine, axis)


def _lean_batch_norm(form: NormFormula, axis: int, x, *affine, epsilon, dtype):
    scale, bias = form.split(affine)
    fast = form.variance != "two_pass"
    options = {"epsilon": epsilon, "dtype": dtype, "use_fast_variance": fast}
    return batch_norm(x, scale, bias, axis=axis, **options)[0]


def _plain_given(form: NormFormula, axis: int, x, mean, var, *affine, epsilon):
    shape = [1] * x.ndim
    shape[axis] = -1
    factor = jax.lax.rsqrt(var.reshape(shape) + epsilon)
    return form.apply((x - mean.reshape(shape)) * factor, affine, axis)


def _lean_given(
    form: NormFormula, axis: int, x, mean, var, *affine, epsilon, dtype
) -> jax.Array:
    scale, bias = form.split(affine)
    options = {"epsilon": epsilon, "dtype": dtype, "axis": axis}
    y = batch_norm(x, scale, bias, mean=mean, var=var, **options)
    assert not isinstance(y, tuple)
    return y


def _batch_norm_formulas() -> tuple[Formula, ...]:
    """Over all axes but the last, or the second; with given statistics too."""
    layouts = ((-1, "*batch n"), (1, "b n *space"))
    found = []
    variants = itertools.product(AFFINE, layouts, (*FORMS, None))
    for affine, (axis, example), variance in variants:
        form = NormFormula(variance, *affine)
        plain, lean, given = _plain_batch_norm, _lean_batch_norm, ()
        if variance is None:
            plain, lean, given = _plain_given, _lean_given, ("n", "n")
        found.append(
            Formula(
                functools.partial(plain, form, axis),
                lean=functools.partial(lean, form, axis),
                examples=(example, *given, *["n"] * sum(affine)),
                scalars=("epsilon",),
                when=_is_small,
                typed=True,
                gate=_gate(True, *affine, False),
            )
        )
    return tuple(found)


NORMS = (
    OpRecord(
        layer_norm,
        _norm_formulas(FORMS, AFFINE),
        _by_norm_word,
        Layers(("LayerNorm",), ("LayerNorm",), words=True, bits=True),
        family="norm",
    ),
    OpRecord(
        rms_norm,
        _norm_formulas((None,), ((True, False, True), (True, False), (False, False))),
        _by_norm_word,
        Layers(("RMSNorm",), ("RMSNorm",), words=True, bits=True),
        # A two-pass layer norm contains an RMS norm, of x less its mean.
        family="norm",
    ),
    OpRecord(
        batch_norm,
        _batch_norm_formulas(),
        layers=Layers(("BatchNorm",), ("BatchNorm",)),
    ),
    OpRecord(group_norm, layers=Layers(("GroupNorm",), ("GroupNorm",))),
    *map(OpRecord, (ms_layer_norm, ms_rms_norm, inplace_abn)),
    *map(OpRecord, (dropout_add_layer_norm, dropout_add_rms_norm)),
)
