"""DP-SGD: gradients of single examples, which are never all live at once.

    python examples/recipes/dp_sgd.py

Each example's gradient is clipped, they are summed, and noise is added (Abadi et al.
2016). optax needs the gradients of all examples, a copy of the parameters for each.
Scheduled within a budget the same step runs on some examples at a time: it clips and
adds up theirs, then takes the next ones. The noise is the same.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem.demo import data

WIDTH, BATCH, TOKENS = 64, 64, 16
NORM, NOISE = 1.0, 0.5  # of an example's gradient; standard deviation, by the norm
BUDGET = "8MiB"


class Model(nn.Module):
    """Logits of the byte that follows `TOKENS` bytes."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, WIDTH)(tokens).reshape(-1)
        return nn.Dense(256)(nn.gelu(nn.Dense(2 * WIDTH)(x)))


def make_optimizer(noise=NOISE):
    private = optax.contrib.differentially_private_aggregate(NORM, noise, key=1)
    return optax.chain(private, optax.sgd(0.5, momentum=0.9))


def make_state(tx):
    params = Model().init(jax.random.key(0), jnp.zeros(TOKENS, jnp.int32))
    # the key in it is optax's own, and the state will be donated
    return params, jax.tree.map(jnp.copy, tx.init(params))


def loss_fn(params, tokens):
    """Of one example."""
    logits = Model().apply(params, tokens[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[-1])


def make_step(tx):
    def step(state, batch):
        params, opt_state = state
        of_each = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))
        losses, grads = of_each(params, batch)  # each gradient is [BATCH, ...]
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses.mean()

    return step


def batches(seed=0):
    return data.batches(data.standard_library().train, BATCH, TOKENS, seed)


def train(run, tx, steps):
    state, losses = make_state(tx), []
    for _, batch in zip(range(steps), batches(), strict=False):
        state, loss = run(state, batch)
        losses.append(float(loss))
    return state, losses


def main():
    tx = make_optimizer()
    run = jaxmem.schedule(make_step(tx), BUDGET, donate_argnums=0, quick=True)
    plan = run.plan(make_state(tx), next(batches()))
    print(plan)
    print(f"peak: {plan.plain.peak_bytes:,} bytes -> {plan.scheduled.peak_bytes:,}")
    _, losses = train(run, tx, 200)
    print(f"loss {np.mean(losses[:20]):.3f} -> {np.mean(losses[-20:]):.3f}")


if __name__ == "__main__":
    main()
