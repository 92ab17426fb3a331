"""Tiles of steps that XLA partitions: values, and what the devices send each other.

In float64 a step in tiles may be off by m u of the largest result, where m counts the
roundings on the longest path of three steps (`roundings`) and u is half of eps.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import compiled
from benchmarks.steps.tile_ways import in_tiles, is_in_tiles
from benchmarks.steps.tiles import SHARDINGS, sharded
from jaxmem import schedule
from jaxmem.ir import jaxprs
from jaxmem.memory.buffers import collectives_of, parse_hlo
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.plan.fingerprint import fingerprint
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.regions import Region
from jaxmem.scheduling.tiling.tiles import TileRegions, Tiles, is_tile_loop
from tests.arrays import array
from tests.scheduling.tiling.generated import generated
from tests.scheduling.tiling.roundings import longest
from tests.scheduling.tiling.test_generated import apart, traced, wanted_and_most
from tests.scheduling.tiling.test_generated import run as evaluated
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")

LAYERS, WIDTH, HIDDEN, WORDS, TOKENS, HEADS = 2, 16, 32, 64, 16, 4
EACH = 4  # examples of a device along the data
STEPS = 3
# way -> shape of the mesh, names of its axes
WAYS: Mapping[str, tuple[Sequence[int], Sequence[str]]] = {
    "data": ((8,), ("data",)),
    "FSDP": ((8,), ("data",)),
    "FSDP and tensor parallel": ((4, 2), ("data", "model")),
}
COLUMNS, ROWS = ("qkv", "up"), ("out", "down")


def spec_of(way: str, name: str) -> P:
    tensor = "model" if way == "FSDP and tensor parallel" else None
    if way == "data":
        return P()
    if name == "table":
        return P(tensor, "data")
    return P(None, "data", tensor) if name in COLUMNS else P(None, tensor, "data")


def mesh_of(way: str, kind: AxisType = AxisType.Auto):
    shape, names = WAYS[way]
    return jax.make_mesh(shape, names, (kind,) * len(shape))


def layer(x, w):
    """Causal attention, whose mask counts tokens, and an MLP."""
    qkv = jnp.split(x @ w["qkv"], 3, -1)
    q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in qkv)
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    p = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
    x = x + jnp.einsum("bhst,bthd->bshd", p, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def loss(place, params, tokens):
    """The mean over examples, each of which has a weight by its number."""
    x = place(params["table"][tokens[:, :-1]])
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
    log_probs = jax.nn.log_softmax(x @ params["table"].T)
    picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
    number = lax.broadcasted_iota(picked.dtype, picked.shape, 0)
    return -jnp.mean(picked * (1 + number / len(tokens)))


def step_of(place):
    def step(params, tokens):
        value, grads = jax.value_and_grad(functools.partial(loss, place))(
            params, tokens
        )
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    return step


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed + sum(shape))
    return rng.standard_normal(shape) * shape[-2] ** -0.5


def arguments(way: str, mesh, dtype=jnp.float64):
    shapes = {
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    }
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    made = lambda name, shape: put(array(normal(*shape), dtype), spec_of(way, name))
    layers = {name: made(name, shape) for name, shape in shapes.items()}
    params = {"layers": layers, "table": made("table", (WORDS, WIDTH))}
    shape = EACH * WAYS[way][0][0], TOKENS + 1
    words = np.random.default_rng(1).integers(WORDS, size=shape)
    return params, put(array(words, jnp.int32), P("data"))


def pinned(mesh):
    where = NamedSharding(mesh, P("data"))
    return lambda x: lax.with_sharding_constraint(x, where)


def rewritten(step, args, tiles: Tiles):
    """The step with nothing kept of the layers, in tiles or not."""
    choice = Choice("h100", (Recompute(1e-3), tiles))
    found = schedule(step, donate_argnums=()).rewritten(choice, *args)
    tree = jax.tree.structure(jax.eval_shape(step, *args))

    def run(*args):
        return jax.tree.unflatten(tree, found.run(jax.tree.leaves(args)))

    return jax.jit(run), found


def after(step, params, tokens) -> tuple:
    """(parameters, losses) of a few steps."""
    losses = []
    for _ in range(STEPS):
        params, value = step(params, tokens)
        losses.append(value)
    return params, losses


def assert_same(wanted, got, roundings: int) -> None:
    """To roundings of the largest number: where terms cancel, theirs is left."""
    pairs = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True))
    scale = max(float(jnp.abs(x).max()) for x, _ in pairs)
    error = max(float(jnp.abs(x - y).max()) for x, y in pairs) / scale
    assert error <= roundings * 2.0**-53, error


def sent(step, args) -> Counter:
    """Bytes of the operands of each kind of collective, as often as it runs."""
    found = Counter()
    text = step.lower(*args).compile().as_text()
    for one in collectives_of(parse_hlo(text)):
        found[one.kind] += one.times * one.bytes
        found["in tiles"] += one.times * one.bytes * is_in_tiles(one)
    return found


def regions(found) -> list[Region]:
    done = (pair for record in found.records for pair in record.rewrites)
    lists = (made.tiles for one, made in done if type(one) is TileRegions)
    return [tile.found.region for tiles in lists for tile in tiles]


CASES = [(way, n) for way in WAYS for n in (2, 4, 8)]


@pytest.mark.parametrize("case", some_fast(CASES, ("FSDP", 4)), ids=str)
def test_values_and_no_new_collective(case):
    way, n = case
    step, args = step_of(pinned(mesh_of(way))), arguments(way, mesh_of(way))
    whole, _ = rewritten(step, args, Tiles())
    run, found = rewritten(step, args, Tiles(limit=0, n=n))
    # of a device's four examples no eight tiles can be made: then over its tokens
    shards = WAYS[way][0][0] if n <= EACH else 1
    assert {r.shards for r in regions(found)} == {shards}
    closed = jaxprs.trace(functools.partial(after, step), *args).jaxpr
    assert_same(after(jax.jit(step), *args), after(run, *args), longest(closed))
    before, now = sent(whole, args), sent(run, args)
    inside = now.pop("in tiles")
    assert all(now[kind] <= before[kind] for kind in {*before, *now}), (before, now)
    # what tensor parallelism sends is of the tokens, so that it is sent part by part
    assert not inside or "model" in WAYS[way][1]


@pytest.mark.slow
def test_a_jitted_step_that_names_its_shardings():
    """As users have it: arrays that are not placed yet, and a plan that is kept."""
    mesh = mesh_of("FSDP")
    args = of_mlp(mesh, P(None, "data"))
    places = jax.tree.map(lambda x: x.sharding, args)
    step = jax.jit(mlp_step(mesh), in_shardings=places)
    args = jax.tree.map(np.asarray, args)
    choice = Choice("cpu", (Recompute(1e-3), Tiles(limit=0, n=4)))
    plan = schedule(step, donate_argnums=()).plan(*args)
    mark = fingerprint(jaxprs.trace(mlp_step(mesh), *args).jaxpr)
    plan = dataclasses.replace(plan, choice=choice, fingerprint=mark)
    tiled = schedule(step, plan=plan, donate_argnums=())
    found = tiled.rewritten(choice, *args)
    assert {r.shards for r in regions(found)} == {8}
    now = sent(tiled, args)
    assert now["all-reduce"] and not now["in tiles"]
    assert_tiled_alike(step, args, found, tiled)


def mlp(place, params, x):
    def body(x, w):
        return place(x) + jnp.tanh(place(x) @ w["up"]) @ w["down"], None

    return jnp.square(lax.scan(body, x, params)[0]).mean()


def mlp_step(mesh):
    return jax.value_and_grad(functools.partial(mlp, pinned(mesh)))


REPLICATED = P()


def of_mlp(mesh, spec=REPLICATED):
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params = {
        "up": put(normal(LAYERS, WIDTH, HIDDEN), spec),
        "down": put(normal(LAYERS, HIDDEN, WIDTH), spec),
    }
    return params, put(normal(32, TOKENS, WIDTH), P("data"))


def assert_tiled_alike(step, args, found, run) -> None:
    roundings = longest(jaxprs.trace(step, *args).jaxpr)
    assert found.did(Tiles)
    assert_same(jax.jit(step)(*args), run(*args), roundings)


def test_a_constraint_in_a_layer_is_kept_in_its_tiles():
    mesh = mesh_of("data")
    step, args = mlp_step(mesh), of_mlp(mesh)
    run, found = rewritten(step, args, Tiles(limit=0, n=2))
    loops = [e for e in jaxprs.walk(found.jaxpr) if is_tile_loop(e)]
    held = [e for one in loops for e in jaxprs.walk(one.params["jaxpr"])]
    assert "sharding_constraint" in {e.primitive.name for e in held}
    assert {r.shards for r in regions(found)} == {8}
    assert_tiled_alike(step, args, found, run)


@pytest.mark.parametrize("n", some_fast((2, 4), 2))
def test_parts_of_shards_where_types_say_how_arrays_are_sharded(n):
    mesh = mesh_of("data", AxisType.Explicit)
    step = jax.value_and_grad(functools.partial(mlp, lambda x: x))
    with jax.set_mesh(mesh):
        args = of_mlp(mesh)
        run, found = rewritten(step, args, Tiles(limit=0, n=n))
        assert {r.shards for r in regions(found)} == {8}
        assert_tiled_alike(step, args, found, run)


@pytest.mark.slow
def test_images():
    """XLA does not partition what a convolution in groups would be for the devices."""

    def convolved(w, x):
        x = jax.nn.relu(lax.conv(x, w["a"], (1, 1), "SAME"))
        return jnp.square(lax.conv(x, w["b"], (1, 1), "SAME")).mean()

    mesh = mesh_of("data")
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    w = {"a": put(normal(8, 3, 3, 3), P()), "b": put(normal(4, 8, 3, 3), P())}
    args = w, put(normal(32, 3, 8, 8), P("data"))
    step = jax.value_and_grad(convolved)
    whole, _ = rewritten(step, args, Tiles())
    run, found = rewritten(step, args, Tiles(limit=0, n=2))
    assert_tiled_alike(step, args, found, run)
    assert sent(run, args) == sent(whole, args)


def spread(x) -> P:
    """The last axis that two devices can share."""
    axes = [d for d, size in enumerate(x.shape) if size % 2 == 0]
    return P(*[None] * axes[-1], "data") if x.ndim > 1 and axes else P()


def unit(closed) -> float:
    """The largest rounding of a number that a step computes."""
    dtypes = {v.aval.dtype for eqn in jaxprs.walk(closed) for v in eqn.outvars}
    wide = (d for d in dtypes if jnp.issubdtype(d, jnp.floating))
    return max(float(jnp.finfo(d).eps) for d in wide) / 2


GENERATED = range(0, 300, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", GENERATED)
def test_generated_steps(seed):
    """Of every other step the parameters are sharded, too."""
    step = generated(seed)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    params, batch = step.args
    specs = jax.tree.map(spread if seed % 2 else lambda x: P(), params), P("data")
    leaves = jax.tree.leaves((params, batch))
    shardings = [NamedSharding(mesh, spec) for spec in jax.tree.leaves(specs)]
    args = [jax.device_put(x, s) for x, s in zip(leaves, shardings, strict=True)]
    closed = traced(step)
    wanted, most = wanted_and_most(step, closed)
    if step.dtype == jnp.float64:  # parts of it may be in float32 all the same
        most = longest(closed) * unit(closed)
    for n in (2, 3, 4):
        choice = Choice("cpu", (Tiles(limit=0, n=n),))
        found = rewrite(closed, {}, choice=choice, shardings=shardings)
        error = apart(evaluated(found.jaxpr, args), wanted)
        assert error <= most, f"{step}; n={n}: off by {error:.1e}, not {most:.1e}"


H100 = "h100"


@pytest.mark.slow
@pytest.mark.parametrize("way", SHARDINGS)
def test_eight_h100s(way):
    """The steps of the benchmark: less than with remat alone, and no more is sent."""
    plain, remat = sharded(way, "plain"), sharded(way, "remat")
    tiles = Recompute(1e-3), Tiles(limit=0, n=8)
    tiled, _ = in_tiles(plain, Choice(H100, tiles))
    before = schedule(remat.step, donate_argnums=remat.donate)
    kinds: list[Counter] = []
    temps = []
    for step, made in ((before, remat), (tiled, plain)):
        found, temp = compiled(step, *made.args, donate=made.donate)
        kinds.append(Counter())
        for one in found:
            kinds[-1][one.kind] += one.times * one.bytes
        temps.append(temp)
    assert temps[1] < 0.5 * temps[0]
    assert all(kinds[1][kind] <= kinds[0][kind] for kind in {*kinds[0], *kinds[1]})
