"""Formulas as people write them, with arguments: what the library must recognise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from tests.arrays import array

S = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Formula:
    """`fn` is the pattern `name` once, at `shapes` of floats and then `others`.

    `masked`: what attention does to its logits, where that is known.
    """

    id: str
    name: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((2, 4, 8),)
    others: tuple[Any, ...] = ()
    saves: bool = True
    masked: Callable[..., Any] | None = None

    def args(self, dtype=jnp.float32):
        rng = np.random.default_rng(3)
        floats = (array(rng.standard_normal(s), dtype) for s in self.shapes)
        return (*floats, *self.others)


def gelu_by_power(x):
    """As in the HF Flax models."""
    root = 0.7978845608028654
    return 0.5 * x * (1.0 + jnp.tanh(root * (x + 0.044715 * x**3)))


def gelu_by_products(x):
    cube = x * x * x
    return x * (0.5 * (1 + jnp.tanh((cube * 0.044715 + x) * (2 / np.pi) ** 0.5)))


def gelu_erf(x):
    return x * 0.5 * (1.0 + jax.lax.erf(x / np.sqrt(2).astype("float32")))


def mean(x):
    return x.mean(-1, keepdims=True)


def layer_norm_by_sqrt(x, w, b):
    return (x - mean(x)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * w[None, None] + (
        b[None, None]
    )


def flax_layer_norm(**options):
    def fn(x, *affine):
        names = [n for n in ("scale", "bias") if options.get(f"use_{n}", True)]
        params = dict(zip(names, affine, strict=True))
        module = nn.LayerNorm(dtype=x.dtype, **options)
        return module.apply({"params": params}, x)

    return fn


def flax_rms_norm(x, w):
    return nn.RMSNorm(dtype=x.dtype).apply({"params": {"scale": w}}, x)


def llama_rms_norm(x, w):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(mean(jnp.power(h, 2)) + 1e-6)
    return w[None, None] * h.astype(x.dtype)


def gemma_rms_norm(x, w):
    h = x.astype(jnp.float32)
    h = h / jnp.sqrt(mean(h * h) + 1e-6)
    return (h * (1 + w.astype(jnp.float32)[None, None])).astype(x.dtype)


def softmax_by_hand(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention_matmul(q, k, v):
    """As translated from PyTorch: heads first, and back."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    w = q @ k.swapaxes(-1, -2) / jnp.sqrt(jnp.asarray(q.shape[-1], q.dtype))
    causal = jnp.tril(jnp.ones(w.shape[-2:], bool))[None, None]
    w = jnp.where(causal, w, jnp.finfo(w.dtype).min)
    w = jax.nn.softmax(w.astype(jnp.float32), axis=-1).astype(q.dtype)
    return (w @ v).transpose(0, 2, 1, 3)


def attention_einsum(q, k, v):
    w = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    t = jnp.arange(q.shape[1])
    w = jnp.where((t[:, None] >= t[None, :])[None, None], w, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax_by_hand(w), v)


def attention_bias(q, k, v, bias):
    w = jnp.einsum("bqhd,bkhd->bhqk", q * 0.25, k) + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(w), v)


def attention_in_groups(masked):
    """As pod-sized models write it: heads are axes of queries, scores in float32."""

    def attention(q, k, v):
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, k).astype(jnp.float32)
        scores = scores / q.shape[-1] ** 0.5
        if masked:
            seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(seen, scores, -1e30)
        weights = jax.nn.softmax(scores, -1).astype(q.dtype)
        return jnp.einsum("bgrts,bsgd->btgrd", weights, v)

    return attention


def attention_repeated(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    w = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(w), v)


def attention_heads_first(q, k, v):
    w = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bhqd", jax.nn.softmax(w), v)


