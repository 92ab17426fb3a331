"""The table of operations: what it says of the layer axis, against the operations.

Operands are NumPy's, which compiles nothing.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives
from jax.sharding import AxisType, PartitionSpec

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.placements import Placements, Shard, at
from jaxmem.ir.placements.layers import OF_MODELS, of_slice
from jaxmem.ir.placements.layers import placements_of as treatment_of
from jaxmem.ir.placements.lower import on_part, one
from jaxmem.ir.placements.rules import RULES, resized
from jaxmem.ir.primitives import names

ELEMENTWISE = names(lambda primitive: primitive.elementwise)

L = 3  # layers; no other axis of a case has this size
EPS = 2.0**-23
RTOL = 16 * EPS  # sums of at most eight products, or one function off by a few ulps


def normal(*shape, dtype=jnp.float32, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def integers(*shape, dtype=jnp.int32):
    return np.asarray(np.random.default_rng(1).integers(0, 100, shape), dtype)


def bools(*shape):
    return integers(*shape) > 50


def spd(*shape):
    a = normal(*shape)
    return a @ a.mT + 4 * np.eye(shape[-1], dtype="f4")


@dataclass(frozen=True)
class Case:
    """`fn(*args)` is one operation; `axes` says where its operands have the layers.

    `expect` is the axes of the outputs, "reduced", or what a refusal says.
    """

    fn: Callable
    args: tuple[Any, ...]
    axes: tuple[int | None, ...]
    expect: tuple[int, ...] | str

    @functools.cached_property
    def eqn(self):
        return equation(self.fn, self.args)

    def __str__(self):
        places = ",".join(map(str, self.axes))
        return f"{self.eqn.primitive.name}-{places}-{self.expect}"


def equation(fn, args):
    eqns = jax.make_jaxpr(fn)(*args).eqns
    assert len(eqns) == 1, eqns
    return eqns[0]


def placements_of(eqn, axes) -> Placements | str:
    return treatment_of(eqn, [*map(at, axes)])


def along(axis) -> Placements:
    """Of an operation on one array."""
    return Placements((Shard(axis),), (Shard(axis),))


def operands(case: Case) -> list:
    """The values of the equation's operands, literals among them."""
    given = iter(case.args)
    literal = lambda v: isinstance(v, _compat.Literal)
    return [v.val if literal(v) else next(given) for v in case.eqn.invars]


def cut(x, axis, j):
    """Layer j; numpy's, which compiles nothing."""
    if axis is None:
        return x
    return np.take(np.asarray(x), [j], axis)


def layer(eqn, values, placed, j):
    args = [cut(x, a, j) for x, a in zip(values, placed.in_axes, strict=True)]
    return on_part(eqn, args, placed, one)


def assert_close(got, want, rtol=RTOL):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if np.issubdtype(want.dtype, np.inexact):
        atol = rtol * np.max(np.abs(want), initial=0, where=np.isfinite(want))
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)
    else:
        np.testing.assert_array_equal(got, want)


X = normal(L, 4, 5)


def reductions():
    """Each reduction over another axis, and over the layers (with another)."""
    numbers = {"sum": X, "max": X, "min": X, "prod": X}
    logic = {"and": integers(L, 4, 5), "or": bools(L, 4, 5), "xor": integers(L, 4, 5)}
    for name, x in (numbers | logic).items():
        fn = getattr(lax, f"reduce_{name}")
        apart = lambda x, axes, fn=fn: fn(x, axes)
        yield Case(functools.partial(apart, axes=(1,)), (x,), (0,), (0,))
        yield Case(functools.partial(apart, axes=(1,)), (x.mT,), (0,), (0,))
        last = np.moveaxis(x, 0, 2)
        yield Case(functools.partial(apart, axes=(0,)), (last,), (2,), (1,))
        for axes in ((0,), (0, 2), (0, 1, 2)):
            yield Case(functools.partial(apart, axes=axes), (x,), (0,), "reduced")
        yield Case(functools.partial(apart, axes=(1, 2)), (last,), (2,), "reduced")
    for fn in (lax.argmax, lax.argmin):
        index = functools.partial(fn, axis=1, index_dtype=jnp.int32)
        yield Case(index, (X,), (0,), (0,))
        yield Case(index, (np.moveaxis(X, 0, 2),), (2,), (1,))
        yield Case(index, (X,), (1,), "it is over the layers")


