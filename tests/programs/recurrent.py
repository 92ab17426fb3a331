"""Gated recurrent nets over long sequences: a GRU, then an LSTM. Flax linen."""

from typing import NamedTuple

import flax.linen as nn
import jax
import optax

from tests.programs._common import arguments, of_size, training_step


class Size(NamedTuple):
    batch: int
    length: int
    width: int
    vocabulary: int


class Tagger(nn.Module):
    """Logits of a tag for each token [B, T]."""

    size: Size

    @nn.compact
    def __call__(self, tokens):
        s = self.size
        of = {"param_dtype": float}  # which a cell's first state has, too
        lstm = nn.OptimizedLSTMCell(s.width, **of)
        x = nn.Embed(s.vocabulary, s.width, **of)(tokens)
        x = x + nn.RNN(nn.GRUCell(s.width, **of))(x)
        x = x + nn.RNN(lstm, reverse=True, keep_order=True)(x)
        return nn.Dense(17, **of)(nn.LayerNorm(**of)(x))


def make(size: str):
    s = of_size(size, small=Size(2, 5, 6, 11), big=Size(64, 512, 256, 20_000))
    model = Tagger(s)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))

    def loss(params, tokens, tags):
        logits = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tags).mean()

    def init(key):
        k = jax.random.split(key, 3)
        tokens = jax.random.randint(k[0], (s.batch, s.length), 0, s.vocabulary)
        tags = jax.random.randint(k[1], (s.batch, s.length), 0, 17)
        params = model.init(k[2], tokens)
        return (params, tx.init(params)), tokens, tags

    return training_step(loss, tx), arguments(size, init), (0,)
