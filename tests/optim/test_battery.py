"""Every optimizer is held to the same: its rule, its state, and jaxmem's transforms."""

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.arrays import array
from tests.optim import cases
from tests.optim.cases.case import LR, STEPS, Case
from tests.sets import slow_unless

ROWS, COLUMNS, LAYERS = 32, 64, 3


def all_cases() -> list[Case]:
    names = (m.name for m in pkgutil.iter_modules(cases.__path__) if m.name != "case")
    modules = (importlib.import_module(f"{cases.__name__}.{name}") for name in names)
    return [case for module in modules for case in module.CASES]


def over_cases(fast: Callable[[str], bool]):
    cases = [(case, slow_unless(fast(case.name))) for case in all_cases()]
    params = [pytest.param(case, id=case.name, marks=marks) for case, marks in cases]
    return pytest.mark.parametrize("case", params)


# Each is what two others are.
each = over_cases(
    lambda name: name not in ("adama_8_bits", "apollo_mini", "lion_8_bits")
)
# These are held to all of it in the fast suite; low rank and the host have own tests.
some = over_cases(
    {"adama", "adam_8_bits", "sm3", "rowwise_adagrad", "muon"}.__contains__
)


def params(dtype=np.float32):
    r = np.random.default_rng(0)
    draw = lambda *shape: array(0.3 * r.standard_normal(shape), dtype)
    return {
        "layers": draw(LAYERS, ROWS, COLUMNS),
        "w": draw(COLUMNS, ROWS),
        "b": draw(COLUMNS),
    }


def gradients(steps=STEPS):
    """Of a common direction and noise, as those of training are: [steps, ...]."""
    r = np.random.default_rng(1)
    draw = lambda p: (
        0.3 * r.standard_normal(p.shape) + r.standard_normal((steps, *p.shape))
    ).astype(np.float32)
    return jax.tree.map(draw, params())


@functools.partial(jax.jit, static_argnums=0)
def run(tx, params, grads):
    """Parameters and state after all steps."""

    def step(carry, g):
        updates, state = tx.update(g, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), grads)[0]


def by_layer(fn, path, p, grads):
    if path != "layers":
        return fn(path, p, grads)
    layers = range(len(p))
    return np.stack([fn(path, p[i], grads[:, i]) for i in layers])


@each
def test_as_the_reference(case):
    given, grads = params(), jax.tree.map(case.prepared, gradients())
    got, _ = run(case.make(), given, grads)
    for path, p in given.items():
        wide = np.float64(p)
        want = by_layer(case.reference, path, wide, np.float64(grads[path]))
        moved = np.abs(want - wide).max()
        error = np.abs(np.float64(got[path]) - want).max()
        # parameters of order 1 are rounded to float32 once a step
        assert error <= case.rtol * moved + STEPS * 2.0**-25, (path, error / moved)


@each
def test_state_is_made_from_shapes_and_keeps_its_types(case):
    tx, given = case.make(), params()
    shapes = jax.eval_shape(lambda: given)
    made = jax.eval_shape(tx.init, shapes)
    chex.assert_trees_all_equal_shapes_and_dtypes(made, tx.init(given))
    after = jax.eval_shape(lambda g, s, p: tx.update(g, s, p)[1], given, made, shapes)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, made)
    assert jax.tree.structure(after) == jax.tree.structure(made)


@each
def test_donated_state_is_updated_in_place(case):
    """No array stands twice in parameters and state, and nothing is copied."""
    tx = case.make()
    given = params()
    g = jax.tree.map(lambda x: x[0], gradients(1))

    def step(params, state, g):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(given)
    arrays = [x for x in jax.tree.leaves((given, state)) if isinstance(x, jax.Array)]
    places = [x.unsafe_buffer_pointer() for x in arrays if x.size]
    assert len(set(places)) == len(places)
    want = jax.jit(step)(given, state, g)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(given, state, g).compile()
    sizes = compiled.memory_analysis()
    assert sizes.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(want))
    chex.assert_trees_all_close(compiled(given, state, g), want, rtol=1e-6)