def along_an_axis():
    runs = (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
    for fn in runs:
        for reverse in (False, True):
            run = functools.partial(fn, axis=1, reverse=reverse)
            yield Case(run, (X,), (0,), (0,))
        yield Case(run, (np.moveaxis(X, 0, 2),), (2,), (2,))
        yield Case(run, (X,), (1,), "it is along the layers")
    yield Case(lambda x: lax.rev(x, (1, 2)), (X,), (0,), (0,))
    yield Case(lambda x: lax.rev(x, (0, 2)), (X,), (0,), "it is along the layers")
    yield Case(lambda x: lax.sort(x, dimension=1), (X,), (0,), (0,))
    yield Case(lambda x: lax.sort(x, dimension=0), (X,), (0,), "it is along the layers")
    sort = lambda x, y: lax.sort((x, y), dimension=1, num_keys=1)
    yield Case(sort, (X, integers(L, 4, 5)), (0, 0), (0, 0))
    yield Case(sort, (X, integers(L, 4, 5)), (None, 0), (0, 0))
    yield Case(sort, (X, X), (1, 1), "it is along the layers")
    yield Case(sort, (X, X), (None, 1), "it is along the layers")
    yield Case(lambda x: lax.split(x, (1, 3), axis=1), (X,), (0,), (0, 0))
    yield Case(lambda x: lax.split(x, (2, 1)), (X,), (0,), "it is along the layers")


def moves():
    bc = lambda shape, dims: lambda x: lax.broadcast_in_dim(x, shape, dims)
    yield Case(bc((L, 4, 5), (0, 1)), (normal(L, 4),), (0,), (0,))
    yield Case(bc((7, 4, L), (1, 2)), (normal(4, L),), (1,), (2,))
    yield Case(bc((7, L, 1), (1,)), (normal(L),), (0,), (1,))
    yield Case(bc((L, 4, 5), (0, 1)), (normal(L, 1),), (0,), (0,))
    yield Case(bc((L, 4), (0, 1)), (normal(1, 4),), (0,), "it repeats a single layer")
    re = lambda *shape: lambda x: lax.reshape(x, shape)
    yield Case(re(L, 20), (X,), (0,), (0,))
    yield Case(re(1, L, 2, 10), (X,), (0,), (1,))
    yield Case(re(L, 1, 1, 20), (X,), (0,), (0,))
    yield Case(re(20, L), (normal(4, 5, L),), (2,), (1,))
    yield Case(re(4, 5, L, 7), (normal(20, L, 7),), (1,), (2,))
    yield Case(re(12, 5), (X,), (0,), "it merges the layers")
    yield Case(re(4, L, 5), (X,), (0,), "it merges the layers")
    yield Case(re(5, 4), (normal(4, 5),), (0,), "it merges the layers")
    yield Case(re(60), (X,), (0,), "it merges the layers")
    squeeze = lambda *dims: lambda x: lax.squeeze(x, dims)
    yield Case(squeeze(1), (normal(L, 1, 5),), (0,), (0,))
    yield Case(squeeze(0, 2), (normal(1, L, 1, 5),), (1,), (0,))
    yield Case(
        squeeze(0, 2), (normal(1, 4, 1),), (0,), "it removes the axis of the layers"
    )
    transposed = lambda *order: lambda x: lax.transpose(x, order)
    yield Case(transposed(1, 0, 2), (X,), (0,), (1,))
    yield Case(transposed(1, 2, 0), (X,), (0,), (2,))
    yield Case(transposed(2, 0, 1), (normal(4, 5, L),), (2,), (0,))
    part = lambda start, end, by=None: lambda x: lax.slice(x, start, end, by)
    yield Case(part((0, 1, 2), (L, 4, 4)), (X,), (0,), (0,))
    yield Case(part((0, 0, 0), (L, 4, 5), (1, 2, 3)), (X,), (0,), (0,))
    yield Case(part((1, 0), (4, L)), (normal(4, L),), (1,), (1,))
    some = "it takes some of the layers"
    yield Case(part((1, 0, 0), (L, 4, 5)), (X,), (0,), some)
    yield Case(part((0, 0, 0), (L - 1, 4, 5)), (X,), (0,), some)
    yield Case(part((0, 0, 0), (L, 4, 5), (2, 1, 1)), (X,), (0,), some)
    pad = lambda *config: lambda x, v: lax.pad(x, v, config)
    zero = jnp.float32(0)
    none = (0, 0, 0)
    yield Case(pad(none, (1, 2, 1)), (normal(L, 4), zero), (0, None), (0,))
    yield Case(pad((-1, 2, 0), none), (normal(4, L), zero), (1, None), (1,))
    for config in ((1, 0, 0), (0, 2, 0), (0, 0, 1), (-1, 0, 0)):
        yield Case(
            pad(config, none), (normal(L, 4), zero), (0, None), "it pads the layers"
        )
    join = lambda d: lambda *xs: lax.concatenate(xs, d)
    ends = normal(L, 2, seed=3)
    yield Case(join(1), (normal(L, 4), ends), (0, 0), (0,))
    yield Case(join(1), (normal(L, 4), ends), (None, 0), (0,))
    yield Case(join(0), (normal(4, L), ends.T), (1, 1), (1,))
    yield Case(
        join(0), (normal(L, 4), X[:, :, 0]), (0, 0), "it joins arrays along the layers"
    )
    yield Case(join(0), (X[0], X[1]), (0, 1), "different axes")


def dot(dims):
    return lambda a, b: lax.dot_general(a, b, dims, precision="highest")


def products():
    batch = dot((((2,), (1,)), ((0,), (0,))))
    yield Case(batch, (X, normal(L, 5, 6)), (0, 0), (0,))
    yield Case(batch, (X, normal(L, 5, 6)), (None, 0), (0,))
    yield Case(batch, (X, normal(L, 5, 6)), (0, None), (0,))
    two = dot((((3,), (1,)), ((0, 1), (2, 0))))
    heads = normal(7, 5, L, 6)
    yield Case(two, (normal(L, 7, 4, 5), heads), (0, 2), (0,))
    yield Case(two, (normal(L, 7, 4, 5), heads), (None, 2), (0,))
    yield Case(two, (normal(L, 7, 4, 5), heads), (0, 1), "different axes")
    rows = dot((((1,), (0,)), ((), ())))
    yield Case(rows, (normal(L, 4), normal(4, 6)), (0, None), (0,))
    yield Case(rows, (normal(6, 4), normal(4, L)), (None, 1), (1,))
    three = dot((((2,), (0,)), ((), ())))
    yield Case(three, (normal(4, L, 5), normal(5, 6, 7)), (1, None), (1,))
    yield Case(three, (normal(2, 4, 5), normal(5, 6, L)), (None, 2), (3,))
    shared = dot((((2,), (1,)), ((0,), (0,))))
    yield Case(shared, (normal(7, L, 5), normal(7, 5, 6)), (1, None), (1,))
    yield Case(shared, (normal(7, 4, 5), normal(7, 5, L)), (None, 2), (2,))
    yield Case(
        dot((((0,), (0,)), ((), ()))),
        (normal(L, 4), normal(L, 5)),
        (0, 0),
        "it sums over the layers",
    )
    yield Case(rows, (normal(4, L), normal(L, 5)), (None, 0), "it sums over the layers")
    yield Case(rows, (normal(L, 4), normal(4, L)), (0, 1), "each layer by every other")


def loops():
    over = lambda w, x, y: lax.map(lambda one: one[0] @ w @ one[1], (x, y))
    args = normal(4, 4), normal(L, 4, 4), normal(L, 4)
    yield Case(over, args, (None, 0, 0), (0,))
    yield Case(over, args, (None, 0, None), (0,))
    each = lambda w, x: lax.map(lambda one: one @ w, x)
    args = normal(L, L), normal(L, 4, L)
    yield Case(each, args, (0, 0), "it carries something")
    yield Case(each, args, (None, 2), "it loops over another axis")
    total = lambda c, x: lax.scan(lambda c, y: (c + y, c), c, x)
    args = normal(4), normal(L, 4)
    yield Case(total, args, (None, 0), "it carries something")


def matrices():
    square = spd(L, 4, 4)
    for fn in (
        lax.linalg.cholesky_p.bind,
        lambda a: lax.linalg.eigh(a, symmetrize_input=False),
        lax.linalg.lu,
        lax.linalg.qr,
        lax.linalg.svd,
    ):
        name = equation(fn, (square,)).primitive.name
        counts = {"cholesky": 1, "eigh": 2, "lu": 3, "qr": 2, "svd": 3}[name]
        yield Case(fn, (square,), (0,), (0,) * counts)
        yield Case(fn, (square,), (1,), "it decomposes the layers themselves")
        yield Case(fn, (square,), (2,), "it decomposes the layers themselves")
    two = spd(2, L, 4, 4)
    yield Case(lax.linalg.cholesky_p.bind, (two,), (1,), (1,))
    solve = functools.partial(lax.linalg.triangular_solve, left_side=True, lower=True)
    yield Case(solve, (square, normal(L, 4, 5)), (0, 0), (0,))
    yield Case(solve, (square, normal(L, 4, 5)), (None, 0), (0,))
    yield Case(solve, (square, square), (1, 1), "it decomposes the layers themselves")
    reflect = lax.linalg.householder_product
    yield Case(reflect, (square, normal(L, 4)), (0, 0), (0,))
    yield Case(reflect, (spd(2, L, 4, 4), normal(2, L, 4)), (1, 1), (1,))
    yield Case(
        reflect, (square, normal(L, 4)), (1, 1), "it decomposes the layers themselves"
    )


def elementwise():
    yield Case(lax.add, (X, X), (0, 0), (0,))
    yield Case(lax.add, (normal(4, L), normal(4, L)), (None, 1), (1,))
    yield Case(lax.add, (normal(4, 4), normal(4, 4)), (0, 1), "different axes")
    yield Case(lax.mul, (X, normal(L, 1, 5)), (0, 0), (0,))
    yield Case(lax.div, (X, normal(L, 4, 1)), (0, None), (0,))
    yield Case(lax.add, (normal(1, 4), normal(L, 1)), (None, 0), (0,))
    yield Case(lax.sub, (normal(4, L), normal(4, 1)), (1, None), (1,))
    yield Case(lax.mul, (normal(1, 4), normal(L, 4)), (0, 0), "repeats a single layer")
    yield Case(lambda x: lax.mul(x, 3.0), (X,), (0,), (0,))
    yield Case(lambda x: lax.sub(1.0, x), (X,), (None, 0), (0,))
    yield Case(lax.select_n, (bools(L, 4), X[..., 0], X[..., 1]), (0, None, 0), (0,))
    yield Case(lax.select_n, (bools(), X, X + 1), (None, 0, 0), (0,))
    yield Case(lax.clamp, (jnp.float32(-1), X, jnp.float32(1)), (None, 0, None), (0,))
    yield Case(lax.clamp, (X - 1, X, X + 1), (None, 0, None), (0,))
    yield Case(lambda x: lax.convert_element_type(x, jnp.bfloat16), (X,), (0,), (0,))
    bits = lambda dtype: lambda x: lax.bitcast_convert_type(x, dtype)
    yield Case(bits(jnp.uint32), (X,), (0,), (0,))
    yield Case(bits(jnp.uint16), (X,), (0,), "it changes the number of axes")
    yield Case(lambda x: lax.optimization_barrier(x), ((X),), (0,), (0,))
    yield Case(lambda x: jax.device_put(x, jax.memory.Space.Host), ((X),), (0,), (0,))
    yield Case(
        lambda x, y: lax.optimization_barrier((x, y)),
        (X, normal(4, L)),
        (0, 1),
        (0, 1),
    )
    yield Case(
        lambda x, y: lax.optimization_barrier((x, y)),
        (X, X),
        (0, None),
        "some of its operands do not run along the layers",
    )


def unknown():
    text = "it is not known to work layer by layer"
    yield Case(lambda x: lax.top_k(x, 2), (X,), (0,), text)
    yield Case(lambda x: lax.dynamic_slice(x, (0, 0, 0), (L, 2, 2)), (X,), (0,), text)
    yield Case(lambda x: lax.fft(x, "FFT", (5,)), (X + 1j * X,), (0,), text)


CASES = [
    *elementwise(),
    *reductions(),
    *along_an_axis(),
    *moves(),
    *products(),
    *loops(),
    *matrices(),
    *unknown(),
]
DONE = [c for c in CASES if isinstance(c.expect, tuple)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_treatment_of_an_axis(case):
    axes = list(case.axes)
    while len(axes) < len(case.eqn.invars):  # literals
        axes.append(None)
    result = placements_of(case.eqn, axes)
    if isinstance(case.expect, tuple):
        assert isinstance(result, Placements) and not result.op, result
        assert result.out_axes == case.expect
        known = zip(axes, result.in_axes, strict=True)
        assert all(have in (None, want) for have, want in known)
    elif case.expect == "reduced":
        assert isinstance(result, Placements) and result.op, result
    else:
        assert isinstance(result, str), result
        assert case.expect in result


@pytest.mark.parametrize("case", DONE, ids=str)
def test_layer_by_layer_is_all_at_once(case):
    eqn, values = case.eqn, operands(case)
    axes = [*case.axes, *[None] * (len(values) - len(case.axes))]
    result = placements_of(eqn, axes)
    whole = _compat.bind(eqn, values)
    layers = [layer(eqn, values, result, j) for j in range(L)]
    for out, axis, *slices in zip(whole, result.out_axes, *layers, strict=True):
        assert out.shape[axis] == L
        assert_close(np.concatenate(slices, axis), out)


@pytest.mark.parametrize("case", [c for c in CASES if c.expect == "reduced"], ids=str)
def test_layers_combine_to_the_reduction(case):
    eqn, values = case.eqn, operands(case)
    result = placements_of(eqn, case.axes)
    layers = [layer(eqn, values, result, j)[0] for j in range(L)]
    got = functools.reduce(getattr(lax, result.op), layers)
    assert_close(got, _compat.bind(eqn, values)[0])


def test_every_rule_has_a_case():
    on_a_mesh = {"psum", "psum2", "psum_invariant", "pvary", "pcast"}
    on_a_mesh |= {"sharding_constraint", "iota"}
    seen = {c.eqn.primitive.name for c in CASES} | ELEMENTWISE | on_a_mesh
    older = {"geqrf"}  # no public function makes it, in any jax of today
    assert set(RULES) - OF_MODELS - seen <= older


# -- along the axes of a mesh


COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "x"), False),
    "psum, checked": (lambda x: lax.pcast(lax.psum(x, "x"), "x", to="varying"), True),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_sums_over_devices_are_done_by_layers(name):
    fn, check_vma = COLLECTIVES[name]

    def by_layers(x):
        layers = []
        for j in range(L):
            value = x[j : j + 1]
            for eqn in eqns:
                result = placements_of(eqn, [0])
                assert result == along(0), eqn
                (value,) = on_part(eqn, [value], result, one)
            layers.append(value)
        return jnp.concatenate(layers)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    mapped = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    x = normal(8 * L, 4)
    jaxpr = jax.make_jaxpr(mapped(fn))(x)
    eqns = [e for e in jaxprs.walk(jaxpr) if e.primitive.name != "shard_map"]
    assert {e.primitive.name for e in eqns} <= set(RULES)
    assert_close(jax.jit(mapped(by_layers))(x), jax.jit(mapped(fn))(x))


