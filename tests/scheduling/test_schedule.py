"""`schedule` as a function transformation: it is to a step what `jax.jit` is."""

import functools
import io
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import schedule
from jaxmem.ir import jaxprs
from jaxmem.scheduling import Plan, Scheduled
from tests.scheduling import problem
from tests.scheduling.problem import D, L, array, assert_close, bytes_of, copy
from tests.sets import some_fast

LR = 0.1
RTOL = 64 * 2.0**-24  # float32: sums of 5 to 16 terms, forward and back


def sgd(params, x):
    """Strict promotion, no optax."""
    value, grads = jax.value_and_grad(problem.loss)(params, x)
    return jax.tree.map(lambda p, g: p - LR * g, params, grads), value


PARAMS, X = problem.params(jnp.float32), problem.inputs(jnp.float32)
WANT = jax.jit(sgd)(PARAMS, X)
LAYERS = bytes_of(PARAMS["layers"])


def donated():
    return schedule(sgd, donate_argnums=0)


def same(got, want=WANT):
    assert_close(got, want, RTOL)


def deleted(tree) -> set[bool]:
    return {x.is_deleted() for x in jax.tree.leaves(tree)}


# -- calls


def test_call_donates():
    step, given, x = donated(), copy(PARAMS), jnp.copy(X)
    same(step(given, x))
    assert deleted(given) == {True}
    assert deleted(x) == {False}


def test_a_second_call_does_not_trace():
    traces = []

    def counted(params, x):
        traces.append(x.shape)
        return sgd(params, x)

    step = schedule(counted, donate_argnums=0)
    params, _ = step(copy(PARAMS), X)
    first = len(traces)
    for _ in range(3):
        params, _ = step(params, X)
    assert len(traces) == first
    step(params, X[:2])
    assert len(traces) > first
    assert traces[-1] == (2, D)


def test_attributes_of_the_function():
    step = donated()
    assert isinstance(step, Scheduled)
    assert (step.__name__, step.__doc__) == ("sgd", "Strict promotion, no optax.")
    assert step.__wrapped__ is sgd


def test_trace_lower_compile_eval_shape():
    step = donated()
    assert isinstance(step.trace(PARAMS, X), jax.stages.Traced)
    compiled = step.lower(PARAMS, X).compile()
    same(compiled(copy(PARAMS), X))
    assert compiled.memory_analysis().alias_size_in_bytes == bytes_of(PARAMS)
    shapes = jax.eval_shape(sgd, PARAMS, X)
    assert step.eval_shape(PARAMS, X) == jax.eval_shape(step, PARAMS, X) == shapes


def test_abstract_arguments():
    """Nothing need be there to lower or to plan."""
    step = donated()
    shapes = jax.eval_shape(lambda x: x, (PARAMS, X))
    same(step.lower(*shapes).compile()(copy(PARAMS), X))
    assert step.plan(*shapes).released_bytes == LAYERS


def test_inside_another_jit():
    step = donated()
    same(jax.jit(step)(PARAMS, X))
    given = copy(PARAMS)
    same(jax.jit(step, donate_argnums=0)(given, X))
    assert deleted(given) == {True}
    doubled = jax.jit(lambda p, x: step(jax.tree.map(lambda a: a * 2, p), x / 2))
    same(doubled(jax.tree.map(lambda a: a / 2, PARAMS), X * 2))


def test_in_a_scan_of_steps():
    def run(step, params, xs):
        return jax.lax.scan(step, params, xs)

    xs = array(3, problem.BATCH, D, seed=4, dtype=jnp.float32)
    got, want = (
        jax.jit(run, static_argnums=0)(f, PARAMS, xs) for f in (donated(), sgd)
    )
    assert_close(got, want, 3 * RTOL)


def test_twice():
    step = schedule(schedule(sgd, donate_argnums=0))
    (note,) = step.plan(PARAMS, X).notes  # none on donation: the inner one's is known
    assert note.startswith("nothing is changed: ")
    same(step(copy(PARAMS), X))


class Trainer:
    rate = LR

    def step(self, params, x):
        grads = jax.grad(problem.loss)(params, x)
        return jax.tree.map(lambda p, g: p - self.rate * g, params, grads)

    __call__ = step


