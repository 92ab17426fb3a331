"""A `shard_map` in a layer: taken apart, put together, and recomputed in part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.ir.flatten import flatten
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.joined import put_together
from jaxmem.ir.map_operations import operations_of
from jaxmem.ir.map_parts import MAPS, can_be_taken_apart, taken_apart
from jaxmem.ir.shard_maps import inside_of
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.pairs import pairs
from jaxmem.scheduling.recompute.residuals import Recompute
from tests.sets import some_fast

DEVICES, TENSOR = 2, 2
L, B, C, H = 3, 8, 16, 64
MESH = jax.make_mesh(
    (DEVICES, TENSOR), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2
)
ROWS, COLUMNS = P("data"), P(None, "tensor")
# float32: sums of up to 64 terms that XLA may take in another order, three steps
RTOL, ATOL = 256 * 2.0**-24, 1e-6


def block(x, first, second):
    """An MLP whose hidden features lie along "tensor", and a number of each device."""
    h = x @ first
    scale = jnp.tanh(jnp.mean(h))
    h = jnp.tanh(h) * jax.nn.sigmoid(h) * scale
    return jax.lax.psum(h @ second, "tensor")


def mapped(check_vma: bool, axes=("data", "tensor")):
    rows = ROWS if "data" in axes else P()
    return jax.shard_map(
        block,
        mesh=MESH,
        in_specs=(rows, COLUMNS, P("tensor")),
        out_specs=rows,
        axis_names={*axes},
        check_vma=check_vma,
    )


FORMS = {
    "checked": functools.partial(mapped, True),
    "unchecked": functools.partial(mapped, False),
    "partial": functools.partial(mapped, True, ("tensor",)),
}


def parameters():
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = {"first": (L, C, H), "second": (L, H, C)}
    specs = {"first": P(None, None, "tensor"), "second": P(None, "tensor")}
    return {
        name: jax.device_put(
            jax.random.normal(key, shape) / shape[1] ** 0.5,
            NamedSharding(MESH, specs[name]),
        )
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def batch():
    x = jax.random.normal(jax.random.key(1), (B, C))
    return jax.device_put(x, NamedSharding(MESH, ROWS))


def step_of(form: str):
    one = FORMS[form]()

    def loss(params, x):
        layer = lambda x, w: (x + one(x, w["first"], w["second"]), None)
        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0]))

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def trained(step):
    params, losses = parameters(), []
    for _ in range(3):
        params, loss = step(params, batch())
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    return params, losses


def forward_map(form: str):
    """The `shard_map` of a forward layer, with what it leaves for the backward one."""
    closed = jax.make_jaxpr(step_of(form))(parameters(), batch())
    (pair,) = pairs(closed)
    maps = [e for e in pair.body.eqns if e.primitive.name == "shard_map"]
    (eqn,) = (e for e in maps if {*e.outvars} & {*pair.slots.values()})
    return eqn


def alone(eqn):
    """A jaxpr of one equation."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(lambda *xs: jaxprs._compat.bind(eqn, xs))(*structs)


def in_parts(closed):
    rule = lambda eqn, args: taken_apart(eqn, inside_of(eqn, flatten), args)
    return jaxprs.retrace(closed, lambda args: jaxprs.evaluate(closed, args, rule))


def inputs(closed):
    keys = jax.random.split(jax.random.key(2), len(closed.jaxpr.invars))
    pairs = zip(keys, closed.jaxpr.invars, strict=True)
    return [jax.random.normal(key, v.aval.shape, v.aval.dtype) for key, v in pairs]


def values(closed, xs):
    return jax.jit(lambda *xs: jaxprs.evaluate(closed, xs))(*xs)


@pytest.mark.fast("checked", "partial")
@pytest.mark.parametrize("form", FORMS)
def test_parts_give_what_the_whole_gives(form):
    eqn = forward_map(form)
    assert can_be_taken_apart(eqn)
    whole = alone(eqn)
    parts = in_parts(whole)
    maps = JaxprGraph(parts).eqns
    assert len(maps) > 5
    assert all(len(operations_of(e)) < 2 for e in maps)
    again = put_together(parts, MAPS)
    assert [e.primitive.name for e in again.jaxpr.eqns].count("shard_map") == 1
    xs = inputs(whole)
    wanted = values(whole, xs)
    for closed in (parts, again):
        for got, want in zip(values(closed, xs), wanted, strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=RTOL, atol=ATOL)


def test_what_is_put_together_is_as_it_was_where_nothing_was_apart():
    closed = alone(forward_map("checked"))
    assert put_together(closed, MAPS) is closed


def test_operations_between_maps_keep_them_apart():
    tanh = jax.shard_map(jnp.tanh, mesh=MESH, in_specs=ROWS, out_specs=ROWS)

    def fn(x):
        y = tanh(x)
        z = tanh(x) + tanh(y)
        return tanh(jnp.sum(z) + y), tanh(y)

    closed = jax.make_jaxpr(fn)(batch())
    joined = put_together(closed, MAPS)
    maps = [e for e in joined.jaxpr.eqns if e.primitive.name == "shard_map"]
    assert len(maps) == 2
    for got, want in zip(values(joined, [batch()]), fn(batch()), strict=True):
        np.testing.assert_allclose(got, want, rtol=RTOL, atol=ATOL)


