"""MesaDense: running ranges wherever state goes, in linen and nnx."""

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
from tests.nn.compare import initialized, kept_bytes, kernel_step
from tests.ops.codes.test_ranges import FEATURES, GROUPS, ROWS, WIDTH, activations

X, NEXT = activations(0), activations(1)
UNKNOWN = jnp.zeros((2, GROUPS), jnp.float32)
linen_layer = functools.partial(lean_linen.MesaDense, FEATURES, groups=GROUPS)


def of_batches(*batches):
    ranges = UNKNOWN
    for x in batches:
        ranges = ops.stored_in_ranges(x, ranges)[1]
    return ranges


def linen_step(layer, variables, x=X):
    return kernel_step(layer, variables, x, lambda y: jnp.sin(y).sum())


def nnx_layer(**options):
    how = {"groups": GROUPS, "rngs": nnx.Rngs(0), **options}
    return lean_nnx.MesaDense(WIDTH, FEATURES, **how)


@nnx.jit
def nnx_step(layer, x):
    of = lambda layer: jnp.sin(layer(x)).sum()
    return nnx.grad(of)(layer)["kernel"][...]


def gradient_at(kernel, x, known):
    """Of the same loss, with the codes of a range that was known."""
    kept = ops.stored_in_ranges(x, known)[0]
    return jax.grad(lambda k: jnp.sin(ops.dense(kept, k)).sum())(kernel)


def assert_near(got, want):
    """Sums of 48 products in two programs."""
    atol = ROWS * 6e-8 * float(jnp.linalg.norm(X)) * ROWS**0.5
    np.testing.assert_allclose(got, want, atol=atol)


def test_linen_steps():
    layer = linen_layer()
    variables = layer.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    assert not variables["ranges"]["ranges"].any()  # of ones nothing is taken
    kernel = variables["params"]["kernel"]
    got, variables = linen_step(layer, variables)
    assert_near(got, gradient_at(kernel, X, UNKNOWN))
    got, after = linen_step(layer, variables, NEXT)
    assert_near(got, gradient_at(kernel, NEXT, of_batches(X)))
    want = of_batches(X, NEXT)
    np.testing.assert_allclose(after["ranges"]["ranges"], want, rtol=1e-6)


def test_nnx_steps():
    layer = nnx_layer()
    kernel = layer.kernel[...]
    assert_near(nnx_step(layer, X), gradient_at(kernel, X, UNKNOWN))
    assert_near(nnx_step(layer, NEXT), gradient_at(kernel, NEXT, of_batches(X)))
    np.testing.assert_allclose(layer.ranges[...], of_batches(X, NEXT), rtol=1e-6)
    assert "ranges" not in nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def test_parameters_and_outputs_are_those_of_flax():
    layer = linen_layer()
    variables = initialized(layer, X)
    plain = nn.Dense(FEATURES)
    want = initialized(plain, X)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], want["params"])
    np.testing.assert_allclose(
        layer.apply(variables, X), plain.apply(want, X), rtol=1e-5, atol=1e-5
    )


def test_evaluation_leaves_the_ranges():
    layer = nnx_layer()
    nnx_step(layer, X)
    before = jnp.copy(layer.ranges[...])
    layer.eval()
    nnx_step(layer, NEXT)
    np.testing.assert_array_equal(layer.ranges[...], before)
    # in linen without `mutable`, and it codes in the ranges that it was given
    linen, known = linen_layer(), of_batches(X)
    params = initialized(linen, X)["params"]
    of = lambda given: (
        lambda p: jnp.sin(linen.apply({**given, "params": p}, NEXT)).sum()
    )
    for given, at in (({"ranges": {"ranges": known}}, known), ({}, UNKNOWN)):
        got = jax.jit(jax.grad(of(given)))(params)["kernel"]
        assert_near(got, gradient_at(params["kernel"], NEXT, at))


