"""`schedule` updates the touched rows of a table, where that is exact."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import optim
from tests.arrays import array
from tests.optim.rows.problem import loss, params, train_step
from tests.sets import some_fast

ROWS, WIDTH, IDS = 8192, 128, 64  # a table of 4 MiB


@pytest.fixture(autouse=True)
def loose_promotion():
    """Optax multiplies numbers of several dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def ids(step):
    r = np.random.default_rng(step)
    return array(r.integers(-100, 100, IDS), jnp.int32)


def start(tx, rows=ROWS, dtype=jnp.float32):
    given = jax.tree.map(lambda x: x.astype(dtype), params(rows, WIDTH))
    return given, tx.init(given)


def planned(step, state):
    return jaxmem.schedule(step, donate_argnums=0).plan(state, ids(0))


def narrow(params, ids):
    table = params["embed"]["table"].astype(jnp.bfloat16)
    y = (table[ids] + jnp.take(table, ids + 1, axis=0)) @ params["w"].astype(
        jnp.bfloat16
    )
    return jnp.mean(jnp.tanh(y.astype(jnp.float32)) ** 2)


EXACT = {
    "sgd": (optax.sgd(0.1), loss),
    "a schedule": (optax.sgd(optax.linear_schedule(0.1, 0.0, 10)), loss),
    "adagrad": (optax.adagrad(0.1), loss),
    "clipped elements": (optax.chain(optax.clip(0.01), optax.adagrad(0.1)), loss),
}


@pytest.mark.parametrize("name", some_fast(EXACT, "sgd", "adagrad"))
def test_equals_the_plain_step(name):
    tx, lossy = EXACT[name]
    step = train_step(tx, rows=False, loss=lossy)
    plan = planned(step, start(tx))
    (row,) = plan.gradients
    assert row.shape == (ROWS, WIDTH) and row.released
    scheduled, plain = jaxmem.schedule(step, donate_argnums=0), jax.jit(step)
    ours, theirs = start(tx), start(tx)
    for i in range(4):
        ours, got = scheduled(ours, ids(i))
        theirs, want = plain(theirs, ids(i))
        np.testing.assert_allclose(got, want, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.fast("bfloat16-loss")
@pytest.mark.parametrize("dtype, lossy", [("bfloat16", loss), ("float32", narrow)])
def test_sums_in_bfloat16(dtype, lossy):
    """Of a table in it, or of one that is looked up in it, twice."""
    tx, rows = optax.sgd(0.1), 2 * ROWS
    step = train_step(tx, rows=False, loss=lossy)
    state = start(tx, rows, dtype)
    assert [g.released for g in planned(step, state).gradients] == [True]
    ours, _ = jaxmem.schedule(step, donate_argnums=())(state, ids(0))
    want, _ = jax.jit(step)(state, ids(0))
    for p, x, y in zip(*map(jax.tree.leaves, (state, ours, want)), strict=True):
        p, x, y = (np.float64(a) for a in (p, x, y))
        moved = np.abs(y - p).max()
        # the order of at most 8 sums, and a parameter below 8 rounded to its dtype
        rounded = 2.0**-6 if dtype == "bfloat16" else 2.0**-22
        assert np.abs(x - y).max() <= 8 * 2.0**-8 * moved + rounded


def test_takes_arrays_of_ids_alone():
    tx = optax.adagrad(0.1)
    step, state = train_step(tx, rows=False), start(tx)
    lower = lambda fn: jax.jit(fn, donate_argnums=0).lower(state, ids(0)).compile()
    ours = lower(jaxmem.schedule(step, donate_argnums=0)).memory_analysis()
    plain = lower(step).memory_analysis()
    assert plain.temp_size_in_bytes > ROWS * WIDTH * 4
    assert ours.temp_size_in_bytes < 24 * IDS * WIDTH * 4 < ROWS * WIDTH * 4 / 4
    assert ours.alias_size_in_bytes == plain.alias_size_in_bytes


@pytest.mark.parametrize("width", [64, 65])
def test_narrow_rows_need_a_target(width):
    """A TPU may copy tables into rows twice as wide: it is not for the graph to say."""
    tx, table = optax.adagrad(0.1), ROWS * WIDTH // width
    step, given = train_step(tx, rows=False), params(table, width)
    plan = jaxmem.schedule(step, donate_argnums=0).plan((given, tx.init(given)), ids(0))
    notes = [n for n in plan.notes if "name a target" in n]
    assert [g.released for g in plan.gradients] == [True] * (width > 64)
    assert [f"float32[{table},64]" in n for n in notes] == [True] * (width == 64)


@pytest.mark.slow
def test_narrow_rows_with_a_target():
    """Both steps are compiled, and the gradient in rows is the smaller."""
    tx = optax.adagrad(0.1)
    given = params(ROWS, 32)
    step = jaxmem.schedule(train_step(tx, False), donate_argnums=0, target="cpu")
    plan = step.plan((given, tx.init(given)), ids(0))
    assert [g.released for g in plan.gradients] == [True]


def tied(params, ids):
    table = params["embed"]["table"]
    return jnp.mean((table[ids] @ params["w"] @ table[:8].T) ** 2)


MOVES = "moves rows without a gradient"
LEFT = {
    "adam": (optax.adam(0.1), loss, MOVES),
    "momentum": (optax.sgd(0.1, 0.9), loss, MOVES),
    "decay": (
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
        loss,
        MOVES,
    ),
    "norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        loss,
        "`reduce_sum` reads all of it",
    ),
    "tied": (optax.sgd(0.1), tied, "used elsewhere too: `pad` makes a part of it"),
}


