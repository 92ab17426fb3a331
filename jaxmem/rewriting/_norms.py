"""Norms as people write them, with the scale and the bias that follow.

The statistics are written in three ways, and their places vary: layer and RMS norm take
them over the last axis, batch norm over all but the channels, or is given them.
"""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem.rewriting._pattern import Pattern

FORMS = ("fast", "fast_unclipped", "two_pass")
AFFINE = ((True, True), (True, False), (False, True), (False, False))


def _is_small(epsilon: float) -> bool:
    return 0 <= epsilon < 0.1


@dataclass(frozen=True)
class NormFormula:
    """One way to write a norm.

    Attributes:
      variance: one of `FORMS`; None for an RMS norm, and where it is given.
      scaled, biased: what follows.
      shifted: whether the scale is stored less one.
    """

    variance: str | None
    scaled: bool
    biased: bool
    shifted: bool = False

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
        return ops.rms_norm(x, scale, **options)
    fast = form.variance != "two_pass"
    return ops.layer_norm(x, scale, bias, use_fast_variance=fast, **options)


@functools.cache
def _gate(centred: bool, scaled: bool, biased: bool, shifted: bool) -> Pattern:
    """The norms of these parts, whatever their statistics are."""
    form = NormFormula(None, scaled, biased, shifted)
    count = scaled + biased

    def plain(x, *given, epsilon):
        affine, (var, *mean) = given[:count], given[count:]
        x = x - mean[0] if centred else x
        return form.apply(x * jax.lax.rsqrt(var + epsilon), affine)

    examples = ("*batch n", *["n"] * count, *["*batch n"] * (1 + centred))
    return Pattern("norm", plain, plain, examples=examples, scalars=("epsilon",))


def norm_patterns(save: str) -> list[Pattern]:
    """Layer norm and RMS norm over the last axis, those with more in them first."""
    forms = [NormFormula(v, *affine) for v in FORMS for affine in AFFINE]
    forms += [NormFormula(None, True, False, shifted=True)]
    forms += [NormFormula(None, scaled, False) for scaled in (True, False)]
    forms.sort(key=lambda f: -(f.scaled + f.biased + f.shifted))
    return [
        Pattern(
            "rms_norm" if form.variance is None else "layer_norm",
            functools.partial(_plain_norm, form),
            functools.partial(_lean_norm, form, save=save),
            examples=("*batch n", *["n"] * (form.scaled + form.biased)),
            scalars=("epsilon",),
            when=_is_small,
            typed=True,
            gate=_gate(
                form.variance is not None, form.scaled, form.biased, form.shifted
            ),
        )
        for form in forms
    ]


def _plain_batch_norm(form: NormFormula, axis: int, x, *affine, epsilon):
    axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    assert form.variance is not None
    mean, variance = _moments(x, axes, form.variance)
    return form.apply((x - mean) * jax.lax.rsqrt(variance + epsilon), affine, axis)


def _lean_batch_norm(form: NormFormula, axis: int, x, *affine, epsilon, dtype):
    scale, bias = form.split(affine)
    fast = form.variance != "two_pass"
    options = {"epsilon": epsilon, "dtype": dtype, "use_fast_variance": fast}
    return ops.batch_norm(x, scale, bias, axis=axis, **options)[0]


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
    y = ops.batch_norm(x, scale, bias, mean=mean, var=var, **options)
    assert not isinstance(y, tuple)
    return y


def batch_norm_patterns() -> list[Pattern]:
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
            Pattern(
                "batch_norm",
                functools.partial(plain, form, axis),
                functools.partial(lean, form, axis),
                examples=(example, *given, *["n"] * sum(affine)),
                scalars=("epsilon",),
                when=_is_small,
                typed=True,
                gate=_gate(True, *affine, False),
            )
        )
    return found