@pytest.mark.parametrize(
    "step",
    [
        Trainer().step,
        Trainer(),
        functools.partial(Trainer.step, Trainer()),
        lambda params, x: sgd(params, x)[0],
    ],
    ids=["method", "object", "partial", "lambda"],
)
def test_callables(step):
    scheduled = schedule(step, donate_argnums=0)
    same(scheduled(copy(PARAMS), X), WANT[0])
    assert scheduled.plan(PARAMS, X).released_bytes == LAYERS


# -- donation


def test_a_jitted_step_brings_its_donation():
    step = schedule(jax.jit(sgd, donate_argnums=(0,)))
    given = copy(PARAMS)
    same(step(given, X))
    assert deleted(given) == {True}
    assert step.plan(PARAMS, X).notes == ()


def test_a_jitted_step_brings_its_static_arguments():
    @functools.partial(jax.jit, static_argnames="mode", donate_argnames="params")
    def step(params, x, mode="half"):
        assert isinstance(mode, str)
        return sgd(params, x * (0.5 if mode == "half" else 1))

    scheduled = schedule(step)
    same(scheduled(copy(PARAMS), X * 2))
    given = copy(PARAMS)
    same(scheduled(given, X, mode="whole"))
    assert deleted(given) == {True}
    same(scheduled(copy(PARAMS), X, "whole"))
    assert scheduled.plan(PARAMS, X, mode="whole").released_bytes == LAYERS


def test_the_donation_that_is_named_wins():
    step = schedule(jax.jit(sgd, donate_argnums=1), donate_argnums=0)
    given, x = copy(PARAMS), jnp.copy(X)
    same(step(given, x))
    assert (deleted(given), deleted(x)) == ({True}, {False})


@pytest.mark.fast("{'donate_argnums': [0]}", "{'donate_argnames': 'params'}")
@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 0},
        {"donate_argnums": [0]},
        {"donate_argnames": "params"},
        {"donate_argnames": ("params",)},
    ],
    ids=str,
)
def test_places_as_jit_takes_them(options):
    step = schedule(sgd, **options)
    for call in (lambda p: step(p, X), lambda p: step(params=p, x=X)):
        given = copy(PARAMS)
        same(call(given))
        assert deleted(given) == {True}
    assert step.plan(PARAMS, X).released_bytes == LAYERS


def test_nothing_donated_is_said_once():
    step = schedule(sgd)
    with pytest.warns(UserWarning, match="no argument is donated") as record:
        same(step(PARAMS, X))
    (warning,) = record
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(PARAMS, X)
    assert deleted(PARAMS) == {False}
    (note,) = step.plan(PARAMS, X).notes
    assert "donate_argnums" in note


def test_no_warning_where_it_is_meant_or_inside_another_jit():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(schedule(sgd, donate_argnums=())(PARAMS, X))
        same(jax.jit(schedule(sgd))(PARAMS, X))


# -- what it is given


@pytest.mark.parametrize("step", [3, None, "step", [sgd]])
def test_not_callable(step):
    with pytest.raises(TypeError, match="step=.*: a function"):
        schedule(step)


@pytest.mark.parametrize("clip", ["three_pass", "", True, 1.0])
def test_another_word_for_clip(clip):
    wrong = ValueError if isinstance(clip, str) else TypeError
    with pytest.raises(wrong, match="clip=.*: one of None, 'two_pass'"):
        schedule(sgd, clip=clip)


def test_errors_of_the_step_are_its_own():
    step = donated()
    with pytest.raises(TypeError, match="dot_general"):
        step(PARAMS, X[:, :3])
    with pytest.raises(TypeError, match="missing"):
        step(PARAMS)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        lambda x: jnp.sin(x) * 2,
        lambda x: (x, None, 3, x[0]),
        lambda x: jax.lax.scan(lambda c, a: (c + a, c), x[0], x),
        lambda x: (),
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x),
        lambda x: {"a": jnp.zeros(3), "b": jax.random.key(0)},
    ],
)
def test_nothing_to_schedule(fn):
    """The equations stay as they were, inner jits written out."""
    step = schedule(fn, donate_argnums=())
    plan = step.plan(X)
    assert plan.released_bytes == plan.kept_bytes == plan.residual_bytes == 0
    names = lambda f: [
        e.primitive.name
        for e in jaxprs.walk(jax.make_jaxpr(f)(X))
        if e.primitive.name != "jit"
    ]
    assert names(step) == names(fn)
    assert_close(step(X), jax.jit(fn)(X), RTOL)


def test_no_arrays_at_all():
    assert schedule(lambda: jnp.float32(3), donate_argnums=())() == 3