def masked_attention(masked):
    """`softmax(masked(q k', *extra)) v`, scaled before the mask."""

    def fn(q, k, v, *extra):
        w = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        w = jax.nn.softmax(masked(w, *extra).astype(jnp.float32)).astype(q.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", w, v)

    return fn


def tril(w):
    return jnp.tril(jnp.ones(w.shape[-2:], bool))[None, None]


def lowest(w):
    return jnp.finfo(w.dtype).min


def jax_attention(q, k, v, mask=None, **options):
    return jax.nn.dot_product_attention(q, k, v, mask=mask, **options)


def causal_attention(q, k, v):
    return jax_attention(q, k, v, is_causal=True)


def linen_attention(q, k, v, mask=None):
    return nn.dot_product_attention(q, k, v, mask=mask)


def nnx_attention(q, k, v, mask=None):
    return nnx.dot_product_attention(q, k, v, mask=mask)


def hugging_face_rms_norm(x, w):
    """Of the Flax Llama: the statistics in float32, the scale after a cast back."""
    v = jnp.power(jnp.asarray(x, jnp.float32), 2).mean(-1, keepdims=True)
    return w[None, None] * jnp.asarray(x / jnp.sqrt(v + 1e-6), x.dtype)


def flax_batch_norm(training, *, channels=-1, module=nn.BatchNorm, **options):
    def fn(x, *affine):
        names = [n for n in ("scale", "bias") if options.get(f"use_{n}", True)]
        n = x.shape[channels]
        mean, var = np.linspace(-1, 1, n), np.linspace(0.5, 2, n)
        stats = {"mean": jnp.asarray(mean), "var": jnp.asarray(var)}
        params = dict(zip(names, affine, strict=True))
        variables = {"params": params, "batch_stats": stats}
        norm = module(not training, axis=channels, dtype=x.dtype, **options)
        return norm.apply(variables, x, mutable=["batch_stats"])[0]

    return fn


def nnx_batch_norm(x, w, b):
    norm = nnx.BatchNorm(x.shape[-1], rngs=nnx.Rngs(0), dtype=x.dtype)
    norm.scale, norm.bias = nnx.Param(w), nnx.Param(b)
    ones = jnp.ones(w.shape)
    norm.mean, norm.var = nnx.BatchStat(ones), nnx.BatchStat(ones)
    return norm(x)


def batch_norm_by_var(x, w, b):
    """As from a textbook, channels first."""
    axes = (0, 2, 3)
    mean, var = (f(x, axes, keepdims=True) for f in (jnp.mean, jnp.var))
    w, b = (p[None, :, None, None] for p in (w, b))
    return w * (x - mean) / jnp.sqrt(var + 1e-5) + b


def batch_norm_given(x, mean, var, w, b):
    """With running statistics."""
    pad = lambda p: p[None, None]
    return (x - pad(mean)) * pad(w / jnp.sqrt(var**2 + 1e-3)) + pad(b)


def tied_head(x, embedding):
    """What a model with one embedding for both ends does last."""
    return x @ embedding.astype(x.dtype).T


def cast_product(x, w):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


ROWS = ((6, 8), (8,), (8,))
AFFINE = ((2, 4, 8), (8,), (8,))
SCALED = AFFINE[:2]
PIXELS = ((3, 4, 2, 8), (8,), (8,))
QKV = ((2, 12, 3, 8),) * 3
# Several biases are added up, and that is kept: less than plain keeps, of long rows.
LONG = ((2, 36, 3, 8),) * 3
IN_GROUPS = ((2, 12, 2, 3, 8), (2, 12, 2, 8), (2, 12, 2, 8))
GROUPED = ((2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8))
# True where a key is not seen; each query sees the first
UNSEEN = (
    array(np.random.default_rng(5).random((2, 1, 1, 12)) < 0.4).at[..., 0].set(False),
)
MASK = (
    array(np.random.default_rng(0).random((2, 1, 12, 12)) < 0.7).at[..., 0].set(True),
)
ATTENTION = "dot_product_attention"
ROW = ((2, 1, 1, 12),)
BIASES = ((2, 1, 1, 36), (1, 3, 36, 36))
# name, what is done to the logits, shapes of floats and other arrays that it takes
MASKED = (
    ("the opposite of a mask", lambda w, m: jnp.where(m, -1e9, w), (), UNSEEN),
    ("a mask negated", lambda w, m: jnp.where(~m, w, -jnp.inf), (), UNSEEN),
    ("above the diagonal", lambda w: jnp.where(tril(w), w, -1e9), (), ()),
    ("triu", lambda w: jnp.where(~tril(w), -jnp.inf, w), (), ()),
    (
        "a mask in a causal one",
        lambda w, m: jnp.where(tril(w), jnp.where(m, w, lowest(w)), lowest(w)),
        (),
        MASK,
    ),
    (
        "three masks",
        lambda w, m, n: jnp.where(
            n, -1e9, jnp.where(tril(w), jnp.where(m, w, -1e9), -1e9)
        ),
        (),
        (*MASK, *UNSEEN),
    ),
    ("bias subtracted", lambda w, b: w - b, ROW, ()),
    ("1 - mask", lambda w, m: w - 1e30 * (1 - m.astype(w.dtype)), (), MASK),
    (
        "lowest (1 - mask)",
        lambda w, m: w + (1 - m.astype(w.dtype)) * lowest(w),
        (),
        MASK,
    ),
    ("two biases", lambda w, a, b: w + a + b, BIASES, ()),
    ("bias and mask", lambda w, b, m: jnp.where(m, w + b, -1e9), ROW, MASK),
    (
        "bias after mask",
        lambda w, a, b: jnp.where(tril(w), w, -1e9) - a + b,
        BIASES,
        (),
    ),
    ("bias by where", lambda w, m: w + jnp.where(m, 0.0, -1e9), (), MASK),
)

ELEMENTWISE = (
    Formula("jax.nn.gelu", "gelu", jax.nn.gelu),
    Formula("gelu by power", "gelu", gelu_by_power),
    Formula("gelu by products", "gelu", gelu_by_products),
    Formula("jax.nn.gelu erf", "gelu", lambda x: jax.nn.gelu(x, approximate=False)),
    Formula("gelu erf", "gelu", gelu_erf),
    Formula("jax.nn.silu", "silu", jax.nn.silu),
    Formula("silu by hand", "silu", lambda x: jax.nn.sigmoid(x) * x),
    Formula("silu by exp", "silu", lambda x: x / (1 + jnp.exp(-x))),
    Formula("quick gelu", "swish", lambda x: x * jax.nn.sigmoid(1.702 * x)),
    Formula("swish by exp", "swish", lambda x: x / (1 + jnp.exp(x * -0.7))),
    Formula("jax.nn.relu", "relu", jax.nn.relu, saves=False),
    Formula("squared relu", "squared_relu", lambda x: jax.nn.relu(x) ** 2),
    Formula("squared maximum", "squared_relu", lambda x: jnp.maximum(x, 0) ** 2),
    Formula("jax.nn.softplus", "softplus", jax.nn.softplus),
    Formula("jax.nn.elu", "elu", lambda x: jax.nn.elu(x, 0.7)),
    Formula("leaky", "leaky_relu", lambda x: jax.nn.leaky_relu(x, 0.2), saves=False),
    Formula("jax.nn.mish", "mish", jax.nn.mish),
    Formula("swiglu", "swiglu", lambda g, u: u * jax.nn.silu(g), ((2, 8),) * 2),
    Formula("geglu", "geglu", lambda g, u: jax.nn.gelu(g) * u, ((2, 8),) * 2),
)

REDUCING = (
    Formula("jax.nn.softmax", "softmax", jax.nn.softmax),
    Formula("softmax axis 1", "softmax", lambda x: jax.nn.softmax(x, axis=1)),
    Formula("softmax by hand", "softmax", softmax_by_hand),
    Formula("jax.nn.log_softmax", "log_softmax", jax.nn.log_softmax),
    Formula("layer norm", "layer_norm", layer_norm_by_sqrt, AFFINE),
    Formula("linen.LayerNorm", "layer_norm", flax_layer_norm(), AFFINE),
    Formula(
        "linen.LayerNorm two-pass",
        "layer_norm",
        flax_layer_norm(use_fast_variance=False),
        AFFINE,
    ),
    Formula("linen, no bias", "layer_norm", flax_layer_norm(use_bias=False), SCALED),
    Formula("linen, no scale", "layer_norm", flax_layer_norm(use_scale=False), SCALED),
    Formula("linen.RMSNorm", "rms_norm", flax_rms_norm, SCALED),
    Formula("llama norm", "rms_norm", llama_rms_norm, SCALED),
    Formula("gemma norm", "rms_norm", gemma_rms_norm, SCALED),
    Formula("hugging face norm", "rms_norm", hugging_face_rms_norm, SCALED),
    Formula("linen.BatchNorm", "batch_norm", flax_batch_norm(True), PIXELS),
    Formula(
        "linen.BatchNorm, channels first",
        "batch_norm",
        flax_batch_norm(True, channels=1),
        ((3, 8, 4, 2), (8,), (8,)),
    ),
    Formula(
        "linen.BatchNorm two-pass",
        "batch_norm",
        flax_batch_norm(True, use_fast_variance=False),
        PIXELS,
    ),
    Formula(
        "linen.BatchNorm, bare",
        "batch_norm",
        flax_batch_norm(True, use_scale=False, use_bias=False),
        PIXELS[:1],
    ),
    Formula("linen.BatchNorm, of rows", "batch_norm", flax_batch_norm(True), ROWS),
    Formula("linen.BatchNorm, inference", "batch_norm", flax_batch_norm(False), PIXELS),
    Formula("nnx.BatchNorm", "batch_norm", nnx_batch_norm, PIXELS),
    Formula(
        "batch norm by var", "batch_norm", batch_norm_by_var, ((3, 8, 4, 2), (8,), (8,))
    ),
    Formula(
        "given statistics", "batch_norm", batch_norm_given, ((3, 4, 8), *[(8,)] * 4)
    ),
    Formula("tied head", "dense", tied_head, ((2, 4, 8), (16, 8))),
)

ATTENTIONS = (
    Formula("matmul", ATTENTION, attention_matmul, QKV),
    Formula("einsum", ATTENTION, attention_einsum, QKV),
    Formula("bias", ATTENTION, attention_bias, (*QKV, (2, 1, 1, 12))),
    *(
        Formula(
            *(name, ATTENTION, masked_attention(masked)),
            (*(LONG if shapes is BIASES else QKV), *shapes),
            others,
            masked=masked,
        )
        for name, masked, shapes, others in MASKED
    ),
    Formula("repeated heads", ATTENTION, attention_repeated, GROUPED),
    Formula("in groups", ATTENTION, attention_in_groups(False), IN_GROUPS),
    Formula("in groups, causal", ATTENTION, attention_in_groups(True), IN_GROUPS),
    Formula("heads first", ATTENTION, attention_heads_first, QKV),
    Formula("jax.nn", ATTENTION, jax_attention, QKV),
    Formula("jax.nn causal", ATTENTION, causal_attention, QKV),
    Formula("jax.nn mask", ATTENTION, jax_attention, QKV, MASK),
    Formula("jax.nn grouped", ATTENTION, jax_attention, GROUPED),
    Formula("linen", ATTENTION, linen_attention, QKV),
    Formula("linen mask", ATTENTION, linen_attention, QKV, MASK),
    Formula("nnx", ATTENTION, nnx_attention, QKV),
    Formula("nnx mask", ATTENTION, nnx_attention, QKV, MASK),
)


def pool(*window):
    """Of a product, which is there for the pooling alone."""
    return lambda x: nn.max_pool(2 * x, *window)


POOLS = (
    Formula("2 x 2", "max_pool", pool((2, 2), (2, 2)), ((2, 8, 9, 8),)),
    Formula("3 x 3", "max_pool", pool((3, 3), (2, 2), "SAME"), ((1, 8, 9, 8),)),
    Formula("of rows", "max_pool", pool((3,), None, ((1, 1),)), ((2, 9, 8),)),
    Formula("no batch", "max_pool", pool((2, 2), (2, 2)), ((8, 8, 8),)),
)

FORMULAS = ELEMENTWISE + REDUCING + ATTENTIONS + POOLS
