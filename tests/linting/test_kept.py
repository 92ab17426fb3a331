"""Wide copies, masks, and values that a scan stacks twice."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem

SDS = jax.ShapeDtypeStruct
LAYERS, BATCH, WIDTH = 4, 64, 32
WEIGHTS = SDS((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
X = SDS((BATCH, WIDTH), jnp.bfloat16)
ELEMENTS = BATCH * WIDTH


def scanned(layer):
    def loss(weights, x):
        step = lambda x, w: (layer(x, w), None)
        y = jax.lax.scan(step, x, weights)[0]
        return jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss)


def unrolled(layer):
    def loss(weights, x):
        for i in range(LAYERS):
            x = layer(x, weights[i])
        return jnp.sum(x.astype(jnp.float32))

    return jax.grad(loss)


def of(check, step, *args):
    return jaxmem.lint(step, *(args or (WEIGHTS, X))).of(check)


def wide(x, w):
    """The cosine is read twice: in bfloat16 and, as the sine's residual, in float32."""
    y = (x @ w).astype(jnp.float32)
    return jnp.square(y).astype(jnp.bfloat16)


def narrow(x, w):
    return jnp.square(x @ w)


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_wide_copies_of_what_is_kept_narrow(stack):
    found = of("wide copy", stack(wide))
    # half of float32: the product could be kept as it was
    assert sum(f.bytes for f in found) == LAYERS * ELEMENTS * 2
    assert all("float32" in f.what and "bfloat16" in f.what for f in found)
    assert all("test_kept.py" in f.where and "(wide)" in f.where for f in found)
    assert not of("wide copy", stack(narrow))


def test_a_wide_copy_of_what_is_there_anyway_costs_all_its_bytes():
    def loss(w, x):
        return jnp.sum(jnp.square(x.astype(jnp.float32) @ w))

    w = SDS((WIDTH, WIDTH), jnp.float32)
    (found,) = of("wide copy", jax.grad(loss), w, X)
    assert found.bytes == ELEMENTS * 4


def masked(x, keys_and_weights):
    key, w = keys_and_weights
    y = jnp.maximum(x @ w, 0)
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, y.shape)
    return jnp.where(keep, y, 0)


def test_dropout_masks():
    keys = SDS((LAYERS, 2), jnp.uint32)
    step = jax.grad(
        lambda w, keys, x: jnp.sum(
            jax.lax.scan(lambda x, k: (masked(x, k), None), x, (keys, w))[0]
        ).astype(jnp.float32)
    )
    (found,) = of("dropout mask", step, WEIGHTS, keys, X)
    assert found.bytes == LAYERS * ELEMENTS  # a bool is a byte; relu's is none of it
    assert "(masked)" in found.where
    relu = lambda x, w: jnp.maximum(x @ w, 0)
    assert not of("dropout mask", scanned(relu))
    assert not of("dropout mask", unrolled(relu))


@pytest.mark.parametrize("form", ["select", "times", "scaled mask", "broadcast"])
def test_each_way_to_drop_is_a_mask(form):
    def dropped(key, y):
        shape = (BATCH, 1) if form == "broadcast" else y.shape
        keep = jax.random.bernoulli(key, 0.9, shape)
        if form == "select":
            return jnp.where(keep, y / 0.9, 0)
        mask = jnp.broadcast_to(keep.astype(y.dtype), y.shape)
        return y * (mask / 0.9) if form == "scaled mask" else y * mask / 0.9

    def loss(w, x, key):
        return jnp.sum(jnp.square(dropped(key, x @ w)))

    w, x = (SDS((n, WIDTH), jnp.float32) for n in (WIDTH, BATCH))
    key = jax.eval_shape(lambda: jax.random.key(0))
    (found,) = of("dropout mask", jax.grad(loss), w, x, key)
    assert "(test_each_way_to_drop_is_a_mask.<locals>.dropped)" in found.where


