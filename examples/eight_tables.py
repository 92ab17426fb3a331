"""Click prediction with eight embedding tables, of which a step touches some rows.

The model of DLRM (arXiv 1906.00091): numbers go through dense layers, each field of ids
through its table, all pairs of these vectors are multiplied, and dense layers predict a
click. Six large tables have gradients of rows, and Adagrad with one accumulator a row;
two small ones are cheaper dense, with Adam as the layers. Clicks are drawn from a law
that the model has to find.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem

# field -> (rows of its table, ids of an example)
FIELDS = {
    "user": (400_000, 1),
    "item": (200_000, 1),
    "history": (200_000, 8),
    "query": (100_000, 4),
    "advertiser": (50_000, 1),
    "site": (20_000, 1),
    "country": (200, 1),
    "device": (50, 1),
}
LARGE = tuple(name for name, (rows, _) in FIELDS.items() if rows >= 10_000)
WIDTH, NUMBERS, BATCH = 32, 8, 512


def init(key):
    keys = iter(jax.random.split(key, len(FIELDS) + 4))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / shape[-1] ** 0.5
    pairs = (len(FIELDS) + 1) * len(FIELDS) // 2
    return {
        "tables": {name: draw(rows, WIDTH) for name, (rows, _) in FIELDS.items()},
        "numbers": [draw(NUMBERS, 64), draw(64, WIDTH)],
        "top": [draw(pairs + WIDTH, 64), draw(64, 1)],
    }


def mlp(layers, x):
    *hidden, last = layers
    for kernel in hidden:
        x = jax.nn.relu(x @ kernel)
    return x @ last


def loss_fn(params, batch):
    x = mlp(params["numbers"], batch["numbers"])
    bags = (
        jaxmem.ops.embedding_bag(params["tables"][name], batch[name], mode="mean")
        for name in FIELDS
    )
    vectors = jnp.stack([x, *bags], axis=1)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    pairs = products[:, *np.tril_indices(vectors.shape[1], -1)]
    logits = mlp(params["top"], jnp.concatenate([x, pairs], axis=1))[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, batch["click"]).mean()


def optimizer():
    """Row-wise Adagrad for the large tables, Adam for all else."""
    labels = lambda params: {
        **{name: jax.tree.map(lambda _: "dense", p) for name, p in params.items()},
        "tables": {name: "rows" if name in LARGE else "dense" for name in FIELDS},
    }
    rules = {"rows": jaxmem.optim.rowwise_adagrad(0.1), "dense": optax.adam(1e-3)}
    return optax.partition(rules, labels)


tx = optimizer()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    tables = [f"tables/{name}" for name in LARGE]
    loss, grads = jaxmem.optim.value_and_row_grad(loss_fn, tables)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def batches(seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Few ids are common, most are rare, as in logs."""
    law = np.random.default_rng(1)
    taste = {name: law.standard_normal(rows) for name, (rows, _) in FIELDS.items()}
    draw = np.random.default_rng(seed)
    while True:
        ids = {
            name: (rows * draw.random((BATCH, bag)) ** 6).astype(np.int32)
            for name, (rows, bag) in FIELDS.items()
        }
        numbers = draw.standard_normal((BATCH, NUMBERS)).astype(np.float32)
        score = numbers[:, 0] + sum(taste[k][v].mean(1) for k, v in ids.items())
        click = draw.random(BATCH) < 1 / (1 + np.exp(-score))
        yield {**ids, "numbers": numbers, "click": click.astype(np.float32)}


def main(steps: int = 200) -> list[float]:
    params = init(jax.random.key(0))
    opt_state, losses = tx.init(params), []
    for _, batch in zip(range(steps), batches(), strict=False):
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    params = jax.eval_shape(init, jax.random.key(0))
    state = jax.eval_shape(tx.init, params)
    print(jaxmem.estimate(train_step, params, state, next(batches())))
    losses = main()
    print(f"loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f}")
