"""Accumulation in the state of any optimizer: one that is written here, from outside.

It is SGD with momentum, which adds the gradients of micro-batches to the momentum. That
is exact, so each test compares it with `optax.sgd` on the whole batch.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxmem import accumulate
from jaxmem.accumulate import microbatch
from jaxmem.optim import MultiSteps
from jaxmem.optim.accumulation import (
    accumulates,
    accumulating_state,
    accumulating_transformation,
)
from tests.accumulate import problem
from tests.accumulate.problem import LR, RTOL, assert_close, assert_same
from tests.sets import some_fast

DECAY, DEVICES, LAYERS = 0.9, 8, 6
WEIGHTS = np.random.default_rng(0).uniform(0.1, 0.5, (LAYERS, 3, 3))
PARAMS = problem.params() | {"layers": jnp.asarray(WEIGHTS, jnp.float32)}
WHOLE = optax.sgd(LR, momentum=DECAY)


@accumulating_state("trace")
class MomentumState(NamedTuple):
    count: Any  # pyright: ignore[reportIncompatibleMethodOverride]
    micro_step: Any
    micro_batches: Any
    trace: Any


def momentum(axis_name=None):
    """`WHOLE`, for a mini-batch that comes in micro-batches."""
    axes = () if axis_name is None else (axis_name,)

    def init(params):
        zero = lambda: jnp.zeros((), jnp.int32)
        return MomentumState(
            zero(), zero(), zero(), jax.tree.map(jnp.zeros_like, params)
        )

    def accumulate(grads, state, n, weight, keep):
        weight = 1 / n if weight is None else weight
        decay = jnp.where(state.micro_step == 0, DECAY, 1.0)

        def add(g, trace):
            term = weight * g
            if keep is not None:
                term = jnp.where(keep, term, jnp.zeros_like(term))
            return decay * trace + term

        trace = jax.tree.map(add, grads, state.trace)
        return state._replace(micro_step=state.micro_step + 1, trace=trace)

    def apply(grads, state, params):
        del grads, params
        trace = jax.lax.pmean(state.trace, axes) if axes else state.trace
        new = state._replace(
            count=state.count + 1, micro_step=jnp.zeros((), jnp.int32), trace=trace
        )
        return jax.tree.map(lambda t: -LR * t, trace), new

    def check(updates, state, phase, n, weight, keep):
        if not isinstance(state, MomentumState):
            raise TypeError(f"state={state}: a MomentumState")

    return accumulating_transformation(init, accumulate, apply, check=check, axes=axes)


def loss(params, batch, rng):
    """Its gradient has scanned layers, which `schedule` takes in one by one."""
    layer = lambda x, w: (jnp.exp(0.1 * x @ w), None)
    y, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return problem.loss(params, {"x": y}, rng) + batch["bad"].sum()


def batches(size, bad=0):
    """Two batches; the last `bad` examples of the second have an infinite loss."""
    marks = jnp.zeros((size,)), jnp.zeros((size,)).at[size - bad :].set(jnp.inf)
    return [
        problem.batch(size, seed) | {"bad": marks[seed]} for seed in range(len(marks))
    ]


def on_whole_batch(params, all_batches, kept=1.0):
    """Parameters and momentum by `optax.sgd`; `kept` is the share of the second."""
    state = WHOLE.init(params)
    for batch, share in zip(all_batches, (1.0, kept), strict=True):
        good = jax.tree.map(lambda x, ok=batch["bad"] == 0: x[ok], batch)
        grads = jax.grad(loss)(params, good, None)
        grads = jax.tree.map(lambda g, s=share: s * g, grads)
        updates, state = WHOLE.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state[0].trace


def assert_as_on_whole_batch(params, state, want):
    # a step is at most LR times a momentum of 20, with as many roundings as a gradient,
    # which through six layers are four times those of the problem without them
    assert_close(params, want[0], rtol=4 * RTOL, atol=20 * LR * RTOL)
    assert_close(state.trace, want[1], rtol=8 * RTOL)


@pytest.mark.fast("4")
@pytest.mark.parametrize("n", [1, 4])
def test_as_on_the_whole_batch(n):
    tx, want = momentum(), on_whole_batch(PARAMS, batches(16))
    step = microbatch(loss, tx, n, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    for batch in batches(16):
        params, state, _ = step(params, state, batch, None)
    assert_as_on_whole_batch(params, state, want)
    assert [int(x) for x in state[:3]] == [2, 0, n]


def test_its_gradients_are_released():
    """The layers' gradients go into the momentum inside the backward pass."""
    tx = momentum()
    plan = microbatch(loss, tx, 4).plan(PARAMS, tx.init(PARAMS), batches(16)[0], None)
    (gradient,) = (g for g in plan.gradients if g.shape == PARAMS["layers"].shape)
    assert gradient.released, str(plan)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("n", some_fast([1, 4], 4))
