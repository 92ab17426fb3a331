"""Gradients of scanned layers that the optimizer takes as they come."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax

from jaxmem import schedule, targets
from jaxmem.ir import jaxprs
from jaxmem.scheduling import _passes
from jaxmem.scheduling._choice import NO_CHOICE
from tests.scheduling import problem
from tests.scheduling.problem import (
    BATCH,
    D,
    L,
    array,
    assert_close,
    bytes_of,
    checked,
    copy,
    state_of,
    temp_bytes,
    train_step,
    whys,
)
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_promotion")

AVAILABLE = {t.name for t in targets() if t.available}
needs_h100 = pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")

LR = 1e-2
ADAM = optax.adam(LR)


def only_matrices(tree):
    return jax.tree.map(lambda x: x.ndim > 1 and x.shape[-2] > 1, tree)


def of_stacks(tree):
    """Which parameters muon takes as stacks of matrices; the rest goes to adam."""
    dims = optax.contrib.MuonDimensionNumbers(1, 2)
    return jax.tree.map(lambda x: dims if x.ndim == 3 else None, tree)


def released_all(plan, layers=None):
    layers = problem.params()["layers"] if layers is None else layers
    assert plan.kept_bytes == 0, whys(plan)
    assert plan.released_bytes == bytes_of(layers)


def kept_all(plan, why, layers=None):
    layers = problem.params()["layers"] if layers is None else layers
    assert plan.released_bytes == 0
    assert plan.kept_bytes == bytes_of(layers)
    assert all(why in w for w in whys(plan)), whys(plan)


# -- optimizers

LAYERWISE = {
    "momentum": optax.sgd(LR, momentum=0.9, nesterov=True),
    "adam": ADAM,
    "adamw": optax.adamw(
        optax.linear_schedule(LR, 0.0, 10), weight_decay=0.1, mask=only_matrices
    ),
    "lion": optax.lion(LR),
    "rmsprop": optax.rmsprop(LR, centered=True, momentum=0.9),
    "adafactor": optax.adafactor(
        LR,
        min_dim_size_to_factor=D,
        multiply_by_parameter_scale=False,
        clipping_threshold=None,
    ),
    "clip": optax.chain(optax.clip(0.01), ADAM),
    "ema": optax.chain(ADAM, optax.ema(0.9)),
    "bf16 moment": optax.adam(LR, mu_dtype=jnp.bfloat16),
    "schedule free": optax.contrib.schedule_free_adamw(LR),
    "injected": optax.inject_hyperparams(optax.adamw)(LR),
}
OVER_LAYERS = "`reduce_sum` over all layers"
BLOCKED = {
    "clip by global norm": (optax.clip_by_global_norm(0.01), OVER_LAYERS),
    "clip by block rms": (optax.clip_by_block_rms(0.01), OVER_LAYERS),
    "lamb": (optax.lamb(LR), OVER_LAYERS),
    "novograd": (optax.novograd(LR), "`cond` "),
    "apply if finite": (optax.apply_if_finite(ADAM, 3), "`cond` "),
    "multi steps": (optax.MultiSteps(ADAM, 2), "`cond` "),
}


# What differs: a mask and a schedule, dtypes, numbers in the state.
FAST = ("adamw", "bf16 moment", "injected")


@pytest.mark.parametrize("name", some_fast(LAYERWISE, *FAST))
def test_layerwise_optimizers_release_everything(name):
    tx = LAYERWISE[name]
    args = state_of(tx, problem.params(), problem.inputs())
    # a bfloat16 moment is rounded from values that may differ in the last place
    rtol = 2**-8 if name == "bf16 moment" else problem.RTOL
    released_all(checked(train_step(tx), *args, rtol=rtol))


@pytest.mark.fast("clip by global norm", "novograd", "apply if finite")
@pytest.mark.parametrize("name", BLOCKED)
def test_what_needs_all_layers_is_kept_and_named(name):
    tx, why = BLOCKED[name]
    args = state_of(tx, problem.params(), problem.inputs())
    plan = checked(train_step(tx), *args)
    kept_all(plan, why)
    hint = 'clip="two_pass"'
    assert all((hint in w) == (why == OVER_LAYERS) for w in whys(plan))


def test_muon_over_a_stack_of_matrices():
    """Newton-Schulz iterates in a loop of its own, which is not opened: kept."""
    tx = optax.contrib.muon(LR, muon_weight_dimension_numbers=of_stacks)
    args = state_of(tx, problem.params(), problem.inputs())
    # five products of 16 x 16 matrices, each a sum of 16
    plan = checked(train_step(tx), *args, rtol=1e-10)
    kept = {g.shape: g.why for g in plan.gradients}
    assert kept[L, D] == ""
    assert kept[L, D, D]


@pytest.mark.parametrize("sums", [True, False])
def test_clipping_is_where_the_chain_has_it(sums):
    """adam before the clip is released with it or not at all: one group."""
    clip = optax.clip_by_global_norm(0.01) if sums else optax.clip(0.01)
    tx = optax.chain(ADAM, clip)
    args = state_of(tx, problem.params(), problem.inputs())
    plan = checked(train_step(tx), *args)
    kept_all(plan, OVER_LAYERS) if sums else released_all(plan)


# -- remat


def remats():
    save = jax.checkpoint_policies
    body = problem.layer
    of_body = lambda policy, **options: functools.partial(
        problem.loss_with, jax.checkpoint(body, policy=policy, **options)
    )
    yield "a layer", of_body(None)
    yield "a layer, no cse guard", of_body(None, prevent_cse=False)
    yield "dots", of_body(save.dots_with_no_batch_dims_saveable)
    named = jax.checkpoint(
        problem.named_layer, policy=save.save_only_these_names("out")
    )
    yield "names", functools.partial(problem.loss_with, named)
    yield "the loss", jax.checkpoint(problem.loss)
    yield "the loss, dots", jax.checkpoint(problem.loss, policy=save.dots_saveable)
    both = functools.partial(problem.loss_with, jax.checkpoint(body))
    yield "both", jax.checkpoint(both)


REMATS = dict(remats())


@pytest.mark.parametrize("name", some_fast(REMATS, "a layer", "the loss"))
def test_remat(name):
    loss = REMATS[name]
    args = state_of(ADAM, problem.params(), problem.inputs(), loss)
    released_all(checked(train_step(ADAM, loss), *args))


# -- scans of other kinds


def check_loss(loss, params, tx=ADAM, layers=None, **options):
    args = state_of(tx, params, problem.inputs(), loss)
    plan = checked(train_step(tx, loss), *args, **options)
    return plan


@pytest.mark.parametrize(
    "options",
    some_fast([{"unroll": 2}, {"unroll": True}, {"reverse": True}], {"reverse": True}),
    ids=str,
)
def test_options_of_the_scan(options):
    def loss(params, x):
        return jnp.mean(
            (problem.forward(x, params["layers"], **options) @ params["head"]) ** 2
        )

    released_all(check_loss(loss, problem.params()))


def test_a_single_layer():
    params = problem.params() | {"layers": problem.stack(1)}
    plan = check_loss(problem.loss, params)
    assert plan.kept_bytes == 0


def two_stacks():
    return {"a": problem.stack(3), "b": problem.stack(L, seed=7)}


def test_two_scans():
    def loss(params, x):
        memory = problem.forward(x, params["a"])

        def decode(x, w):
            return jnp.tanh(x @ w["w"] + memory + problem.add_row(x, w["b"])), None

        return jnp.mean(problem.forward(x, params["b"], decode) ** 2)

    released_all(check_loss(loss, two_stacks()), two_stacks())


def test_parameters_used_in_two_scans():
    """Each scan has half of the gradient: the sum is there when the second ends."""

    def loss(params, x):
        once = problem.forward(x, params["layers"])
        twice = problem.forward(once, params["layers"])
        return jnp.mean((twice @ params["head"]) ** 2)

    plan = check_loss(loss, problem.params())
    layers = bytes_of(problem.params()["layers"])
    assert plan.released_bytes == layers  # of the scan that is last
    assert plan.kept_bytes == layers  # of the first one, which it reads


def test_scan_of_scans():
    """Blocks of layers: the inner gradient goes out through the outer scan's stack."""
    blocks = jax.tree.map(
        lambda x: x.reshape(2, L // 2, *x.shape[1:]), problem.stack(L)
    )

    def loss(params, x):
        def block(x, layers):
            return problem.forward(x, layers), None

        x = problem.forward(x, params["layers"], block)
        return jnp.mean((x @ params["head"]) ** 2)

    plan = check_loss(loss, problem.params() | {"layers": blocks})
    outer = [g for g in plan.gradients if len(g.shape) == len(g.shape)]
    assert sum(g.bytes for g in outer if g.released and g.shape[0] == 2) == bytes_of(
        blocks
    )


def test_a_scan_with_stacked_outputs_and_xs_of_data():
    """Layers that put something out (a hidden norm) and read something (a mask)."""
    scales = array(L, D, seed=9) * 0.1 + 1

    def loss(params, x):
        def body(x, iteration):
            w, scale = iteration
            x = problem.layer(x, w)[0] * problem.add_row(x, scale)
            return x, jnp.sum(x**2)

        x, norms = lax.scan(body, x, (params["layers"], scales))
        return jnp.mean((x @ params["head"]) ** 2) + 1e-3 * norms.sum()

    plan = check_loss(loss, problem.params())
    assert plan.kept_bytes == 0
    stacks = problem.params()["layers"], jnp.zeros(L)  # the norms are summed up too
    assert plan.released_bytes == bytes_of(stacks)


def test_layers_along_another_axis():
    """Parameters kept as (D, L, D): the layers are moved to the front and back."""
    params = problem.params()
    params["layers"] = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), params["layers"])

    def loss(params, x):
        layers = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), params["layers"])
        return problem.loss(params | {"layers": layers}, x)

    released_all(check_loss(loss, params))


