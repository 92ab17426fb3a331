"""Reversible blocks beside rematerialization: bytes, predicted ms, and their drift.

    python -m benchmarks.reversible          # everything
    python -m benchmarks.reversible h100 96  # rows that have both; others stay

A block is attention (f) and MLP (g), each with its norm: those of ViT-L, 4 x 1024
tokens, bfloat16, attention by cuDNN, in stacks of several depths. "one stream": the
usual pre-LN stack. "two streams": what reversible blocks compute, as a scan that JAX
differentiates. Bytes are temporaries of the gradient of a loss, on an H100.

"error": the norm of the difference of all gradients from those of the two streams as a
scan in the same dtypes, over their norm: on a CPU, for blocks of width 128, 4 x 64
tokens. "rounding" is the difference of that scan from the one in float32, which is what
training in this dtype does anyway.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxmem
from benchmarks._common import MS, publish_some, size_and_ms
from benchmarks.models.transformers import (
    VIT_LARGE,
    PreLNLayer,
    StackConfig,
    abstract_params,
    fused_attention,
    mean_square,
)
from jaxmem.nn.linen import Reversible

TARGET, TOKENS = "h100", (4, 1024)
DEPTHS = (12, 24, 48, 96)
LARGE = dataclasses.replace(VIT_LARGE, fused=True)
SMALL = StackConfig(0, 128, 4, 4, 512, dropout=0.0, causal=False)
SMALL_TOKENS = (4, 64)


class Attention(nn.Module):
    """The first half of a pre-LN layer."""

    config: StackConfig

    @nn.compact
    def __call__(self, x):
        c = self.config
        attend = fused_attention if c.fused else nn.dot_product_attention
        y = nn.LayerNorm(dtype=c.dtype)(x)
        return nn.MultiHeadDotProductAttention(
            num_heads=c.heads, dtype=c.dtype, attention_fn=attend
        )(y)


class Mlp(nn.Module):
    """The second half."""

    config: StackConfig

    @nn.compact
    def __call__(self, x):
        c = self.config
        y = nn.Dense(c.hidden, dtype=c.dtype)(nn.LayerNorm(dtype=c.dtype)(x))
        return nn.Dense(c.width, dtype=c.dtype)(nn.gelu(y))


class TwoStreams(nn.Module):
    """A block as a layer of `nn.scan`."""

    config: StackConfig
    stream_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, _):
        narrow, wide = self.config.dtype, self.stream_dtype
        f, g = Attention(self.config, name="f"), Mlp(self.config, name="g")
        y1 = x[0] + f(x[1].astype(narrow)).astype(wide)
        return (y1, x[1] + g(y1.astype(narrow)).astype(wide)), None


class Stack(nn.Module):
    """Blocks in one of the forms that are compared; parameters are alike but for one.

    `streams`: their dtype in blocks of two; None: the usual blocks. `policy`: how they
    are rematerialized; None: not at all.
    """

    config: StackConfig
    streams: jnp.dtype | None
    policy: str | None = None
    reversible: bool = False

    @nn.compact
    def __call__(self, x):
        c = self.config
        if self.reversible:
            halves = Attention(c, parent=None), Mlp(c, parent=None)
            blocks = Reversible(
                *halves, c.layers, stream_dtype=self.streams, name="blocks"
            )
            return sum(blocks((x, x)))
        layer = PreLNLayer if self.streams is None else TwoStreams
        if self.policy:
            policy = getattr(jax.checkpoint_policies, self.policy)
            layer = nn.remat(layer, policy=policy, prevent_cse=False)
        rngs = {"params": True}
        scan = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs=rngs, length=c.layers
        )
        if self.streams is None:
            return scan(c, name="blocks")(x, None)[0]
        wide = x.astype(self.streams)
        return sum(scan(c, self.streams, name="blocks")((wide, wide), None)[0])


ONE, WIDE, NARROW = None, jnp.float32, jnp.bfloat16
NOTHING, DOTS = "nothing_saveable", "dots_with_no_batch_dims_saveable"
REVERSIBLE = "reversible"
FORMS = {
    "one stream": (ONE,),
    f"one stream, {DOTS}": (ONE, DOTS),
    f"one stream, {NOTHING}": (ONE, NOTHING),
    f"two streams, {NOTHING}": (NARROW, NOTHING),
    f"two float32 streams, {NOTHING}": (WIDE, NOTHING),
    REVERSIBLE: (WIDE, None, True),
    f"{REVERSIBLE}, bfloat16 streams": (NARROW, None, True),
}
# of the blocks and of the streams
DTYPES = {
    "float32": (jnp.float32, WIDE),
    "bfloat16, float32 streams": (jnp.bfloat16, WIDE),
    "bfloat16, bfloat16 streams": (jnp.bfloat16, NARROW),
}
COLUMNS = ("what", "layers", "form", "temp MiB", MS, "error", "rounding")


def of_bytes(depth: int, form: str) -> tuple:
    """Temporaries and predicted milliseconds of a gradient."""
    config = dataclasses.replace(LARGE, layers=depth)
    model = Stack(config, *FORMS[form])
    unfused = Stack(dataclasses.replace(config, fused=False), *FORMS[form])
    x = jax.ShapeDtypeStruct((*TOKENS, config.width), config.dtype)
    params = abstract_params(unfused, x)  # cuDNN is asked for where it is traced
    step = jax.grad(mean_square(model))
    report = jaxmem.estimate(step, params, x, jax.random.key(0), target=TARGET)
    return *size_and_ms(report), "", ""


def gradient(config: StackConfig, params, x, *form):
    """All gradients of a random linear function of the outputs, as one vector."""
    model = Stack(config, *form)
    weights = jax.random.normal(jax.random.key(2), x.shape)
    loss = lambda params, x: jnp.vdot(model.apply({"params": params}, x), weights)
    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x.astype(config.dtype))
    return jnp.concatenate(
        [g.ravel().astype(jnp.float32) for g in jax.tree.leaves(found)]
    )


def of_drift(depth: int, dtypes: str) -> tuple:
    """Errors of the gradients relative to their norm."""
    narrow, streams = DTYPES[dtypes]
    exact = dataclasses.replace(SMALL, layers=depth, dtype=jnp.float32)
    config = dataclasses.replace(exact, dtype=narrow)
    x = jax.random.normal(jax.random.key(0), (*SMALL_TOKENS, SMALL.width))
    params = Stack(exact, WIDE).init(jax.random.key(1), x)["params"]
    plain = gradient(config, params, x, streams)
    ours = gradient(config, params, x, streams, None, True)
    best = gradient(exact, params, x, WIDE)
    norm = jnp.linalg.norm
    errors = norm(ours - plain) / norm(plain), norm(plain - best) / norm(best)
    return "", "", *(f"{float(e):.1e}" for e in errors)


if __name__ == "__main__":
    rows = {
        **{
            (TARGET, str(depth), form): functools.partial(of_bytes, depth, form)
            for depth in DEPTHS
            for form in FORMS
        },
        **{
            ("drift", str(depth), dtypes): functools.partial(of_drift, depth, dtypes)
            for depth in DEPTHS
            for dtypes in DTYPES
        },
    }
    publish_some("reversible", COLUMNS, rows, sys.argv[1:])