def test_on_devices(n, check_vma):
    """Also where the last device skips all its micro-batches, the second time."""
    tx, all_batches = momentum("data"), batches(DEVICES * 8, bad=8)
    want = on_whole_batch(PARAMS, all_batches, kept=1 - 1 / DEVICES)
    step = microbatch(loss, tx, n, axis_name="data", skip_nonfinite=True)
    specs = {"in_specs": (P(), P(), P("data"), P()), "out_specs": P()}
    mesh = jax.make_mesh((DEVICES,), ("data",), (jax.sharding.AxisType.Auto,))
    run = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))
    params, state = PARAMS, tx.init(PARAMS)
    for batch, skipped in zip(all_batches, (0, n), strict=True):
        params, state, metrics = run(params, state, batch, None)
        assert int(metrics["skipped"]) == skipped
    assert_as_on_whole_batch(params, state, want)
    none = batches(DEVICES * 8, bad=DEVICES * 8)[1]
    unchanged = run(params, state, none, None)
    keep = lambda s: (s.count, s.micro_step, s.trace)
    assert_same((unchanged[0], keep(unchanged[1])), (params, keep(state)))


def test_in_multi_steps():
    """Two steps of two micro-batches are one mini-batch of four."""
    tx = MultiSteps(momentum(), 2)
    step = microbatch(loss, tx, 2, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    assert not jax.tree.leaves(state.acc_grads)
    halves = batches(16)
    for batch in halves:
        params, state, _ = step(params, state, batch, None)
    both = jax.tree.map(lambda *xs: jnp.concatenate(xs), *halves)
    updates, want = WHOLE.update(jax.grad(loss)(PARAMS, both, None), WHOLE.init(PARAMS))
    want = optax.apply_updates(PARAMS, updates), want[0].trace
    assert_as_on_whole_batch(params, state.inner_opt_state, want)


def test_calls_that_do_not_fit():
    tx, (batch, _) = momentum(), batches(16)
    _, state, _ = microbatch(loss, tx, 4, donate=False)(
        PARAMS, tx.init(PARAMS), batch, None
    )
    restored = jax.tree.map(np.asarray, state)
    with pytest.raises(ValueError, match="n=2, but the MomentumState .* of 4"):
        microbatch(loss, tx, 2)(PARAMS, restored, batch, None)
    within = restored._replace(micro_step=np.int32(1))
    with pytest.raises(ValueError, match="MomentumState is in the middle"):
        microbatch(loss, tx, 4)(PARAMS, within, batch, None)
    with pytest.raises(ValueError, match="accumulator_dtype="):
        microbatch(loss, tx, 4, accumulator_dtype="float32")(PARAMS, state, batch, None)


def test_registration_names_the_fields_that_are_missing():
    class Bare(NamedTuple):
        micro_step: Any

    with pytest.raises(TypeError, match="Bare .* count, micro_batches, trace"):
        accumulating_state("trace")(Bare)
    assert not accumulates(Bare(0))


def test_the_step_knows_no_optimizer_by_name():
    folder = pathlib.Path(accumulate.__file__).parent
    for path in folder.rglob("*.py"):
        assert "AdamAState" not in path.read_text(), path