@pytest.mark.parametrize("spec", [(), (None, "x"), (None, None)], ids=str)
def test_a_constraint_that_leaves_the_layers_whole(spec):
    eqn = constraint(spec)
    assert placements_of(eqn, [0]) == of_slice(eqn, 0) == along(0)
    assert resized(eqn, along(0), lambda _: 1) == eqn.params
    (part,) = on_part(eqn, [normal(1, 4)], along(0), one)
    assert_close(part, normal(1, 4))


def test_a_constraint_that_spreads_the_layers_is_refused():
    eqn = constraint(("x", None))
    assert placements_of(eqn, [0]) == "it shards the layers over devices"
    assert of_slice(eqn, 0) is None


def constraint(spec):
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(*spec))
    fn = lambda x: lax.with_sharding_constraint(x, sharding)
    return equation(fn, (normal(L, 4) if spec[:1] != ("x",) else normal(2 * L, 4),))


def test_a_sum_over_a_mapped_axis_is_not_of_a_mesh():
    """vmap's own positional axes are where the layers may be."""
    mapped = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 2)])(
        normal(L, 4)
    )
    (eqn,) = mapped.eqns
    assert placements_of(eqn, [0]) == along(0)
    positional = eqn.replace(params=eqn.params | {"axes": (0,)})
    assert "named axes" in placements_of(positional, [0])
    groups = eqn.replace(params=eqn.params | {"axis_index_groups": ((0,), (1,))})
    assert "named axes" in placements_of(groups, [0])


