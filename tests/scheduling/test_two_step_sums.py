"""Sums over rows in two steps: which, values, where they stand, seconds and bytes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import by_shape
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.shards import Shardings, of_shardings
from jaxmem.scheduling import Choice
from jaxmem.scheduling._passes import rewrite, searched
from jaxmem.scheduling._searched import SearchedStep
from jaxmem.scheduling.sums.two_steps import Split, TwoStepSums, split_of

GPU = Choice("h100")
PROCESSORS = 132


def sums_in(closed) -> list:
    return [e for e in jaxprs.walk(closed) if primitives.is_reduce_sum(e)]


def split(shape, axes, dtype=jnp.float32) -> Split | None:
    closed = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, axes))(
        jax.ShapeDtypeStruct(shape, dtype)
    )
    (eqn,) = sums_in(closed)
    return split_of(eqn, Shardings(), PROCESSORS)


def made(fn, *args, choice=GPU):
    closed = jax.make_jaxpr(fn)(*args)
    return rewrite(closed, by_shape(closed, ()), None, choice)


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((8, 512, 768), (0, 1), Split((8, 2, 256, 768), (2,), (0, 1))),
        ((4096, 768), (0,), Split((16, 256, 768), (1,), (0,))),
        ((2, 64, 2048, 96), (2,), Split((2, 64, 2, 1024, 96), (3,), (2,))),
        ((1, 2048, 1024), (0, 1), Split((1, 16, 128, 1024), (2,), (0, 1))),
    ],
)
def test_rows_are_put_into_groups(shape, axes, expected):
    assert split(shape, axes) == expected
    assert np.prod(expected.shape) == np.prod(shape)


@pytest.mark.parametrize(
    ("shape", "axes", "why"),
    [
        ((16, 512, 768), (0, 1), "XLA makes two steps of more than 4,096 rows"),
        ((128, 768), (0,), "few rows"),
        ((8, 512), (0, 1), "all is summed"),
        ((8, 512), (1,), "rows, which keep all processors busy"),
        ((64, 8, 512, 64), (0, 2), "axes that are apart"),
        ((8, 512, 65536), (0, 1), "columns enough"),
        ((0, 512, 64), (0, 1), "nothing to sum"),
        ((0, 512, 64), (1,), "no columns"),
        ((1, 2048, 65536), (0, 1), "one group"),
        ((4093, 64), (0,), "no divisor"),
    ],
)
def test_sums_that_stay_one(shape, axes, why):
    assert split(shape, axes) is None, why


def test_integers_stay_one():
    assert split((8, 512, 768), (0, 1), jnp.int32) is None


def test_weak_types_stay_as_they_are():
    fn = lambda x: jax.lax.reduce_sum(jax.lax.broadcast(2.5, (512, 40)), (0,)) * x
    assert not made(fn, jnp.ones(40)).did(TwoStepSums)


def test_gradients_on_a_mesh_that_jax_shards():
    """The transposition of a broadcast names the mesh of its operand."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda x, *spec: jax.device_put(
        x, NamedSharding(mesh, PartitionSpec(*spec))
    )
    args = place(jnp.ones(128)), place(jnp.ones((16, 512, 128)), "data")
    step = jax.grad(lambda b, x: jnp.sum(jnp.tanh(x + jnp.broadcast_to(b, x.shape))))
    plan = jaxmem.schedule(step, target="h100", donate_argnums=()).plan(*args)
    assert "sums over rows are done in two steps" in str(plan)
    assert plan.scheduled.sent_bytes <= plan.plain.sent_bytes


def test_a_budget_that_the_step_fits():
    step = lambda x: (x, jnp.sum(x, axis=(0, 1)))
    args = (jnp.ones((8, 256, 128)),)
    how = {"target": "h100", "donate_argnums": (0,)}
    peak = jaxmem.estimate(step, *args, **how).peak_bytes
    assert jaxmem.schedule(step, peak, **how).plan(*args).scheduled.peak_bytes <= peak


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values(dtype):
    x = jax.random.normal(jax.random.key(0), (3, 700, 40), jnp.float32).astype(dtype)
    fn = lambda x: jax.lax.reduce_sum(x, (0, 1))
    after = made(fn, x)
    assert after.did(TwoStepSums)
    (found,) = after.run([x])
    exact = np.asarray(x, np.float64).sum((0, 1))
    magnitude = np.abs(np.asarray(x, np.float64)).sum((0, 1))
    # float32 adds 2,100 numbers; the result is rounded once
    eps = float(jnp.finfo(jnp.float32).eps)
    limit = 2100 * eps * magnitude + float(jnp.finfo(dtype).eps) * np.abs(exact)
    assert found.dtype == dtype
    assert np.all(np.abs(np.asarray(found, np.float64) - exact) <= limit)


def scaled(x, by):
    return x * jnp.broadcast_to(by, x.shape)


def in_scan(x):
    body = lambda c, row: (c + jnp.sum(scaled(row, c), axis=(0, 1)), None)
    return jax.lax.scan(body, jnp.ones(x.shape[-1]), x)[0]


