"""FSDP on eight devices: what each takes, a budget for each, and a training loop.

    python examples/fsdp.py         # eight emulated CPU devices
    python examples/fsdp.py h100    # also prints the bytes on eight H100s

One line of a step changes: `jaxmem.schedule` replaces `jax.jit`.
"""

import functools
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

LAYERS, WIDTH, WORDS, BATCH, TOKENS = 8, 128, 512, 64, 64
BUDGET = "15MiB"  # per device
OPTIMIZER = optax.adamw(1e-3)


def spec_of(x):
    """Matrices are spread along their last axis, over the axis of the examples."""
    large = x.ndim > 1 and x.shape[-1] % DEVICES == 0
    return P(*[None] * (x.ndim - 1), "data") if large else P()


def make_state():
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, *shape: 0.05 * jax.random.normal(key, shape)
    params = {
        "table": draw(keys[0], WORDS, WIDTH),
        "up": draw(keys[1], LAYERS, WIDTH, 4 * WIDTH),
        "down": draw(keys[2], LAYERS, 4 * WIDTH, WIDTH),
    }
    return params, OPTIMIZER.init(params)


def loss_fn(params, tokens, examples):
    # One constraint a layer: without it XLA may spread activations over their features,
    # and devices exchange activations in every layer.
    keep = functools.partial(jax.lax.with_sharding_constraint, shardings=examples)

    def layer(x, params):
        before = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        hidden = jax.nn.gelu(before @ params["up"])
        return keep(x + hidden @ params["down"]), None

    layers = {name: params[name] for name in ("up", "down")}
    x, _ = jax.lax.scan(layer, keep(params["table"][tokens[:, :-1]]), layers)
    logits = x @ params["table"].T
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return each.mean()


def make_step(mesh):
    examples = NamedSharding(mesh, P("data"))

    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, examples)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def shapes(mesh):
    """The step's arguments, of which nothing is allocated."""

    def struct(x, spec):
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    state = jax.tree.map(lambda x: struct(x, spec_of(x)), jax.eval_shape(make_state))
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS + 1), jnp.int32)
    return state, struct(tokens, P("data"))


def train(step, mesh, steps=5):
    place = lambda x: NamedSharding(mesh, spec_of(x))
    where = jax.tree.map(place, jax.eval_shape(make_state))
    state = jax.jit(make_state, out_shardings=where)()
    draw, losses = np.random.default_rng(0), []
    for _ in range(steps):
        starts = draw.integers(0, WORDS, (BATCH, 1))  # each row counts on from its own
        tokens = ((starts + np.arange(TOKENS + 1)) % WORDS).astype("int32")
        tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        state, loss = step(state, tokens)
        losses.append(float(loss))
    return losses


def main():
    if len(sys.argv) > 1:  # absent chips: bytes per device
        target = sys.argv[1]
        mesh = jaxmem.target_mesh(target, (DEVICES,), ("data",))
        how = {"target": target, "donate_argnums": 0}
        print(jaxmem.estimate(make_step(mesh), *shapes(mesh), **how))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((DEVICES,), ("data",), auto)
    step = make_step(mesh)
    before = jaxmem.estimate(step, *shapes(mesh), donate_argnums=0)
    scheduled = jaxmem.schedule(step, BUDGET, donate_argnums=0, progress=False)
    plan = scheduled.plan(*shapes(mesh))
    print(plan)
    print(f"a device: {before.peak_bytes:,} bytes -> {plan.scheduled.peak_bytes:,}")
    plain_losses = train(jax.jit(step, donate_argnums=0), mesh)
    losses = train(scheduled, mesh)
    print("losses, plain:    ", plain_losses)
    print("losses, scheduled:", losses)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-4)


if __name__ == "__main__":
    main()
