"""BERT in Flax linen, as a user writes it: plain layers, `nn.scan` over the stack."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class BertConfig:
    """Sizes of BERT-Large (Devlin et al. 2018, section 3); smaller ones by argument."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    hidden: int = 4096
    vocabulary: int = 30522
    positions: int = 512
    dropout: float = 0.1
    dtype: jnp.dtype = jnp.bfloat16


class Layer(nn.Module):
    """One post-LN encoder layer; the carry is the residual stream."""

    config: BertConfig
    deterministic: bool = False

    @nn.compact
    def __call__(self, x, _):
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=c.heads,
            dtype=c.dtype,
            dropout_rate=c.dropout,
            broadcast_dropout=False,
            deterministic=self.deterministic,
            name="attention",
        )
        y = dropout(attention(x))
        x = nn.LayerNorm(epsilon=1e-12, dtype=c.dtype, name="attention_norm")(x + y)
        y = nn.Dense(c.hidden, dtype=c.dtype, name="up")(x)
        y = nn.gelu(y, approximate=False)
        y = dropout(nn.Dense(c.width, dtype=c.dtype, name="down")(y))
        x = nn.LayerNorm(epsilon=1e-12, dtype=c.dtype, name="output_norm")(x + y)
        return x, None


class Bert(nn.Module):
    """Token logits at the first 15 % of positions, as masked-language training has."""

    config: BertConfig
    deterministic: bool = False
    layer: type[nn.Module] = Layer

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        embed = nn.Embed(c.vocabulary, c.width, dtype=c.dtype, name="tokens")
        place = nn.Embed(c.positions, c.width, dtype=c.dtype, name="positions")
        x = embed(tokens) + place(jnp.arange(tokens.shape[1]))
        stack = nn.scan(
            self.layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=c.layers,
        )
        x, _ = stack(c, self.deterministic, name="layers")(x, None)
        return embed.attend(x[:, : max(1, int(tokens.shape[1] * 0.15))])


def masked_loss(model):
    """`loss(params, tokens, key)`: mean cross entropy of the predicted positions."""

    def loss(params, tokens, key):
        logits = model.apply({"params": params}, tokens, rngs={"dropout": key})
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        labels = tokens[:, : logits.shape[1], None]
        return -jnp.take_along_axis(log_probs, labels, -1).mean()

    return loss


def abstract_params(model, tokens):
    """Shapes and dtypes of the parameters; nothing is allocated."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return jax.eval_shape(model.init, keys, tokens)["params"]
