"""The labels of axes: what they say, as in einsum, and parts against the whole."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxmem import _compat
from jaxmem.ir.placements import Placements, at
from jaxmem.ir.placements.lower import on_part
from jaxmem.ir.placements.rules import BEYOND, RULES, Labels, labels, place, resized
from jaxmem.ir.primitives import names
from tests.ir.axis_cases import CASES, Case, equation, normal, operands
from tests.sets import slow_unless

ELEMENTWISE = names(lambda primitive: primitive.elementwise)

EPS = 2.0**-23
# Sums of at most 72 products, of which each part rounds some otherwise: 72 EPS.
RTOL = 72 * EPS
N = 2  # parts


def as_einsum(table: Labels) -> str:
    letters: dict[Any, str] = {None: "."}
    for label in (x for axes in (*table.ins, *table.outs) for x in axes):
        letters.setdefault(label, chr(ord("a") - 1 + len(letters)))
    side = lambda arrays: ",".join("".join(map(letters.get, axes)) for axes in arrays)
    return f"{side(table.ins)}->{side(table.outs)}"


def named(case: Case) -> str:
    return f"{equation(case).primitive.name} {case.text}"


def cut(eqn, ins, outs, n: int) -> Placements | str:
    """`place`, of axes."""
    return place(eqn, [*map(at, ins)], [*map(at, outs)], n)


def ways(eqn, n: int = N) -> list[Placements]:
    """Every way to cut an equation along one label."""
    atoms = [*eqn.invars, *eqn.outvars]
    found = {}
    for k, v in enumerate(atoms):
        for axis in range(v.aval.ndim):
            known = [axis if j == k else None for j in range(len(atoms))]
            i = len(eqn.invars)
            way = cut(eqn, known[:i], known[i:], n)
            if not isinstance(way, str):
                found[way] = None
    return list(found)


def part(x, axis, j: int, n: int = N):
    if axis is None or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x if axis is None else np.split(np.asarray(x), n, axis)[j]
    return jax.random.wrap_key_data(part(jax.random.key_data(x), axis, j, n))


def parts_of(case: Case) -> list[list[list[Any]]]:
    """The operands of each part, for each way."""
    eqn, values = equation(case), operands(case)
    operand = lambda x, axis, j: x if axis is None else part(x, axis, j)
    return [
        [
            [operand(x, a, j) for x, a in zip(values, way.in_axes, strict=True)]
            for j in range(N)
        ]
        for way in ways(eqn)
    ]


def _start(j: int, size: int):
    return jnp.int32(j * (size // N))


def by_parts(eqn, way: Placements, parts: list[list[Any]]) -> list[list[Any]]:
    """The outputs of the parts."""
    params = resized(eqn, way, lambda size: size // N)
    if "scatter-" not in eqn.primitive.name or not way.op:
        length = lambda size: size // N
        starts = [functools.partial(_start, j) for j in range(N)]
        pairs = zip(parts, starts, strict=True)
        return [on_part(eqn, args, way, length, s) for args, s in pairs]
    total = parts[0][0]
    for _, *args in parts:  # each adds to what the others have added
        (total,) = _compat.bind(eqn, [total, *args], params)
    return [[total]]


def words_of(x):
    """An array; of keys their words."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


TOGETHER = 12  # cases: to compile each alone, or all at once, takes longer


@functools.cache
def results(group: int) -> dict[int, Any]:
    """(whole, outputs of the parts) of some cases; an error that was raised."""
    cases = dict(list(enumerate(CASES))[group * TOGETHER :][:TOGETHER])
    errors: dict[int, Any] = {}

    def run(whole, parts):
        found = {}
        for k, case in cases.items():
            eqn = equation(case)
            pairs = zip(ways(eqn), parts[k], strict=True)
            try:
                alone = [by_parts(eqn, way, args) for way, args in pairs]
                found[k] = _compat.bind(eqn, whole[k]), alone
                found[k] = jax.tree.map(words_of, found[k])
            except (TypeError, ValueError, AssertionError, IndexError) as error:
                errors[k] = error
        return found

    whole = {k: operands(case) for k, case in cases.items()}
    found = jax.jit(run)(whole, {k: parts_of(case) for k, case in cases.items()})
    return jax.device_get(found) | errors


