"""The direction of VeLoRADense: that of the first batch, wherever state goes."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import ops
from jaxmem.nn import linen as lean_linen
from jaxmem.nn import nnx as lean_nnx
from tests.arrays import array
from tests.nn.compare import initialized, kept_bytes, kernel_step

GROUPS, WIDTH, FEATURES = 4, 64, 8
METHODS = ("average", "ema", "svd")


def batch(seed=0, rows=64):
    """Rows as of a real layer: a mean that all sub-tokens share, and noise."""
    rng = np.random.default_rng(seed)
    mean = np.tile(np.linspace(-2, 2, WIDTH // GROUPS), GROUPS)
    return array(rng.standard_normal((rows, WIDTH)) + mean, "float32")


X, NEXT = batch(), batch(1)
TARGET = X[:, :FEATURES]
linen_layer = functools.partial(lean_linen.VeLoRADense, FEATURES, groups=GROUPS)


def loss(y):
    return jnp.vdot(y, TARGET)


@jax.jit
def cosine(a, b):
    return jnp.vdot(a, b) / jnp.linalg.norm(a) / jnp.linalg.norm(b)


def linen_step(layer, variables, x=X):
    return kernel_step(layer, variables, x, loss)


def nnx_layer(**options):
    how = {"groups": GROUPS, "rngs": nnx.Rngs(0), **options}
    return lean_nnx.VeLoRADense(WIDTH, FEATURES, **how)


@nnx.jit
def nnx_step(layer, x):
    return nnx.grad(lambda layer: loss(layer(x)))(layer)["kernel"][...]


def seen(x, vector):
    """What is left of the exact gradient: the part of each group along the vector."""
    exact = (x.T @ TARGET).reshape(GROUPS, -1, FEATURES)
    return jnp.einsum("gmf,m,n->gnf", exact, vector, vector).reshape(WIDTH, -1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_an_ordinary_init_then_the_first_batch(kind, method):
    """Initialised by ones, as for shapes alone, the gradient is that of a real batch.

    Its cosine to the exact one is the share of that one's norm that lies along the
    vector. Half of it is far below what a mean of length 4.9 in noise of variance one
    leaves, and far above the 0.0 of the direction of ones, to which the mean is
    orthogonal.
    """
    if kind == "linen":
        layer = linen_layer(method=method)
        variables = layer.init(jax.random.key(0), jnp.ones((1, WIDTH)))
        got, variables = linen_step(layer, variables)
        vector = variables["velora"]["projection"]
    else:
        layer = nnx_layer(method=method)
        got = nnx_step(layer, X)
        vector = layer.projection[...]
    how = "svd" if method == "svd" else "average"
    want = ops.velora_projection(X, GROUPS, how)
    np.testing.assert_allclose(vector, want, atol=1e-6)
    np.testing.assert_allclose(got, seen(X, want), rtol=1e-4, atol=1e-3)
    exact = X.T @ TARGET
    assert cosine(got, exact) == pytest.approx(
        float(jnp.linalg.norm(got) / jnp.linalg.norm(exact)), rel=1e-4
    )
    assert cosine(got, exact) > 0.5
    assert cosine(seen(X, jnp.full(16, 0.25)), exact) < 0.25  # as it was


@pytest.mark.parametrize("first", [0 * X, X.at[0, 0].set(jnp.nan), X[:0]])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_a_direction_leaves_the_vector_unknown(method, first):
    """The first one: zeros, as from a layer that begins with zeros; NaN; no rows."""
    layer = linen_layer(method=method)
    step = jax.jit(functools.partial(layer.apply, mutable=["velora"]))
    variables = initialized(layer, X)
    state = step(variables, first)[1]
    assert not state["velora"]["projection"].any()
    known = step({**variables, **state}, X)[1]
    assert known["velora"]["projection"].any()
    again = step({**variables, **known}, first)[1]
    np.testing.assert_array_equal(*map(jax.tree.leaves, (again, known)))
    model = nnx_layer(method=method)
    model(first)
    model.fit_projection(first)
    assert not model.projection[...].any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_later_batches_move_an_average_of_all_alone(kind, method):
    if kind == "linen":
        layer = linen_layer(method=method, decay=0.75)
        variables = linen_step(layer, initialized(layer, X))[1]
        first = variables["velora"]["projection"]
        second = linen_step(layer, variables, NEXT)[1]["velora"]["projection"]
    else:
        layer = nnx_layer(method=method, decay=0.75)
        nnx_step(layer, X)
        first = jnp.copy(layer.projection[...])
        nnx_step(layer, NEXT)
        second = layer.projection[...]
    if method == "ema":
        new = ops.velora_projection(NEXT, GROUPS)
        want = 0.75 * first + 0.25 * new
        np.testing.assert_allclose(second, want / jnp.linalg.norm(want), atol=1e-6)
        assert not np.array_equal(second, first)
    else:
        np.testing.assert_array_equal(second, first)


def test_a_checkpoint_keeps_its_vector():
    """A restored vector stays; parameters without one take the next batch's."""
    layer = linen_layer()
    trained = linen_step(layer, initialized(layer, X))[1]
    stored = flax.serialization.to_bytes(trained)
    restored = flax.serialization.from_bytes(initialized(layer, X), stored)
    kept = linen_step(layer, restored, NEXT)[1]["velora"]["projection"]
    np.testing.assert_array_equal(kept, trained["velora"]["projection"])
    plain = nn.Dense(FEATURES).init(jax.random.key(0), X)
    got, after = linen_step(layer, plain, NEXT)
    want = ops.velora_projection(NEXT, GROUPS)
    np.testing.assert_allclose(after["velora"]["projection"], want, atol=1e-6)
    np.testing.assert_allclose(got, seen(NEXT, want), rtol=1e-4, atol=1e-3)