def test_results_that_are_spread_otherwise_are_not_handed_on():
    tanh = jax.shard_map(jnp.tanh, mesh=MESH, in_specs=ROWS, out_specs=ROWS)
    other = jax.shard_map(
        lambda x: x + jax.lax.axis_index("tensor").astype(x.dtype),
        mesh=MESH,
        in_specs=P("tensor"),
        out_specs=P("tensor"),
    )
    fn = lambda x: (other(tanh(x)),)
    joined = put_together(jax.make_jaxpr(fn)(batch()), MAPS)
    np.testing.assert_array_equal(values(joined, [batch()])[0], fn(batch())[0])


def test_an_operand_and_a_number_among_the_results():
    def body(x):
        return x, jnp.sum(x)[None], jnp.tanh(x) * jnp.sum(x)

    one = jax.shard_map(body, mesh=MESH, in_specs=ROWS, out_specs=(ROWS, ROWS, ROWS))
    closed = jax.make_jaxpr(one)(batch())
    parts = in_parts(closed)
    again = put_together(parts, MAPS)
    for closed in (parts, again):
        for got, want in zip(values(closed, [batch()]), one(batch()), strict=True):
            np.testing.assert_allclose(got, want, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("form", some_fast(FORMS, "partial"))
def test_a_layer_with_a_map_trains_alike_and_keeps_less(form):
    step = step_of(form)
    how = {"donate_argnums": (), "progress": False, "target": "h100"}
    scheduled = jaxmem.schedule(step, **how)
    plan = scheduled.plan(parameters(), batch())
    assert any("elementwise" in row.how for row in plan.residuals)
    got, losses = trained(scheduled)
    want, wanted = trained(jax.jit(step))
    np.testing.assert_allclose(losses, wanted, rtol=RTOL)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL)


# -- loops and branches in a map


def smooth(x, w):
    return x + jnp.tanh(jnp.sin(x @ w)) * x


def repeated(fn, times: int):
    """A loop, each of whose iterations is `fn`."""

    def loop(x, w):
        return jax.lax.scan(lambda x, _: (fn(x, w), None), x, length=times)[0]

    return loop


def chosen(fn):
    """A branch, by a number that differs between devices."""
    return lambda x, w: jax.lax.cond(jnp.sum(x) < 1e3, fn, lambda x, w: x, x, w)


NESTED = {
    "loop": repeated(smooth, 3),
    "branch": chosen(smooth),
    "loop in a loop": repeated(repeated(smooth, 3), 2),
    "loop in a branch": chosen(repeated(smooth, 3)),
    "branch in a loop": repeated(chosen(smooth), 2),
}
# where types do not say along which axes arrays differ, all are kept for each device
ROW_MESH = jax.make_mesh((DEVICES,), ("data",), (jax.sharding.AxisType.Auto,))
PREDICATES = 8 * DEVICES * L  # bytes: a number of each device is kept for each layer


def nested_step(fn, is_mapped: bool, check_vma: bool = True):
    if is_mapped:
        how = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        fn = jax.shard_map(fn, mesh=ROW_MESH, check_vma=check_vma, **how)

    def loss(ws, x):
        return jnp.mean(jnp.square(jax.lax.scan(lambda *a: (fn(*a), None), x, ws)[0]))

    def step(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        return ws - 0.1 * grads, value

    return step


def kept(closed) -> int:
    """Bytes that the forward layers leave for the backward ones."""
    eqn = next(e for e in JaxprGraph(closed).eqns if e.primitive.name == "scan")
    return sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars[1:])


@pytest.mark.parametrize(("rate", "check_vma"), [(None, False), (1e-3, True)])
@pytest.mark.parametrize("name", NESTED)
def test_what_is_nested_in_a_map_keeps_what_it_does_without(name, rate, check_vma):
    ws = 0.4 * jax.random.normal(jax.random.key(3), (L, C, C))
    x = jax.random.normal(jax.random.key(1), (B, C))
    choice = Choice(configs=(Recompute(rate),))
    plain, step = (nested_step(NESTED[name], m, check_vma) for m in (False, True))
    before = jax.make_jaxpr(step)(ws, x)
    found = rewrite(before, {}, choice=choice).jaxpr
    alone = rewrite(jax.make_jaxpr(plain)(ws, x), {}, choice=choice).jaxpr
    assert kept(found) <= kept(alone) + PREDICATES
    assert kept(found) < 0.6 * kept(before)
    if rate:
        outs = (values(closed, [ws, x]) for closed in (found, before))
        for got, want in zip(*outs, strict=True):
            np.testing.assert_allclose(got, want, rtol=RTOL, atol=ATOL)


def test_costs_of_a_map_are_those_of_one_device():
    from jaxmem.cost.equations import flops

    closed = jax.make_jaxpr(mapped(True))(
        batch(), *map(lambda w: w[0], parameters().values())
    )
    (eqn,) = closed.jaxpr.eqns
    assert flops(eqn) == 2 * 2 * B * C * H / (DEVICES * TENSOR)