UFUNCS = dict(add=np.add, mul=np.multiply, max=np.maximum, min=np.minimum)


def joined(eqn, way: Placements, outs: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The outputs made of the outputs of the parts."""
    if way.op:
        combine = UFUNCS.get(way.op) or getattr(np, way.op)
        return [functools.reduce(combine, [x for (x,) in outs])]
    return [
        np.concatenate(xs, axis) for axis, *xs in zip(way.out_axes, *outs, strict=True)
    ]


# Its compiled program is long, and goes through no code that others do not.
LONG = "igamma"
BY_NUMBER = [
    pytest.param(k, marks=slow_unless(not named(case).startswith(LONG)))
    for k, case in enumerate(CASES)
]


@pytest.mark.parametrize("k", BY_NUMBER, ids=lambda k: named(CASES[k]))
def test_parts_by_labels_are_the_whole(k):
    eqn, result = equation(CASES[k]), results(k // TOGETHER)[k]
    table = labels(eqn, N)
    assert isinstance(table, Labels)
    assert as_einsum(table) == CASES[k].text
    if isinstance(result, Exception):
        raise result
    whole, of_parts = result
    letters = set(CASES[k].text) - set(".,->")
    assert len(of_parts) == len(letters)
    for way, outs in zip(ways(eqn), of_parts, strict=True):
        for got, want in zip(joined(eqn, way, outs), whole, strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            np.testing.assert_allclose(got, want, RTOL, RTOL)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_no_axis_is_cut_in_parts_that_do_not_divide_it(n):
    """Those that are summed over neither: a rest would be left out."""
    for case in CASES:
        eqn = equation(case)
        for way in ways(eqn, n):
            atoms = zip(
                [*eqn.invars, *eqn.outvars], way.in_axes + way.out_axes, strict=True
            )
            cut = [v.aval.shape[axis] for v, axis in atoms if axis is not None]
            assert cut and not any(size % n for size in cut), named(case)


def test_every_rule_has_a_case():
    on_devices = {"psum", "psum2", "psum_invariant", "pvary", "pcast", "device_put"}
    seen = {equation(case).primitive.name for case in CASES} | ELEMENTWISE | on_devices
    older = {"geqrf"}  # no public function makes it, in any jax of today
    assert RULES.keys() - seen <= older | {"sharding_constraint"}


# -- many shapes


@st.composite
def reshapes(draw):
    """Two shapes of as many elements, with axes of size one anywhere."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4))
    factors = draw(st.permutations(sizes)) if draw(st.booleans()) else sizes

    def merged(left):
        cuts = sorted(draw(st.lists(st.integers(0, len(left)), max_size=3)))
        edges = zip([0, *cuts], [*cuts, len(left)], strict=True)
        return tuple(int(np.prod(left[a:b])) for a, b in edges)

    return merged(sizes), merged(factors), draw(st.sampled_from([1, 2, 3, 4, 6]))


def check_by_numpy(eqn, x, n: int, run) -> None:
    """All ways to cut a move, against `run(x, params)`, which is NumPy's."""
    whole = run(x, eqn.params)
    for way in ways(eqn, n):
        params = resized(eqn, way, lambda size: size // n)
        outs = [run(part(x, way.in_axes[0], j, n), params) for j in range(n)]
        if way.in_axes == (None,):
            assert all((out == outs[0]).all() for out in outs)
        np.testing.assert_array_equal(np.concatenate(outs, way.out_axes[0]), whole)


SETTINGS = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)


@SETTINGS
@hypothesis.given(reshapes())
def test_a_reshape_of_any_shape(shapes):
    old, new, n = shapes
    x = np.arange(np.prod(old)).reshape(old)
    eqns = jax.make_jaxpr(lambda x: lax.reshape(x, new))(x).eqns
    for eqn in eqns:  # none if the shapes are the same
        check_by_numpy(eqn, x, n, lambda x, params: x.reshape(params["new_sizes"]))
        at = {int(np.prod(old[:i])) for i, s in enumerate(old) if s % n == 0}
        of = {int(np.prod(new[:i])) for i, s in enumerate(new) if s % n == 0}
        if n > 1:  # every common view [before, n, rest] is found
            assert len(ways(eqn, n)) == len(at & of)


@SETTINGS
@hypothesis.given(st.data())
def test_a_broadcast_to_any_shape(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4))
    places = data.draw(st.sets(st.integers(0, len(shape) - 1)).map(sorted))
    ones = data.draw(st.sets(st.sampled_from(places or [0])))
    x = np.zeros([1 if d in ones else shape[d] for d in places])
    x += np.arange(x.size).reshape(x.shape)

    def run(x, params):
        sizes = [1] * len(params["shape"])
        for d, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
            sizes[d] = size
        return np.broadcast_to(x.reshape(sizes), params["shape"])

    fn = lambda x: lax.broadcast_in_dim(x, shape, places)
    for eqn in jax.make_jaxpr(fn)(x).eqns:
        check_by_numpy(eqn, x, 2, run)
        assert len(ways(eqn)) == sum(size % 2 == 0 for size in shape)


