"""Reversible blocks beside the same two streams as a scan that JAX differentiates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.errors import ModifyScopeVariableError
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.nn import linen as lean_linen
from jaxmem.nn import nnx as lean_nnx

LAYERS, ROWS, WIDTH = 5, 8, 16
EPS = float(jnp.finfo(jnp.float32).eps)
_keys = jax.random.split(jax.random.key(0), 6)
KERNELS = [jax.random.normal(k, (LAYERS, WIDTH, WIDTH)) / 4 for k in _keys[:2]]
X = tuple(jax.random.normal(k, (ROWS, WIDTH)) for k in _keys[2:4])
ARGS = X, *KERNELS, jax.random.split(_keys[4], LAYERS), jnp.linspace(1, 2, WIDTH)[None]
FLOATS = (0, 1, 2, 4)


def _f(x, layer, scale):
    kernel, key = layer
    kept = jax.random.bernoulli(key, 0.8, x.shape[1:])
    return jnp.where(kept, jnp.tanh(x @ kernel) * scale, 0)


def _g(x, kernel):
    return jnp.sin(x @ kernel)


def plain(x, of_f, of_g, keys, scale):
    def layer(x, p):
        y1 = x[0] + _f(x[1], p[0], scale)
        return (y1, x[1] + _g(y1, p[1])), None

    return jax.lax.scan(layer, x, ((of_f, keys), of_g))[0]


def ours(x, of_f, of_g, keys, scale):
    f = lambda x, layer: _f(x, layer, scale)  # closes over what is differentiated
    return jaxmem.reversible(f, _g)(x, ((of_f, keys), of_g))


def loss(fn):
    def run(*args):
        y1, y2 = fn(*args)
        return jnp.sum(y1 * jnp.cos(y2))

    return run


def gradients(fn, argnums=FLOATS):
    return jax.value_and_grad(loss(fn), argnums=argnums)


def assert_equal(got, want, layers=LAYERS):
    """Up to roundings: of a stream in each layer, and of sums in another order."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        allowed = 4 * EPS * layers * WIDTH * np.max(np.abs(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed)


def _twice(fn, x, *rest):
    body = lambda x, _: (fn(x, *rest), None)
    return jax.lax.scan(body, x, None, length=2)[0]


def _sharded(fn, *args):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    specs = P("rows"), P(), P(), P(), P()
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("rows"))
    return mapped(*args)


FORMS = {
    "jit": lambda fn: fn,
    "jit inside": jax.jit,
    "vmap": lambda fn: (
        lambda x, *rest: jax.vmap(lambda a, b: fn((a, b), *rest), in_axes=0)(
            x[0][:, None], x[1][:, None]
        )
    ),
    "scan": lambda fn: functools.partial(_twice, fn),
    "remat": lambda fn: jax.checkpoint(fn),
    "shard_map": lambda fn: functools.partial(_sharded, fn),
}


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_two_streams(form):
    of = FORMS[form]
    got, want = (jax.jit(gradients(of(fn)))(*ARGS) for fn in (ours, plain))
    assert_equal(got, want, 2 * LAYERS)


def test_gradients_inside_of_shard_map_are_summed():
    def both(fn, *args):
        value, grads = gradients(fn)(*args)
        return jax.lax.psum(value, "rows"), grads

    def run(fn):
        mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
        specs = P("rows"), P(), P(), P(), P()
        outs = P(), (P("rows"), P(), P(), P())
        inside = functools.partial(both, fn)
        return jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=outs)(*ARGS)

    assert_equal(jax.jit(lambda: run(ours))(), jax.jit(gradients(plain))(*ARGS))


def test_a_second_derivative():
    def norm(fn):
        of_f = lambda w: gradients(fn)(ARGS[0], w, *ARGS[2:])[1]
        squares = lambda w: sum(jnp.vdot(g, g) for g in jax.tree.leaves(of_f(w)))
        return jax.jit(jax.grad(squares))(KERNELS[0])

    # A gradient, its square and a gradient again.
    assert_equal(norm(ours), norm(plain), 4 * LAYERS)


# products of f and g in both passes, one each for the input; and those of weights
PRODUCTS = {(0,): 6, (1,): 7, (2,): 7, (4,): 6, (1, 2): 8}


