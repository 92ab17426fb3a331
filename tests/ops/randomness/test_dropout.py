"""Dropout: semantics, and one mask whatever the transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.ops.randomness.bits import keep_mask, positions, seed_words
from jaxmem.ops.randomness.dropout import dropout
from tests.arrays import array
from tests.references import kept_bytes

KEY = jax.random.key(11)
X = array(np.random.default_rng(0).standard_normal((16, 24, 40)), jnp.float32)
RATE = 0.3


def lean(x, key=KEY):
    return dropout(x, RATE, key)


def mesh_of_8(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


def both(fn, x=X):
    """Output and the mask of the gradient."""
    out, pull = jax.vjp(fn, x)
    return np.asarray(out), np.asarray(pull(jnp.ones_like(out))[0])


def test_scales_as_flax():
    out, grad = both(lean)
    seed = seed_words(KEY)
    keep = np.asarray(keep_mask(seed, *positions(X.shape), RATE))
    np.testing.assert_array_equal(out, np.where(keep, np.asarray(X / (1 - RATE)), 0))
    one = np.float32(1) / np.float32(1 - RATE)
    np.testing.assert_array_equal(grad, np.where(keep, one, np.float32(0)))


def test_mask_is_the_same_under_transformations():
    out, grad = both(lean)
    mesh = mesh_of_8()
    sharded = jax.device_put(X, NamedSharding(mesh, PartitionSpec("x")))
    columns = jax.device_put(X, NamedSharding(mesh, PartitionSpec(None, None, "x")))
    explicit = NamedSharding(mesh_of_8(AxisType.Explicit), PartitionSpec(None, "x"))

    def scanned(x):
        return jax.lax.scan(lambda c, _: (c, lean(x)), None, None, length=3)[1][1]

    def in_scan(x):  # one differentiated scan over what is dropped
        keys = jnp.stack([KEY] * 2)
        return jax.lax.scan(lambda c, k: (lean(x, k), None), x, keys)[0]

    for fn, x in (
        (jax.jit(lean), X),
        (jax.checkpoint(lean), X),
        (jax.jit(jax.checkpoint(lean, prevent_cse=False)), X),
        (jax.jit(scanned), X),
        (jax.jit(in_scan), X),
        (jax.jit(lean), sharded),
        (jax.jit(lean), columns),
        (jax.jit(lean), jax.device_put(X, explicit)),
    ):
        got_out, got_grad = both(fn, x)
        np.testing.assert_array_equal(got_out, out)
        np.testing.assert_array_equal(got_grad, grad)


def test_a_mask_is_one_equation():
    """A search asks each equation many times: a hash is not dozens of them."""
    jaxpr = jax.make_jaxpr(lambda x, key: dropout(x, 0.5, key))(
        jnp.ones((4, 8)), jax.random.key(0)
    )
    names = [eqn.primitive.name for eqn in jaxprs.walk(jaxpr)]
    assert names.count("position_bits") == 1
    assert "shift_right_logical" not in names
    assert len(names) < 40


def test_vmap_gives_each_example_its_own_mask():
    keys = jax.random.split(KEY, X.shape[0])
    mapped = jax.vmap(lambda x, k: dropout(x, RATE, k))(X, keys)
    single = jnp.stack([dropout(x, RATE, k) for x, k in zip(X, keys, strict=True)])
    np.testing.assert_array_equal(mapped, single)


def test_sharded_mask_needs_no_communication():
    mesh = mesh_of_8()
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    step = jax.jit(lambda x, k: both_of(x, k), out_shardings=sharding)

    def both_of(x, k):
        out, pull = jax.vjp(lambda x: dropout(x, RATE, k), x)
        return out, pull(out)[0]

    text = step.lower(jax.device_put(X, sharding), KEY).compile().as_text()
    assert not any(w in text for w in ("all-gather", "all-reduce", "all-to-all"))


def test_broadcast_dims():
    out = np.asarray(dropout(jnp.ones_like(X), RATE, KEY, broadcast_dims=(1, -3)))
    assert (out == out[:1, :1]).all()
    assert 0 < (out[0, 0] == 0).sum() < out.shape[2]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 0, 3), (7,)])
def test_odd_shapes(shape):
    assert dropout(jnp.ones(shape), RATE, KEY).shape == shape


def test_ends_of_the_rate():
    assert dropout(X, 0.0) is X
    assert dropout(X, 0.5, deterministic=True) is X
    assert not dropout(X, 1.0).any()
    assert not np.isnan(both(lambda x: dropout(x, 1.0))[1]).any()


def test_dropped_values_need_not_be_finite():
    x = jnp.full((64,), jnp.inf)
    out = np.asarray(dropout(x, 0.5, KEY))
    assert set(out.tolist()) == {0.0, np.inf}


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((X, -0.1, KEY), {}, "rate=-0.1: .*at least 0"),
        ((X, 1.5, KEY), {}, "rate=1.5: .*at most 1"),
        ((X, 0.5), {}, "needs a random key"),
        ((X, 0.5, KEY), {"broadcast_dims": (3,)}, "broadcast_dims"),
    ],
)
def test_bad_input(args, kwargs, text):
    with pytest.raises(ValueError, match=text):
        dropout(*args, **kwargs)


def test_keeps_eight_bytes():
    assert kept_bytes(lambda x: dropout(x, RATE, KEY), (X,), {0}) == 8


def test_an_unrolled_step_draws_masks_when_their_gradients_are_there(standard_jax):
    """XLA:GPU draws what waits for nothing early, and holds the mask until then."""
    rows, width, layers = 8192, 512, 4

    def loss(weights, x, key, rate):
        for i, (w, bias, *norm) in enumerate(weights):
            y = jaxmem.ops.dense(jnp.tanh(x), w, bias)
            y = dropout(y, rate, jax.random.fold_in(key, i))
            x = jaxmem.ops.layer_norm(x + y, *norm)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def temp_bytes(rate):
        like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        one = like(width, width), *[like(width)] * 3
        step = jax.grad(functools.partial(loss, rate=rate))
        args = [one] * layers, like(rows, width), KEY
        return jaxmem.estimate(step, *args, target="h100").temp_bytes

    assert temp_bytes(RATE) - temp_bytes(0.0) < rows * width  # bytes of a mask


def test_second_derivative():
    def f(x):
        return (dropout(x, RATE, KEY) ** 2).sum()

    hessian = jax.grad(lambda x: jax.grad(f)(x).sum())(X)
    want = 2 * both(lean)[1] ** 2
    np.testing.assert_allclose(np.asarray(hessian), want, rtol=1e-6)


def test_replicated_input_with_a_key_a_shard():
    mesh = mesh_of_8()

    def shard(x):
        key = jax.random.fold_in(KEY, jax.lax.axis_index("x"))
        return dropout(x, RATE, key)[None]

    def loss(x):
        spec = PartitionSpec()
        out = jax.shard_map(
            shard, mesh=mesh, in_specs=spec, out_specs=PartitionSpec("x")
        )
        return out(x).sum()

    alone = lambda x, i: dropout(x, RATE, jax.random.fold_in(KEY, i)).sum()
    slope = jax.jit(jax.grad(alone))
    want = sum(np.asarray(slope(X, i)) for i in range(8))
    # sums of eight numbers near 1, in another order
    np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(loss))(X)), want, rtol=1e-5)
