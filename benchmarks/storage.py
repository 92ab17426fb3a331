"""Temp bytes with activations stored in codes, in another form, or in part, on an H100.

    python -m benchmarks.storage
    python -m benchmarks.storage BERT    # rows that have it; others stay

BERT-Large after `substitute` alone (batch 8 of 512 tokens, the loss gradient), and
scans over eight layers in bfloat16 with 4096 tokens: `x + dense(norm(x))` of 4096
channels, an MLP of 1024 to 4096, and `x + gelu(x @ w1) @ w2` with sampled kernel
gradients.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import bert
from benchmarks._common import MS, publish_some, size_and_ms
from benchmarks.models import scans
from benchmarks.models.transformers import Bert, BertConfig
from jaxmem import ops
from jaxmem.ops.codes.stored import sharing

TARGET = "h100"


def berts():
    """(variant, loss gradient, its arguments)."""
    for name, options in (
        ("outputs", {}),
        ("8 bits", {"save": 8}),
        ("8 bits, blocks of 256", {"save": ops.Quantization(8, 256)}),
        ("8 bits, gelu 2 bits", {"save": 8, "activations": 2}),
        ("4 bits", {"save": 4}),
    ):
        model = jaxmem.substitute(Bert(BertConfig()), **options)
        yield name, *bert.gradient(model)


def scanned(layer, weights, x, wanted=0):
    """Gradient of the sum of squares after a scan of `layer(x, w)`."""

    def loss(weights, x):
        body = lambda x, w: (layer(x, w), None)
        y = jax.lax.scan(body, x, weights)[0]
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(loss, wanted), (weights, x)


def pre_norms():
    _, (weights, x) = scans.pre_norm(ops.layer_norm)

    def plain(x, w):
        return x + ops.dense(ops.layer_norm(x, w[1], w[2], save="output"), w[0])

    def coded(bits, x, w):
        with sharing():  # as the layers of a substituted model have it
            y = ops.layer_norm(x, w[1], w[2], save=bits)
            return x + ops.dense(y, w[0], save=bits)

    def shared(x, w):
        return x + ops.dense(ops.ms_layer_norm(x, w[1], w[2]), w[0])

    for name, layer in (
        ("save=output", plain),
        ("8 bits", partial(coded, 8)),
        ("4 bits", partial(coded, 4)),
        ("ms_layer_norm", shared),
    ):
        yield name, *scanned(layer, weights, x)


def chain(x):
    return jnp.tanh(x) * jnp.exp(-x * x) * x


def mlps():
    for name, act in (
        ("a chain, plain", chain),
        ("the chain by elementwise", ops.elementwise(chain)),
        ("the chain by elementwise, 8 bits", ops.elementwise(chain, save=8)),
    ):
        loss, args = scans.mlp(act)
        yield name, jax.grad(loss, (0, 1)), args


def sampled():
    _, (weights, x) = scans.mlp(lambda x: x)
    keys = jax.ShapeDtypeStruct((8, 2), jnp.uint32)

    def layer(act, budget, x, w):
        (w1, w2), words = w
        dense = ops.dense
        if budget < 1:
            key = jax.random.wrap_key_data(words)
            dense = partial(ops.sampled_dense, budget=budget, key=key)
        return x + dense(act(dense(x, w1)), w2)

    for name, act, budget in (
        ("jax.nn.gelu", jax.nn.gelu, 1),
        ("gelu, save=output", partial(ops.gelu, save="output"), 1),
        ("gelu, save=input, sampled at 0.3", ops.gelu, 0.3),
        ("gelu, save=3", partial(ops.gelu, save=3), 1),
        ("gelu, save=3, sampled at 0.3", partial(ops.gelu, save=3), 0.3),
    ):

        def loss(weights, x, keys, act=act, budget=budget):
            body = lambda x, w: (layer(act, budget, x, w), None)
            y = jax.lax.scan(body, x, (weights, keys))[0]
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        yield name, jax.grad(loss, (0, 1)), (weights, x, keys)


STACKS = {
    "BERT-Large": berts,
    "norm and dense": pre_norms,
    "MLP": mlps,
    "sampled MLP": sampled,
}


def temp_and_ms(step, args) -> tuple[float, float]:
    return size_and_ms(jaxmem.estimate(step, *args, target=TARGET))


def main() -> None:
    rows = {
        (stack, name): lambda step=step, args=args: temp_and_ms(step, args)
        for stack, cases in STACKS.items()
        for name, step, args in cases()
    }
    publish_some("storage", ("stack", "kept", "temp MiB", MS), rows, sys.argv[1:])


if __name__ == "__main__":
    main()
