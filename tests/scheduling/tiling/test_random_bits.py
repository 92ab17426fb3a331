"""Random bits by tiles: the same bits, part by part, and no mask as a whole."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.chips import rates_of
from jaxmem.cost import equations
from jaxmem.ir import jaxprs
from jaxmem.scheduling.tiling.masks import with_private_masks, with_shared_draws
from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from jaxmem.scheduling.tiling.tiles import Tiles
from tests.scheduling.tiling.test_tiles import rewritten, run, tiles_of

pytestmark = pytest.mark.usefixtures("standard_jax")

AVAILABLE = {t.name for t in jaxmem.targets() if t.available}
needs_h100 = pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")

BATCH, LENGTH, WIDTH, HIDDEN, LAYERS = 8, 4, 16, 64, 2
MASK = BATCH, LENGTH, HIDDEN
FOUR = Tiles(limit=0, n=4)


def integers(*shape):
    """Sums and halves of so few bits have no rounding, in whatever order."""
    values = np.random.default_rng(sum(shape)).integers(-2, 3, shape)
    return jnp.asarray(values, jnp.float32)


def bernoulli(key, h):
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0)


def narrow(key, h):
    return jnp.where(jax.random.bits(key, h.shape, jnp.uint8) < 128, h, 0)


def by_linen(key, h):
    layer = nn.Dropout(0.5, deterministic=False)
    return layer.apply({}, h, rngs={"dropout": key})


def by_nnx(key, h):
    return nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=key))(h)


def of_each(key, h):
    """Each example has its own key."""
    return jax.vmap(bernoulli)(jax.random.split(key, len(h)), h)


def by_folding(key, h):
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(h)))
    return jax.vmap(bernoulli)(keys, h)


def loss_of(dropout):
    def loss(weights, x, key):
        up, down = weights
        return (dropout(key, jax.nn.relu(x @ up)) @ down * x).sum()

    return jax.value_and_grad(loss)


WEIGHTS = integers(WIDTH, HIDDEN), integers(HIDDEN, WIDTH)
X = integers(BATCH, LENGTH, WIDTH)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
DROPOUTS = {
    "typed key": (bernoulli, jax.random.key(5)),
    "raw key": (bernoulli, jax.random.PRNGKey(5)),
    "8 bits": (narrow, jax.random.key(5)),
    "linen": (by_linen, jax.random.key(5)),
    "nnx": (by_nnx, jax.random.key(5)),
    "a key for each": (of_each, jax.random.key(5)),
    "a raw key for each": (of_each, jax.random.PRNGKey(5)),
    "folded": (by_folding, jax.random.key(5)),
}


def shapes(closed) -> set[tuple[int, ...]]:
    """Of random bits and masks."""
    avals = (v.aval for e in jaxprs.walk(closed) for v in e.outvars)
    return {aval.shape for aval in avals if aval.dtype in (bool, "uint32", "uint8")}


def assert_equal(found, fn, args):
    wanted = jax.tree.leaves(jax.jit(fn)(*args))
    for a, b in zip(wanted, run(found, args), strict=True):
        np.testing.assert_array_equal(a, b)


SOME = {"a key for each"}


@pytest.mark.parametrize("name", [n if n in SOME else slow(n) for n in DROPOUTS])
def test_the_same_bits_by_tiles(name):
    dropout, key = DROPOUTS[name]
    fn, args = loss_of(dropout), (WEIGHTS, X, key)
    found = rewritten(fn, args, FOUR)
    (tile,) = tiles_of(found)
    assert tile.found.region.n == 4
    assert MASK not in shapes(found.jaxpr)
    assert_equal(found, fn, args)
    assert all(float(jnp.abs(x).max()) for x in jax.tree.leaves(fn(*args)))


@pytest.mark.parametrize("axis", [0, slow(1), slow(2)])
def test_a_mask_is_the_same_along_every_axis(axis):
    def fn(key, x, w):
        keep = jax.random.bernoulli(key, 0.5, MASK)
        h = jnp.einsum("abi,ih->abh", x, w)
        return jnp.where(keep, h, 0).sum(axis)

    args = jax.random.key(1), X, WEIGHTS[0]
    assert_equal(rewritten(fn, args, FOUR), fn, args)


def scanned(weights, x, key):
    """Layers in a scan, each with its own key, and a key handed on from one to one."""

    def layer(carry, item):
        x, key = carry
        key, mine = jax.random.split(key)
        (up, down), own = item
        h = bernoulli(own, jax.nn.relu(x @ up))
        new = jnp.clip(h @ down, -64, 64)  # no number outgrows a float
        return (bernoulli(mine, new) + x, key), None

    keys = jax.random.split(key, LAYERS)
    (x, _), _ = jax.lax.scan(jax.checkpoint(layer), (x, key), (weights, keys))
    return (x * jnp.arange(BATCH)[:, None, None]).sum()


@pytest.mark.slow
def test_layers_in_a_scan():
    weights = jax.tree.map(lambda w: jnp.stack([w] * LAYERS), WEIGHTS)
    fn, args = jax.value_and_grad(scanned), (weights, X, jax.random.key(2))
    found = rewritten(fn, args, FOUR)
    assert len(tiles_of(found)) >= 2  # of the forward and of the backward pass
    assert MASK not in shapes(found.jaxpr)
    assert_equal(found, fn, args)


@pytest.mark.slow
def test_on_each_device():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=(P(), P())
    )
    def fn(weights, x, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return jax.lax.psum(loss_of(bernoulli)(weights, x, key), "data")

    args = WEIGHTS, jnp.concatenate([X, X]), jax.random.key(3)
    found = rewritten(fn, args, FOUR)
    assert tiles_of(found)
    assert MASK not in shapes(found.jaxpr)
    assert_equal(found, fn, args)


@pytest.mark.parametrize("impl", ["rbg", slow("unsafe_rbg"), slow("threefry2x32")])
def test_what_cannot_be_drawn_by_parts_is_named(impl):
    fn, args = loss_of(bernoulli), (WEIGHTS, X, jax.random.key(5, impl=impl))
    with jax.threefry_partitionable(False):
        found = rewritten(fn, args, FOUR)
        assert tiles_of(found)
        # the bits once, in front of the tiles, which read the mask in bits
        loops = [e for e in found.jaxpr.eqns if e.primitive.name == "scan"]
        assert MASK in shapes(found.jaxpr)
        for loop in loops:
            arrays = {v.aval for v in loop.invars if v.aval.size >= 8 * LENGTH * 8}
            assert all(a.dtype in ("float32", "uint8") for a in arrays)
        (note,) = [n for n in found.description.notes if "`random_bits`" in n]
        assert "packed" in note
        assert_equal(found, fn, args)


@pytest.mark.parametrize("returned, count", [(False, 2), (True, 1)])
def test_a_mask_is_made_for_each_user_and_once_for_those_left(returned, count):
    def fn(key, x):
        keep = jax.random.normal(key, x.shape) > 0.5
        used = jnp.where(keep, x, 0), jnp.where(keep, x * 2, 1)
        return (*used, keep) if returned else used

    args = jax.random.key(1), X
    closed = jax.make_jaxpr(fn)(*args)
    closed = jaxprs.retrace(closed, lambda args: inlined(closed, args))
    draws = lambda c: sum(e.primitive.name == "random_bits" for e in c.eqns)
    private = with_private_masks(closed)
    shared = with_shared_draws(private)
    assert (draws(closed), draws(private), draws(shared)) == (1, count, 1)
    assert len(shared.eqns) == len(closed.eqns)
    for some in (private, shared):
        pairs = zip(fn(*args), jaxprs.evaluate(some, args), strict=True)
        for a, b in pairs:
            np.testing.assert_array_equal(a, b)


def inlined(closed, args):
    def rule(eqn, values):
        bodies = jaxprs.bodies(eqn)
        return jaxprs.evaluate(bodies[0], values, rule) if bodies else None

    return jaxprs.evaluate(closed, args, rule)


def test_bits_that_are_drawn_twice_cost_seconds():
    def fn(first, second, x, w):
        h = jnp.where(jax.random.bernoulli(first, 0.5, MASK), x @ w, 0) @ w.T
        some = jax.random.bernoulli(second, 0.5, MASK)
        return h, jnp.cumsum(some.ravel())

    key, other = jax.random.split(jax.random.key(0))
    tiles = {}
    for name, fn_of in {
        "one": lambda key, other, *args: fn(key, key, *args),
        "two": fn,
    }.items():
        (tiles[name],) = tiles_of(rewritten(fn_of, (key, other, X, WEIGHTS[0]), FOUR))
    bits = next(e for e in tiles["one"].eqns if e.primitive.name == "random_bits")
    once = equations.seconds(bits, rates_of("h100"))
    longer = tiles["one"].found.seconds - tiles["two"].found.seconds
    assert longer == pytest.approx(once)


def test_micro_batches_draw_their_own():
    fn, args = loss_of(bernoulli), (WEIGHTS, X, jax.random.key(5))
    found = rewritten(fn, args, MicroBatches(4))
    assert MASK not in shapes(found.jaxpr)
    assert (BATCH // 4, *MASK[1:]) in shapes(found.jaxpr)
    assert_equal(found, fn, args)


def test_tiles_of_micro_batches_draw_their_own():
    fn, args = loss_of(bernoulli), (WEIGHTS, X, jax.random.key(5))
    found = rewritten(fn, args, MicroBatches(2), FOUR)
    assert tiles_of(found)
    assert (BATCH // 2, *MASK[1:]) not in shapes(found.jaxpr)
    assert_equal(found, fn, args)


def temp_bytes(fn, args) -> int:
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_bytes():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (array(64, 1024), array(1024, 64)), array(1024, 64), key
    fn = loss_of(bernoulli)
    by_tiles = rewritten(fn, args, Tiles(limit=0, n=16))
    tiled = lambda *args: jaxprs.evaluate(by_tiles.jaxpr, jax.tree.leaves(args))
    # hidden values, their mask and its bits are 4 MiB each, or nearly
    assert temp_bytes(tiled, args) < temp_bytes(fn, args) / 4


@needs_h100
@pytest.mark.slow
def test_bytes_on_h100():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (array(1024, 8192), array(8192, 1024)), array(8192, 1024), key
    fn = loss_of(bernoulli)
    by_tiles = rewritten(fn, args, Tiles(limit=0, n=16))
    tiled = lambda *args: jaxprs.evaluate(by_tiles.jaxpr, jax.tree.leaves(args))
    bytes_of = lambda step: jaxmem.estimate(step, *args, target="h100").temp_bytes
    # what is left are the sums of the weights' gradients in float32, 32 MiB each
    assert bytes_of(fn) >= 256 * 2**20
    assert bytes_of(tiled) < 72 * 2**20
