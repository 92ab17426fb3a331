"""A Keras 3 model on the JAX backend, trained by a scheduled step.

    pip install keras && python examples/recipes/keras_jax.py

Keras gives a model, an optimizer and their variables as pure functions of arrays. A
step made of them is one of plain JAX: it is measured, scheduled, and donates its state.
The trained arrays go back into the model, which Keras evaluates.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

import jax
import jax.numpy as jnp
import keras
import numpy as np

import jaxmem
from jaxmem.demo import data

LAYERS, WIDTH, HEADS, BATCH, TOKENS = 2, 64, 4, 16, 64
BUDGET = "14MiB"


def make_model():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(256, WIDTH)(tokens)
    for _ in range(LAYERS):
        y = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * WIDTH, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH)(y))
    return keras.Model(tokens, keras.layers.Dense(256)(x))


def make_state(model, optimizer):
    """Trained arrays, others (seeds of dropout), and the optimizer's; copies."""
    optimizer.build(model.trainable_variables)
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    return tuple([jnp.copy(v.value) for v in group] for group in groups)


def make_step(model, optimizer):
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_fn(trained, others, tokens):
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        logits, others = model.stateless_call(trained, others, inputs, training=True)
        return entropy(labels, logits), others

    def step(state, tokens):
        trained, others, moments = state
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, others), grads = grad(trained, others, tokens)
        trained, moments = optimizer.stateless_apply(moments, grads, trained)
        return (trained, others, moments), loss

    return step


def train(run, state, steps):
    batches, losses = data.batches(data.standard_library().train, BATCH, TOKENS, 0), []
    for _, tokens in zip(range(steps), batches, strict=False):
        state, loss = run(state, tokens)
        losses.append(float(loss))
    return state, losses


def write_back(model, state):
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)


def main():
    model, optimizer = make_model(), keras.optimizers.AdamW(1e-3)
    state, step = make_state(model, optimizer), make_step(model, optimizer)
    tokens = np.zeros((BATCH, TOKENS + 1), np.int32)
    run = jaxmem.schedule(step, BUDGET, donate_argnums=0, quick=True)
    plan = run.plan(state, tokens)
    print(f"peak: {plan.plain.peak_bytes:,} bytes -> {plan.scheduled.peak_bytes:,}")
    state, losses = train(run, state, 100)
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f}")
    write_back(model, state)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    held_out = next(data.batches(data.standard_library().validation, 64, TOKENS, 0))
    value = model.evaluate(held_out[:, :-1], held_out[:, 1:], verbose=0)
    print(f"held-out, by Keras: {value:.3f}")


if __name__ == "__main__":
    main()
