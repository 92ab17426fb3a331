"""Expert, pipeline and context parallel steps on a mesh of eight devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jaxmem
from benchmarks.models import context as context_models
from benchmarks.models import moe as moe_models
from benchmarks.models import pipeline as pipeline_model
from benchmarks.models.parallel import REAL, Model, made
from benchmarks.steps.tiles import Made


class Spec(NamedTuple):
    """A model, and the mesh that it is for."""

    model: Callable[..., Model]  # of a mesh and sizes
    shape: Sequence[int]
    axes: Sequence[str]


MODELS: Mapping[str, Spec] = {
    "MoE, ragged, data parallel": Spec(moe_models.ragged_data, (8,), ("data",)),
    "MoE, ragged, data parallel, mapped": Spec(
        moe_models.ragged_mapped, (8,), ("data",)
    ),
    "MoE, ragged, expert parallel": Spec(
        moe_models.ragged_experts, (2, 4), ("data", "expert")
    ),
    "MoE, one-hot, expert parallel": Spec(
        moe_models.one_hot_experts, (2, 4), ("data", "expert")
    ),
    "pipeline parallel": Spec(pipeline_model.pipeline, (2, 4), ("data", "stage")),
    "context parallel, gathered": Spec(
        context_models.gathered_context, (2, 4), ("data", "context")
    ),
    "context parallel, ring attention": Spec(
        context_models.ring_context, (2, 4), ("data", "context")
    ),
}


def step_for(name: str, target: str) -> Made:
    """The step of a model, for chips that need not be there."""
    spread = MODELS[name]
    mesh = jaxmem.target_mesh(target, spread.shape, spread.axes)
    return made(spread.model(mesh, REAL), mesh, REAL)


# name -> what makes the step for a target
STEPS: Mapping[str, Callable[[str], Made]] = {
    name: functools.partial(step_for, name) for name in MODELS
}
