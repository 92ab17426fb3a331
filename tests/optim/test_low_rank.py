"""GaLore, APOLLO and Fira: what the battery of optimizers does not ask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.optim import adama, apollo, fira, galore, scale_by_galore
from jaxmem.optim.low_rank import stored
from jaxmem.optim.low_rank.noise import gaussian, seeds_of
from jaxmem.optim.low_rank.subspace import left_vectors
from tests.optim.cases import low_rank as reference
from tests.optim.cases.case import LR, STEPS

EPS = 2.0**-23


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(values, np.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(tx, params, grads):
    def step(carry, g):
        updates, state = tx.update(g, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), grads)[0]


def assert_near(got, want, rtol):
    """The error against the largest element."""
    want = np.asarray(want, np.float64)
    assert np.abs(np.asarray(got, np.float64) - want).max() <= rtol * np.abs(want).max()


# -- the whole space


@pytest.mark.fast(
    "(6, 4)-svd-std",
    "(6, 4)-svd-reverse_std",
    "(6, 4)-svd-left",
    "(6, 4)-svd-right",
    "(6, 4)-svd-full",
    "(4, 6)-randomized-std",
    "(4, 6)-randomized-full",
)
@pytest.mark.parametrize("projection", ["std", "reverse_std", "left", "right", "full"])
@pytest.mark.parametrize("subspace", ["svd", "randomized"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
def test_of_full_rank_with_sgd_is_sgd(projection, subspace, shape):
    tx = scale_by_galore(
        4, 1, 1.0, projection=projection, subspace=subspace, inner=optax.identity()
    )
    grads = normal(3, 2, *shape)  # stacks of two
    state = tx.init(jnp.asarray(grads[0]))
    step = jax.jit(tx.update)
    for g in grads:
        update, state = step(g, state)
        # two products with orthonormal matrices, of at most six terms each
        assert_near(update, g, 16 * EPS)


def test_of_full_rank_with_momentum_is_momentum():
    """In any basis, as long as it stays."""
    inner = optax.trace(0.9)
    tx = galore(LR, 4, STEPS, 1.0, inner=inner)
    p, grads = jnp.asarray(normal(6, 4)), normal(STEPS, 6, 4, seed=1)
    got, _ = run(tx, p, grads)
    want, _ = run(optax.chain(inner, optax.scale(-LR)), p, grads)
    assert_near(got - p, want - p, 1e-5)


def test_of_full_rank_with_adam_is_adam_in_a_rotated_basis():
    """A new basis, and moments from the old one, at every step."""
    p = normal(6, 4)
    # singular values are well apart: 1, 2, 4, 8 times those of orthogonal matrices
    rotations = normal(2, 6, 6, seed=1)
    u, v = (np.linalg.qr(x)[0] for x in rotations)
    noise = 0.05 * normal(STEPS, 6, 4, seed=2)
    grads = np.float32(u[:, :4] @ np.diag([8.0, 4.0, 2.0, 1.0]) @ v[:4, :4] + noise)
    tx = galore(LR, 4, 1, 1.0, subspace="svd")
    got, _ = run(tx, jnp.asarray(p), grads)
    wide = np.float64(p)
    want = reference.galore_matrix(wide, np.float64(grads), rank=4, gap=1, scale=1.0)
    moved = np.abs(want - wide).max()
    assert np.abs(np.float64(got) - want).max() <= 1e-4 * moved


# -- the subspace


def test_iteration_finds_most_of_what_singular_vectors_hold():
    decay = 0.8 ** np.arange(32)
    u, v = (np.linalg.qr(normal(n, 32, seed=n))[0] for n in (48, 64))
    g = jnp.asarray(u @ np.diag(decay) @ v.T, jnp.float32)[None]
    seeds = seeds_of(0, "w", jnp.int32(0), (1,))
    held = []
    vectors = jnp.zeros((1, 8, 48))
    for _ in range(10):
        vectors = left_vectors(g, vectors, seeds, "randomized", 1)
        gram = np.asarray(vectors[0] @ vectors[0].T)
        assert np.abs(gram - np.eye(8)).max() < 16 * EPS
        held.append(np.square(np.asarray(vectors[0] @ g[0])).sum())
    best = np.square(decay[:8]).sum()
    # an iteration shrinks what the ninth direction has of the eighth's place to 0.8**2
    # of it, and what the others have to less: after ten, to 0.8**20 = 0.01
    assert held[0] > 0.98 * best
    assert held[9] > 0.999 * best


def test_directions_that_the_old_subspace_is_orthogonal_to_are_found():
    """As of an embedding whose rows come and go."""
    g = np.zeros((1, 32, 16), np.float32)
    g[0, 16:20] = normal(4, 16)
    old = jnp.eye(4, 32)[None]
    seeds = seeds_of(0, "w", jnp.int32(3), (1,))
    vectors = left_vectors(jnp.asarray(g), old, seeds, "randomized", 1)
    left = g[0] - np.asarray(vectors[0].T @ (vectors[0] @ g[0]))
    assert np.abs(left).max() < 1e-5 * np.abs(g).max()


def test_vectors_point_as_the_old_ones():
    g = jnp.asarray(normal(2, 8, 6))
    seeds = seeds_of(0, "w", jnp.int32(0), (2,))
    old = left_vectors(g, jnp.zeros((2, 3, 8)), seeds, "svd", 1)
    new = left_vectors(g, -old, seeds, "svd", 1)
    np.testing.assert_array_equal(new, -old)


def test_noise_is_normal_and_each_matrix_its_own():
    seeds = seeds_of(1, "w", jnp.int32(7), (2, 3))
    x = np.asarray(gaussian(seeds, 64, 80))
    n = x.size
    # five standard errors of a mean, of a variance, of a correlation, of a tail
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((np.abs(x) > 2).mean() - 0.0455) < 5 * (0.0455 / n) ** 0.5
    flat = x.reshape(6, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(6)).max() < 5 / flat.shape[1] ** 0.5
    shifted = (x[..., 1:] * x[..., :-1]).mean(), (x[..., 1:, :] * x[..., :-1, :]).mean()
    assert np.abs(shifted).max() < 5 / n**0.5
    one = gaussian(seeds[1, 2], 64, 80)  # as in a scan over layers
    np.testing.assert_array_equal(one, x[1, 2])
    for seed, path, index in ((2, "w", 7), (1, "v", 7), (1, "w", 8)):
        other = seeds_of(seed, path, jnp.int32(index), (2, 3))
        assert not np.intersect1d(other, seeds).size


@pytest.mark.parametrize("make", [galore, fira], ids=lambda f: f.__name__)
def test_stacked_leaves_are_separate_ones(make):
    tx = make(LR, 3, 4, subspace="svd")
    stack, grads = normal(2, 3, 6, 8), normal(10, 2, 3, 6, 8, seed=1)
    got, _ = run(tx, {"w": jnp.asarray(stack)}, {"w": grads})
    for i, j in np.ndindex(2, 3):
        want, _ = run(tx, {"w": jnp.asarray(stack[i, j])}, {"w": grads[:, i, j]})
        assert_near(got["w"][i, j] - stack[i, j], want["w"] - stack[i, j], 1e-4)


# -- the state


@pytest.mark.parametrize(
    ("projection", "projector", "moments"),
    [
        ("std", 4 * 32, 4 * 64),
        ("reverse_std", 4 * 64, 4 * 32),
        ("left", 4 * 32, 4 * 64),
        ("right", 4 * 64, 4 * 32),
        ("full", 4 * (32 + 64), 4 * 4),
    ],
)
def test_numbers_in_the_state(projection, projector, moments):
    """Of a matrix 32 x 64 and rank 4; two of it, stacked."""
    tx = scale_by_galore(4, projection=projection)
    state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct((2, 32, 64), "bfloat16"))
    arrays = lambda tree: [x for x in jax.tree.leaves(tree) if x.ndim]
    assert sum(x.size for x in arrays(state.projectors)) == 2 * projector
    assert sum(x.size for x in arrays(state.inner)) == 2 * 2 * moments
    assert {x.dtype.name for x in arrays(state)} == {"float32"}


@pytest.mark.fast("512-int4-0.5-15", "48-int8-1-255")
@pytest.mark.parametrize(
    ("kind", "each", "bound"), [("int8", 1, 255), ("int4", 0.5, 15)]
)
@pytest.mark.parametrize("columns", [512, 48])
def test_codes_are_off_by_at_most_a_step(kind, each, bound, columns):
    x = normal(3, 4, columns) + np.float32([0, 5, -5, 0])[:, None]
    kept = stored.store(jnp.asarray(x), kind)
    back = np.asarray(stored.load(kept, columns))
    group = 256 if columns % 256 == 0 else columns
    groups = x.reshape(-1, group)
    span = np.maximum(groups.max(1), 0) - np.minimum(groups.min(1), 0)
    error = np.abs(back - x).reshape(-1, group).max(1)
    assert (error <= (1 + 1e-5) * span / bound).all()
    assert sum(a.nbytes for a in kept) == x.size * each + 5 * len(groups)
    zeros = stored.store(jnp.zeros((2, columns)), kind)
    np.testing.assert_array_equal(stored.load(zeros, columns), 0)


def test_bfloat16_projectors_are_rounded_under_jit():
    x = jnp.asarray(normal(4, 64))
    rounded = jax.jit(lambda x: stored.load(stored.store(x, "bfloat16"), 64))(x)
    np.testing.assert_array_equal(rounded, np.float32(x.astype(jnp.bfloat16)))


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_stored_projectors_change_little(kind):
    # each vector of length 1 is off by about half a step an element, at random
    error = {"bfloat16": 2.0**-8, "int8": 8 / 255, "int4": 8 / 15}[kind]
    given, g = jnp.asarray(normal(24, 32)), jnp.asarray(normal(24, 32, seed=1))
    update = lambda kind: scale_by_galore(
        8, subspace="svd", projector_dtype=kind, inner=optax.identity()
    )
    got, want = (
        jax.jit(lambda g, p, tx=tx: tx.update(g, tx.init(p))[0])(g, given)
        for tx in (update(kind), update("float32"))
    )
    assert 0 < np.linalg.norm(got - want) <= error * np.linalg.norm(want)


def test_a_lazy_gap_doubles_while_the_subspace_stays():
    tx = scale_by_galore(2, 2, lazy=True, subspace="svd")
    one = normal(6, 5)
    turned = lambda t: np.roll(np.eye(6, 5) * [9, 1, 1, 1, 1], t // 2, (0, 1))
    state = tx.init(jnp.zeros((2, 6, 5)))
    update = jax.jit(tx.update)
    refreshes = [[], []]
    for t in range(40):
        g = jnp.asarray(np.stack([one, turned(t)]), jnp.float32)
        before = np.asarray(state.projectors.refresh_at)
        _, state = update(g, state)
        for i in np.flatnonzero(before != state.projectors.refresh_at):
            refreshes[i].append(t)
    # six projectors are five pairs; the other layer turns each time
    assert refreshes[0] == [0, 2, 4, 6, 8, 10, 14, 22, 38]
    assert refreshes[1] == [*range(0, 40, 2)]
    np.testing.assert_array_equal(state.projectors.lazy.gap, [32, 2])


# -- the rules' own


def test_eps_as_the_reference_places_it():
    p, grads = normal(8), 1e-6 * normal(STEPS, 8, seed=1)
    got, _ = run(galore(LR, 1, eps_placement="reference"), jnp.asarray(p), grads)
    want = reference.whole(np.float64(p), np.float64(grads))
    other, _ = run(galore(LR, 1), jnp.asarray(p), grads)
    moved = np.abs(want - p).max()
    # a parameter of order 1 is rounded once a step
    assert np.abs(got - want).max() <= 1e-5 * moved + STEPS * 2.0**-25
    assert np.abs(other - want).max() > 0.1 * moved


@pytest.mark.parametrize("rate", [0.1, lambda t: 0.1 / (1 + jnp.float32(t))])
def test_weight_decay_is_of_the_new_parameters(rate):
    p, g = jnp.asarray(normal(6, 4)), jnp.asarray(normal(6, 4, seed=1))
    decayed = galore(rate, 2, weight_decay=0.5, mask={"a": True, "b": False})
    plain = galore(rate, 2)
    params, grads = {"a": p, "b": p}, {"a": g, "b": g}
    state = decayed.init(params)
    states = plain.init(params)
    decayed_update, plain_update = jax.jit(decayed.update), jax.jit(plain.update)
    for t in range(2):
        lr = rate(t) if callable(rate) else rate
        updates, state = decayed_update(grads, state, params)
        steps, states = plain_update(grads, states, params)
        want = (1 - lr * 0.5) * (params["a"] + steps["a"])
        assert_near(params["a"] + updates["a"], want, 4 * EPS)
        np.testing.assert_array_equal(updates["b"], steps["b"])
        params = optax.apply_updates(params, updates)
    with pytest.raises(ValueError, match="params"):
        decayed.update(grads, state)


@pytest.mark.parametrize("make", [apollo, fira], ids=lambda f: f.__name__)
def test_a_gradient_of_zeros_does_not_stop_the_next(make):
    tx = make(1.0, 4)
    state = tx.init(jnp.zeros((6, 4)))
    g = jnp.asarray(normal(6, 4))
    sizes, step = [], jax.jit(tx.update)
    for x in (jnp.zeros_like(g), g, g):
        update, state = step(x, state)
        sizes.append(float(jnp.linalg.norm(update)))
    assert sizes[0] == 0
    assert sizes[1] > 1


def test_apollo_mini_steps_along_the_gradient():
    tx = apollo(1.0, 1, scaling="tensor")
    g = jnp.asarray(normal(6, 4))
    update, state = tx.update(g, tx.init(g))
    cosine = jnp.sum(update * g) / jnp.linalg.norm(update) / jnp.linalg.norm(g)
    assert float(cosine) == pytest.approx(-1, abs=8 * EPS)
    assert sum(x.size for x in jax.tree.leaves(state[0].moments)) == 2 * 6 + 1


# -- micro-batches


def accumulated(tx, state, grads, **extra):
    for g in grads:
        _, state = tx.update(g, state, phase="accumulate", micro_batches=4, **extra)
    return tx.update(grads[0], state, phase="apply")


def test_accumulation_in_the_subspace_is_exact():
    options = {"gap": 2, "subspace": "svd", "projected": "w"}
    several = scale_by_galore(3, **options, micro_batches=4)
    whole = scale_by_galore(3, **options)
    shapes = {"w": (2, 6, 8), "b": (2, 8)}
    state = several.init({k: jnp.zeros(s) for k, s in shapes.items()})
    sizes = {k: x.shape for k, x in state.accumulated.items()}
    assert sizes == {"w": (2, 3, 8), "b": (2, 8)}
    for t in range(4):
        grads = [
            {k: jnp.asarray(normal(*s, seed=10 * t + i)) for k, s in shapes.items()}
            for i in range(4)
        ]
        mean = jax.tree.map(lambda *g: sum(g) / 4, *grads)
        before = state.galore
        got, state = accumulated(several, state, grads)
        # the projector is that of the first micro-batch: the plain rule is given it
        held = before._replace(projectors=state.galore.projectors)
        want, held = whole.update(mean, held)
        for k in shapes:
            assert_near(got[k], want[k], 1e-5)
        first = whole.update(grads[0], before)[1].projectors["w"]
        np.testing.assert_allclose(state.galore.projectors["w"].left, first.left)
    assert [int(x) for x in state[:3]] == [4, 0, 4]


def test_a_skipped_micro_batch_makes_no_projector():
    tx = scale_by_galore(2, micro_batches=4)
    g = jnp.asarray(normal(4, 6, 5))
    bad = jnp.full((6, 5), jnp.nan)
    with_skips = tx.init(g[0])
    plain = tx.init(g[0])
    share = {"phase": "accumulate", "weight": 0.5}
    for x in (bad, g[0], bad, g[1]):
        keep = bool(jnp.isfinite(x).all())
        _, with_skips = tx.update(x, with_skips, keep=keep, **share)
        if keep:
            _, plain = tx.update(x, plain, **share)
    got, want = (tx.update(g[0], s, phase="apply")[0] for s in (with_skips, plain))
    np.testing.assert_array_equal(got, want)
    assert bool(jnp.isfinite(got).all())


# -- calls that do not fit

W, B = jnp.ones((6, 4)), jnp.ones(4)


@pytest.mark.parametrize(
    ("make", "params", "message"),
    [
        (lambda: galore(LR, 5), {"w": W}, r"rank=5 is larger than the leaf \['w'\]"),
        (lambda: fira(LR, 5), {"w": W}, r"rank=5 is larger than the leaf \['w'\]"),
        (lambda: apollo(LR, 5), {"w": W}, r"rank=5 is larger than the leaf \['w'\]"),
        (
            lambda: galore(LR, 2, projected="a"),
            {"a": {"b": B}, "w": W},
            r"the leaf \['a'\]\['b'\], float32\[4\], which has fewer than two axes",
        ),
        (lambda: galore(LR, 2, projected="x"), {"w": W}, "'x' matches no path"),
        (
            lambda: galore(LR, 2, projector_dtype="int4"),
            {"w": jnp.ones((9, 7))},
            r"int4' for the leaf \['w'\], float32\[9,7\]: two codes of 4 bits",
        ),
        (lambda: galore(LR, 2), {"w": W.astype(int)}, r"the leaf \['w'\]"),
        (lambda: galore(LR, 2, inner=adama(LR)), {"w": W}, "accumulates gradients"),
    ],
)
def test_parameters_that_do_not_fit(make, params, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make().init(params)


def test_states_that_do_not_fit():
    params = {"w": W, "b": B}
    state = galore(LR, 2).init(params)
    with pytest.raises(ValueError, match=r"state\.projectors\['w'\].* makes float32"):
        galore(LR, 3).update(params, state)
    others = {"projector_dtype": "int8"}, {"lazy": True}, {"projection": "reverse_std"}
    for tx in (galore(LR, 2, **options) for options in others):
        with pytest.raises(ValueError, match="not of the structure"):
            tx.update(params, state)
    for tx in (fira(LR, 2), apollo(LR, 2), galore(LR, 2, micro_batches=2)):
        with pytest.raises(TypeError, match="that .* init makes"):
            tx.update(params, state)


def test_an_inner_transformation_that_needs_parameters():
    tx = galore(LR, 2, inner=optax.add_decayed_weights(0.1))
    with pytest.raises(ValueError, match="inner asks for params"):
        tx.update({"w": W}, tx.init({"w": W}), {"w": W})
