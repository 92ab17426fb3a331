"""Three memory layers that read one pool of values: bytes of a step, dense and in rows.

    python -m benchmarks.memory_layers
    python -m benchmarks.memory_layers scan h100    # rows that have both; others stay

A pool of 1,048,576 values of 512 numbers in float32, 2 GiB, read by three layers
(`jaxmem.nn.linen.ProductKeyMemory`, 4 heads, 32 values each, gated) for 512 tokens;
Adagrad, parameters and state donated. "dense" is the step with `jax.value_and_grad`,
"scheduled" the same through `jaxmem.schedule`, "rows" takes `value_and_row_grad` and
`rowwise`. Layers are written out, or run by a scan, or by one that recomputes them.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxmem
from benchmarks._common import MIB, TARGETS, publish_some, size_and_ms
from benchmarks.tables import step_of
from jaxmem.nn.linen import LayerNorm, ProductKeyMemory

KEYS, WIDTH, LAYERS, TOKENS = 1024, 512, 3, 512
COLUMNS = ("gradient", "layers", "target", "state MiB", "temp MiB", "peak MiB")
COLUMNS += ("predicted ms",)
RULE = optax.adagrad(0.05)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, pool):
        return x + ProductKeyMemory(KEYS, gated=True)(LayerNorm()(x), pool)


def written_out(layer, x, params):
    for i in range(LAYERS):
        x, _ = layer(x, jax.tree.map(lambda p, i=i: p[i], params))
    return x


def scanned(layer, x, params):
    return jax.lax.scan(layer, x, params)[0]


def recomputed(layer, x, params):
    return scanned(jax.checkpoint(layer), x, params)


STACKS = {"written out": written_out, "scan": scanned, "scan, remat": recomputed}
GRADIENTS = ("dense", "scheduled", "rows")


def loss_of(stack):
    def loss(params, x, y):
        layer = lambda x, p: (Layer().apply(p, x, params["pool"]), None)
        return jnp.mean((stack(layer, x, params["layers"]) - y) ** 2)

    return loss


def measure(gradient: str, layers: str, target: str):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    x, pool = f32(TOKENS, WIDTH), f32(KEYS**2, WIDTH)
    one = jax.eval_shape(Layer().init, jax.random.key(0), x, pool)
    params = {"layers": jax.tree.map(lambda p: f32(LAYERS, *p.shape), one)}
    params["pool"] = pool
    loss, tx = loss_of(STACKS[layers]), RULE
    value_and_grad = jax.value_and_grad(loss)
    if gradient == "rows":
        tx = jaxmem.optim.rowwise(RULE)
        value_and_grad = jaxmem.optim.value_and_row_grad(loss, "pool")
    step, how = step_of(tx, value_and_grad), {"donate_argnums": (0, 1)}
    if gradient == "scheduled":
        step, how = jaxmem.schedule(step, target=target, **how), {}
    args = params, jax.eval_shape(tx.init, params), x, x
    report = jaxmem.estimate(step, *args, target=target, **how)
    sizes = report.argument_bytes / MIB, report.temp_bytes / MIB
    return *sizes, *size_and_ms(report, "peak_bytes")


if __name__ == "__main__":
    cases = {
        key: functools.partial(measure, *key)
        for key in (
            (gradient, layers, target)
            for layers in STACKS
            for gradient in GRADIENTS
            for target in TARGETS
        )
    }
    publish_some("memory_layers", COLUMNS, cases, sys.argv[1:])
