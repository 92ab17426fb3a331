"""An exponential moving average of the parameters, updated in place with the rest.

    python examples/recipes/ema.py

The average is a field of the train state, and the state is donated: the step writes all
of it where it was. The average begins as a copy: an array that is in the state twice
cannot be donated.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxmem
from jaxmem.demo import data

LAYERS, WIDTH, BATCH, TOKENS = 4, 128, 4, 32
DECAY = 0.99


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        counts = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        before = jnp.cumsum(nn.LayerNorm()(x), axis=1) / counts
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(before))
        return x + nn.Dense(WIDTH)(hidden), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(256, WIDTH)
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(Block, length=LAYERS, **split)()(embed(tokens), None)
        return embed.attend(x)


class AveragedState(TrainState):
    average: Any  # of the parameters, of their structure


def make_state():
    tokens = jnp.zeros((1, TOKENS), jnp.int32)
    params = Model().init(jax.random.key(0), tokens)["params"]
    average = jax.tree.map(jnp.copy, params)  # `params` itself could not be donated
    tx = optax.adamw(1e-3)
    return AveragedState.create(
        apply_fn=Model().apply, params=params, tx=tx, average=average
    )


def loss_fn(params, tokens):
    logits, labels = Model().apply({"params": params}, tokens[:, :-1]), tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step(state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
    state = state.apply_gradients(grads=grads)
    average = optax.incremental_update(state.params, state.average, 1 - DECAY)
    return state.replace(average=average), loss


def train(run, steps):
    state, losses = make_state(), []
    batches = data.batches(data.standard_library().train, BATCH, TOKENS, seed=0)
    for _, tokens in zip(range(steps), batches, strict=False):
        state, loss = run(state, tokens)
        losses.append(float(loss))
    return state, losses


def main():
    state, tokens = make_state(), np.zeros((BATCH, TOKENS + 1), np.int32)
    for name, donated in {"not donated": (), "donated": 0}.items():
        report = jaxmem.estimate(step, state, tokens, donate_argnums=donated)
        print(f"{name}: peak {report.peak_bytes:,} bytes")
    run = jaxmem.schedule(step, donate_argnums=0)  # releases the layers' gradients, too
    print(f"and scheduled: {jaxmem.estimate(run, state, tokens).peak_bytes:,} bytes")

    state, losses = train(run, 300)
    held_out = next(data.batches(data.standard_library().validation, 64, TOKENS, 0))
    evaluate = jax.jit(loss_fn)
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}; held-out, by")
    print(f"  the last parameters: {evaluate(state.params, held_out):.3f}")
    print(f"  their average:       {evaluate(state.average, held_out):.3f}")


if __name__ == "__main__":
    main()
