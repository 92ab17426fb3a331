"""Shampoo: beside numpy, its blocks and grafts, its bytes and codes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.optim import LowBit, scale_by_shampoo, shampoo
from jaxmem.optim.preconditioned.blocks import block_groups, joined
from jaxmem.optim.preconditioned.roots import inverse_root
from jaxmem.optim.preconditioned.symmetric import load_symmetric
from tests.optim.cases.shampoo import EPS, shampoo_reference
from tests.optim.test_soap import (
    LR,
    Dims,
    compiles_in_place,
    draw,
    layers,
    run,
    train_step,
)

HOW = {"eps": EPS, "precondition_frequency": 4}


@pytest.mark.parametrize(
    "shape, how",
    [
        ((8, 8), {}),
        ((7, 12), {"grafting": "rmsprop"}),
        ((12, 5), {"grafting": "sgd", "b2": 1.0}),
        ((12, 5), {"grafting": None, "b2": 0.9}),
        ((1, 6), {"start_preconditioning_step": 2}),
        ((20, 8), {"block_size": 8}),
        ((21, 35), {"block_size": 16, "start_preconditioning_step": 6}),
        ((16, 32), {"block_size": 8, "grafting": "rmsprop"}),
        ((5, 9), {"block_size": 1}),
        ((8, 8), {"one_sided": True}),
        ((6, 11), {"one_sided": True, "grafting": "sgd", "b2": 1.0}),
        ((21, 10), {"one_sided": True, "block_size": 8}),
    ],
    ids=str,
)
def test_as_the_reference(shape, how):
    p, grads = draw(shape, 14)
    got, _ = run(shampoo(LR, **HOW, **how), p, grads)
    names = {"grafting": "kind", "block_size": "block", "b2": "b2"}
    names |= {"start_preconditioning_step": "start", "one_sided": "one_sided"}
    same = {"block": 1024} | {names[k]: x for k, x in how.items()}
    wide = np.float64(p)
    want = shampoo_reference(wide, np.float64(grads), every=4, decay=0.0, **same)
    error, moved = np.abs(got - want).max(), np.abs(want - wide).max()
    # an eigenvalue near 0 is off by the roundings of the largest, of which eps is 1e-4
    assert error < 1e-4 * moved, error / moved


@pytest.mark.parametrize("shape, size", [((5, 7), 3), ((6, 4), 2), ((2, 9), 4)])
def test_blocks_are_cut_and_joined(shape, size):
    x = jnp.arange(np.prod(shape)).reshape(shape)
    groups = block_groups(*shape, size)
    assert sum(g.blocks for row in groups for g in row) == np.prod(
        [-(-n // size) for n in shape]
    )
    back = joined([[g.placed(g.taken(x)) for g in row] for row in groups])
    np.testing.assert_array_equal(back, x)


def test_root_of_a_matrix_that_roundings_made_indefinite():
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
    values = np.array([-1e-3, 0.0, 1e-2, 0.5, 1.0, 2.0])
    gram = jnp.asarray((vectors * values) @ vectors.T, jnp.float32)
    want = (vectors * (values + 1e-3 + 1e-2) ** -0.25) @ vectors.T
    np.testing.assert_allclose(inverse_root(gram, 4, 1e-2), want, atol=1e-4)
    least = np.maximum(values, 1e-3) + 1e-2
    want = (vectors * least**-0.25) @ vectors.T
    np.testing.assert_allclose(inverse_root(gram, 4, 1e-2, True), want, atol=1e-4)


def test_matrices_of_stacks_each_by_itself():
    p, grads = draw((3, 10, 7), 6)
    how = {**HOW, "block_size": 4, "precondition_frequency": 2}
    got, _ = run(shampoo(LR, stacked="*", **how), {"w": p}, {"w": grads})
    for i in range(3):
        want, _ = run(shampoo(LR, **how), p[i], grads[:, i])
        np.testing.assert_allclose(got["w"][i], want, rtol=1e-5, atol=1e-6)
    turned = {"w": np.moveaxis(p, 0, 1)}, {"w": np.moveaxis(grads, 1, 2)}
    numbers = {"w": Dims(0, 2)}
    back, _ = run(shampoo(LR, weight_dimension_numbers=numbers, **how), *turned)
    np.testing.assert_allclose(np.moveaxis(back["w"], 1, 0), got["w"], atol=1e-6)


def test_other_leaves_take_the_grafted_rule():
    start = {"b": jnp.ones(5), "s": jnp.float32(2.0), "stack": jnp.ones((2, 3, 4))}
    start |= {"empty": jnp.ones((0, 4)), "layers": jnp.ones((0, 3, 4))}
    r = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda p: r.standard_normal((5, *p.shape)).astype("float32"), start
    )
    got, state = run(shampoo(LR), start, grads)
    assert not jax.tree.leaves(state[0].blocks)
    with jax.numpy_dtype_promotion("standard"):  # optax's own counters need it
        want, _ = run(optax.adam(LR, 0.9, 0.999), start, grads)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    "how, moments, sides",
    [
        ({}, 8, 16),
        ({"grafting": "sgd"}, 4, 16),
        ({"bits": 8, "preconditioner_dtype": "bfloat16"}, 2.125, 8),
        # codes of half of two matrices a side, their scales, zeros and diagonals
        (
            {"bits": 8, "preconditioner_dtype": "int8"},
            2.125,
            4 * ((1 + 5 / 128) / 2 + 4 / 256),
        ),
        (
            {"bits": 4, "preconditioner_dtype": "int8", "one_sided": True},
            1.0625,
            2 * ((1 + 5 / 128) / 2 + 4 / 256),
        ),
    ],
    ids=str,
)
def test_bytes(how, moments, sides):
    m, n, layers = 512, 1024, 2
    tx = shampoo(LR, stacked="w", block_size=256, **how)
    shapes = {"w": jax.ShapeDtypeStruct((layers, m, n), jnp.float32)}
    state = jax.tree.leaves(jax.eval_shape(tx.init, shapes))
    held = sum(x.size * x.dtype.itemsize for x in state)
    assert held - 4 == layers * m * n * (moments + sides)  # less the count


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_roots_in_few_bits(kind):
    """Each is off by the rounding of its own elements, of Gram matrices as kept."""
    p, grads = draw((32, 32), 4)
    how = {**HOW, "preconditioner_dtype": kind}
    _, state = run(scale_by_shampoo(**how), p, grads)
    (blocks,) = state.blocks
    for side in blocks:
        gram, root = (jax.tree.map(lambda x: x[0], x) for x in side)
        mean = np.float64(load_symmetric(gram)) / (1 - 0.999**4)
        values, vectors = np.linalg.eigh(mean)
        values = np.maximum(values, -values[0]) + EPS
        want = (vectors * values**-0.25) @ vectors.T
        off = want - np.diag(np.diag(want))
        gap = (off.max() - off.min()) / 255 if kind == "int8" else 2.0**-8 * want.max()
        # half a code of a value and of the code of 0; roots of float32's eigenvalues
        assert np.abs(load_symmetric(root) - want).max() < gap + 1e-3 * want.max()


CODES = {"bits": LowBit(8, least_size=0), "preconditioner_dtype": "int8"}
ONE_SIDE = CODES | {"one_sided": True}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, CODES, ONE_SIDE], ids=["float32", "codes", "one"])
def test_released(how):
    """In the backward scan over layers: the same values, and no more bytes."""
    tx = shampoo(LR, stacked="*", block_size=32, **{**HOW, **how})
    step, start = train_step(tx), layers()
    state, x = (start, tx.init(start)), jnp.ones((8, 32))
    scheduled = jaxmem.schedule(step, donate_argnums=0)
    plan = scheduled.plan(state, x)
    assert [g.released for g in plan.gradients] == [True] * 2, str(plan)
    plain = jaxmem.estimate(jax.jit(step, donate_argnums=0), state, x)
    assert jaxmem.estimate(scheduled, state, x).peak_bytes < plain.peak_bytes
    ours, got = jaxmem.schedule(step, donate_argnums=()), state
    for _ in range(5):
        state, got = jax.jit(step)(state, x)[0], ours(got, x)[0]
    chex.assert_trees_all_close(got[0], state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
def test_compiles_for_absent_chips(target):
    compiles_in_place(shampoo(LR, stacked="*", block_size=32), target)


@pytest.mark.parametrize(
    "how, words",
    [
        ({"b2": 0.0}, "b2=0.0.*more than 0"),
        ({"grafting": "adamw"}, "grafting='adamw'.*'rmsprop'.*None"),
        ({"block_size": 0}, "block_size=0"),
        ({"start_preconditioning_step": 0}, "start_preconditioning_step=0"),
        ({"bits": LowBit(8, on_host=True)}, "on_host"),
    ],
)
def test_arguments(how, words):
    with pytest.raises((TypeError, ValueError), match=words):
        shampoo(LR, **how)