# -- what is recomputed


RECOMPUTED = [
    *(Case(fn, (X,), (), "") for fn in (lax.neg, lax.exp, lax.sqrt)),
    Case(lax.add, (X, X + 1), (), ""),
    Case(lambda x: lax.mul(x, jnp.float32(2)), (X,), (), ""),
    Case(lax.select_n, (bools(), X, X + 1), (), ""),
    Case(lambda x: lax.convert_element_type(x, jnp.bfloat16), (X,), (), ""),
    Case(lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,), (), ""),
    Case(lambda x: lax.broadcast_in_dim(x, (L, 4), ()), (jnp.float32(2),), (), ""),
    Case(lambda x: lax.broadcast_in_dim(x, (L, 4), (1,)), (normal(4),), (), ""),
    Case(lambda x: lax.broadcast_in_dim(x, (L, 4, 2), (1, 2)), (normal(1, 2),), (), ""),
    Case(lambda x: lax.broadcast_in_dim(x, (L, 4), (0, 1)), (normal(1, 4),), (), ""),
    Case(lambda x: lax.transpose(x, (2, 0, 1)), (X,), (), ""),
    Case(lambda x: lax.reshape(x, (1, L, 20)), (X,), (), ""),
    Case(lambda: lax.broadcasted_iota(jnp.int32, (L, 4), 1), (), (), ""),
]


