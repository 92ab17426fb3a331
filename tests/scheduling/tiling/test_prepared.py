"""Barriers of what runs in no tile are those of the step as it was given."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import by_shape
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.unrolled import Unrolled
from jaxmem.scheduling.tiling.prepared import prepared, with_whole_barriers
from jaxmem.scheduling.tiling.tiles import Tiles
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles

X = jnp.ones((4, 8))


def sizes(closed):
    """How many arrays each barrier of a list holds."""
    eqns = jaxprs.split(closed)[0].eqns
    return [len(eqn.invars) for eqn in eqns if primitives.is_barrier(eqn)]


def test_a_barrier_is_parted_and_put_together():
    def fn(x, y, z):
        held = lax.optimization_barrier((x, y, z))
        again = lax.optimization_barrier((held[0] @ held[1].T, held[2]))
        return sum(map(jnp.sum, again))

    closed = jax.make_jaxpr(fn)(X, X, X)
    parted = prepared(closed, in_scan=False)
    assert sizes(closed) == [3, 2] and sizes(parted) == [1] * 5
    whole = with_whole_barriers(parted)
    assert sizes(whole) == [3, 2]
    assert jaxprs.evaluate(whole, [X, X, X]) == [fn(X, X, X)]
    assert with_whole_barriers(whole) is whole


def test_what_reads_one_barrier_is_in_another():
    def fn(x, y):
        once = lax.optimization_barrier(x)
        return lax.optimization_barrier(once) + lax.optimization_barrier(y)

    whole = with_whole_barriers(jax.make_jaxpr(fn)(X, X))
    assert sorted(sizes(whole)) == [1, 2]
    assert (jaxprs.evaluate(whole, [X, X])[0] == 2 * X).all()


def test_arrays_that_vary_over_other_axes_are_held_by_another():
    def fn(x, y):  # x is in parts on the devices, y is whole
        a, b = lax.optimization_barrier(x), lax.optimization_barrier(y)
        c, d = lax.optimization_barrier(x), lax.optimization_barrier(y)
        return a + b + c + d

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("x",))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    (eqn,) = jax.make_jaxpr(mapped)(X, X[:2]).eqns
    (body,) = jaxprs.bodies(eqn)
    closed = body if hasattr(body, "consts") else _compat.ClosedJaxpr(body, ())
    assert sizes(closed) == [1] * 4
    assert sizes(with_whole_barriers(closed)) == [2, 2]


LAYERS, TOKENS, WIDTH, WORDS = 4, 4096, 256, 16384


def gradient(params, x, labels):
    """Of layers that are written out, and its arguments."""

    def loss(params):
        y = x
        for up, down in params["layers"]:
            y = y + jax.nn.gelu(y @ up) @ down
        logits = (y @ params["head"]).astype("float32")
        of_each = optax.softmax_cross_entropy_with_integer_labels
        return of_each(logits, labels).mean()

    return jax.grad(loss)(params)


@functools.cache
def made(*configs):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    layers = [(of(WIDTH, 8 * WIDTH), of(8 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    params = {"layers": layers, "head": of(WIDTH, WORDS)}
    args = params, of(TOKENS, WIDTH), jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    closed = jax.make_jaxpr(gradient)(*args)
    choice = Choice("h100").having(*configs)
    return rewrite(closed, by_shape(closed, ()), choice=choice), args


def peak(*configs):
    found, args = made(*configs)
    step = lambda *args: found.run(jax.tree.leaves(args))
    return jaxmem.estimate(step, *args, target="h100").peak_bytes


RECOMPUTED = Unrolled(rate=1e12, reductions=True, layer_inputs=1)


def test_beside_blocks_recomputation_waits_for_its_gradient():
    kept = 2 * LAYERS * TOKENS * 8 * WIDTH * 2  # a layer's GELU, before and after it
    blocks = VocabularyTiles(n=4)
    assert peak(RECOMPUTED, blocks) < peak(blocks) - kept
    assert peak(RECOMPUTED, blocks) < peak(RECOMPUTED)


@pytest.mark.parametrize("tiles", [VocabularyTiles(n=4), Tiles(limit=2**25)])
def test_no_barrier_outside_of_tiles_is_parted(tiles):
    assert min(sizes(made(RECOMPUTED)[0].jaxpr)) > 1
    assert min(sizes(made(RECOMPUTED, tiles)[0].jaxpr)) > 1
