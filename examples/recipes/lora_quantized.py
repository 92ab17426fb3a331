"""LoRA on a base in 4 bits: trained adapters, frozen codes, within a budget.

    python examples/recipes/lora_quantized.py

A small model is trained, then quantized in blocks that share a scale. Adapters are
trained on other text: gradients and moments are theirs alone, and no dequantized weight
is kept for the backward pass, since the few bits that it comes from are arguments.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem.demo import data

LAYERS, WIDTH, RANK, BATCH, TOKENS, BLOCK = 4, 128, 4, 8, 32, 32
TX = optax.adamw(2e-3)


def make_base(key):
    keys = jax.random.split(key, 3)
    draw = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
    layers = {
        "up": draw(keys[0], LAYERS, WIDTH, 4 * WIDTH),
        "down": draw(keys[1], LAYERS, 4 * WIDTH, WIDTH),
    }
    return {"layers": layers, "table": 8 * draw(keys[2], 256, WIDTH)}


def quantize(w):
    """Codes of 4 bits, a scale for each block of rows; named as in qwix's arrays."""
    w = w.reshape(*w.shape[:-2], -1, BLOCK, w.shape[-1])
    scale = jnp.abs(w).max(-2, keepdims=True) / 7
    return {"qvalue": jnp.round(w / scale).astype(jnp.int4), "scale": scale}


def dequantize(w):
    wide = w["qvalue"].astype(jnp.float32) * w["scale"]
    return wide.reshape(*wide.shape[:-3], -1, wide.shape[-1])


def with_adapters(base, key):
    """Quantized layers, each weight with thin matrices of its own beside it."""

    def adapted(w, key):
        lora_a = jax.random.normal(key, (LAYERS, w.shape[1], RANK)) * w.shape[1] ** -0.5
        lora_b = jnp.zeros((LAYERS, RANK, w.shape[2]))
        return {"base": quantize(w), "lora_a": lora_a, "lora_b": lora_b}

    names = sorted(base["layers"])
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    layers = {name: adapted(base["layers"][name], keys[name]) for name in names}
    return {**base, "layers": layers}


def product(x, w):
    if not isinstance(w, dict):
        return x @ w
    return x @ dequantize(w["base"]) + x @ w["lora_a"] @ w["lora_b"]


def loss_fn(params, tokens):
    def layer(x, w):
        before = (
            jnp.cumsum(jax.nn.standardize(x), 1) / jnp.arange(1, TOKENS + 1)[:, None]
        )
        return x + product(jax.nn.gelu(product(before, w["up"])), w["down"]), None

    x, _ = jax.lax.scan(layer, params["table"][tokens[:, :-1]], params["layers"])
    logits = jax.nn.standardize(x) @ params["table"].T / WIDTH**0.5
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step(params, opt_state, frozen, tokens):
    """`frozen` is an argument: what a step closes over are constants in it."""
    loss, grads = jaxmem.value_and_grad(loss_fn)(params, frozen, tokens)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(run, part, batches, steps):
    params, frozen = part
    params = jax.tree.map(jnp.copy, params)  # the caller's are not donated
    opt_state, losses = TX.init(params), []
    for tokens in itertools.islice(batches, steps):
        params, opt_state, loss = run(params, opt_state, frozen, tokens)
        losses.append(float(loss))
    return frozen.merge(params), losses


def main():
    text, donated = data.standard_library(), {"donate_argnums": (0, 1)}
    batches = lambda text: data.batches(text, BATCH, TOKENS, seed=0)
    run = jaxmem.schedule(step, **donated)
    whole = jaxmem.trainable(make_base(jax.random.key(0)), lambda path, leaf: True)
    base, losses = train(run, whole, batches(text.train), 200)
    print(f"the base: loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}")

    part = jaxmem.trainable(with_adapters(base, jax.random.key(1)), "**/lora_*")
    print(part)
    tokens = next(batches(text.validation))
    arguments = part[0], TX.init(part[0]), part[1], tokens
    for name, one in {"plain": jax.jit(step, **donated), "scheduled": run}.items():
        report = jaxmem.estimate(one, *arguments)
        print(f"{name}: {report.temp_bytes:,} bytes of temporaries")
    _, losses = train(run, part, batches(text.validation), 200)
    print(f"adapters: loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f}")


if __name__ == "__main__":
    main()