@pytest.mark.fast("adam", "norm", "tied")
@pytest.mark.parametrize("name", LEFT)
def test_left_alone_and_said_why(name):
    tx, lossy, why = LEFT[name]
    step = train_step(tx, rows=False, loss=lossy)
    plan = planned(step, start(tx))
    notes = [n for n in plan.notes if "of a table stays dense" in n]
    assert len(notes) == 1 and why in notes[0], plan.notes
    assert f"float32[{ROWS},{WIDTH}]" in notes[0]
    assert not any(g.released for g in plan.gradients)
    ours, _ = jaxmem.schedule(step, donate_argnums=())(start(tx), ids(0))
    want, _ = jax.jit(step)(start(tx), ids(0))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_returned_stays():
    def step(params, ids):
        grads = jax.grad(loss)(params, ids)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return new, grads["embed"]["table"], 1.0  # a literal among the outputs

    notes = planned(step, params(ROWS, WIDTH)).notes
    assert any("the step returns it" in note for note in notes)


def test_many_ids_do_not_pay():
    tx = optax.sgd(0.1)
    step = jaxmem.schedule(train_step(tx, rows=False), donate_argnums=0)
    plan = step.plan(start(tx), jnp.arange(ROWS // 2))
    assert not plan.gradients and not any("of a table" in n for n in plan.notes)


def test_a_step_on_rows_is_left_as_it_is():
    """What `value_and_row_grad` has written needs nothing."""
    tx = optim.lazy_adam(0.1)
    plan = planned(train_step(tx), start(tx))
    assert not any("of a table" in n for n in plan.notes)


def test_a_forward_scatter_is_no_gradient():
    """Nothing is said of it."""

    def step(x, ids):
        table = jnp.zeros((ROWS, WIDTH)).at[ids].add(x[: ids.size])
        return table.T @ jnp.ones(ROWS)

    plan = planned(step, jnp.ones((IDS, WIDTH)))
    assert not any("of a table" in n for n in plan.notes)


def test_counts_of_ids_are_updated_in_place():
    """What is no gradient, but treated as one: exact all the same."""
    rows = 2**18

    def step(counts, ids):
        return counts + jnp.zeros(rows).at[ids].add(1.0)

    start = jnp.arange(rows, dtype=jnp.float32)
    scheduled = jaxmem.schedule(step, donate_argnums=())
    assert scheduled.plan(start, ids(0)).gradients
    np.testing.assert_array_equal(scheduled(start, ids(0)), step(start, ids(0)))


def test_a_table_sharded_over_rows_is_not_gathered():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    spec = lambda x: PartitionSpec(*["rows"] * (x.shape[:1] == (ROWS,)))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))
    tx = optax.adagrad(0.1)
    step = train_step(tx, rows=False)
    scheduled = jaxmem.schedule(step, donate_argnums=0)
    state = jax.tree.map(put, start(tx))
    program = jax.jit(scheduled, donate_argnums=0).lower(state, ids(0)).compile()
    moves = r"= (.*) (?:all-gather|all-reduce|all-to-all|collective-permute)\("
    moved = " ".join(re.findall(moves, program.as_text()))
    shapes = re.findall(r"\w+\[([\d,]*)\]", moved)
    sizes = [np.prod([int(n) for n in s.split(",") if n]) for s in shapes]
    assert sizes and max(sizes) <= IDS * WIDTH
    ours, _ = program(state, ids(0))
    want, _ = jax.jit(step)(start(tx), ids(0))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_micro_batches():
    """Whatever the pass does in the loop over them, whose accumulator is dense."""
    lossy = lambda params, ids, key: loss(params, ids)
    tx = optax.sgd(0.1)
    given = params(ROWS, WIDTH)
    step = jaxmem.microbatch(lossy, tx, 2, donate=False)
    got = step(given, tx.init(given), ids(0), None)[0]
    (want, _), _ = train_step(tx, rows=False)((given, tx.init(given)), ids(0))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "own, wide, kept",
    [
        ("bfloat16", "float32", True),
        ("float32", "float32", True),
        ("float32", "bfloat16", False),
        ("int32", "float32", False),
    ],
)
def test_an_input_is_the_same_in_a_dtype_that_has_all_its_values(own, wide, kept):
    """Under any rule of promotion: a step may forbid it."""
    rows = 2**20

    def step(x, ids):
        added = jnp.zeros(rows, wide).at[ids].add(jnp.ones((), wide))
        return (x.astype(wide) + added).astype(own)

    with jax.numpy_dtype_promotion("strict"):
        scheduled = jaxmem.schedule(step, donate_argnums=())
        plan = scheduled.plan(jnp.ones(rows, own), ids(0))
    assert [g.released for g in plan.gradients] == [True] * kept
