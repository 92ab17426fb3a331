"""`galore.paper`, and that signs of projectors survive a checkpoint."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.optim import LowBit, galore
from jaxmem.optim.low_rank import subspace
from tests.optim.cases import low_rank as reference

LR, RANK, GAP, STEPS = 1e-2, 4, 3, 8


def gradients(steps, m, n, size=1.0):
    """[steps, m, n], whose singular values are apart: as `low_rank.apart` says."""
    values = np.random.default_rng(m * n).standard_normal((steps, m, n))
    u, s, vh = np.linalg.svd(values, full_matrices=False)
    even = size * np.arange(s.shape[-1], 0, -1) / s.shape[-1]
    return np.float32(u * even @ vh)


def published(grads, placed, eps):
    """The parameter's movement, in float64: the rule of the paper's algorithm 2."""
    m = v = moved = 0.0
    rows = zip(grads, reference.projectors(grads, RANK, GAP), strict=True)
    for t, (g, by) in enumerate(rows, 1):
        low = reference.down(g, *by)
        m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
        root = np.sqrt(1 - 0.999**t)
        added = eps if placed == "reference" else eps * root
        step = root / (1 - 0.9**t) * m / (np.sqrt(v) + added)
        moved = moved - LR * 0.25 * reference.up(step, *by)
    return moved


def run(tx, params, grads, state=None):
    """Parameters and state after these gradients, a call each."""
    state = tx.init(params) if state is None else state
    step = jax.jit(tx.update)
    for g in grads:
        updates, state = step(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(
    ("bits", "placed", "eps"), [(8, "optax", 1e-8), (32, "reference", 1e-6)]
)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=str)
def test_the_rule_is_the_published_one(bits, placed, eps, shape):
    """Of few numbers, which keep float32 moments with 8 bits too.

    Gradients are as large as eps, so that a step depends on where it is added.
    """
    grads = gradients(STEPS, *shape, size=10 * eps)
    tx = galore.paper(LR, RANK, GAP, bits=bits)
    got, _ = run(tx, jnp.zeros(shape), jnp.asarray(grads))
    want = published(np.float64(grads), placed, eps)
    # values are apart by a sixth of the largest: the vectors are off by some 6 eps of
    # float32, the sums of a product of ten terms by ten more
    bound = 1e-5 * np.abs(want).max()
    assert np.abs(got - want).max() <= bound
    other = {"optax": "reference", "reference": "optax"}[placed]
    assert np.abs(got - published(np.float64(grads), other, eps)).max() > 100 * bound


def test_defaults_and_what_is_passed_on():
    said = inspect.signature(galore.paper).parameters
    defaults = {k: said[k].default for k in ("rank", "gap", "scale", "weight_decay")}
    assert defaults == {"rank": 128, "gap": 200, "scale": 0.25, "weight_decay": 0.0}
    assert said["bits"].default == LowBit(8)
    assert galore.__name__ == "galore"
    assert galore.paper.__qualname__ == "galore.paper"
    params = {"w": jnp.ones((64, 256)), "b": jnp.ones((4, 8))}
    tx = galore.paper(LR, 16, projected="w", micro_batches=2, weight_decay=0.1)
    state = tx.init(params)[0]
    assert {k: x.shape for k, x in state.accumulated.items()} == {
        "w": (16, 256), "b": (4, 8),
    }  # fmt: skip
    assert state.galore.inner.mu["w"].codes.dtype == jnp.int8
    assert state.galore.projectors["b"] is None


def test_projectors_have_the_dtypes_of_the_gradients():
    params = {
        kind: jnp.asarray(gradients(1, 12, 16)[0], kind)
        for kind in ("bfloat16", "float16", "float32")
    }
    tx = galore.paper(LR, RANK)
    update, state = tx.update(params, tx.init(params))
    for kind, projector in state[0].projectors.items():
        assert projector.left.dtype == kind == update[kind].dtype
        assert projector.left.shape == (RANK, 12)
        # rows of length 1, whose elements are each off by at most half a unit
        product = np.float64(projector.left) @ np.float64(projector.left).T
        unit = float(jnp.finfo(kind).eps)
        assert np.abs(product - np.eye(RANK)).max() <= 4 * unit


def by_pickle(state, shapes, path):
    del shapes, path
    return pickle.loads(pickle.dumps(state))


def by_orbax(state, shapes, path):
    ocp = pytest.importorskip("orbax.checkpoint")
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path / "state", state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(path / "state", shapes)


OPTIONS = {
    "paper": lambda: galore.paper(LR, RANK, GAP),
    "int8": lambda: galore(LR, RANK, GAP, subspace="svd", projector_dtype="int8"),
    "int4": lambda: galore(LR, RANK, GAP, subspace="svd", projector_dtype="int4"),
    "lazy": lambda: galore(LR, RANK, GAP, subspace="svd", lazy=True),
}
SVD = jax.lax.linalg.svd


def other_signs(x, **how):
    """The decomposition of another machine: each pair of vectors turned round."""
    u, s, vh = SVD(x, **how)
    return -u, s, -vh


@pytest.mark.parametrize("restore", [by_pickle, by_orbax], ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", OPTIONS)
def test_a_restored_run_turns_new_vectors_as_the_old(
    make, restore, monkeypatch, tmp_path
):
    """Two refreshes come after the restore, whose decompositions have other signs."""
    tx, grads = OPTIONS[make](), jnp.asarray(gradients(STEPS + 1, 12, 16))
    params = jnp.zeros((12, 16))
    want, last = run(tx, params, grads)
    half, state = run(tx, params, grads[:2])
    back = restore(state, jax.eval_shape(tx.init, params), tmp_path)
    monkeypatch.setattr(subspace.lax.linalg, "svd", other_signs)
    got, end = run(tx, half, grads[2:], back)
    jax.tree.map(np.testing.assert_array_equal, (got, end), (want, last))
    # without the old vectors moments would be of other directions
    lost = jax.tree.map(jnp.zeros_like, state[0].projectors.left)
    projector = state[0].projectors._replace(left=lost)
    without = state[0]._replace(projectors=projector), *state[1:]
    refreshed = run(tx, half, grads[3:], without)[0]
    kept = run(tx, half, grads[3:], state)[0]
    assert np.abs(refreshed - kept).max() > 0.1 * LR * 0.25
