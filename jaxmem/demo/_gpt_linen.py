"""A byte-level GPT in Flax linen, as one would write it without thinking of memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxmem.demo._settings import Settings


class Block(nn.Module):
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
    """Bytes in, logits of the next byte out.

    `dense` makes the layers of the MLPs, `activation` what stands between them.
    """

    settings: Settings
    dense: Callable[..., nn.Module] = nn.Dense
    activation: Callable[[], Callable] = lambda: nn.gelu

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch length"], deterministic: bool = True
    ) -> Float[Array, "batch length 256"]:
        s, length = self.settings, tokens.shape[1]
        position = nn.Embed(s.context, s.width, name="position")(jnp.arange(length))
        x = nn.Embed(256, s.width, name="embed")(tokens) + position[None]
        mask = nn.make_causal_mask(jnp.ones((1, length)))
        for name, length in s.stacks.items():
            parts = s.heads, s.dropout, self.dense, self.activation
            blocks = _stack(length)(*parts, name=name)
            x, _ = blocks(x, mask, deterministic)
        return nn.Dense(256, name="head")(nn.LayerNorm(name="norm")(x))


def _stack(length: int):
    """Blocks one after another: compiled once, not once a layer."""
    return nn.scan(
        Block,
        variable_axes={"params": 0, "velora": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
        length=length,
    )


def build(settings: Settings) -> GPT:
    """The model, without values."""
    return GPT(settings)


def split(model: nn.Module, settings: Settings):
    """Initial parameters and the pure `forward(params, tokens, key)` of a model."""
    key = jax.random.key(settings.seed)
    # What is fitted to a first batch (VeLoRA's vectors) sees embeddings as yet random.
    tokens = jax.random.randint(key, (1, settings.context), 0, 256)
    rest = dict(model.init(key, tokens))
    params = rest.pop("params")

    def forward(params, tokens, key=None):
        rngs = None if key is None else {"dropout": key}
        variables = {"params": params, **rest}
        return model.apply(variables, tokens, key is None, rngs=rngs)

    return params, forward