def in_branch(x):
    more = lambda x: jnp.sum(x[0], axis=(0, 1))
    return jax.lax.cond(x[0, 0, 0, 0] > 0, more, lambda x: x[0, 0, 0], x)


def in_while(x):
    body = lambda c: (c[0] + 1, c[1] + jnp.sum(scaled(x[0], c[1]), axis=(0, 1)))
    return jax.lax.while_loop(lambda c: c[0] < 2, body, (0, x[0, 0, 0]))[1]


def in_remat(x):
    loss = jax.checkpoint(lambda w: jnp.sum(jnp.sin(scaled(x[0], w)) ** 2))
    return jax.grad(loss)(jnp.ones(x.shape[-1]))


@pytest.mark.parametrize("fn", [in_scan, in_branch, in_while, in_remat])
def test_in_bodies(fn):
    x = jax.random.uniform(jax.random.key(1), (2, 4, 256, 24)) / 256
    after = made(fn, x)
    assert after.did(TwoStepSums)
    (found,) = after.run([x])
    np.testing.assert_allclose(found, fn(x), rtol=1024 * 2e-7)


@pytest.mark.parametrize("target", ["cpu", "tpu-v5e"])
def test_gpus_alone(target):
    fn = lambda x: jnp.sum(x, axis=(0, 1))
    assert not made(fn, jnp.ones((8, 512, 64)), choice=Choice(target)).did(TwoStepSums)


def test_switched_off():
    fn = lambda x: jnp.sum(x, axis=(0, 1))
    choice = GPU.having(TwoStepSums(enabled=False))
    assert not made(fn, jnp.ones((8, 512, 64)), choice=choice).did(TwoStepSums)
    assert Choice.from_dict(choice.to_dict(), {"two_step_sums": TwoStepSums}) == choice


def two_sums(x):
    return jnp.sum(x, axis=(0, 1)), jnp.sum(jnp.sin(x), axis=(0, 1))


def test_the_first_sums_can_be_left():
    x = jnp.ones((8, 512, 64))
    count = lambda left: len(
        sums_in(made(two_sums, x, choice=GPU.having(TwoStepSums(left=left))).jaxpr)
    )
    assert [count(left) for left in range(4)] == [4, 3, 2, 2]


def test_less_and_less_is_done_where_bytes_do_not_allow_it():
    x = jnp.ones((8, 512, 64))
    step = SearchedStep(
        SimpleNamespace(rewritten=lambda c: made(two_sums, x, choice=c))
    )
    own = next(one for one in searched() if one.config is TwoStepSums)
    assert [*own.undone(step, GPU)] == [
        TwoStepSums(left=1),
        TwoStepSums(enabled=False),
    ]
    assert not [*own.undone(step, GPU.having(TwoStepSums(enabled=False)))]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # of 8 examples a device has one: 2,048 rows of its own are in groups
        (PartitionSpec("data"), Split((8, 16, 128, 768), (2,), (0, 1))),
        # devices would send what each group gives
        (PartitionSpec(None, "data"), None),
    ],
)
def test_rows_of_one_device(spec, expected):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    closed = jax.make_jaxpr(lambda x: jnp.sum(x, axis=(0, 1)))(
        jax.ShapeDtypeStruct((8, 2048, 768), jnp.float32)
    )
    given = of_shardings(closed, [NamedSharding(mesh, spec)])
    (eqn,) = sums_in(closed)
    assert split_of(eqn, shardings_in(closed, given), PROCESSORS) == expected


def layers(params, x):
    def layer(x, w):
        scale, bias, kernel = w
        x = scaled(x, scale) + jnp.broadcast_to(bias, x.shape)
        return x + jnp.tanh(x @ kernel), None

    return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)


def problem():
    keys = jax.random.split(jax.random.key(2), 3)
    params = (
        jnp.ones((4, 256)),
        0.1 * jax.random.normal(keys[0], (4, 256)),
        jax.random.normal(keys[1], (4, 256, 256)) / 16,
    )
    return jax.grad(layers), (params, jax.random.normal(keys[2], (8, 512, 256)))


def test_a_step_takes_less_time_and_no_more_bytes():
    step, args = problem()
    plan = jaxmem.schedule(step, target="h100", donate_argnums=()).plan(*args)
    assert plan.scheduled.peak_bytes <= plan.plain.peak_bytes
    assert plan.scheduled.seconds < 0.9 * plan.plain.seconds
    assert "sums over rows are done in two steps" in str(plan)


def test_gradients_are_those_of_the_step():
    step, args = problem()
    after = made(lambda *leaves: jax.tree.leaves(step(*_tree(leaves))), *_leaves(args))
    assert after.did(TwoStepSums)
    found = after.run(_leaves(args))
    for ours, theirs in zip(found, jax.tree.leaves(step(*args)), strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * scale)


def _leaves(args):
    return jax.tree.leaves(args)


def _tree(leaves):
    return tuple(leaves[:3]), leaves[3]