def test_layers_merged_with_another_axis_are_kept():
    """One matrix of (L * D, D): its rows are not the layers."""
    params = problem.params()
    params["layers"]["w"] = params["layers"]["w"].reshape(L * D, D)

    def loss(params, x):
        layers = params["layers"] | {"w": params["layers"]["w"].reshape(L, D, D)}
        return problem.loss(params | {"layers": layers}, x)

    plan = check_loss(loss, params)
    found = {g.shape: g.why for g in plan.gradients}
    assert found[L, D] == ""
    assert "it merges the layers" in found[L, D, D]


# -- precision


def test_bf16_copy_of_the_whole_stack():
    """f32 parameters, cast before the loss: the cast of the gradient is moved too."""
    params = jax.tree.map(lambda x: x.astype(jnp.float32), problem.params())
    x = problem.inputs().astype(jnp.bfloat16)

    def loss(params, x):
        narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return problem.loss(narrow, x).astype(jnp.float32)

    args = state_of(ADAM, params, x, loss)
    step = train_step(ADAM, loss)
    # bfloat16 products are the same, gradients are rounded once: 2**-8, through adam's
    # division, moves an update of at most LR
    plan = checked(step, *args, rtol=2 * LR)
    assert plan.kept_bytes == 0
    assert plan.released_bytes == bytes_of(params["layers"]) // 2


