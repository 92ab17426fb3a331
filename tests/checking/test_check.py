"""`check`: right rewrites pass, wrong ones are found, in float32 and in bfloat16."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.checking._check import compared
from jaxmem.checking._compare import StepComparison
from tests.checking import steps

F32, BF16 = jnp.float32, jnp.bfloat16
SEEDS = [
    0,
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(2, marks=pytest.mark.slow),
]


@functools.cache
def comparison(dtype, seed):
    """Of the right step, whose runs all tests share."""
    arguments = steps.arguments(dtype, seed)
    return StepComparison(steps.step, (arguments, {}), (), steps=2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("step", steps.RIGHT, ids=lambda f: f.__name__)
def test_another_order_of_sums_agrees(step, dtype, seed):
    report = compared(step, comparison(dtype, seed))
    assert report and len(report.leaves) == 8
    assert all(leaf.tolerance < np.inf for leaf in report.leaves)
    if dtype == F32 and step is steps.in_micro_batches:
        assert any(leaf.largest > 0 for leaf in report.leaves)


# a factor of 1.001 is 1 in bfloat16
FOUND = [(step, F32) for step in steps.WRONG] + [
    (step, BF16)
    for step in steps.WRONG
    if step not in (steps.scaled_residual, steps.scaled_gradient)
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step, dtype", FOUND)
def test_a_wrong_step_is_found(step, dtype, seed):
    found = comparison(dtype, seed).differences(step)
    assert found.share > 1


@pytest.mark.parametrize("factor, found", [(1.0, False), (1.03, True)])
def test_a_factor_is_found_behind_bfloat16_products(factor, found):
    """As in mixed precision: the residuals are in float32."""

    def mixed(factor, p, x):
        def body(h, w):
            y = jnp.tanh(h.astype(BF16) @ w["up"].astype(BF16)) @ w["down"].astype(BF16)
            return h + factor * y.astype(F32), None

        return jax.value_and_grad(lambda p: jnp.mean(jax.lax.scan(body, x, p)[0] ** 2))(
            p
        )

    p, x = steps.params(), jnp.tile(steps.batch(), (20, 1))
    right = functools.partial(mixed, 1.0)
    other = lambda p, x: mixed(factor, p, x[::-1])
    report = jaxmem.check(other, right, p, x)
    assert bool(report) != found and "nothing is fed back" in str(report)


def test_the_first_module_is_named_with_its_line():
    report = compared(steps.scaled_residual, comparison(F32, 0))
    assert report.module == "block, iteration 1 of 3"
    assert report.where.endswith("(layer)") and "steps.py" in report.where
    report = compared(steps.sign_of_a_gradient, comparison(F32, 0))
    assert report.module == ""
    assert any("result[0]" in note for note in report.notes)


def test_what_is_reported():
    report = jaxmem.check(steps.swapped_slice, steps.step, *steps.arguments())
    text = str(report)
    assert "swapped_slice differs from step" in text and "argument 0" in text
    leaf = report.different[0]
    assert leaf.name.startswith("result[0]") and leaf.array == "float32[3,16,16]"
    assert leaf.ratio > 1 and report.steps == 3
    assert {leaf.step for leaf in report.different} >= {1}
    data = json.loads(report.to_json())
    assert not data["passed"] and len(data["leaves"]) == 8
    assert "swapped_slice" in report._repr_html_()


def test_arguments_stay_as_they_are():
    donated = jax.jit(steps.step, donate_argnums=0)
    state, x = steps.arguments()
    before = jax.tree.map(np.array, (state, x))
    assert jaxmem.check(donated, donated, state, x)
    jax.tree.map(np.testing.assert_array_equal, before, (state, x))


def test_integers_booleans_and_keys_are_equal():
    def step(x, key):
        key, use = jax.random.split(key)
        return {"n": jnp.arange(4), "b": x > 0, "key": key, "x": x + 1}, use

    def other(which, wrong, x, key):
        out, use = step(x, key)
        return out | {which: wrong(out[which])}, use

    args = steps.batch(), jax.random.key(3)
    assert jaxmem.check(step, step, *args, carry=())
    for which, wrong in {
        "n": lambda n: n.at[3].add(1),
        "b": lambda b: b.at[0, 0].set(~b[0, 0]),
        "key": lambda key: jax.random.fold_in(key, 1),
    }.items():
        changed = functools.partial(other, which, wrong)
        (leaf,) = jaxmem.check(changed, step, *args, carry=()).different
        assert which in leaf.name and leaf.tolerance == 0


def test_quantized_values_may_be_rounded_to_the_next():
    """They depend on roundings: where a run's codes differ, others may."""

    def codes(w, x):
        y = x @ w
        return jnp.round(y / jnp.max(jnp.abs(y)) * 2**22).astype(jnp.int32)

    w = steps.params()["up"][0]
    x = steps.batch()
    assert jaxmem.check(lambda w, x: codes(w[::-1], x[:, ::-1]), codes, w, x)
    assert not jaxmem.check(lambda w, x: codes(w, x) + 2**14, codes, w, x)