# -- what is independent, what is refused


def barrier(*xs):
    case = Case("", lambda *xs: tuple(lax.optimization_barrier(xs)), xs)
    return equation(case)


def test_operands_of_a_barrier_are_cut_along_axes_of_their_own():
    eqn = barrier(normal(2, 4), normal(6), normal(3, 8))
    assert as_einsum(labels(eqn, N)) == "ab,c,de->ab,c,de"
    nothing, placed = [None] * 3, (at(0), at(0), at(1))
    assert cut(eqn, (0, 0, 1), nothing, N) == Placements(placed, placed)
    assert cut(eqn, (0, None, 1), (None, 0, None), N) == Placements(placed, placed)
    assert cut(eqn, (0, None, 1), nothing, N) == "some of its operands are not cut"
    assert cut(eqn, (0, 0, 0), nothing, N) == "2 does not divide its axis"
    assert cut(eqn, (0, 0, 1), (1, None, None), N) == "two axes meet in it"


REFUSED = {
    "two axes meet in it": (lambda x: lax.add(x, x.T), (0, 1)),
    "it needs the whole axis": (lambda x: lax.cumsum(x, axis=0), (0,)),
    "3 does not divide its axis": (lambda x: lax.exp(x), (0,)),
    "it is not known to work part by part": (
        lambda x: lax.while_loop(lambda x: x.sum() < 0, lambda x: x, x),
        (0,),
    ),
    "it carries something from one iteration to the next": (
        lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x),
        (None, 0),
    ),
    "it changes the number of axes": (
        lambda x: lax.bitcast_convert_type(x, jnp.uint16),
        (0,),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused(why):
    fn, axes = REFUSED[why]
    eqn = jax.make_jaxpr(fn)(normal(4, 4)).eqns[-1]
    n = 3 if why[0] == "3" else N
    assert cut(eqn, axes, [None] * len(eqn.outvars), n) == why


def test_what_is_more_than_to_compute_says_so():
    summed = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 2)])
    sent = lambda x: jax.device_put(x, jax.memory.Space.Host)
    (psum,), (put,) = summed(normal(4)).eqns, jax.make_jaxpr(sent)(normal(4)).eqns
    for eqn in (psum, put):
        assert as_einsum(labels(eqn, N)) == "a->a"
        assert eqn.primitive.name in BEYOND


def test_a_constraint_is_kept_and_another_sharding_refused():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    held = lambda x: lax.with_sharding_constraint(x, sharding)
    eqn = equation(Case("", held, (normal(4, 6),)))
    assert as_einsum(labels(eqn, N)) == ".a->.a"
    assert (
        resized(eqn, Placements((at(1),), (at(1),)), lambda size: size // N)["sharding"]
        == eqn.params["sharding"]
    )
    explicit = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(explicit, PartitionSpec("x"))
    wide = lambda x: lax.broadcast_in_dim(x, (4, 6), (0,), out_sharding=sharding)
    assert labels(equation(Case("", wide, (normal(4),))), N) == "it names a sharding"