def test_master_weights():
    """bf16 parameters are what the step computes with, f32 ones what it updates."""
    master = jax.tree.map(lambda x: x.astype(jnp.float32), problem.params())
    x = problem.inputs().astype(jnp.bfloat16)

    def step(narrow, state, x):
        master, moments = state
        value, grads = jax.value_and_grad(problem.loss)(narrow, x)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, moments = ADAM.update(grads, moments, master)
        master = optax.apply_updates(master, updates)
        narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)
        return narrow, (master, moments), value

    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)
    args = problem.compiled(step)(narrow, (master, ADAM.init(master)), x)[:2]
    plan = checked(step, *args, x, rtol=2 * LR)
    assert plan.released_bytes >= bytes_of(narrow["layers"]["w"])
    # the backward pass does not read b: its new bfloat16 value would be stacked instead
    assert plan.kept_bytes <= bytes_of(narrow["layers"]["b"])


# -- what the update does


def per_layer_clip(grads):
    def clip(g):
        over = tuple(range(1, g.ndim))
        norm = jnp.sqrt(jnp.sum(g**2, over, keepdims=True))
        return g / jnp.maximum(1, norm / 0.01)

    return grads | {"layers": jax.tree.map(clip, grads["layers"])}


def step_by(update, loss=problem.loss):
    """A step whose new parameters, state and report are `update(grads, ...)`."""

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return *update(grads, params, state), value

    return step


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - LR * g, params, grads)


def test_clipping_each_layer_by_its_norm():
    step = step_by(lambda g, p, _: (sgd(p, per_layer_clip(g)),))
    released_all(checked(step, problem.params(), None, problem.inputs()))