def test_a_restored_checkpoint_goes_on():
    layer = linen_layer()
    trained = linen_step(layer, initialized(layer, X))[1]
    stored = flax.serialization.to_bytes(trained)
    restored = flax.serialization.from_bytes(initialized(layer, X), stored)
    got, after = linen_step(layer, restored, NEXT)
    want, straight = linen_step(layer, trained, NEXT)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(after["ranges"]["ranges"],
                                  straight["ranges"]["ranges"])  # fmt: skip
    # parameters of a plain Dense, with no ranges yet
    plain = nn.Dense(FEATURES).init(jax.random.key(0), X)
    after = linen_step(layer, plain, NEXT)[1]
    np.testing.assert_array_equal(after["ranges"]["ranges"], of_batches(NEXT))


def test_nnx_restores_its_ranges():
    layer, other = nnx_layer(), nnx_layer()
    nnx_step(layer, X)
    nnx.update(other, nnx.state(layer))
    np.testing.assert_array_equal(nnx_step(other, NEXT), nnx_step(layer, NEXT))
    np.testing.assert_array_equal(other.ranges[...], layer.ranges[...])


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + lean_linen.MesaDense(WIDTH, groups=GROUPS, name="dense")(x), None


@pytest.mark.parametrize("remat", [False, True])
def test_linen_in_a_scan_of_layers(remat):
    """Each layer has the ranges of its own inputs."""
    block = nn.remat(LinenBlock, prevent_cse=False) if remat else LinenBlock
    axes = {"params": 0, "ranges": 0}
    scan = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)
    layers = scan()
    variables = initialized(layers, X, None)

    @jax.jit
    def step(variables):
        def of(params):
            given = {**variables, "params": params}
            (y, _), state = layers.apply(given, X, None, mutable=["ranges"])
            return y.sum(), state

        return jax.grad(of, has_aux=True)(variables["params"])[1]

    got, x = step(variables)["ranges"]["dense"]["ranges"], X
    for n in range(3):
        np.testing.assert_allclose(got[n], of_batches(x), rtol=1e-4)
        dense = jax.tree.map(lambda p, n=n: p[n], variables["params"]["dense"])
        x = x + x @ dense["kernel"] + dense["bias"][None, None]


def test_nnx_in_a_scan_of_layers():
    make = nnx.vmap(
        lambda rngs: lean_nnx.MesaDense(WIDTH, WIDTH, groups=GROUPS, rngs=rngs)
    )
    layers = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))

    @nnx.jit
    def step(layers):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return x + layer(x)

        return nnx.grad(lambda layers: run(layers, X).sum())(layers)

    step(layers)
    got, x = layers.ranges[...], X
    for n in range(3):
        np.testing.assert_allclose(got[n], of_batches(x), rtol=1e-4)
        x = x + x @ layers.kernel[...][n] + layers.bias[...][n][None, None]


def test_rows_over_devices():
    """The ranges are those of the rows of all devices."""
    layer = linen_layer()
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    variables = initialized(layer, X)
    want, after = linen_step(layer, variables)
    rows = X.reshape(ROWS, WIDTH)
    spread = jax.device_put(rows, NamedSharding(mesh, P("d")))
    got, spread_after = linen_step(
        layer, jax.device_put(variables, NamedSharding(mesh, P())), spread
    )
    assert_near(got, want)
    a, b = (v["ranges"]["ranges"] for v in (after, spread_after))
    np.testing.assert_array_equal(a, b)


def test_bytes_of_a_layer_and_of_a_frozen_one():
    """The ranges of a frozen layer move all the same, for when it is trained again."""
    layer = linen_layer()
    variables = initialized(layer, X)

    def of(params):
        given = {**variables, "params": params}
        return layer.apply(given, X, mutable=["ranges"])

    params = variables["params"]
    assert kept_bytes(lambda p: of(p)[0], params) == X.size + 2 * 4 * GROUPS
    trained, frozen = jaxmem.trainable(params, ["bias"])
    assert kept_bytes(lambda p: of(frozen.merge(p))[0], trained) == 0
    state = jax.jit(lambda p: of(frozen.merge(p))[1])(trained)
    np.testing.assert_array_equal(state["ranges"]["ranges"], of_batches(X))


def test_groups_that_do_not_divide():
    with pytest.raises(ValueError, match="5 groups"):
        lean_linen.MesaDense(8, groups=5).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="5 groups"):
        nnx_layer(groups=5)(X)
