"""Replay through time: Memformer's step, its own replay, and the step scheduled.

    python examples/memformer.py         # a small one, trained in all three forms
    python examples/memformer.py h100    # also 64 segments on an absent H100

A long text is read in segments. Memory slots go from one to the next: tokens read them
by cross attention, and a writer, in which each slot attends to itself and to the
tokens, makes those of the next segment. A scan over segments keeps what all of them
computed. Memformer's memory replay back-propagation (MRBP) keeps the slots alone and
runs a segment once more when the backward pass reaches it: here `jax.checkpoint` around
the body of the scan. `jaxmem.schedule` does that to the step that has no checkpoint.

After Wu et al., "Memformer: A Memory-Augmented Transformer for Sequence Modeling",
arXiv 2010.06891: slots, reading, writing, forgetting by biased normalization and the
replay are as there. Simpler than there: one causal decoder instead of an encoder and a
decoder, and a writer with one head.
"""

import dataclasses
import functools
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem

TX = optax.adam(1e-3)
TEMPERATURE = 0.25  # of the writer: a slot changes by few tokens


@dataclasses.dataclass(frozen=True)
class Sizes:
    segments: int = 16
    batch: int = 2
    tokens: int = 32
    width: int = 32
    layers: int = 1
    heads: int = 4
    slots: int = 4
    words: int = 64


SMALL = Sizes()
LARGE = Sizes(
    64, batch=8, tokens=128, width=512, layers=4, heads=8, slots=32, words=256
)


class Layer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, memory):
        attention = functools.partial(nn.MultiHeadDotProductAttention, self.heads)
        h, causal = nn.LayerNorm()(x), nn.make_causal_mask(x[..., 0], dtype=bool)
        x = x + attention(name="self_attention")(h, mask=causal)
        x = x + attention(name="read")(nn.LayerNorm()(x), memory)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1], name="down")(h)


class Write(nn.Module):
    """The slots [b, s, d] as they become by a segment [b, t, d].

    A slot attends to itself and to the tokens, and to no other slot.
    """

    @nn.compact
    def __call__(self, memory, x):
        query, key, value = (
            nn.Dense(x.shape[-1], name=name) for name in ("query", "key", "value")
        )
        q = query(memory) / (TEMPERATURE * x.shape[-1] ** 0.5)
        own = jnp.sum(q * key(memory), -1, keepdims=True)
        scores = jnp.concatenate([own, jnp.einsum("bsd,btd->bst", q, key(x))], -1)
        weights = jax.nn.softmax(scores)
        tokens = jnp.einsum("bst,btd->bsd", weights[..., 1:], value(x))
        return weights[..., :1] * value(memory) + tokens


def unit(slots):
    return slots / jnp.linalg.norm(slots, axis=-1, keepdims=True)


class Memformer(nn.Module):
    """One segment: slots and tokens -> the slots that follow, and logits."""

    sizes: Sizes

    def setup(self):
        s = self.sizes
        self.table, self.write = nn.Embed(s.words, s.width), Write()
        self.layers = [Layer(s.heads) for _ in range(s.layers)]
        self.bias = self.param("bias", nn.initializers.normal(1.0), (s.slots, s.width))

    def start(self, batch):
        """Slots that know nothing: the bias, normalized."""
        return jnp.broadcast_to(unit(self.bias), (batch, *self.bias.shape))

    def __call__(self, memory, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, memory)
        # without new information the bias pulls a slot back to where it began
        memory = unit(self.write(memory, x) + self.bias)
        return memory, self.table.attend(x)


def plain(segment):
    return segment


REPLAY = jax.checkpoint  # MRBP: of a segment only the slots that it begins with


def loss_fn(model, params, text, wrap=plain):
    """The loss of a text [segments, batch, tokens + 1], a scan over its segments.

    `wrap`: changes the function of one segment, which the scan runs.
    """

    def segment(memory, part):
        memory, logits = model.apply({"params": params}, memory, part[:, :-1])
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return memory, entropy(logits, part[:, 1:]).mean()

    start = model.apply({"params": params}, text.shape[1], method="start")
    return jax.lax.scan(wrap(segment), start, text)[1].mean()


def make_step(sizes, wrap=plain):
    model = Memformer(sizes)

    def step(state, text):
        params, opt_state = state
        of_params = lambda params: loss_fn(model, params, text, wrap)
        loss, grads = jax.value_and_grad(of_params)(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def make_state(sizes):
    model, key = Memformer(sizes), jax.random.key(0)
    memory = jnp.zeros((1, sizes.slots, sizes.width))
    params = model.init(key, memory, jnp.zeros((1, sizes.tokens), int))["params"]
    return params, TX.init(params)


def draw_text(sizes):
    """A phrase that comes back in every segment: what the slots can remember."""
    draw = np.random.default_rng(0)
    shape = 1, sizes.batch, sizes.tokens + 1
    phrase = draw.integers(0, sizes.words, shape, dtype="int32")
    return jnp.asarray(np.repeat(phrase, sizes.segments, 0))


def shapes(sizes):
    """The step's arguments, of which nothing is allocated."""
    ids = sizes.segments, sizes.batch, sizes.tokens + 1
    state = jax.eval_shape(functools.partial(make_state, sizes))
    return state, jax.ShapeDtypeStruct(ids, jnp.int32)


def least_budget(sizes, target=None):
    """The peak of the step with its own replay: what `schedule` gets as its budget."""
    step = make_step(sizes, REPLAY)
    how = {"target": target, "donate_argnums": 0}
    return jaxmem.estimate(step, *shapes(sizes), **how).peak_bytes


def train(step, sizes, steps=4):
    state, losses = make_state(sizes), []
    for _ in range(steps):
        state, loss = step(state, draw_text(sizes))
        losses.append(float(loss))
    return state, losses


def forms(sizes, budget):
    """The step in its three forms; each is called as it is."""
    jitted = functools.partial(jax.jit, donate_argnums=0)
    how = {"donate_argnums": 0, "quick": True, "progress": False}
    return {
        "plain": jitted(make_step(sizes)),
        "own replay": jitted(make_step(sizes, REPLAY)),
        "schedule": jaxmem.schedule(make_step(sizes), budget, **how),
    }


def main():
    for target in sys.argv[1:]:
        how = {"target": target, "donate_argnums": 0}
        budget = least_budget(LARGE, target)
        print(jaxmem.schedule(make_step(LARGE), budget, **how).plan(*shapes(LARGE)))
    for name, step in forms(SMALL, least_budget(SMALL)).items():
        found = jaxmem.estimate(step, *shapes(SMALL), donate_argnums=0)
        _, losses = train(step, SMALL)
        print(f"{name}: peak {found.peak_bytes:,} bytes, losses {losses}")


if __name__ == "__main__":
    main()