@pytest.mark.parametrize("case", RECOMPUTED, ids=str)
def test_a_slice_of_the_output_from_cut_operands(case):
    eqn, values = case.eqn, operands(case)
    (whole,) = _compat.bind(eqn, values)
    answered = 0
    for axis, size in enumerate(whole.shape):
        placed = of_slice(eqn, axis)
        if placed is None:
            continue
        answered += 1
        for j in range(size):
            (got,) = layer(eqn, values, placed, j)
            assert_close(got, cut(whole, axis, j))
    assert answered


REFUSED = [
    (lambda x: lax.reshape(x, (12, 5)), (X,), 0),
    (lambda x: lax.reshape(x, (5, 12)), (X,), 1),
    (lambda: lax.broadcasted_iota(jnp.int32, (L, 4), 0), (), 0),
    (lambda x: lax.bitcast_convert_type(x, jnp.int16), (X,), 0),
    (lambda x: lax.cumsum(x, axis=1), (X,), 0),
    (lambda x: lax.reduce_sum(x, (1,)), (X,), 0),
    (dot((((1,), (0,)), ((), ()))), (normal(L, 4), normal(4, 5)), 0),
    (lambda x, y: tuple(lax.optimization_barrier((x, y))), (X, X), 0),
]


@pytest.mark.parametrize(("fn", "args", "axis"), REFUSED)
def test_what_is_not_worth_doing_again(fn, args, axis):
    assert of_slice(equation(fn, args), axis) is None