def test_a_gradient_alone():
    """Without its update nothing is released, and nothing changes."""
    step = schedule(jax.grad(problem.loss), donate_argnums=())
    plan = step.plan(PARAMS, X)
    assert (plan.released_bytes, plan.kept_bytes) == (0, LAYERS)
    assert {g.why for g in plan.gradients} == {"the step returns it"}
    same(step(PARAMS, X), jax.jit(jax.grad(problem.loss))(PARAMS, X))


def test_strict_promotion_and_x64_off():
    """The tests of this module run so; a counter that is carried keeps its type."""
    jaxpr = donated().trace(PARAMS, X).jaxpr
    wide = [
        v for e in jaxprs.walk(jaxpr) for v in e.outvars if v.aval.dtype.itemsize > 4
    ]
    assert wide == []


# -- with the rest of jaxmem


def test_estimate_takes_it():
    step = donated()
    report = jaxmem.estimate(step, PARAMS, X, target="cpu")
    compiled = step.lower(PARAMS, X).compile().memory_analysis()
    assert report.temp_bytes == compiled.temp_size_in_bytes
    assert report.alias_bytes == bytes_of(PARAMS)


def test_a_plan_with_a_target():
    plan = donated().plan(PARAMS, X, target="cpu")
    assert plan.plain is not None and plan.scheduled is not None
    assert plan.plain.argument_bytes == plan.scheduled.argument_bytes
    assert str(plan).startswith("cpu: peak ")
    assert json.loads(plan.to_json())["plain"]["temp_bytes"] == plan.plain.temp_bytes


def test_plan():
    plan = donated().plan(PARAMS, X)
    assert isinstance(plan, Plan)
    assert [(g.shape, g.dtype) for g in plan.gradients] == [
        ((L, D, D), "float32"),
        ((L, D), "float32"),
    ]
    assert all(g.released and not g.why for g in plan.gradients)
    assert plan.released_bytes == LAYERS
    assert plan.notes == ()
    lines = str(plan).splitlines()
    assert lines[0].startswith("predicted peak") and "name a target" in lines[0]
    assert sorted(line.split(":")[0] for line in lines[1:3]) == [
        "recomputed",
        "released",
    ]
    assert "released: 6.38 KiB of gradients, 2 arrays" in lines
    assert lines[3].split()[:4] == ["released", "6.00", "KiB", f"float32[{L},{D},{D}]"]
    data = json.loads(plan.to_json())
    assert [g["bytes"] for g in data["gradients"]] == [4 * L * D * D, 4 * L * D]
    assert [r["how"] for r in data["residuals"]] == [r.how for r in plan.residuals]


def test_plan_in_rich():
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    plan = donated().plan(PARAMS, X)
    console.print(plan)
    text = console.export_text()
    assert f"float32[{L},{D},{D}]" in text
    assert "released: 6.38 KiB of gradients" in text


def test_a_long_plan_is_cut():
    """Thirty rows, and how many there are besides."""

    def loss(params, x):
        for layers in params:
            x = problem.forward(x, layers)
        return jnp.mean(x**2)

    params = [problem.stack(2, dtype=jnp.float32) for _ in range(16)]
    plan = schedule(jax.grad(loss)).plan(params, X)
    rows = len(plan.gradients) + len(plan.residuals)
    assert rows > 30
    lines = str(plan).splitlines()
    assert f"... {rows - 30} smaller ones" in lines
    # the peak, rows, what is left out, what is kept: nothing is changed
    assert len(lines) == 1 + 30 + 1 + bool(plan.kept_bytes) + len(plan.notes)


def test_where_a_gradient_comes_from():
    """Name scopes of the module, and the line of what holds an update up."""

    def body(x, w):
        with jax.named_scope("block"):
            return problem.layer(x, w)

    def step(params, x):
        grads = jax.grad(functools.partial(problem.loss_with, body))(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - LR * g / norm, params, grads)

    plan = schedule(step, donate_argnums=0).plan(PARAMS, X)
    assert plan.kept_bytes == LAYERS
    for gradient in plan.gradients:
        assert "block" in gradient.path
        assert "reduce_sum" in gradient.why
        assert "test_schedule.py" in gradient.why


# -- on eight devices


def mesh_of_8(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


WIDE = problem.params(jnp.float32)
BATCH = array(16, D, seed=4, dtype=jnp.float32)


def placed(spec, batch, kind=AxisType.Auto):
    mesh = mesh_of_8(kind)
    put = lambda x, s: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s)))
    params = jax.tree.map(lambda x: put(x, spec.get(x.ndim, ())), WIDE)
    return params, put(BATCH, batch)


