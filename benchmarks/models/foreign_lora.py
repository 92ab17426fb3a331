"""LoRA over a tunix model, whose base qwix may have quantised, as one more `Model`."""

from dataclasses import replace

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import quantized_base
from benchmarks.models.foreign import Loss, Model, Size
from benchmarks.models.foreign_tunix import Family


def build(base: str, size: Size, family: Family, **options) -> Model:
    """Shapes alone: adapters are the parameters, the base stands with statistics."""
    problem = quantized_base.tunix(base, size, family, **options)

    def init(key):
        zeros = lambda x: jnp.zeros(x.shape, x.dtype)
        params, frozen = jax.tree.map(zeros, tuple(problem.split))
        return params, frozen.params

    def report(params, base, batch):
        model = replace(problem.lean_split.frozen, params=base).merge(params)
        return jaxmem.nn.report(model, *quantized_base.given(batch))

    losses = (_loss(problem, variant) for variant in ("plain", "substituted"))
    return Model(init, *losses, report, problem.batch)


def _loss(problem: quantized_base.Problem, variant: str) -> Loss:
    loss, (_, frozen) = problem.of(variant)

    def scored(params, base, batch, key):
        whole = replace(frozen, params=base).merge(params)
        return loss(whole, batch), base

    return scored
