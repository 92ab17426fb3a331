"""Compiles small steps on cpu in this process and reads what XLA dumps of them."""

import functools
import pathlib
import tempfile
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxmem.memory.report.report import make_report, pack

CPU = SimpleNamespace(name="cpu", memory_bytes=None)
_FILES = {
    "hlo": "*after_optimizations.txt",
    "buffer_assignment": "*buffer-assignment.txt",
    "live_range": "*live-range.txt",
}
_SIZES = ("argument", "output", "alias", "temp", "generated_code")


def compiled(fn, *args, donate_argnums=()):
    """What a worker answers for a step: sizes and the dumped texts."""
    lowered = jax.jit(fn, donate_argnums=donate_argnums).lower(*args)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        memory = lowered.compile(compiler_options=options).memory_analysis()
        texts = {k: _largest(folder, pattern) for k, pattern in _FILES.items()}
    sizes = {k: getattr(memory, f"{k}_size_in_bytes") for k in _SIZES}
    return {"memory": sizes, "cost": {"flops": 1e6}, "dump": texts}


def _largest(folder, pattern):
    paths = pathlib.Path(folder).glob(pattern)
    return max(paths, key=lambda p: p.stat().st_size).read_text()


def report(result, target=CPU, name="step", argument_names=()):
    names = list(argument_names)
    result = result | {"texts": pack(result["dump"])}
    return make_report(result, target=target, name=name, argument_names=names)


def stack_loss(weights, x):
    """Layers in a scan, each with a tanh the backward pass needs."""

    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    with jax.named_scope("stack"):
        x, _ = jax.lax.scan(layer, x, weights)
    return jnp.sum(x * x)


def update(weights, x):
    """A step of descent: donating the weights pays."""
    gradient = jax.grad(stack_loss)(weights, x)
    return weights - 0.5 * gradient


STACK = (jnp.ones((5, 32, 32)), jnp.ones((64, 32)))


@functools.cache
def stack_result():
    """Dumped once for all tests."""
    return compiled(update, *STACK, donate_argnums=0)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="down")(nn.gelu(nn.Dense(128, name="up")(x)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        attention = nn.MultiHeadDotProductAttention(4, name="attention")
        x = x + attention(nn.LayerNorm(name="norm")(x))
        return x + Mlp(name="mlp")(x), None


class Bert(nn.Module):
    scan: bool = True

    @nn.compact
    def __call__(self, x):
        if self.scan:
            axes, rngs = {"params": 0}, {"params": True}
            layers = nn.scan(Layer, variable_axes=axes, split_rngs=rngs, length=5)
            return layers(name="layers")(x, None)[0]
        for i in range(5):
            x, _ = Layer(name=f"layers_{i}")(x, None)
        return x


@functools.cache
def bert_result(scan=True):
    """The loss gradient of a small Flax model, layers in a scan or written out."""
    model, x = Bert(scan), jnp.ones((2, 64, 32))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), x))
    return compiled(jax.grad(lambda p, x: model.apply(p, x).sum()), params, x)
