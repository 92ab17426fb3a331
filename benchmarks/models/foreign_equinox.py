"""Models in equinox: its MLP, a transformer and a conv net from its layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks.models.foreign import Model, Size, cross_entropy, images, tokens


class Block(eqx.Module):
    """A pre-norm transformer block, on one sequence [S, D]."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    dropout: eqx.nn.Dropout

    def __init__(self, s: Size, key):
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(s.heads, s.width, key=one)
        self.mlp = eqx.nn.MLP(s.width, s.width, 4 * s.width, 1, jax.nn.gelu, key=two)
        self.norms = (eqx.nn.LayerNorm(s.width), eqx.nn.LayerNorm(s.width))
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        keys = (None, None) if key is None else jax.random.split(key)
        still = key is None
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        y = jax.vmap(self.norms[0])(x)
        y = self.attention(y, y, y, mask)
        x = x + self.dropout(y, key=keys[0], inference=still)
        y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(y, key=keys[1], inference=still)


class Transformer(eqx.Module):
    """Causal, on the tokens of one sequence [S]."""

    words: eqx.nn.Embedding
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, s: Size, key):
        one, two, three, *keys = jax.random.split(key, 3 + s.layers)
        self.words = eqx.nn.Embedding(s.vocabulary, s.width, key=one)
        self.places = 0.02 * jax.random.normal(two, (s.length, s.width))
        self.blocks = [Block(s, k) for k in keys]
        self.norm = eqx.nn.LayerNorm(s.width)
        self.head = eqx.nn.Linear(s.width, s.vocabulary, key=three)

    def __call__(self, tokens, key):
        x = jax.vmap(self.words)(tokens) + self.places
        for i, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, i))
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class ConvNet(eqx.Module):
    """Four stages of convolution, group norm and SiLU, on one image [3, H, W]."""

    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]
    pool: eqx.nn.MaxPool2d
    head: eqx.nn.Linear

    def __init__(self, s: Size, key):
        widths = [3, *(s.width // n for n in (8, 4, 2, 1))]
        *keys, last = jax.random.split(key, len(widths))
        pairs = zip(widths, widths[1:], keys, strict=False)
        self.convs = [eqx.nn.Conv2d(a, b, 3, padding=1, key=k) for a, b, k in pairs]
        self.norms = [eqx.nn.GroupNorm(min(32, w // 2), w) for w in widths[1:]]
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.head = eqx.nn.Linear(s.width, 10, key=last)

    def __call__(self, x, key):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.pool(jax.nn.silu(norm(conv(x))))
        return self.head(x.mean((1, 2)))


class Mlp(eqx.Module):
    """Equinox's own MLP, on the pixels of one image."""

    mlp: eqx.nn.MLP

    def __init__(self, s: Size, key):
        pixels = 3 * s.image**2
        self.mlp = eqx.nn.MLP(pixels, 10, s.width, s.layers, jax.nn.gelu, key=key)

    def __call__(self, x, key):
        return self.mlp(x.reshape(-1))


def _model(make, batch) -> Model:
    """A vmapped equinox model: its arrays are the parameters."""
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))[1]

    def init(key):
        return eqx.partition(make(key), eqx.is_inexact_array)[0], {}

    def scored(params, statistics, batch, key):
        model = eqx.combine(params, static)
        inputs = batch["inputs"]
        keys = None if key is None else jax.random.split(key, len(inputs))
        logits = jax.vmap(model, (0, None if key is None else 0))(inputs, keys)
        return cross_entropy(logits, batch["labels"]), statistics

    lean = jaxmem.substitute(scored)

    def report(params, statistics, batch):
        return jaxmem.nn.report(lean, params, statistics, batch, None)

    return Model(init, scored, lean, report, batch)


def _pictures(s: Size) -> dict[str, np.ndarray]:
    labels = np.arange(s.batch, dtype=np.int32) % 10
    return {"inputs": images(s).transpose(0, 3, 1, 2), "labels": labels}


FAMILIES = {
    "transformer": lambda s: _model(
        lambda key: Transformer(s, key),
        {"inputs": tokens(s), "labels": tokens(s, 1)},
    ),
    "conv": lambda s: _model(lambda key: ConvNet(s, key), _pictures(s)),
    "mlp": lambda s: _model(lambda key: Mlp(s, key), _pictures(s)),
}


def build(name: str, size: Size) -> Model:
    """The model of this name."""
    return FAMILIES[name](size)