def test_only_what_names_the_size_is_narrowed():
    eqn = equation(lambda x: lax.broadcast_in_dim(x, (L, 4), (0,)), (normal(L),))
    of_one = lambda axis: resized(eqn, Placements((at(0),), (at(axis),)), lambda _: 1)
    assert of_one(0)["shape"] == (1, 4)
    assert of_one(1)["shape"] == (L, 1)
    assert of_one(None) == eqn.params
    eqn = equation(lambda x: lax.slice(x, (0, 1), (L, 4)), (normal(L, 4),))
    assert of_one(0)["limit_indices"] == (1, 4)


def test_effects_and_shardings_are_refused():
    def printed(x):
        jax.debug.callback(lambda v: None, x)
        return x

    (eqn,) = (
        e
        for e in jaxprs.walk(jax.make_jaxpr(printed)(X))
        if e.primitive.name == "debug_callback"
    )
    assert isinstance(placements_of(eqn, [0]), str)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    wide = lambda x: lax.broadcast_in_dim(x, (L, 4), (0,), out_sharding=sharding)
    eqn = equation(wide, (normal(L),))
    assert placements_of(eqn, [0]) == "it names a sharding"
    assert of_slice(eqn, 0) is None


# -- elementwise


def all_primitives():
    found = {}
    for module in (primitives, lax):
        named = (getattr(module, n) for n in dir(module) if n.endswith("_p"))
        found |= {p.name: p for p in named if hasattr(p, "name")}
    return found


