"""A Grain loader that feeds a scheduled step, and stops and goes on with it.

    pip install grain && python examples/recipes/grain_loader.py

The plan is made of the shape of a batch before the first one is read. All batches have
that shape, so that the step is planned and compiled once. While it runs, Grain's
threads prepare the next batch and put it on the device. The state of the iterator is
part of a checkpoint: a run that goes on from it reads the batches it has not seen.
"""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem.demo import data

LAYERS, WIDTH, BATCH, TOKENS = 4, 64, 16, 64
BUDGET = "8MiB"
TX = optax.adamw(1e-3)


class Windows(grain.sources.RandomAccessDataSource):
    """Stretches of a text, TOKENS + 1 bytes each."""

    def __init__(self, text):
        self.text = text

    def __len__(self):
        return len(self.text) // (TOKENS + 1)

    def __getitem__(self, i):
        start = i * (TOKENS + 1)
        return self.text[start : start + TOKENS + 1].astype(np.int32)


def make_batches(text, seed=0):
    """Endless; the last batch of an epoch is filled up from the next epoch."""
    windows = grain.MapDataset.source(Windows(text)).seed(seed)
    batches = windows.shuffle().repeat().batch(BATCH, drop_remainder=True)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(batches.to_iter_dataset(options).map(jax.device_put))


def init(key):
    keys = jax.random.split(key, 3)
    draw = lambda key, *shape: jax.random.normal(key, shape) * shape[-1] ** -0.5
    return {
        "table": draw(keys[0], 256, WIDTH),
        "up": draw(keys[1], LAYERS, WIDTH, 4 * WIDTH),
        "down": draw(keys[2], LAYERS, 4 * WIDTH, WIDTH),
    }


def loss_fn(params, tokens):
    def layer(x, w):
        before = jnp.cumsum(jax.nn.standardize(x), 1) / counts
        return x + jax.nn.gelu(before @ w["up"]) @ w["down"], None

    counts = jnp.arange(1, TOKENS + 1)[:, None]
    layers = {name: params[name] for name in ("up", "down")}
    x, _ = jax.lax.scan(layer, params["table"][tokens[:, :-1]], layers)
    logits = x @ params["table"].T
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step(state, tokens):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def make_state():
    params = init(jax.random.key(0))
    return params, TX.init(params)


def train(run, state, batches, steps):
    losses = []
    for _ in range(steps):
        state, loss = run(state, next(batches))
        losses.append(loss)  # not read yet: reading waits for the step
    return state, [float(loss) for loss in losses]


def main():
    batches = make_batches(data.standard_library().train)
    run = jaxmem.schedule(step, BUDGET, donate_argnums=0, quick=True)
    shape = jax.ShapeDtypeStruct((BATCH, TOKENS + 1), jnp.int32)
    plan = run.plan(jax.eval_shape(make_state), shape)
    print(f"peak: {plan.plain.peak_bytes:,} bytes -> {plan.scheduled.peak_bytes:,}")
    state, losses = train(run, make_state(), batches, 100)
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}")

    where = batches.get_state()  # stored with `state`
    again = make_batches(data.standard_library().train)
    again.set_state(where)
    state, losses = train(run, state, again, 100)
    print(f"and on: loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}")


if __name__ == "__main__":
    main()