@pytest.mark.parametrize("draw", ["normal", "uniform", "truncated_normal", "gumbel"])
@pytest.mark.parametrize("use", ["latents", "noise of a scale", "into a layer"])
def test_noise_is_no_mask(draw, use):
    """Latents of a GAN or of a variational model, what diffusion adds to an image."""

    def noise(key, shape):
        ends = (-2.0, 2.0) if draw == "truncated_normal" else ()
        return getattr(jax.random, draw)(key, *ends, shape)

    def loss(w, x, key):
        y = x @ w
        if use == "latents":
            y = jnp.tanh(noise(key, x.shape) @ w)
        elif use == "into a layer":
            y = jnp.tanh((0.7 * x + 0.7 * noise(key, x.shape)) @ w)
        else:
            y = y + jnp.exp(y) * noise(key, y.shape)
        return jnp.sum(jnp.square(y))

    w, x = (SDS((n, WIDTH), jnp.float32) for n in (WIDTH, BATCH))
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert not of("dropout mask", jax.grad(loss), w, x, key)


class Net(nn.Module):
    """Two dense layers with dropout between."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(WIDTH)(x))
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=False)(x))


def test_one_function_called_twice_makes_two_values():
    """A jitted function is traced once: its variables are the same in both calls."""
    double = jax.jit(lambda x: 2 * x)

    def step(weights, x):
        iteration = lambda x, w: (x @ w, (double(x), double(x @ w)))
        return jax.lax.scan(iteration, x, weights)[1]

    assert not of("stacked twice", step)


def test_substitute_leaves_no_mask():
    x = SDS((BATCH, WIDTH), jnp.float32)
    key = jax.random.key(0)
    keys = {"params": key, "dropout": key}
    params = jax.eval_shape(Net().init, keys, x)["params"]

    def step(model):
        def loss(params, x, key):
            rngs = {"dropout": key}
            return jnp.sum(model.apply({"params": params}, x, rngs=rngs) ** 2)

        return jax.grad(loss)

    plain, lean = (
        of("dropout mask", step(model), params, x, key)
        for model in (Net(), jaxmem.substitute(Net()))
    )
    assert [f.bytes for f in plain] == [ELEMENTS] and plain[0].path == "Net/Dropout_0"
    assert not lean


def recurrent(kept):
    """A carry that the backward pass needs, and what is stacked beside it."""

    def loss(weights, x):
        def step(x, w):
            y = jnp.square(x @ w)
            return y, kept(y)

        y, ys = jax.lax.scan(step, x, weights)
        return sum(
            jnp.sum(v.astype(jnp.float32) ** 2) for v in jax.tree.leaves((y, ys))
        )

    return jax.grad(loss)


def test_a_carry_that_is_stacked_too():
    (found,) = of("stacked twice", recurrent(lambda y: y))
    assert found.bytes == LAYERS * ELEMENTS * 2
    assert "carry" in found.what
    assert not of("stacked twice", recurrent(lambda y: ()))
    assert not of("stacked twice", recurrent(lambda y: jnp.sum(y)))


def test_a_value_that_is_stacked_twice():
    def step(weights, x):
        def iteration(x, w):
            y = x @ w
            return x, (y, y)

        return jax.lax.scan(iteration, x, weights)[1]

    (found,) = of("stacked twice", step)
    assert found.bytes == LAYERS * ELEMENTS * 2 and "value" in found.what


def test_inside_micro_batches():
    """Both passes lie in an outer scan."""

    def step(weights, xs):
        add = lambda total, x: (total + unrolled(wide)(weights, x), None)
        return jax.lax.scan(add, jnp.zeros_like(weights), xs)[0]

    found = of("wide copy", step, WEIGHTS, SDS((3, BATCH, WIDTH), jnp.bfloat16))
    assert sum(f.bytes for f in found) == LAYERS * ELEMENTS * 2


def test_a_clean_step_has_no_finding():
    tx = optax.sgd(1e-3)

    def step(params, state, x):
        value, grads = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    w, x = SDS((WIDTH, WIDTH), jnp.float32), SDS((BATCH, WIDTH), jnp.float32)
    report = jaxmem.lint(step, w, tx.init(w), x, donate_argnums=(0, 1))
    assert len(report) == 0 and "nothing found" in str(report)
