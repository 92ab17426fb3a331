"""Training steps on which a graph of their operations is easily wrong about XLA.

An LSTM written out over time, whose products all have the weights in common; the sum of
several losses on one input; a DenseNet, whose layers are put beside each other.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.steps.train import flat_step


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def with_adam(loss, params, *args):
    """(step, arguments, donated)."""
    tx = optax.adam(1e-3)
    step = flat_step(jax.value_and_grad(loss), tx)
    return step, (params, jax.eval_shape(tx.init, params), *args), (0, 1)


class Lstm(nn.Module):
    """An LSTM over all steps, and a product of its outputs."""

    width: int

    @nn.compact
    def __call__(self, xs):
        cell, outputs = nn.OptimizedLSTMCell(self.width), []
        carry = cell.initialize_carry(jax.random.key(0), xs[:, 0].shape)
        for t in range(xs.shape[1]):
            carry, y = cell(carry, xs[:, t])
            outputs.append(y)
        return nn.Dense(64)(jnp.stack(outputs, 1))


def lstm(steps: int, batch: int, width: int):
    """An unrolled LSTM with Adam."""
    model, xs = Lstm(width), shape(batch, steps, width)
    params = jax.eval_shape(model.init, jax.random.key(0), xs)
    return with_adam(lambda p, xs: jnp.mean(model.apply(p, xs) ** 2), params, xs)


def _picked(logits, labels):
    """The loss by the labels' entries, whose gradient is a scatter into zeros."""
    scores = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(scores, labels[:, None], -1)


def _one_hot(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[1]))


LOSSES = {
    "picked": _picked,
    "one-hot": _one_hot,
    "logsumexp": optax.softmax_cross_entropy_with_integer_labels,
}


def losses(kind: str, rows: int, width: int, classes: int, count: int = 6):
    """The gradient of the sum of losses on one input, each with weights of its own."""

    def loss(weights, x, labels):
        pairs = zip(weights, labels, strict=True)
        return sum(jnp.mean(LOSSES[kind](x @ w, y)) for w, y in pairs)

    weights = [shape(width, classes)] * count
    labels = [shape(rows, dtype=jnp.int32)] * count
    return jax.grad(loss), (weights, shape(rows, width), labels), ()


class DenseNet(nn.Module):
    """Huang et al. 2017, bottlenecks and compression by half; a stem for its size."""

    blocks: tuple[int, ...]
    growth: int = 32
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        large = x.shape[1] > 64
        x = nn.Conv(2 * self.growth, (7, 7) if large else (3, 3), 1 + large)(x)
        x = nn.max_pool(self._active(x), (3, 3), (2, 2), "SAME") if large else x
        for place, layers in enumerate(self.blocks):
            if place:
                x = self._convolved(x, x.shape[-1] // 2, 1)
                x = nn.avg_pool(x, (2, 2), (2, 2))
            for _ in range(layers):
                y = self._convolved(x, 4 * self.growth, 1)
                x = jnp.concatenate([x, self._convolved(y, self.growth, 3)], -1)
        return nn.Dense(self.classes)(self._active(x).mean((1, 2)))

    def _active(self, x):
        return nn.relu(nn.BatchNorm(use_running_average=False)(x))

    def _convolved(self, x, features: int, window: int):
        conv = nn.Conv(features, (window, window), use_bias=False)
        return conv(self._active(x))


def dense_net(blocks: tuple[int, ...], batch: int, size: int, growth: int = 32):
    """A DenseNet with Adam."""
    model, x = DenseNet(blocks, growth), shape(batch, size, size, 3)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    stats = variables["batch_stats"]

    def loss(params, x, labels):
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), stats)
        collections = {"params": params, "batch_stats": zeros}
        logits, _ = model.apply(collections, x, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(loss(logits, labels))

    return with_adam(loss, variables["params"], x, shape(batch, dtype=jnp.int32))