@pytest.mark.parametrize("argnums", PRODUCTS, ids=str)
def test_frozen_arguments_have_no_gradient(argnums):
    got, want = (jax.jit(gradients(fn, argnums))(*ARGS) for fn in (ours, plain))
    assert_equal(got, want)
    text = str(jax.make_jaxpr(gradients(ours, argnums))(*ARGS))
    assert text.count("dot_general") == PRODUCTS[argnums]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stream", [None, jnp.bfloat16])
def test_keeps_the_output_alone(dtype, stream):
    """As many bytes for 3 layers as for 12; frozen ones are not copied either."""

    def run(x, kernels):
        stack = jaxmem.reversible(_g, _g, stream_dtype=stream)
        return stack((x, x), (kernels, kernels))

    x = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
    for layers in (3, 12):
        kernels = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), dtype)
        for argnums in (0, 1, (0, 1)):
            found = jaxmem.residuals(run, x, kernels, argnums=argnums)
            kept = sum(e.bytes for e in found if e.kind == "intermediate")
            assert kept == 2 * ROWS * WIDTH * (2 if stream else 4)


@pytest.mark.parametrize("stream", [jnp.float32, jnp.bfloat16])
def test_drift_in_bfloat16(stream):
    """The norm of the error of gradients: roundings of each layer add up."""

    def two(x, of_f, of_g):
        def layer(x, p):
            y1 = x[0] + _g(x[1].astype(jnp.bfloat16), p[0]).astype(stream)
            y2 = x[1] + _g(y1.astype(jnp.bfloat16), p[1]).astype(stream)
            return (y1, y2), None

        x = tuple(a.astype(stream) for a in x)
        out = jax.lax.scan(layer, x, (of_f, of_g))[0]
        return tuple(y.astype(jnp.bfloat16) for y in out)

    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (X, *KERNELS))
    stack = jaxmem.reversible(_g, _g, stream_dtype=stream)
    reversed_ = lambda x, *kernels: stack(x, kernels)
    got, want = (jax.jit(gradients(fn, (0, 1, 2)))(*half)[1] for fn in (reversed_, two))
    norm = lambda tree: np.sqrt(
        sum(float(jnp.sum(jnp.square(a.astype("float32")))) for a in tree)
    )
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    error = norm([a - b for a, b in zip(got, want, strict=True)]) / norm(want)
    # Two streams round once in a layer, and f and g with what they read.
    assert error <= 4 * LAYERS * float(jnp.finfo(jnp.bfloat16).eps)
    if stream == jnp.float32:
        outs = jax.jit(reversed_)(*half), jax.jit(two)(*half)
        np.testing.assert_allclose(*(np.float32(y[0]) for y in outs), rtol=2**-7)


@pytest.mark.slow
def test_schedule_releases_the_gradients_of_a_stack():
    kernels = jax.ShapeDtypeStruct((LAYERS, 256, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)

    def step(kernels, x):
        y = loss(lambda kernels: jaxmem.reversible(_g, _g)((x, x), kernels))
        return jax.tree.map(lambda w, g: w - 1e-3 * g, kernels, jax.grad(y)(kernels))

    step = jaxmem.schedule(step, donate_argnums=0, target="h100")
    plan = step.plan((kernels, kernels), x)
    assert [g.released for g in plan.gradients] == [True, True]


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic=False):
        y = linen.Dropout(0.3)(linen.Dense(8)(x), deterministic=deterministic)
        return linen.Dense(x.shape[-1])(linen.gelu(linen.LayerNorm()(y)))


class Block(linen.Module):
    """A layer as `nn.scan` takes it, with the parameters of `Reversible`."""

    @linen.compact
    def __call__(self, x, _):
        y1 = x[0] + Mlp(name="f")(x[1], deterministic=True)
        return (y1, x[1] + Mlp(name="g")(y1, deterministic=True)), None


def test_linen_is_its_scan():
    model = lean_linen.Reversible(Mlp(), Mlp(), 3)
    variables = model.init(jax.random.key(0), X, deterministic=True)
    split = {"params": True}
    scan = linen.scan(Block, {"params": 0}, split_rngs=split, length=3)
    shapes = jax.eval_shape(scan().init, jax.random.key(0), X, None)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, shapes)
    kernels = variables["params"]["f"]["Dense_0"]["kernel"]
    assert not jnp.array_equal(kernels[0], kernels[1])
    lean = lambda v, x: model.apply(v, x, deterministic=True)
    found = [
        jax.jit(gradients(fn, (0, 1)))(variables, X)
        for fn in (lean, lambda v, x: scan().apply(v, x, None)[0])
    ]
    assert_equal(*found)


