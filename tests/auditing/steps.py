"""Small steps of many forms, compiled once, and their texts."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.memory.dumps import STACK, compiled, update

X = jnp.ones((64, 32))


def micro_batches(weights, x):
    def body(total, part):
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w[0])))(weights), None

    parts = x.reshape(8, 8, 32)
    return weights - jax.lax.scan(body, jnp.zeros_like(weights), parts)[0]


def attention(q, k, v):
    def loss(q, k, v):
        scores = jax.nn.softmax(jnp.einsum("td,sd->ts", q, k), axis=-1)
        return jnp.sum((scores @ v) ** 2)

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def scatter(table, rows):
    return table.at[rows].add(2.0), jnp.sum(table[rows[::-1]])


def cond(x, y):
    heavy = lambda x: jnp.sin(x) @ jnp.cos(x).T @ x
    return jax.lax.cond(x[0, 0] > 0, heavy, lambda x: x + y, x) + y


def loop(x):
    body = lambda c: (c[0] + 1, jnp.sin(c[1]) @ jnp.ones((32, 32)))
    return jax.lax.while_loop(lambda c: c[0] < jnp.sum(c[1]), body, (0, x))[1]


def sharded(weights, x):
    return weights - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(weights)


def two_moments(w, m, v):
    g = jnp.tanh(w)
    m, v = 0.9 * m + g, 0.99 * v + g * g
    return w - m / (jnp.sqrt(v) + 1), m, v


def ordered(x):
    """XLA:CPU has no fusions of two outputs, but sorts that have."""
    first, second = jax.lax.sort((x, jnp.cos(x)), num_keys=1)
    return first @ second.T, second


def stack(buffer, x):
    """A stack that is written row by row."""

    def body(i, carry):
        buffer, x = carry
        x = jnp.sin(x)
        return buffer.at[i].set(x), x

    return jax.lax.fori_loop(0, 8, body, (buffer, x))


def _of_sharded():
    mesh = Mesh(jax.devices("cpu")[:8], ("data",))
    place = lambda x, *axes: jax.device_put(
        x, NamedSharding(mesh, PartitionSpec(*axes))
    )
    return place(jnp.ones((32, 32))), place(X, "data")


STEPS = {
    "layers": (update, lambda: STACK, (0,)),
    "micro_batches": (micro_batches, lambda: STACK, (0,)),
    "attention": (attention, lambda: (X, X, X), ()),
    "scatter": (scatter, lambda: (jnp.ones((64, 32)), jnp.arange(8)), (0,)),
    "cond": (cond, lambda: (X, X), (0,)),
    "loop": (loop, lambda: (X,), (0,)),
    "two_moments": (two_moments, lambda: (X, X + 1, X + 2), (0, 1, 2)),
    "ordered": (ordered, lambda: (X,), ()),
    "stack": (stack, lambda: (jnp.ones((8, 64, 32)), X), (0,)),
    "sharded": (sharded, _of_sharded, (0,)),
}


@functools.cache
def dump(name):
    """The texts that XLA:CPU leaves of a step."""
    step, arguments, donate = STEPS[name]
    return compiled(step, *arguments(), donate_argnums=donate)["dump"]
