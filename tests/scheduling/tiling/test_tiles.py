"""Regions in tiles: what is found, what it saves, and that values stay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.cost.live_bytes import LiveBytes
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import by_shape
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.regions import RegionGraph, find, in_more_parts
from jaxmem.scheduling.tiling.tiles import Tile, TileRegions, Tiles

pytestmark = pytest.mark.usefixtures("standard_jax")

TOKENS, WIDTH, WORDS, LAYERS = 32, 16, 96, 3
EPS = 2.0**-23


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape) * 0.3


def rewritten(fn, args, *configs, donated=0) -> Rewritten:
    traced = jaxprs.trace(fn, *args)
    aliases = by_shape(traced.jaxpr, range(donated))
    return rewrite(traced.jaxpr, aliases, choice=Choice("h100", configs))


def run(found: Rewritten, args):
    leaves = jax.tree.leaves(args)
    return jax.jit(lambda *x: jaxprs.evaluate(found.jaxpr, x))(*leaves)


def tiles_of(found: Rewritten) -> list[Tile]:
    done = (pair for record in found.records for pair in record.rewrites)
    return [t for one, made in done if type(one) is TileRegions for t in made.tiles]


def assert_same(found: Rewritten, fn, args, terms: int):
    """Sums of `terms` terms, in another order, differ by `terms` roundings."""
    wanted, got = jax.tree.leaves(jax.jit(fn)(*args)), run(found, args)
    for a, b in zip(wanted, got, strict=True):
        scale = float(jnp.abs(a).max()) + 1e-30
        np.testing.assert_allclose(a, b, rtol=0, atol=terms * EPS * scale)


def mean(losses, labels):
    return losses.mean()


def masked(losses, labels):
    mask = labels > 7
    return jnp.where(mask, losses, 0).sum() / mask.sum()


def weighted(losses, labels):
    return (losses * jnp.linspace(0.1, 2, losses.size)).sum() / 17


def head(reduced, smooth=0.0, z=0.0):
    def loss(x, w, labels):
        logits = x @ w
        total = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        losses = total - (1 - smooth) * picked - smooth * logits.mean(-1)
        return reduced(losses + z * total**2, labels)

    return jax.value_and_grad(loss, argnums=(0, 1))


HEADS = {
    "mean": head(mean),
    "masked": head(masked),
    "weighted": head(weighted),
    "smoothed": head(mean, smooth=0.1),
    "z": head(masked, z=1e-2),
}
HEAD = drawn(TOKENS, WIDTH), drawn(WIDTH, WORDS), jnp.arange(TOKENS) * 2


def products(closed) -> int:
    return sum(e.primitive.name == "dot_general" for e in jaxprs.walk(closed))


@pytest.mark.fast("masked", "smoothed", "z")
@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_one_loop_and_does_no_product_twice(name):
    fn = HEADS[name]
    found = rewritten(fn, HEAD, Tiles(limit=0, n=4))
    plain = rewritten(fn, HEAD)
    (tile,) = tiles_of(found)
    assert tile.found.region.n == 4
    # three products, on a quarter of the tokens each
    assert products(found.jaxpr) == products(plain.jaxpr) == 3
    shapes = {v.aval.shape for e in jaxprs.walk(found.jaxpr) for v in e.outvars}
    assert (TOKENS, WORDS) not in shapes and (TOKENS // 4, WORDS) in shapes
    assert_same(found, fn, HEAD, TOKENS)


def test_the_fewest_tiles_below_the_limit():
    inside = tiles_of(rewritten(HEADS["mean"], HEAD, Tiles(limit=0, n=2)))
    needs = inside[0].found.figures.inside
    for n in (2, 4, 8):
        (tile,) = tiles_of(rewritten(HEADS["mean"], HEAD, Tiles(limit=-(-needs // n))))
        assert tile.found.region.n == n
    assert not tiles_of(rewritten(HEADS["mean"], HEAD, Tiles(limit=needs)))
    assert not tiles_of(rewritten(HEADS["mean"], HEAD))


def layer(x, w):
    heads = lambda a: a.reshape(*a.shape[:2], 2, WIDTH // 2)
    q, k, v = (heads(a) for a in jnp.split(x @ w["qkv"], 3, -1))
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    p = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
    x = x + jnp.einsum("bhst,bthd->bshd", p, v).reshape(x.shape) @ w["o"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def layers(count):
    return {
        "qkv": drawn(count, WIDTH, 3 * WIDTH),
        "o": drawn(count, WIDTH, WIDTH, seed=1),
        "up": drawn(count, WIDTH, 64, seed=2),
        "down": drawn(count, 64, WIDTH, seed=3),
    }


def scanned_loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)
    return (x**2).mean()


def written_out_loss(params, x):
    for i in range(LAYERS):
        x = layer(x, {name: w[i] for name, w in params.items()})
    return (x**2).mean()


X = drawn(4, 8, WIDTH, seed=4)


@pytest.mark.slow
def test_layers_of_a_scan_and_their_gradients_are_released_still():
    adam = optax.adam(1e-2)

    def step(params, moments, x):
        value, grads = jax.value_and_grad(scanned_loss)(params, x)
        updates, moments = adam.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = layers(LAYERS)
    args = params, adam.init(params), X
    count = len(jax.tree.leaves(args[:2]))
    how = Recompute(rate=1e-3), Tiles(limit=0, n=4)
    found = rewritten(step, args, *how, donated=count)
    assert {t.times for t in tiles_of(found)} == {LAYERS}
    assert all(row.released for row in found.description.gradients)
    # Adam divides by the root of the square: its first step is the gradient's sign
    moments = jax.tree.leaves(jax.jit(step)(*args)[1][0].mu)
    got = run(found, args)[len(params) + 1 :][: len(params)]
    for a, b in zip(moments, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * EPS * float(abs(a).max()))


@pytest.mark.slow
def test_written_out_layers():
    fn = jax.value_and_grad(written_out_loss)
    x = drawn(
        8, 8, WIDTH, seed=4
    )  # more than the gradients of weights, summed in parts
    args = layers(LAYERS), x
    found = rewritten(fn, args, Tiles(limit=0, n=4))
    assert tiles_of(found)
    assert_same(found, fn, args, x.size)


@pytest.mark.slow
def test_tiles_inside_of_tiles():
    fn = jax.value_and_grad(scanned_loss)
    args = layers(LAYERS), X
    found = rewritten(fn, args, Recompute(rate=1e-3), Tiles(limit=1024))
    assert LAYERS < max(t.times for t in tiles_of(found))
    assert_same(found, fn, args, X.size)


def test_a_convolution_over_its_images():
    def loss(w, x):
        x = jax.lax.conv(x, w["a"], (1, 1), "SAME")
        x = jax.lax.conv(jax.nn.relu(x), w["b"], (2, 2), "SAME")
        return (x**2).mean()

    fn = jax.value_and_grad(loss)
    w = {"a": drawn(8, 3, 3, 3), "b": drawn(4, 8, 3, 3)}
    args = w, drawn(8, 3, 12, 12)
    found = rewritten(fn, args, Tiles(limit=0, n=4))
    assert tiles_of(found)
    assert_same(found, fn, args, 8 * 12 * 12)


def test_sums_of_narrow_arrays_are_wide():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), HEAD[:2])
    found = rewritten(HEADS["mean"], (*narrow, HEAD[2]), Tiles(limit=0, n=8))
    (loop,) = [e for e in found.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    sums = [v.aval for v in loop.outvars if v.aval.shape == (WIDTH, WORDS)]
    assert [a.dtype for a in sums] == [jnp.float32]
    dw = run(found, (*narrow, HEAD[2]))[2].astype(jnp.float32)
    wanted = jax.jit(HEADS["mean"])(*(x.astype(jnp.float32) for x in narrow), HEAD[2])
    # logits and their gradient are rounded to 8 bits; their sum is not
    scale = float(jnp.abs(wanted[1][1]).max())
    np.testing.assert_allclose(dw, wanted[1][1], rtol=0, atol=2.0**-6 * scale)


def test_what_has_effects_is_named():
    def loss(x, w, labels):
        logits = x @ w
        jax.debug.callback(lambda x: None, logits)
        return jax.nn.logsumexp(logits, -1).mean()

    fn = jax.value_and_grad(loss, argnums=(0, 1))
    found = rewritten(fn, HEAD, Tiles(limit=0, n=4))
    blocked = [why for t in tiles_of(found) for why in t.found.region.blocked.values()]
    assert "it has side effects" in blocked
    assert_same(found, fn, HEAD, TOKENS)


def test_a_sum_over_devices_is_not_in_tiles():
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def loss(w, x):
        return jax.lax.psum(jax.nn.logsumexp(x @ w, -1).sum(), "data")

    def step(w, x):
        return jax.grad(loss)(w, x)

    fn = jax.shard_map(
        step, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec()
    )
    args = HEAD[1], HEAD[0]
    found = rewritten(fn, args, Tiles(limit=0, n=4))
    loops = [e for e in jaxprs.walk(found.jaxpr) if e.primitive.name == "scan"]
    inside = [
        e.primitive.name
        for one in loops
        for b in jaxprs.bodies(one)
        for e in jaxprs.walk(b)
    ]
    assert loops and not {"psum", "psum2", "psum_invariant"} & set(inside)
    assert_same(found, fn, args, TOKENS)


def test_figures_are_bytes_of_live_ranges():
    traced = jaxprs.trace(HEADS["mean"], *HEAD)
    live = LiveBytes(RegionGraph(traced.jaxpr))
    logits = 4 * TOKENS * WORDS
    assert 2 * logits <= live.whole.max() <= 5 * logits


def test_the_body_of_a_while_loop_writes_its_stack_in_place():
    def fn(count, x, w):
        def layer(i, carry):
            x, stack = carry
            x = x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T)
            return x, jax.lax.dynamic_update_index_in_dim(stack, x, i, 0)

        stack = jnp.zeros((LAYERS, *x.shape))
        return jax.lax.fori_loop(0, count, layer, (x, stack))

    args = jnp.int32(2), drawn(TOKENS, WIDTH), drawn(WIDTH, WORDS)
    found = rewritten(fn, args, Tiles(limit=0, n=4))
    (tile,) = tiles_of(found)
    names = {tile.eqns[i].primitive.name for i in tile.found.region.eqns}
    assert "dot_general" in names and "dynamic_update_slice" not in names
    (loop,) = [e for e in found.jaxpr.eqns if e.primitive.name == "while"]
    shapes = {
        v.aval.shape for e in jaxprs.walk(loop.params["body_jaxpr"]) for v in e.outvars
    }
    # of tokens or of hidden features: here both save alike
    assert shapes & {(TOKENS // 4, WORDS), (TOKENS, WORDS // 4)}
    assert (TOKENS, WORDS) not in shapes
    assert_same(found, fn, args, WORDS)


def test_a_sum_is_not_started_from_what_is_broadcast_onto_it():
    """One row is added to all rows of what is summed over tokens."""

    def fn(x, w, y, bias):
        return jax.lax.add(jax.nn.softmax(x @ w).T @ y, bias)

    args = drawn(TOKENS, WIDTH), drawn(WIDTH, WORDS), drawn(TOKENS, 8), drawn(1, 8)
    found = rewritten(fn, args, Tiles(limit=0, n=4))
    assert tiles_of(found)
    assert_same(found, fn, args, TOKENS)


def test_more_parts_are_the_same_region_where_nothing_says_otherwise():
    args = drawn(TOKENS, WIDTH), drawn(WIDTH, WORDS), jnp.arange(TOKENS) % WORDS
    graph = RegionGraph(jax.make_jaxpr(HEADS["mean"])(*args))
    for v in list(graph.maker):
        for axis, size in enumerate(v.aval.shape):
            if size % 8:
                continue
            more = in_more_parts(graph, find(graph, v, axis, 4), 8)
            found = find(graph, v, axis, 8)
            assert more is None or more == found


def _attention(x, w):
    """Heads that are split and merged: reshapes cut other axes in other numbers."""
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    heads = lambda a: a.reshape(*a.shape[:2], 4, 8).transpose(0, 2, 1, 3)
    scores = jax.nn.softmax(heads(q) @ heads(k).transpose(0, 1, 3, 2))
    mixed = (scores @ heads(v)).transpose(0, 2, 1, 3).reshape(x.shape)
    return (mixed.reshape(-1, x.shape[-1]) ** 2).sum()


def test_reshapes_of_other_axes_leave_the_region_of_more_parts_as_it_is():
    args = drawn(8, 16, 32), drawn(32, 96)
    graph = RegionGraph(jax.make_jaxpr(jax.grad(_attention, (0, 1)))(*args))
    labels = ((graph.labels(i, 4), graph.labels(i, 8)) for i in range(len(graph.eqns)))
    assert any(four != eight for four, eight in labels)
    known = 0
    for v in list(graph.maker):
        for axis, size in enumerate(v.aval.shape):
            if size % 8:
                continue
            more = in_more_parts(graph, find(graph, v, axis, 4), 8)
            known += more is not None
            assert more is None or more == find(graph, v, axis, 8)
    assert known