def test_a_matrix_preconditions_each_layer():
    """Batched products, (L, n, n) statistics, as in Shampoo."""

    def update(grads, params, stats):
        g = grads["layers"]["w"]
        stats = 0.9 * stats + jnp.einsum("lij,lkj->lik", g, g)
        w = jnp.einsum("lij,ljk->lik", stats, g)
        return sgd(params, grads | {"layers": grads["layers"] | {"w": w}}), stats

    stats = jnp.broadcast_to(jnp.eye(D), (L, D, D)) * 1.0
    step = step_by(update)
    released_all(checked(step, problem.params(), stats, problem.inputs()))


def test_one_matrix_for_all_layers():
    """The rows of a gradient times something that all layers share."""
    shared = array(D, D, seed=11)

    def update(grads, params, state):
        w = grads["layers"]["w"] @ state
        return sgd(params, grads | {"layers": grads["layers"] | {"w": w}}), state

    step = step_by(update)
    released_all(checked(step, problem.params(), shared, problem.inputs()))


def test_a_rate_for_each_layer():
    """A vector over the layers is cut too."""
    rates = jnp.linspace(0.1, 1.0, L)

    def update(grads, params, state):
        scale = lambda g: g * state.reshape(L, *[1] * (g.ndim - 1))
        layers = jax.tree.map(scale, grads["layers"])
        return sgd(params, grads | {"layers": layers}), state

    step = step_by(update)
    released_all(checked(step, problem.params(), rates, problem.inputs()))


def test_a_mean_over_each_layer_is_stacked_alone():
    """What the step reports of each layer stays; the gradient does not."""

    def update(grads, params, state):
        each = jnp.mean(jnp.abs(grads["layers"]["w"]), (1, 2))
        return sgd(params, grads), each

    plan = checked(step_by(update), problem.params(), None, problem.inputs())
    assert plan.released_bytes == bytes_of(problem.params()["layers"])


def test_numbers_over_all_layers_that_are_reported():
    """They become running sums: nothing waits for them."""

    def update(grads, params, state):
        w, b = grads["layers"]["w"], grads["layers"]["b"]
        bits = jnp.abs(1e6 * b).astype(jnp.uint32)
        return sgd(params, grads), {
            "norm": optax.tree.norm(grads),
            "mean": jnp.mean(w, 0, keepdims=True),
            "max": jnp.max(jnp.abs(w)),
            "min": jnp.min(w, (0, 2)),
            "any": jnp.any(jnp.isnan(w)),
            "all": jnp.all(jnp.isfinite(b)),
            "product": jnp.prod(1 + 0.01 * b),
            "count": jnp.sum(w > 0, dtype=jnp.int32),
            "some bits": lax.reduce_or(bits, (0, 1)),
            "all bits": lax.reduce_and(bits | 1, (0,)),
        }

    step = step_by(update)
    released_all(checked(step, problem.params(), None, problem.inputs()))


def test_gradients_that_the_step_returns_are_kept():
    update = lambda grads, params, state: (sgd(params, grads), grads)
    plan = checked(step_by(update), problem.params(), None, problem.inputs())
    kept_all(plan, "")


def test_old_parameters_that_the_step_returns():
    """Donated or not, what was there before is still what comes out."""
    update = lambda grads, params, state: (sgd(params, grads), params)
    step = step_by(update)
    for donate in ((), (0,)):
        checked(step, problem.params(), None, problem.inputs(), donate=donate)


def test_parameters_read_after_the_update():
    """The change of the parameters: a read of the old ones has to come first."""

    def update(grads, params, state):
        new = sgd(params, grads)
        moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), new, params)
        return new, (moved, problem.loss(params, problem.inputs()))

    checked(step_by(update), problem.params(), None, problem.inputs())


def test_a_loss_after_the_update():
    """The new parameters go through a forward scan of their own."""

    def update(grads, params, state):
        new = sgd(params, grads)
        return new, problem.loss(new, problem.inputs())

    released_all(checked(step_by(update), problem.params(), None, problem.inputs()))


@pytest.mark.slow
def test_two_steps_in_one():
    def twice(params, state, x):
        for _ in range(2):
            params, state, value = train_step(ADAM)(params, state, x)
        return params, state, value

    args = state_of(ADAM, problem.params(), problem.inputs())
    plan = checked(twice, *args)
    assert plan.kept_bytes == 0
    assert plan.released_bytes == 2 * bytes_of(problem.params()["layers"])