POSITIVE = np.abs(normal(13)) + 1.1  # acosh and the logarithms are defined
INSIDE = POSITIVE / 8  # asin, atanh, erf_inv: within (-1, 1)
INTS = integers(13) % 20 + 1
OPERANDS = {
    **dict.fromkeys(("and", "or", "xor"), (INTS, INTS[::-1])),
    **dict.fromkeys(
        ("shift_left", "shift_right_arithmetic", "shift_right_logical"),
        (INTS, INTS[::-1]),
    ),
    **dict.fromkeys(("not", "population_count"), (INTS,)),
    **dict.fromkeys(("acos", "asin", "atanh", "erf_inv"), (INSIDE,)),
    **dict.fromkeys(("real", "imag"), (POSITIVE + 1j * INSIDE,)),
    "clamp": (jnp.float32(1.5), POSITIVE, jnp.float32(2)),
    "select_n": (INTS % 2 == 0, POSITIVE, INSIDE),
    "is_finite": (np.float32([1, np.inf, 2]),),
    "sign": (normal(13),),
    "polynomial": (POSITIVE, jnp.float32(2), jnp.float32(3)),
}
FUNCTIONS = {
    "convert_element_type": lambda x: lax.convert_element_type(x, jnp.int32),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 4),
    "polynomial": lambda *xs: all_primitives()["polynomial"].bind(*xs),
}
BINARY = frozenset(
    """add add_any atan2 complex div eq eq_to ge gt le le_to lt lt_to max min mul ne
    nextafter pow rem sub""".split()
)


def names_of_this_jax():
    return sorted(ELEMENTWISE & all_primitives().keys())


def bind_by_name(name):
    """The function that makes this one equation."""
    bitwise = getattr(lax, f"bitwise_{name}", None)
    fn = FUNCTIONS.get(name) or bitwise or getattr(lax, name, None)
    return fn or all_primitives()[name].bind


@pytest.mark.parametrize("name", names_of_this_jax())
def test_elementwise_is_elementwise(name):
    """An element of the output is made of the elements in its place, and no other."""
    args = OPERANDS.get(name, (POSITIVE, POSITIVE[::-1])[: 1 + (name in BINARY)])
    fn = bind_by_name(name)
    eqn = equation(fn, args)
    assert eqn.primitive.name == name
    assert len(eqn.outvars) == 1
    (whole,) = _compat.bind(eqn, args)
    assert len(np.unique(np.asarray(whole))) > 1  # a constant would say nothing
    one = [x.reshape(-1, 1) if x.ndim else [x] * whole.size for x in args]
    each = [_compat.bind(eqn, parts)[0] for parts in zip(*one, strict=True)]
    assert_close(np.concatenate(each), whole)


def test_names_of_primitives_are_spelled_right():
    # of an older, of newer jax
    other = {"copy_p", "log2", "one_minus_square", "polynomial"}
    other |= {"hash_mix", "position_bits"}  # of jaxmem
    missing = ELEMENTWISE - all_primitives().keys()
    assert missing <= other
    # not in jax.lax
    known = re.compile("psum2|psum_invariant|pvary|pcast|geqrf|random_.*|threefry2x32")
    rest = set(RULES) - ELEMENTWISE - all_primitives().keys()
    assert all(known.fullmatch(name) for name in rest)
