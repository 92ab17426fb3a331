"""GRPO: texts that a policy writes, rewards in groups, and no logits of whole texts.

    python examples/recipes/grpo.py

Texts of a group begin with the same word. A reward less the mean of its group, in
standard deviations, is the advantage of all words of the text, and the ratio of new to
old probabilities is clipped (Shao et al. 2024). Log-probabilities are negative cross
entropies, a block of the vocabulary at a time. The reward counts frequent words.
"""

import functools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem.demo import data

WORDS, WIDTH, TOKENS, GROUPS, GROUP = 8192, 64, 16, 8, 8
CLIP, EPOCHS, FREQUENT = 0.2, 2, 1024
TX = optax.adam(1e-2)


def read_words():
    """The words of a text as numbers, from the most frequent one on."""
    text = data.standard_library(1_000_000).train.tobytes()
    found = re.findall(rb"\w+|[^\w\s]", text)
    words = np.array([zlib.crc32(word) % WORDS for word in found])
    order = np.argsort(-np.bincount(words, minlength=WORDS))
    return np.int32(np.argsort(order)[words])


def init(key):
    keys = jax.random.split(key, 3)
    draw = lambda key, *shape: jax.random.normal(key, shape) * shape[-1] ** -0.5
    return {
        "table": draw(keys[0], WORDS, WIDTH),
        "up": draw(keys[1], WIDTH, 4 * WIDTH),
        "down": draw(keys[2], 4 * WIDTH, WIDTH),
    }


def features(params, tokens):
    """[..., TOKENS, WIDTH], of each word with those before."""
    x = params["table"][tokens]
    before = jnp.cumsum(x, -2) / jnp.arange(1, tokens.shape[-1] + 1)[:, None]
    return x + jax.nn.gelu(before @ params["up"]) @ params["down"]


def log_probability(params, tokens):
    """[..., TOKENS - 1], of each word after the first."""
    x, labels = features(params, tokens[..., :-1]), tokens[..., 1:]
    head = {"vocab_axis": 0, "block_size": 512, "reduction": "none"}
    return -jaxmem.ops.linear_cross_entropy(x, params["table"], labels, **head)


def plain_log_probability(params, tokens):
    logits = features(params, tokens[..., :-1]) @ params["table"].T
    return -optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:])


@jax.jit
def write(params, first, key):
    """Texts [GROUPS, GROUP, TOKENS], their rewards and log-probabilities."""

    def add(t, tokens):
        logits = features(params, tokens)[:, :, t - 1] @ params["table"].T
        drawn = jax.random.categorical(jax.random.fold_in(key, t), logits)
        return tokens.at[:, :, t].set(drawn.astype(jnp.int32))

    first = jnp.broadcast_to(first[:, None, None], (GROUPS, GROUP, TOKENS))
    tokens = jax.lax.fori_loop(1, TOKENS, add, first)
    rewards = (tokens[..., 1:] < FREQUENT).mean(-1)
    return tokens, rewards, log_probability(params, tokens)


def loss_fn(params, written, of=log_probability):
    tokens, rewards, old = written
    above = rewards - rewards.mean(-1, keepdims=True)
    advantage = (above / (rewards.std(-1, keepdims=True) + 1e-6))[..., None]
    ratio = jnp.exp(of(params, tokens) - old)
    near = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    return -jnp.minimum(ratio * advantage, near * advantage).mean()


def step(params, opt_state, written, of=log_probability):
    loss, grads = jax.value_and_grad(loss_fn)(params, written, of)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(run, rounds, words):
    params, draw = init(jax.random.key(0)), np.random.default_rng(0)
    opt_state, rewards = TX.init(params), []
    for i in range(rounds):
        written = write(params, draw.choice(words, GROUPS), jax.random.key(i))
        for _ in range(EPOCHS):  # the second one is of a policy that has moved on
            params, opt_state, _ = run(params, opt_state, written)
        rewards.append(float(written[1].mean()))
    return params, rewards


def main():
    words, params = read_words(), init(jax.random.key(0))
    written = write(params, words[:GROUPS], jax.random.key(0))
    plain = functools.partial(step, of=plain_log_probability)
    arguments = params, TX.init(params), written
    for name, one in {"plain": plain, "a block at a time": step}.items():
        report = jaxmem.estimate(one, *arguments, donate_argnums=(0, 1))
        print(f"{name}: {report.temp_bytes:,} bytes of temporaries")
    _, rewards = train(jax.jit(step, donate_argnums=(0, 1)), 60, words)
    print(f"reward {np.mean(rewards[:5]):.3f} -> {np.mean(rewards[-5:]):.3f}")


if __name__ == "__main__":
    main()
