"""DPO: a policy, its frozen reference, and no logits of whole texts.

    python examples/recipes/dpo.py

The loss needs the log-probabilities of two texts under two models (Rafailov et al.
2023). They are negative cross entropies, which `jaxmem.ops.linear_cross_entropy`
computes a block of the vocabulary at a time. Words are those of the Python standard
library; of each two texts a real one is preferred to one whose words are shuffled.
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

WORDS, WIDTH, TOKENS, PAIRS = 8192, 64, 16, 16
BETA = 0.5
TX = optax.adam(1e-3)


def read_words():
    text = data.standard_library(1_000_000).train.tobytes()
    found = re.findall(rb"\w+|[^\w\s]", text)
    return np.array([zlib.crc32(word) % WORDS for word in found], np.int32)


def pairs_of(words, seed=0):
    """[2, PAIRS, TOKENS]: real texts, and the same in another order."""
    draw = np.random.default_rng(seed)
    while True:
        starts = draw.integers(0, len(words) - TOKENS, PAIRS)
        real = words[starts[:, None] + np.arange(TOKENS)]
        yield np.stack([real, draw.permuted(real, axis=1)])


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
    return x + jax.nn.gelu((x + before) @ params["up"]) @ params["down"]


def log_probability(params, tokens):
    """[...], of whole texts."""
    x, labels = features(params, tokens[..., :-1]), tokens[..., 1:]
    head = {"vocab_axis": 0, "block_size": 512, "reduction": "none"}
    each = jaxmem.ops.linear_cross_entropy(x, params["table"], labels, **head)
    return -each.sum(-1)


def plain_log_probability(params, tokens):
    logits = features(params, tokens[..., :-1]) @ params["table"].T
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[..., 1:])
    return -each.sum(-1)


def loss_fn(params, reference, pairs, of=log_probability):
    better, worse = of(params, pairs) - of(reference, pairs)
    return -jax.nn.log_sigmoid(BETA * (better - worse)).mean()


def step(params, opt_state, reference, pairs, of=log_probability):
    """The reference is an argument that has no gradient, and is not donated."""
    loss, grads = jax.value_and_grad(loss_fn)(params, reference, pairs, of)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(run, steps, words):
    params = reference = init(jax.random.key(0))
    params = jax.tree.map(jnp.copy, params)  # the reference's arrays stay
    opt_state, losses = TX.init(params), []
    for _, pairs in zip(range(steps), pairs_of(words), strict=False):
        params, opt_state, loss = run(params, opt_state, reference, pairs)
        losses.append(float(loss))
    return params, losses


def main():
    words = read_words()
    run = jax.jit(step, donate_argnums=(0, 1))
    plain = functools.partial(step, of=plain_log_probability)
    params = init(jax.random.key(0))
    arguments = params, TX.init(params), params, next(pairs_of(words))
    shapes = jax.eval_shape(lambda: arguments)
    for name, one in {"plain": plain, "a block at a time": step}.items():
        report = jaxmem.estimate(one, *shapes, donate_argnums=(0, 1))
        print(f"{name}: {report.temp_bytes:,} bytes of temporaries")
    _, losses = train(run, 100, words)
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}")


if __name__ == "__main__":
    main()