@some
def test_sharded_as_the_parameters(case):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"layers": P(None, "data"), "w": P("data"), "b": P()}
    places = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
    tx = case.make()
    given, grads = params(), gradients(3)
    after, _ = run(tx, given, grads)
    there = jax.device_put(given, places)
    state = tx.init(there)
    if case.sharded:
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            # by name where it has one: means of "w" may have the shape of "b"
            names = {getattr(key, "key", None) for key in path} & {*given} or {*given}
            places_of = {given[k].shape: places[k] for k in names}
            if x.shape in places_of:
                place = places_of[x.shape].with_memory_kind(x.sharding.memory_kind)
                assert x.sharding.is_equivalent_to(place, x.ndim), path
    step = jax.jit(lambda p, s, g: tx.update(g, s, p))
    for i in range(3):
        g = {k: jax.device_put(x[i], places[k]) for k, x in grads.items()}
        updates, state = step(there, state, g)
        there = optax.apply_updates(there, updates)
    # sums over a sharded axis are taken in another order
    chex.assert_trees_all_close(there, after, rtol=1e-4, atol=1e-5)


@some
def test_in_masks_chains_and_with_injected_hyperparameters(case):
    given, grads = params(), gradients(3)
    want, _ = run(case.make(), given, grads)
    chained = optax.chain(optax.clip(1e9), case.make())
    chex.assert_trees_all_close(run(chained, given, grads)[0], want, rtol=1e-6)
    masked = optax.masked(case.make(), {"layers": True, "w": True, "b": False})
    got, _ = run(masked, given, grads)
    pick = lambda tree: {k: tree[k] for k in ("layers", "w")}
    chex.assert_trees_all_close(pick(got), pick(want), rtol=1e-6)
    injected = optax.inject_hyperparams(lambda learning_rate: case.make(learning_rate))
    got, state = run(injected(learning_rate=LR), given, grads)
    # the rate is an array there, and its products are rounded elsewhere
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(LR)
    rate = optax.constant_schedule(LR)
    got, _ = run(case.make(rate), given, grads)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def loss(params, batch, rng=None):
    """Scanned layers, whose gradients are stacked."""

    def layer(x, w):
        return jnp.tanh(x + jnp.tanh(x @ w) @ params["w"]), None

    y, _ = jax.lax.scan(layer, batch, params["layers"])
    return jnp.mean((y @ params["w"].T + params["b"][None]) ** 2)


def batch(size=8, seed=2):
    r = np.random.default_rng(seed)
    return array(r.standard_normal((size, ROWS)), jnp.float32)


def train_step(tx):
    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


@some
def test_scheduled(case):
    tx, given = case.make(), params()
    state = given, tx.init(given)
    scheduled = jaxmem.schedule(train_step(tx), donate_argnums=())
    plain, ours = jax.jit(train_step(tx)), state
    for i in range(3):
        state, value = plain(state, batch(seed=i))
        ours, got = scheduled(ours, batch(seed=i))
        assert float(got) == pytest.approx(float(value), rel=1e-5)
    chex.assert_trees_all_close(ours[0], state[0], rtol=1e-4, atol=1e-5)


@each
def test_its_stacked_gradient_is_released(case):
    tx, given = case.make(), params()
    step = jaxmem.schedule(train_step(tx), donate_argnums=0)
    plan = step.plan((given, tx.init(given)), batch())
    (gradient,) = (g for g in plan.gradients if g.shape == given["layers"].shape)
    assert gradient.released is case.released, str(plan)


@some
def test_micro_batches(case):
    tx, given = case.make(), params()
    call = lambda n: jaxmem.microbatch(loss, tx, n, donate=False)(
        given, tx.init(given), batch(16), None
    )
    if case.microbatch not in ("same", "other"):
        with pytest.raises((TypeError, ValueError), match=re.escape(case.microbatch)):
            call(4)
        return
    want, got = call(1)[0], call(4)[0]
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(got))
    if case.microbatch == "same":
        # gradients differ by the order of four sums
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-2 * LR)