def test_nans_must_be_at_the_same_places():
    def step(x):
        return jnp.log(x), jnp.sum(jnp.abs(x))

    x = steps.batch()
    report = jaxmem.check(step, step, x)
    assert report and any("NaN in both" in note for note in report.notes)
    report = jaxmem.check(
        lambda x: (jnp.log(jnp.abs(x)), step(x)[1]), step, x, carry=()
    )
    assert not report and report.different[0].apart > 0
    assert "NaN or infinite in one alone" in str(report)


def test_an_ill_conditioned_result_has_the_tolerance_that_is_due_to_it():
    """The difference of two sums that cancel has no digit in common."""

    def step(x):
        return jnp.sum(x) - jnp.sum(x * 2) / 2, jnp.sum(x)

    def other(x):
        return jnp.sum(x[::-1]) - jnp.sum(x.reshape(16, -1).sum(0) * 2) / 2, jnp.sum(x)

    x = 1 + jax.random.uniform(jax.random.key(0), (4096,))
    assert jaxmem.check(other, step, x)
    assert not jaxmem.check(lambda x: (step(x)[0] + 1, step(x)[1]), step, x)


def test_carried_state():
    def drifts(state, x):
        (p, opt), value = steps.step(state, x)
        first = opt[0].count == 1
        return (jax.tree.map(lambda a: jnp.where(first, a, 1.01 * a), p), opt), value

    state, x = steps.arguments()
    report = jaxmem.check(drifts, steps.step, state, x)
    assert {leaf.step for leaf in report.different} >= {2}
    assert jaxmem.check(drifts, steps.step, state, x, carry=())
    swapped = lambda x, state: steps.step(state, x)
    report = jaxmem.check(swapped, swapped, x, state, carry=1, steps=2)
    assert report.steps == 2 and "argument 1" in report.carried
    with pytest.raises(ValueError, match="carry"):
        jaxmem.check(swapped, swapped, x, state, carry=0)


def test_what_cannot_be_compared():
    x = steps.batch()
    with pytest.raises(TypeError, match=r"args\[0\]=.*an array"):
        jaxmem.check(jnp.sin, jnp.sin, jax.ShapeDtypeStruct((3,), F32))
    with pytest.raises(ValueError, match="same pytree"):
        jaxmem.check(lambda x: (x, x), lambda x: x, x)
    with pytest.raises(ValueError, match="float32"):
        jaxmem.check(lambda x: x.astype(BF16), lambda x: x, x)


def test_sharded_arguments():
    mesh = jax.make_mesh((8,), ("data",))
    place = lambda x, *spec: jax.device_put(
        x, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )
    state, x = steps.arguments()
    state, x = jax.tree.map(place, state), place(x, "data")
    assert jaxmem.check(steps.unrolled, steps.step, state, x, steps=2)
    assert not jaxmem.check(steps.sign_of_a_gradient, steps.step, state, x, steps=2)


def test_inside_a_shard_map():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def mapped(shards):
        how = {"in_specs": (spec(), spec("data")), "out_specs": spec()}
        return jax.shard_map(shards, mesh=mesh, **how)

    def mean(w, x):
        return jax.lax.pmean(jnp.mean(jnp.tanh(x @ w)), "data")

    def wrong(w, x):
        return 1.0001 * mean(w, x)

    args = steps.params()["up"][0], steps.batch()
    assert jaxmem.check(lambda w, x: jnp.mean(jnp.tanh(x @ w)), mapped(mean), *args)
    assert not jaxmem.check(mapped(wrong), mapped(mean), *args)
