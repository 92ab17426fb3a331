"""Checkpoints of Orbax: an nnx model, moments in 8 bits, keys; resumed in less memory.

    python examples/recipes/orbax_nnx.py

One state has all that a step changes: parameters, the codes and scales of the moments,
and the counts and keys of the random streams. A job that is stopped goes on with half
of the memory: it restores that state and schedules the same step for another budget.
"""

import itertools
import tempfile
from pathlib import Path

import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jaxmem
from jaxmem.demo import data

LAYERS, WIDTH, BATCH, TOKENS = 4, 64, 16, 64
BUDGET = "9MiB"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        before = jnp.cumsum(self.norm(x), axis=1) / jnp.arange(1, TOKENS + 1)[:, None]
        return x + self.dropout(self.down(nnx.gelu(self.up(before))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(LAYERS))

    def __call__(self, tokens):
        run = nnx.scan(
            lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return self.embed.attend(run(self.blocks, self.embed(tokens)))


def make():
    """A model and its optimizer, as at the start of a job."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jaxmem.optim.adamw(1e-3, bits=8), wrt=nnx.Param)
    return model, optimizer


def step(model, optimizer, tokens):
    def loss_fn(model):
        logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def train(folder, steps, budget=None):
    """From the last checkpoint on, if there is one: losses, final state, and plan."""
    objects = model, optimizer = make()
    quick = budget is not None  # the first plan that is expected to fit
    run = jaxmem.schedule(step, budget, donate_argnums=(0, 1), quick=quick)
    batches = data.batches(data.standard_library().train, BATCH, TOKENS, seed=0)
    with ocp.CheckpointManager(Path(folder)) as checkpoints:
        if checkpoints.latest_step() is not None:
            like = ocp.args.StandardRestore(nnx.state(objects))
            nnx.update(objects, checkpoints.restore(None, args=like))
        done, losses = int(optimizer.step[...]), []
        for tokens in itertools.islice(batches, done, steps):
            losses.append(float(run(model, optimizer, tokens)))
        state = nnx.state(objects)
        checkpoints.save(steps, args=ocp.args.StandardSave(state))
    return losses, state, run.plan(model, optimizer, tokens)


def main():
    with tempfile.TemporaryDirectory() as folder:
        whole, _, _ = train(f"{folder}/not stopped", 8)
        first, _, _ = train(f"{folder}/stopped", 4)
        then, _, plan = train(f"{folder}/stopped", 8, BUDGET)
    print(plan)
    print(f"peak: {plan.plain.peak_bytes:,} bytes -> {plan.scheduled.peak_bytes:,}")
    print("losses, not stopped:", whole)
    print("losses, resumed:    ", first + then)


if __name__ == "__main__":
    main()