@some
def test_bfloat16_parameters(case):
    given, grads = params(jnp.bfloat16), gradients(3)
    grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.bfloat16), grads)
    got, _ = run(case.make(), given, grads)
    wide, _ = run(case.make(), params(), jax.tree.map(np.float32, grads))
    for path, p in got.items():
        assert p.dtype == jnp.bfloat16
        # each step rounds a parameter below 2 to bfloat16: half an ulp of 2**-7
        np.testing.assert_allclose(
            np.float32(p), np.float32(wide[path]), atol=4 * 2.0**-8 + LR, err_msg=path
        )


@some
def test_restored_by_orbax(case, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx, given = case.make(), params()
    _, state = run(tx, given, gradients(2))
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    shapes = jax.eval_shape(tx.init, given)
    back = checkpointer.restore(tmp_path / "state", shapes)
    chex.assert_trees_all_equal(back, state)


@each
def test_in_an_nnx_optimizer(case):
    """Values, and the structure of the state from the start on: one compile."""
    model = nnx.Module()
    for name, p in params().items():
        setattr(model, name, nnx.Param(p))
    optimizer = nnx.Optimizer(model, case.make(), wrt=nnx.Param)
    before = jax.tree.structure(nnx.state(optimizer))
    update = nnx.jit(lambda model, optimizer, g: optimizer.update(model, g))
    for i in range(2):
        g = {name: nnx.Param(x[i]) for name, x in gradients(2).items()}
        update(model, optimizer, nnx.State(g))
        assert jax.tree.structure(nnx.state(optimizer)) == before
    want, state = run(case.make(), params(), gradients(2))
    same = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=2 * 2.0**-24)
    same(dict(nnx.as_pure(nnx.state(model))), want)
    sizes = lambda tree: sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(tree))
    assert sizes(nnx.state(optimizer.opt_state)) == sizes(state)


@each
def test_parameters_are_asked_for(case):
    tx, given = case.make(), params()
    g = jax.tree.map(lambda x: x[0], gradients(1))
    update = lambda g, p: tx.update(g, tx.init(p), None)
    if case.needs_params:
        with pytest.raises(ValueError, match="params"):
            jax.eval_shape(update, g, given)
    else:
        jax.eval_shape(update, g, given)


@each
def test_states_of_others_are_refused(case):
    """At the call, by the path of a leaf or the class of the state."""
    tx, given = case.make(), params()
    halved = jax.tree.map(lambda x: x[..., : x.shape[-1] // 2], given)
    others = [jax.eval_shape(tx.init, halved)]
    strange = jax.eval_shape(optax.trace(0.9).init, given)
    first, *rest = others[0] if type(others[0]) is tuple else [others[0]]
    if not any(x.ndim for x in jax.tree.leaves(first)):
        return  # nothing in it has the parameters' shapes
    others.append((strange, *rest) if type(others[0]) is tuple else strange)
    for state in others:
        update = lambda state: tx.update(given, state, given)
        with pytest.raises((TypeError, ValueError), match=r"state|\['(layers|w|b)'\]"):
            jax.eval_shape(update, state)


@each
@pytest.mark.slow
def test_in_optax_wrappers(case):
    """Each gives what the transformation gives on the gradients that count."""
    given, grads = params(), gradients(2)
    want, _ = run(case.make(), given, grads)
    first, _ = run(case.make(), given, jax.tree.map(lambda g: g[:1], grads))
    twice = jax.tree.map(lambda g: np.repeat(g, 2, axis=0), grads)
    nan = jax.tree.map(lambda g: np.stack([g[0], np.nan * g[1], g[1]]), grads)
    # parameters of order 1 are rounded to float32 twice
    same = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=2 * 2.0**-24)
    labels = {"layers": "a", "w": "a", "b": "b"}
    with jax.numpy_dtype_promotion("standard"):  # optax's own counters need it
        several = optax.MultiSteps(case.make(), 2).gradient_transformation()
        same(run(several, given, twice)[0], want)
        finite = optax.apply_if_finite(case.make(), 3)
        same(run(finite, given, nan)[0], want)
        groups = {"a": case.make(), "b": optax.set_to_zero()}
        got, _ = run(optax.multi_transform(groups, labels), given, grads)
    pick = lambda tree: {k: tree[k] for k in ("layers", "w")}
    same(pick(got), pick(want))
    assert not np.array_equal(first["w"], want["w"])  # the second step counts
    np.testing.assert_array_equal(got["b"], given["b"])