def test_parameters_are_swapped():
    """Outputs in another order than the inputs whose memory they take."""

    def step(a, b, x):
        def loss(a, b):
            return jnp.mean(problem.forward(problem.forward(x, a), b) ** 2)

        da, db = jax.grad(loss, (0, 1))(a, b)
        return sgd(b, db), sgd(a, da)

    plan = checked(step, problem.stack(), problem.stack(seed=5), problem.inputs())
    assert plan.kept_bytes == 0


# -- frozen parameters


def frozen(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "b" in str(path[-1]), tree)


FROZEN = {
    "masked": optax.masked(ADAM, lambda t: jax.tree.map(lambda f: not f, frozen(t))),
    "partition": optax.partition(
        {True: optax.set_to_zero(), False: ADAM}, param_labels=frozen
    ),
}


@pytest.mark.parametrize("name", some_fast(FROZEN, "partition"))
def test_frozen_by_the_optimizer(name):
    tx = FROZEN[name]
    args = state_of(tx, problem.params(), problem.inputs())
    plan = checked(train_step(tx), *args)
    assert plan.kept_bytes == 0, whys(plan)


def test_frozen_in_the_loss():
    def loss(params, x):
        layers = params["layers"] | {"b": lax.stop_gradient(params["layers"]["b"])}
        return problem.loss(params | {"layers": layers}, x)

    plan = check_loss(loss, problem.params())
    assert plan.released_bytes == bytes_of(problem.params()["layers"]["w"])
    assert plan.kept_bytes == 0


# -- micro-batches


def accumulated(tx, loss=problem.loss):
    """Gradients of micro-batches summed up in an outer scan."""

    def step(params, state, xs):
        def add(total, x):
            grads = jax.grad(loss)(params, x)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, _ = lax.scan(add, zeros, xs)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def micro_batches():
    return array(3, problem.BATCH, D, seed=4)


def test_an_accumulator_in_an_outer_scan():
    """Each layer's share is added in place: nothing but the accumulator is stacked."""
    params = problem.params()
    args = params, ADAM.init(params), micro_batches()
    released_all(checked(accumulated(ADAM), *args))


def test_moments_in_an_outer_scan():
    """The moments are the accumulators (Zhang et al. 2023, AdamA)."""

    def step(params, moments, xs):
        def fold(moments, x):
            grads = jax.grad(problem.loss)(params, x)
            m = jax.tree.map(lambda m, g: m + 0.1 * g, moments[0], grads)
            v = jax.tree.map(lambda v, g: v + 0.1 * g**2, moments[1], grads)
            return (m, v), None

        moments, _ = lax.scan(fold, moments, xs)
        update = lambda p, m, v: p - LR * m / (jnp.sqrt(v) + 1e-8)
        return jax.tree.map(update, params, *moments), moments

    ones = lambda: jax.tree.map(jnp.ones_like, problem.params())
    released_all(checked(step, problem.params(), (ones(), ones()), micro_batches()))


def test_a_step_for_each_micro_batch():
    """Parameters in the carry of an outer scan."""

    def steps(params, state, xs):
        def one(carry, x):
            params, state, value = train_step(ADAM)(*carry, x)
            return (params, state), value

        (params, state), values = lax.scan(one, (params, state), xs)
        return params, state, values

    params = problem.params()
    released_all(checked(steps, params, ADAM.init(params), micro_batches()))


# -- arguments and results


def test_python_scalars_keywords_and_aux():
    def loss(params, x, scale):
        hidden = problem.forward(x * scale, params["layers"])
        return jnp.mean((hidden @ params["head"]) ** 2), {"hidden": hidden, "n": 3}

    def step(params, x, rate, *, scale):
        grads, aux = jax.grad(loss, has_aux=True)(params, x, scale)
        new = jax.tree.map(lambda p, g: p - rate * g, params, grads)
        return new, aux, rate * 2, scale, None, 7

    args = problem.params(), problem.inputs(), 0.01
    released_all(checked(step, *args, donate=(0,), scale=2.0))


