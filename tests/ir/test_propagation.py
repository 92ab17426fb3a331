"""How the arrays of a step are sharded over devices: as the compiler shards them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.cost.equations import flops
from jaxmem.ir import jaxprs
from jaxmem.ir.communication import sent
from jaxmem.ir.flatten import flatten
from jaxmem.ir.lost_axes import lost_axes
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.shards import of_shardings

LAYERS, BATCH, TOKENS, WIDTH = 3, 64, 128, 64


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)


def layer(x, w):
    """A causal mean of tokens, and a product."""
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    scores = jnp.einsum("btd,bsd->bts", x, x)
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    return x + jnp.tanh(jnp.einsum("bts,bsd->btd", p, x) @ w["up"]) @ w["down"]


def loss(place, params, x):
    layers = lambda x, w: (place(layer(place(x), w)), None)
    return jnp.square(lax.scan(layers, place(x), params)[0]).mean()


def step_of(place=lambda x: x):
    def step(params, x):
        value, grads = jax.value_and_grad(loss, argnums=1)(place, params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    return step


def spread(mesh, shape, *spec):
    where = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)


def arguments(mesh, up=(), down=()):
    params = {
        "up": spread(mesh, (LAYERS, WIDTH, 4 * WIDTH), *up),
        "down": spread(mesh, (LAYERS, 4 * WIDTH, WIDTH), *down),
    }
    return params, spread(mesh, (BATCH, TOKENS, WIDTH), "data")


FSDP = {"up": (None, "data"), "down": (None, "data")}
BOTH = {"up": (None, "data", "model"), "down": (None, "model", "data")}
WAYS = {"data": {}, "FSDP": FSDP, "both": BOTH}


def held(mesh):
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))


def found_in(fn, *args):
    """The flat equations of a function, and how their arrays are sharded."""
    closed = flatten(jaxprs.trace(fn, *args).jaxpr)
    given = of_shardings(closed, [x.sharding for x in jax.tree.leaves(args)])
    return closed, shardings_in(closed, given)


def maker_of(closed, name):
    return next(e for e in closed.eqns if e.primitive.name == name)


@pytest.mark.fast("data-True", "FSDP-False", "both-True")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_results_are_spread_as_the_compiler_has_them(mesh, way, pinned):
    step, args = step_of(held(mesh) if pinned else lambda x: x), arguments(mesh)
    args = arguments(mesh, **WAYS[way])
    closed, found = found_in(step, *args)
    compiled = jax.jit(step).lower(*args).compile()
    places = jax.tree.leaves(compiled.output_shardings)
    for v, place in zip(closed.jaxpr.outvars, places, strict=True):
        assert found.bytes_of(v) == 4 * jaxprs.elements(place.shard_shape(v.aval.shape))


def test_what_is_made_of_numbers_is_spread_as_its_reader_is(mesh):
    def masked(x):
        mask = jnp.broadcast_to(jnp.arange(2**14) < 7, x.shape)
        zeros = jnp.zeros_like(x)
        body = lambda carry, _: (jnp.where(mask, carry, x), None)
        return lax.scan(body, zeros, None, length=2)[0]

    closed, found = found_in(masked, spread(mesh, (16, 2**14), "data", "model"))
    made = [v for e in closed.eqns for v in e.outvars if v.aval.shape == (16, 2**14)]
    assert len(made) > 2 and {found.shards(v) for v in made} == {8}


def test_a_device_has_its_part_of_the_work(mesh):
    step, args = step_of(), arguments(mesh)
    closed, found = found_in(step, *args)
    all_of_it = sum(map(flops, closed.eqns))
    own = sum(flops(eqn, found) for eqn in closed.eqns)
    assert all_of_it > 0 and own == all_of_it / 4


def test_a_map_says_how_its_own_arrays_are_spread(mesh):
    def mapped(x):
        y = jax.shard_map(
            lambda x: x * lax.axis_index("model").astype(x.dtype),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data", "model"),
        )(x)
        return jnp.tanh(y)

    closed, found = found_in(mapped, spread(mesh, (16, 8), "data"))
    assert found.of[maker_of(closed, "tanh").outvars[0]] == (("data",), ("model",))


FUNCTIONS = ("abs", "acos", "asinh", "bessel_i1e", "digamma", "erf", "erf_inv", "erfc")
FUNCTIONS += ("exp", "lgamma", "logistic", "sinh", "square", "tan", "tanh")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_each_element_is_spread_as_its_operand(mesh, name):
    """Those too that jax lowers to CHLO, which Shardy does not know; also in a loop."""
    fn = getattr(lax, name)
    step = lambda x: (fn(x), lax.fori_loop(0, 3, lambda _, y: fn(y), x))
    closed, found = found_in(step, spread(mesh, (16, 12), "data", "model"))
    outs = closed.jaxpr.outvars
    assert [found.of.get(v) for v in outs] == [(("data",), ("model",))] * 2


SENDS = {
    "along the axis": (lambda x: jnp.split(x, 3, 1)[0], (None, "model"), "split", 384),
    "another axis": (lambda x: jnp.split(x, 2, 0)[0], (None, "model"), "split", 0),
    "a sum": (lambda x: x.sum(1), (None, "model"), "reduce_sum", 64),
    "its own sum": (lambda x: x.sum(0), (None, "model"), "reduce_sum", 0),
    "elementwise": (jnp.tanh, ("data", "model"), "tanh", 0),
    "partial sums": (lambda x: x.T @ x, ("data",), "dot_general", 864),
    "free axes": (lambda x: x.T @ x, (None, "model"), "dot_general", 0),
}


@pytest.mark.parametrize("case", SENDS)
def test_what_makes_devices_send(mesh, case):
    """Bytes of a device, among four along "data" and two along "model"."""
    fn, spec, name, wanted = SENDS[case]
    closed, found = found_in(fn, spread(mesh, (16, 12), *spec))
    assert sent(maker_of(closed, name), found) == wanted


CONSTRAINTS = {
    "gathered": (P(), 576),
    "as it is": (P("data"), 0),
    "cut": (P("data", "model"), 0),
    "moved": (P(None, "data"), 192),
}


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_constraints_that_make_devices_send(mesh, case):
    spec, wanted = CONSTRAINTS[case]
    hold = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    closed, found = found_in(hold, spread(mesh, (16, 12), "data"))
    assert sent(maker_of(closed, "sharding_constraint"), found) == wanted


def test_a_move_that_gathers(mesh):
    """The constraint after it is met before: the move is where devices send."""
    whole = NamedSharding(mesh, P("data"))

    def moved(x):
        x = x.reshape(16, 12, 4, 2)
        return jax.lax.with_sharding_constraint(x, whole)

    closed, found = found_in(moved, spread(mesh, (16, 12, 8), "data", "model"))
    names = ("reshape", "sharding_constraint")
    half = 16 * 12 * 8 * 4 // 4 / 2
    assert [sent(maker_of(closed, name), found) for name in names] == [half, 0]


def test_gathered_weights_are_not_counted_as_sent(mesh):
    x, w = spread(mesh, (16, 12), "data"), spread(mesh, (12, 5), "data")
    closed, found = found_in(jnp.matmul, x, w)
    assert not sent(maker_of(closed, "dot_general"), found)


def looked_up(place):
    """A step whose examples are rows of a table."""

    def step(params, table, tokens):
        run = lambda params, table: loss(place, params, place(table[tokens]))
        return jax.grad(run, argnums=(0, 1))(params, table)

    return step


@pytest.mark.fast("data", "both")
@pytest.mark.parametrize("way", WAYS)
def test_a_lost_axis_and_the_line_that_brings_it_back(mesh, way):
    params, _ = arguments(mesh, **WAYS[way])
    table = spread(mesh, (512, WIDTH), *((None, "data") if WAYS[way] else ()))
    where = NamedSharding(mesh, P("data"))
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32, sharding=where)
    args = params, table, tokens

    def lost(place):
        closed = jaxprs.trace(looked_up(place), *args).jaxpr
        return list(lost_axes(closed, [x.sharding for x in jax.tree.leaves(args)]))

    found = lost(lambda x: x)
    assert bool(found) is (way != "data")
    for one in found:
        assert one.asked[0] == ("data",) and "data" not in one.found[0]

        def written(x, line=one.constraint):
            known = {"x": x, "mesh": mesh, "jax": jax}
            exec(line, known)
            return known["x"]

        assert not lost(written)


def test_nothing_is_known_of_two_meshes(mesh):
    other = jax.make_mesh((8,), ("all",), (jax.sharding.AxisType.Auto,))
    closed = jaxprs.trace(jnp.add, jnp.ones(8), jnp.ones(8)).jaxpr
    places = [NamedSharding(m, P()) for m in (mesh, other)]
    assert of_shardings(closed, places) is None
    assert shardings_in(closed, None).mesh is None


def test_slices_of_the_hosts_memory(mesh):
    # what reads a layer from the host is a function of its own, with types of the host
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    row = jax.jit(lambda stack, i: lax.dynamic_index_in_dim(stack, i, keepdims=False))

    def step(x):
        forward = lambda x, _: (jnp.tanh(x), jax.device_put(x, host))
        y, kept = lax.scan(forward, x, length=LAYERS)

        def backward(carry, i):  # fetches the layer of the next iteration
            g, ahead = carry
            return (g * jnp.cos(jax.device_put(ahead, device)), row(kept, i)), None

        first = lax.index_in_dim(kept, LAYERS - 1, keepdims=False)
        return lax.scan(backward, (y, first), jnp.arange(LAYERS))[0][0]

    x = spread(mesh, (BATCH, WIDTH), "data")
    closed = jaxprs.trace(step, x).jaxpr  # a pass may leave such functions
    found = shardings_in(closed, of_shardings(closed, [x.sharding]))
    assert found.of[closed.jaxpr.outvars[0]][0] == ("data",)