def _slope(run, tree, key):
    """Of `run` along a random direction: by the gradient, and by differences."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    pairs = zip(keys, leaves, strict=True)
    way = treedef.unflatten([jax.random.normal(k, a.shape) for k, a in pairs])
    moved = lambda t: jax.tree.map(lambda a, d: a + t * d, tree, way)
    grads = jax.tree.leaves(jax.jit(jax.grad(run))(tree))
    slope = sum(
        jnp.vdot(g, d) for g, d in zip(grads, jax.tree.leaves(way), strict=True)
    )
    step = 1e-3  # to the third power of it, and eps over it
    return slope, (run(moved(step)) - run(moved(-step))) / (2 * step)


def test_linen_draws_the_masks_of_the_forward_pass_again():
    model = lean_linen.Reversible(Mlp(), Mlp(), 3)
    variables = model.init(jax.random.key(0), X, deterministic=True)
    rngs = {"dropout": jax.random.key(1)}
    run = jax.jit(loss(lambda v: model.apply(v, X, rngs=rngs)))
    np.testing.assert_allclose(*_slope(run, variables, jax.random.key(2)), rtol=1e-2)
    other = model.apply(variables, X, rngs={"dropout": jax.random.key(3)})
    assert not jnp.array_equal(other[0], model.apply(variables, X, rngs=rngs)[0])


def test_linen_inside_of_a_module():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return lean_linen.Reversible(Mlp(), Mlp(), 3)(x, deterministic=True)

    variables = Model().init(jax.random.key(0), X)
    found = jaxmem.residuals(loss(Model().apply), variables, X)
    sizes = {e.shape for e in found if e.kind == "intermediate"}
    assert (3, ROWS, WIDTH) not in sizes
    assert set(variables["params"]) == {"Mlp_0", "Mlp_1"}


def test_linen_refuses_to_update_variables():
    norms = (linen.BatchNorm(use_running_average=False) for _ in "fg")
    model = lean_linen.Reversible(*norms, 3)
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(ModifyScopeVariableError, match="batch_stats"):
        model.apply(variables, X, mutable=["batch_stats"])


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(8, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.dropout(self.up(x))))


def test_nnx_is_its_scan():
    model = lean_nnx.Reversible(NnxMlp, NnxMlp, 3, rngs=nnx.Rngs(0))
    model.eval()

    def scanned(model, x):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def layer(x, f, g):
            y1 = x[0] + f(x[1])
            return y1, x[1] + g(y1)

        return layer(x, model.f, model.g)

    found = [
        nnx.jit(nnx.value_and_grad(loss(fn)))(model, X)
        for fn in (lambda m, x: m(x), scanned)
    ]
    (value, grads), (want, wanted) = found
    assert_equal((value, grads), (want, wanted))


def test_nnx_draws_other_masks_in_each_call_and_the_same_in_its_backward_pass():
    model = lean_nnx.Reversible(NnxMlp, NnxMlp, 3, rngs=nnx.Rngs(0))
    first, second = model(X), model(X)
    assert not jnp.array_equal(first[0], second[0])
    definition, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(params):
        return loss(nnx.merge(definition, params, rest, copy=True))(X)

    np.testing.assert_allclose(*_slope(run, params, jax.random.key(2)), rtol=1e-2)


def test_nnx_refuses_to_update_variables():
    make = lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs)
    model = lean_nnx.Reversible(make, NnxMlp, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Reversible: f updates mean"):
        model(X)


BAD = [
    ("x=float32", lambda s: s(X[0], (KERNELS[0], KERNELS[1]))),
    ("a pair of floating arrays", lambda s: s((X[0], 3), (KERNELS[0], KERNELS[1]))),
    ("layers=float32", lambda s: s(X, KERNELS[0])),
    ("layers along axis 0", lambda s: s(X, (KERNELS[0], KERNELS[1][:2]))),
    ("layers along axis 0", lambda s: s(X, ((), ()))),
    ("layers along axis 0", lambda s: s(X, (KERNELS[0], 1.0))),
    ("f returned=float32", lambda s: s(X, (KERNELS[0][..., :3], KERNELS[1]))),
]


@pytest.mark.parametrize("message, call", BAD, ids=[m for m, _ in BAD])
def test_bad_input(message, call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(jaxmem.reversible(_g, _g))
    checked = "jaxtyping" in type(caught.value).__module__
    assert checked or message in str(caught.value)