def test_static_arguments():
    def step(params, x, options, kind):
        assert isinstance(kind, str)
        rate = float(options[0])  # which an array that is traced does not allow
        grads = jax.grad(problem.loss)(params, x)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    args = problem.params(), problem.inputs(), (0.01, "x"), "sgd"
    want = jax.jit(step, static_argnums=(2, 3))(*args)
    for static in ({"static_argnums": (2, 3)}, {"static_argnums": (-2, -1)}):
        scheduled = schedule(step, donate_argnums=0, **static)
        released_all(scheduled.plan(*args))
        assert_close(scheduled(*copy(args)), want)


def test_static_and_donated_by_name():
    def step(x, *, params, rate):
        grads = jax.grad(problem.loss)(params, x)
        return jax.tree.map(lambda p, g: p - float(rate) * g, params, grads)

    kwargs = {"params": problem.params(), "rate": "0.01"}
    scheduled = schedule(step, donate_argnames="params", static_argnames="rate")
    released_all(scheduled.plan(problem.inputs(), **kwargs))
    given = copy(kwargs)
    got = scheduled(problem.inputs(), **given)
    want = jax.jit(step, static_argnames="rate")(problem.inputs(), **kwargs)
    assert_close(got, want)
    assert all(x.is_deleted() for x in jax.tree.leaves(given["params"]))


@pytest.mark.fast("key")
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys(make):
    """Dropout in the layers, a key a layer, and a key that is carried on."""

    def loss(params, x, key):
        def body(x, iteration):
            w, key = iteration
            keep = jax.random.bernoulli(key, 0.8, x.shape)
            return jnp.where(keep, problem.layer(x, w)[0], 0), None

        x, _ = lax.scan(body, x, (params["layers"], jax.random.split(key, L)))
        return jnp.mean((x @ params["head"]) ** 2)

    def step(params, key, x):
        now, later = jax.random.split(key)
        grads = jax.grad(loss)(params, x, now)
        return sgd(params, grads), later

    plan = checked(step, problem.params(), make(1), problem.inputs())
    released_all(plan)


def test_a_key_in_the_carry():
    def loss(params, x, key):
        def body(carry, w):
            x, key = carry
            key, now = jax.random.split(key)
            x = problem.layer(x, w)[0] + jax.random.normal(now, x.shape)
            return (x, key), None

        (x, _), _ = lax.scan(body, (x, key), params["layers"])
        return jnp.mean((x @ params["head"]) ** 2)

    def step(params, key, x):
        return sgd(params, jax.grad(loss)(params, x, key))

    released_all(
        checked(step, problem.params(), jax.random.key(1), problem.inputs(), donate=0)
    )


def test_weak_types():
    """A rate that is a Python number inside an array of its own, weakly typed."""

    def step(params, rate, x):
        grads = jax.grad(problem.loss)(params, x)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), rate * 0.5

    rate = jax.jit(lambda: jnp.asarray(0.01) * 1)() * 1
    for value in (rate, 0.01):
        released_all(checked(step, problem.params(), value, problem.inputs()))


# -- memory


def large(n_batches=()):
    layers, width = 12, 64
    head = array(width, problem.OUT)
    params = {"layers": problem.stack(layers, width), "head": head}
    return params, ADAM.init(params), array(*n_batches, problem.BATCH, width)


def saved_layers(step, *args) -> float:
    """What the compiled step takes less when scheduled, in gradients of one layer."""
    scheduled = schedule(step, donate_argnums=(0, 1))
    saved = temp_bytes(step, *args) - temp_bytes(scheduled, *args)
    return saved / bytes_of(args[0]["layers"]) * 12


def test_stacked_gradients_are_not_in_the_compiled_step():
    """Twelve layers' gradients less what one takes: on CPU old and new state, too."""
    step = train_step(ADAM, REMATS["a layer"])
    assert saved_layers(step, *large()) >= 5


def test_an_accumulator_is_all_that_is_stacked():
    loss = REMATS["a layer"]
    assert saved_layers(accumulated(ADAM, loss), *large((3,))) >= 8


@pytest.mark.slow
@needs_h100
@pytest.mark.parametrize("name", ["plain", "a layer", "dots"])
def test_stacked_gradients_are_not_in_a_gpus_step(name):
    """Without remat as well, which XLA for CPU copies the parameters for."""
    step = train_step(ADAM, REMATS.get(name, problem.loss))
    with jax.enable_x64(False):
        args = jax.tree.map(lambda x: x.astype(jnp.float32), large()[::2])
        args = args[0], ADAM.init(args[0]), args[1]
        plan = schedule(step, donate_argnums=(0, 1)).plan(*args, target="h100")
    saved = plan.plain.temp_bytes - plan.scheduled.temp_bytes
    assert saved >= bytes_of(args[0]["layers"]) * 9 // 12