LAYOUTS = {
    "data parallel": ({}, ("x",)),
    "fsdp": ({3: (None, "x"), 2: (None, None)}, ("x",)),
    "tensor parallel": ({3: (None, None, "x")}, ()),
}


SIZES = {k: x.nbytes for k, x in PARAMS["layers"].items()}
# Of one device: weights are sharded over eight, and with them, under tensor
# parallelism, the outputs of a layer and so the gradient of its bias.
OF_ONE = {
    "data parallel": LAYERS,
    "fsdp": SIZES["w"] // 8 + SIZES["b"],
    "tensor parallel": SIZES["w"] // 8 + SIZES["b"] // 8,
}


@pytest.mark.parametrize("name", some_fast(LAYOUTS, "fsdp"))
def test_sharded(name):
    params, x = placed(*LAYOUTS[name])
    want = jax.jit(sgd)(params, x)
    step = donated()
    assert step.plan(params, x).released_bytes == OF_ONE[name]
    compiled = step.lower(params, x).compile()
    assert "all-reduce" in compiled.as_text()
    got = compiled(copy(params), x)
    same(got, want)
    for new, as_was in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert new.sharding.is_equivalent_to(as_was.sharding, new.ndim)


def test_sharded_on_an_explicit_mesh():
    params, x = placed({}, ("x",), AxisType.Explicit)
    with jax.set_mesh(x.sharding.mesh):
        same(donated()(copy(params), x), jax.jit(sgd)(params, x))


def test_inside_shard_map():
    """Gradients summed over the devices, each layer's by itself."""

    def step(params, x):
        value, grads = jax.value_and_grad(problem.loss)(params, x)
        grads = jax.tree.map(lambda g: jax.lax.psum(g, "x") / 8, grads)
        value = jax.lax.pmean(value, "x")
        return jax.tree.map(lambda p, g: p - LR * g, params, grads), value

    mapped = functools.partial(
        jax.shard_map,
        mesh=mesh_of_8(),
        in_specs=(PartitionSpec(), PartitionSpec("x")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    plans = []

    def scheduled(params, x):
        inner = schedule(step, donate_argnums=0)
        plans.append(inner.plan(params, x))
        return inner(params, x)

    got = jax.jit(mapped(scheduled))(WIDE, BATCH)
    same(got, jax.jit(mapped(step))(WIDE, BATCH))
    assert plans[0].released_bytes == LAYERS


def test_a_step_that_is_a_shard_map():
    def step(params, x):
        value, grads = jax.value_and_grad(problem.loss)(params, x)
        grads = jax.lax.pmean(grads, "x")
        return jax.tree.map(lambda p, g: p - LR * g, params, grads), value[None]

    mapped = jax.shard_map(
        step,
        mesh=mesh_of_8(),
        in_specs=(PartitionSpec(), PartitionSpec("x")),
        out_specs=(PartitionSpec(), PartitionSpec("x")),
        check_vma=False,
    )
    got = schedule(mapped, donate_argnums=0)(copy(WIDE), BATCH)
    same(got, jax.jit(mapped)(WIDE, BATCH))


def test_numpy_arguments():
    host = jax.tree.map(np.asarray, PARAMS)
    same(schedule(sgd, donate_argnums=())(host, np.asarray(X)))


def test_compiler_options_are_those_of_the_outermost_jit():
    """A wrong one is refused by the compiler, so it has been given it."""
    step = jax.grad(lambda w: jnp.sum(jnp.tanh(w) ** 2))
    w = jnp.arange(3.0)
    good = schedule(
        step, donate_argnums=(), compiler_options={"xla_cpu_use_acl": False}
    )
    np.testing.assert_array_equal(good(w), step(w))
    np.testing.assert_array_equal(jax.jit(good)(w), step(w))
    bad = schedule(step, donate_argnums=(), compiler_options={"no_such_flag": 1})
    with pytest.raises(Exception, match="no_such_flag"):
        bad(w)
    np.testing.assert_array_equal(jax.jit(bad)(w), step(w))
    np.testing.assert_array_equal(jax.jit(lambda: bad(w))(), step(w))
    searching = {"target": "cpu", "compiler_options": {"no_such_flag": 1}}
    with pytest.raises(RuntimeError, match="no_such_flag"):
        schedule(step, donate_argnums=(), **searching).plan(w)