def test_nnx_restores_its_vector():
    layer, other = nnx_layer(), nnx_layer()
    nnx_step(layer, X)
    nnx.update(other, nnx.state(layer))
    nnx_step(other, NEXT)
    np.testing.assert_array_equal(other.projection[...], layer.projection[...])


def test_without_the_collection_each_batch_has_its_own():
    layer = linen_layer()
    variables = initialized(layer, X)
    for given in ({}, {"velora": variables["velora"]}):
        of = lambda p, x, given=given: loss(layer.apply({**given, "params": p}, x))
        for x in (X, NEXT):
            got = jax.jit(jax.grad(of))(variables["params"], x)["kernel"]
            want = seen(x, ops.velora_projection(x, GROUPS))
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_leaves_the_vector(method):
    layer = nnx_layer(method=method)
    nnx_step(layer, X)
    before = jnp.copy(layer.projection[...])
    layer.eval()
    nnx_step(layer, NEXT)
    np.testing.assert_array_equal(layer.projection[...], before)
    fresh = nnx_layer(deterministic=True)
    nnx_step(fresh, X)
    assert not fresh.projection[...].any()
    fresh.fit_projection(X)
    np.testing.assert_array_equal(
        fresh.projection[...], ops.velora_projection(X, GROUPS)
    )
    assert "projection" not in nnx.to_pure_dict(nnx.state(fresh, nnx.Param))


class LinenBlock(nn.Module):
    method: str

    @nn.compact
    def __call__(self, x, _):
        how = {"groups": GROUPS, "method": self.method, "name": "dense"}
        return x + lean_linen.VeLoRADense(WIDTH, **how)(x), None


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_linen_in_a_scan_of_layers(method, remat):
    """Each layer has the direction of its own inputs."""
    scan = functools.partial(nn.scan, length=3, split_rngs={"params": True})
    axes = {"params": 0, "velora": 0}
    block = nn.remat(LinenBlock, prevent_cse=False) if remat else LinenBlock
    layers = scan(block, variable_axes=axes)(method)
    variables = initialized(layers, X, None)

    @jax.jit
    def step(variables):
        def of(params):
            given = {**variables, "params": params}
            (y, _), state = layers.apply(given, X, None, mutable=["velora"])
            return y.sum(), state

        return jax.grad(of, has_aux=True)(variables["params"])[1]

    got = step(variables)["velora"]["dense"]["projection"]
    x, how = X, "svd" if method == "svd" else "average"
    for n in range(3):
        want = ops.velora_projection(x, GROUPS, how)
        np.testing.assert_allclose(got[n], want, atol=1e-4)
        dense = jax.tree.map(lambda p, n=n: p[n], variables["params"]["dense"])
        x = x + x @ dense["kernel"] + dense["bias"][None]


def test_nnx_in_a_scan_of_layers():
    make = nnx.vmap(lambda rngs: lean_nnx.VeLoRADense(64, 64, groups=4, rngs=rngs))
    layers = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))

    @nnx.jit
    def step(layers):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return x + layer(x)

        return nnx.grad(lambda layers: run(layers, X).sum())(layers)

    step(layers)
    got, x = layers.projection[...], X
    for n in range(3):
        want = ops.velora_projection(x, GROUPS)
        np.testing.assert_allclose(got[n], want, atol=1e-4)
        x = x + x @ layers.kernel[...][n] + layers.bias[...][n][None]


@pytest.mark.parametrize("method", METHODS)
def test_rows_over_devices(method):
    """The vector is that of the rows of all devices."""
    layer = linen_layer(method=method)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    variables = initialized(layer, X)
    want, after = linen_step(layer, variables)
    spread = jax.device_put(X, NamedSharding(mesh, P("d")))
    variables = jax.device_put(variables, NamedSharding(mesh, P()))
    got, spread_after = linen_step(layer, variables, spread)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    a, b = (v["velora"]["projection"] for v in (after, spread_after))
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_kernel_keeps_nothing(method):
    """And its vector is found all the same, for when it is trained again."""
    layer = linen_layer(method=method)
    variables = initialized(layer, X)
    trained, frozen = jaxmem.trainable(variables["params"], ["bias"])

    def of(trained):
        given = {**variables, "params": frozen.merge(trained)}
        return layer.apply(given, X, mutable=["velora"])

    assert kept_bytes(lambda p: of(p)[0], trained) == 0
    state = jax.jit(of)(trained)[1]
    how = "svd" if method == "svd" else "average"
    want = ops.velora_projection(X, GROUPS, how)
    np.testing.assert_allclose(state["velora"]["projection"], want, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_training_keeps_a_number_a_group_and_the_vector(method):
    layer = linen_layer(method=method)
    variables = initialized(layer, X)

    def of(params):
        given = {**variables, "params": params}
        return layer.apply(given, X, mutable=["velora"])[0]

    assert kept_bytes(of, variables["params"]) == 64 * GROUPS * 4 + 16 * 4


def test_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="groups=5 must divide 64"):
        lean_linen.VeLoRADense(8, groups=5).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="groups=5 must divide 64"):
        nnx_layer(groups=5)
