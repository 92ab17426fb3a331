"""One long sequence over eight devices, in a budget for each.

    python examples/long_context.py         # eight emulated CPU devices
    python examples/long_context.py h100    # also 131,072 tokens on eight H100s

Each device has an eighth of the tokens, and of every parameter. Attention needs all
tokens: two constraints exchange tokens for heads before it, and heads for tokens after
it (DeepSpeed Ulysses). `jaxmem.schedule` does the rest: what is recomputed, and which
regions run over some of a device's tokens at a time.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem

DEVICES = 8
if jax.config.jax_num_cpu_devices < DEVICES:  # leave it out where there are devices
    jax.config.update("jax_num_cpu_devices", DEVICES)

LAYERS, WIDTH, HEADS, WORDS, TOKENS = 6, 64, 8, 2048, 1024
BUDGET = "16MiB"  # per device
OPTIMIZER = optax.adamw(1e-3)
AXIS = "tokens"


def spec_of(x):
    """Matrices are spread along their last axis but one."""
    return P(*[None] * (x.ndim - 2), AXIS) if x.ndim > 1 else P()


def make_state(width=WIDTH, words=WORDS):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    draw = lambda *shape: 0.05 * jax.random.normal(next(keys), shape)
    params = {
        "table": draw(words, width),
        "qkv": draw(LAYERS, width, 3 * width),
        "out": draw(LAYERS, width, width),
        "up": draw(LAYERS, width, 4 * width),
        "down": draw(LAYERS, 4 * width, width),
    }
    return params, OPTIMIZER.init(params)


def make_step(mesh, implementation=None):
    pin = lambda x, *spec: jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, P(*spec))
    )
    by_token, by_head = (
        (lambda x: pin(x, None, AXIS)),
        (lambda x: pin(x, None, None, AXIS)),
    )

    def layer(x, w):
        w = jax.tree.map(lambda a: a.astype(x.dtype), w)
        qkv = jnp.split(jax.nn.standardize(x) @ w["qkv"], 3, -1)
        q, k, v = (by_head(a.reshape(*a.shape[:2], HEADS, -1)) for a in qkv)
        y = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation
        )
        x = by_token(x + by_token(y).reshape(x.shape) @ w["out"])
        hidden = jax.nn.gelu(jax.nn.standardize(x) @ w["up"])
        return by_token(x + hidden @ w["down"]), None

    def loss_fn(params, batch):
        tokens, labels = batch
        layers = {name: params[name] for name in ("qkv", "out", "up", "down")}
        x = by_token(params["table"].astype(jnp.bfloat16)[tokens])
        x, _ = jax.lax.scan(layer, x, layers)
        logits = (x @ params["table"].astype(x.dtype).T).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean()

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def shapes(mesh, tokens, **sizes):
    """The step's arguments, of which nothing is allocated."""

    def struct(x, spec):
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    state = jax.eval_shape(lambda: make_state(**sizes))
    state = jax.tree.map(lambda x: struct(x, spec_of(x)), state)
    ids = struct(jax.ShapeDtypeStruct((1, tokens), jnp.int32), P(None, AXIS))
    return state, (ids, ids)


def train(step, mesh, steps=4):
    place = lambda x: NamedSharding(mesh, spec_of(x))
    where = jax.tree.map(place, jax.eval_shape(make_state))
    state = jax.jit(make_state, out_shardings=where)()
    draw, losses = np.random.default_rng(0), []
    for _ in range(steps):
        text = (draw.integers(0, WORDS) + np.arange(TOKENS + 1)) % WORDS
        pair = text[None, :-1].astype("int32"), text[None, 1:].astype("int32")
        pair = jax.device_put(pair, NamedSharding(mesh, P(None, AXIS)))
        state, loss = step(state, pair)
        losses.append(float(loss))
    return losses


def main():
    if len(sys.argv) > 1:  # absent chips
        target = sys.argv[1]
        mesh = jaxmem.target_mesh(target, (DEVICES,), (AXIS,))
        args = shapes(mesh, 131_072, width=2048, words=32_768)
        how = {"target": target, "donate_argnums": 0}
        step = make_step(mesh, "cudnn")
        print(jaxmem.schedule(step, "12GiB", **how).plan(*args))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((DEVICES,), (AXIS,), auto)
    step, args = make_step(mesh), shapes(mesh, TOKENS)
    before = jaxmem.estimate(step, *args, donate_argnums=0)
    how = {"donate_argnums": 0, "quick": True, "progress": False}
    scheduled = jaxmem.schedule(step, BUDGET, **how)
    plan = scheduled.plan(*args)
    print(plan)
    print(f"a device: {before.peak_bytes:,} bytes -> {plan.scheduled.peak_bytes:,}")
    plain_losses = train(jax.jit(step, donate_argnums=0), mesh)
    losses = train(scheduled, mesh)
    print("losses, plain:    ", plain_losses)
    print("losses, scheduled:", losses)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-2)  # in bfloat16


if __name__ == "__main__":
    main()
