"""A pipeline as MaxText writes it: the stages are an axis of one array.

A scan runs all stages at once, each on another micro-batch, under `vmap`; between two
iterations every stage hands its output to the next one, which shifts the array along
the axis that the mesh cuts, from one device to another (GSPMD, Xu et al. 2021,
section 3.3). Stages have nothing to do in the first and the last iterations.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.models.parallel import (
    Model,
    Sizes,
    by_name,
    dense,
    language_loss,
    pin,
)
from benchmarks.steps.tiles import layer, softmax_attention

DATA, STAGE = "data", "stage"


def pipeline(mesh, sizes: Sizes) -> Model:
    stages, count = mesh.shape[STAGE], sizes.micro_batches
    keep, waiting = pin(mesh, DATA), pin(mesh, None, DATA)
    spread = pin(mesh, STAGE, DATA)
    one = functools.partial(layer, softmax_attention, sizes.heads)

    def stage(weights, x):
        return lax.scan(lambda x, w: (one(x, w), None), x, weights)[0]

    all_stages = jax.vmap(stage, spmd_axis_name=STAGE)

    def layers(params, x):
        split = lambda a: a.reshape(stages, -1, *a.shape[1:])
        params = jax.tree.map(split, params)
        micro = waiting(x.reshape(count, -1, *x.shape[1:]))
        idle = jnp.zeros((stages - 1, *micro.shape[1:]), x.dtype)

        def iteration(buffer, new):
            buffer = spread(jnp.roll(buffer, 1, 0).at[0].set(new))
            buffer = spread(all_stages(params, buffer))
            return buffer, buffer[-1]

        first = spread(jnp.zeros((stages, *micro.shape[1:]), x.dtype))
        _, out = lax.scan(iteration, first, jnp.concatenate([micro, idle]))
        return keep(out[stages - 1 :].reshape(x.shape)), 0.0

    specs = dict.fromkeys(dense(sizes)["layers"], P(STAGE))
    return Model(
        language_loss(sizes, keep, layers), dense(sizes), by_name(specs), P(DATA)
    )