@pytest.mark.slow
@needs_h100
def test_a_gpu_writes_a_moment_where_it_is_made():
    """No layer of a moment exists beside its stack, nor is it copied into it."""
    size = 1024
    with jax.enable_x64(False):
        layers = {"w": jnp.zeros((8, size, size)), "b": jnp.zeros((8, size))}
        params = {"layers": layers, "head": jnp.zeros((size, 8))}
        args = params, ADAM.init(params), jnp.zeros((128, size))
        plan = schedule(train_step(ADAM), donate_argnums=(0, 1)).plan(
            *args, target="h100"
        )
    plain, scheduled = plan.plain, plan.scheduled
    assert plain.temp_bytes - scheduled.temp_bytes >= bytes_of(layers)
    # of a layer the weights read both moments once more than in the plain step
    more = scheduled.time.bytes - plain.time.bytes
    assert more <= 2 * bytes_of(layers) + plain.time.bytes // 50


# -- nothing to release


def test_nothing_is_moved_where_nothing_is_gained():
    """What the scan stacks is returned, and something as large made of it."""

    def step(xs):
        _, ys = lax.scan(lambda c, x: (c + x, c * x), 0.0, xs, reverse=True)
        return ys, ys * 2

    plan = checked(step, array(L), donate=())
    assert plan.released_bytes == 0


def test_a_scan_with_effects_is_left_alone():
    seen = []

    def loss(params, x):
        def body(x, w):
            jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
            return problem.layer(x, w)

        return jnp.mean(problem.forward(x, params["layers"], body) ** 2)

    step = train_step(optax.sgd(LR), loss)
    checked(
        step, problem.params(), optax.sgd(LR).init(problem.params()), problem.inputs()
    )
    jax.effects_barrier()
    assert len(seen) == 2 * L  # of the plain step, and of the scheduled one
    np.testing.assert_allclose(sorted(seen[:L]), sorted(seen[L:]), rtol=1e-12)


def test_who_else_reads_what_is_overwritten_does_so_before():
    """Else there are two of it: the step asks for a norm of the old weights last."""

    def step(w, x):
        body = lambda h, w: (jnp.tanh(h @ w), None)
        value, g = jax.value_and_grad(lambda w: lax.scan(body, x, w)[0].sum())(w)
        return w - LR * g, value, jnp.sum(jnp.sin(w))

    w, x = array(L, D, D, scale=0.3), array(BATCH, D, seed=1)
    closed = jax.make_jaxpr(step)(w, x)
    done = _passes.rewrite(closed, {0: 0}, None, NO_CHOICE)
    assert [g.released for g in done.description.gradients] == [True]
    jaxpr, _ = jaxprs.split(done.jaxpr)
    (taken,) = [k for k, e in enumerate(jaxpr.eqns) if jaxpr.outvars[0] in e.outvars]
    readers = [k for k, e in enumerate(jaxpr.eqns) if jaxpr.invars[0] in e.invars]
    assert jaxpr.eqns[taken].primitive.name == "scan"
    assert any(jaxpr.eqns[k].primitive.name == "sin" for k in readers)
    assert max(readers) == taken
    new, _, norm = jaxprs.evaluate(done.jaxpr, [w, x])
    wanted = jax.jit(step)(w, x)
    np.testing.assert_allclose(new, wanted[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(norm, wanted[2], rtol=1e-12)


def test_parameters_that_go_to_the_host_do_not_overwrite_those_on_the_device():
    ws, x = jnp.ones((8, 16, 16)), jnp.ones((4, 16))
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    loss = lambda ws, x: jnp.square(lax.scan(layer, x, ws)[0]).sum()

    def step(ws, x):
        new = ws - 0.1 * jax.grad(loss)(ws, x)
        return jax.device_put(new, jax.memory.Space.Host)

    got = jax.make_jaxpr(schedule(step, donate_argnums=0))(ws, x)
    assert got.out_avals[0].memory_space == jax.memory.Space.Host
