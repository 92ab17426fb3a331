"""A byte-level GPT in Flax linen and in nnx, written without regard to memory.

Layers are scanned in both, so that they are compiled once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jaxmem.demo.settings import Settings


class LinenBlock(nn.Module):
    """Pre-LN attention and a GELU MLP, each added to the residual stream."""

    heads: int
    dropout: float
    dense: Callable[..., nn.Module] = nn.Dense
    activation: Callable[[], Callable] = lambda: nn.gelu

    @nn.compact
    def __call__(self, x, mask, deterministic):
        width = x.shape[-1]
        h = nn.LayerNorm(name="norm_attention")(x)
        h = nn.MultiHeadDotProductAttention(
            self.heads, dropout_rate=self.dropout, name="attention"
        )(h, h, mask=mask, deterministic=deterministic)
        x = x + nn.Dropout(self.dropout)(h, deterministic=deterministic)
        h = nn.LayerNorm(name="norm_mlp")(x)
        h = self.activation()(self.dense(4 * width, name="up")(h))
        h = self.dense(width, name="down")(h)
        return x + nn.Dropout(self.dropout)(h, deterministic=deterministic), None


class GPT(nn.Module):
    """Tokens [batch, length] to logits of the next byte [batch, length, 256].

    `dense` makes the layers of the MLPs, `activation` the function between them.
    """

    settings: Settings
    dense: Callable[..., nn.Module] = nn.Dense
    activation: Callable[[], Callable] = lambda: nn.gelu

    @nn.compact
    def __call__(self, tokens, deterministic: bool = True):
        s, length = self.settings, tokens.shape[1]
        position = nn.Embed(s.context, s.width, name="position")(jnp.arange(length))
        x = nn.Embed(256, s.width, name="embed")(tokens) + position[None]
        mask = nn.make_causal_mask(jnp.ones((1, length)))
        for name, layers in s.stacks.items():
            stack = nn.scan(
                LinenBlock,
                variable_axes={"params": 0, "velora": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
                length=layers,
            )
            parts = s.heads, s.dropout, self.dense, self.activation
            x, _ = stack(*parts, name=name)(x, mask, deterministic)
        return nn.Dense(256, name="head")(nn.LayerNorm(name="norm")(x))


class NnxBlock(nnx.Module):
    """As `LinenBlock`. nnx does not name modules in the compiled program, so the scopes
    are named here, for the figure of bytes by module.
    """

    def __init__(self, s: Settings, rngs: nnx.Rngs):
        rate = {"dropout_rate": s.dropout, "decode": False, "keep_rngs": False}
        self.norm_attention = nnx.LayerNorm(s.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(s.heads, s.width, **rate, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(s.width, rngs=rngs)
        self.up = nnx.Linear(s.width, 4 * s.width, rngs=rngs)
        self.down = nnx.Linear(4 * s.width, s.width, rngs=rngs)
        self.dropout = nnx.Dropout(s.dropout)

    def __call__(self, x, mask, key):
        rngs = None if key is None else nnx.Rngs(key)
        how = {"deterministic": key is None, "rngs": rngs}
        with jax.named_scope("attention"):
            h = self.attention(self.norm_attention(x), mask=mask, **how)
            x = x + self.dropout(h, **how)
        with jax.named_scope("mlp"):
            h = self.down(nnx.gelu(self.up(self.norm_mlp(x))))
            return x + self.dropout(h, **how)


@nnx.scan(in_axes=(0, nnx.Carry, None, 0), out_axes=nnx.Carry)
def _run_stack(block, x, mask, key):
    return block(x, mask, key)


class NnxGPT(nnx.Module):
    """As `GPT`; a key is given where dropout acts."""

    def __init__(self, s: Settings, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, s.width, rngs=rngs)
        self.position = nnx.Embed(s.context, s.width, rngs=rngs)
        self.stacks = tuple(s.stacks.items())
        for name, layers in self.stacks:
            make = nnx.vmap(lambda rngs: NnxBlock(s, rngs))
            setattr(self, name, nnx.split_rngs(splits=layers)(make)(rngs))
        self.norm = nnx.LayerNorm(s.width, rngs=rngs)
        self.head = nnx.Linear(s.width, 256, rngs=rngs)

    def __call__(self, tokens, key=None):
        length = tokens.shape[1]
        with jax.named_scope("embed"):
            x = self.embed(tokens) + self.position(jnp.arange(length))[None]
        mask = nnx.make_causal_mask(jnp.ones((1, length)))
        for number, (name, layers) in enumerate(self.stacks):
            keys = None
            if key is not None:
                keys = jax.random.split(jax.random.fold_in(key, number), layers)
            x = _run_stack(getattr(self, name), x, mask, keys)
        with jax.named_scope("head"):
            return self.head(self.norm(x))


def build(settings: Settings) -> Any:
    """The model of `settings.model`; that of nnx has its initial values."""
    if settings.model == "linen":
        return GPT(settings)
    return NnxGPT(settings, nnx.Rngs(settings.seed))


def split(model, settings: Settings) -> tuple[Any, Callable]:
    """(initial parameters, the pure `forward(params, tokens, key)`) of a model."""
    if isinstance(model, nnx.Module):
        graph, params, state = nnx.split(model, nnx.Param, ...)

        def forward_nnx(params, tokens, key=None):
            return nnx.merge(graph, params, state)(tokens, key)

        return jax.tree.map(jnp.copy, params), forward_nnx
    key = jax.random.key(settings.seed)
    tokens = jax.random.randint(key, (1, settings.context), 0, 256)
    rest = dict(model.init(key, tokens))
    params = rest.pop("params")
    if rest:  # VeLoRA's vectors: those of a first batch, which then stay
        rest = model.apply({"params": params, **rest}, tokens, mutable=list(rest))[1]

    def forward(params, tokens, key=None):
        rngs = None if key is None else {"dropout": key}
        return model.apply({"params": params, **rest}, tokens, key is None, rngs=rngs)

    return params, forward
