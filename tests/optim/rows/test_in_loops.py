"""Tables that a scan, a branch or a recomputation reads have gradients of rows too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import ops, optim
from tests.arrays import array
from tests.optim.rows.problem import TABLE, params, train_step

ROWS, WIDTH, LAYERS, IDS = 4096, 128, 3, 8  # a table of 2 MiB
MIB = 2**20


@pytest.fixture(autouse=True)
def loose_promotion():
    """Optax multiplies numbers of several dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def given(dtype=jnp.float32):
    return jax.tree.map(lambda x: x.astype(dtype), params(ROWS, WIDTH))


def layers_of_ids():
    """Ids that come twice in a layer, and in several."""
    r = np.random.default_rng(0)
    return array(r.integers(-9, 9, (LAYERS, IDS)), jnp.int32)


def by_one_id(table, ids, h):
    """A scan in the scan, whose iteration looks one id up that is no array."""
    total = lambda total, i: (total + jnp.sin(table[i] + h[0]), None)
    return jax.lax.scan(total, jnp.zeros(WIDTH), ids)[0][None] + table[ids]


READS = {
    "embed": lambda table, ids, h: ops.embed(table, ids),
    "weighted bag": lambda table, ids, h: ops.embedding_bag(
        table, ids[:, None] + jnp.arange(3)[None], jax.nn.softmax(h[:, :3])
    ),
    "twice": lambda table, ids, h: table[ids] * jnp.take(table, ids + 1, axis=0),
    "branch": lambda table, ids, h: jax.lax.cond(
        ids[0] > 0, lambda: table[ids] + table[ids + 1], lambda: jnp.sin(table[-ids])
    ),
    "one branch alone": lambda table, ids, h: jax.lax.cond(
        ids[0] > 0, lambda: table[ids], lambda: jnp.zeros((IDS, WIDTH))
    ),
    "one id": by_one_id,
    "jit": lambda table, ids, h: jax.jit(lambda t, i: t[i])(table, ids),
}


def stack(read, wrap=lambda layer: layer):
    """The loss of layers under a scan that read one table; and of a lookup behind."""

    def loss(params, ids):
        table = params["embed"]["table"]

        def layer(h, ids):
            h = h @ params["w"] / WIDTH
            return jnp.tanh(h + read(table, ids, h)), None

        h, _ = jax.lax.scan(wrap(layer), jnp.ones((IDS, WIDTH)), ids)
        return jnp.mean((h + table[ids[0]]) ** 2)

    return loss


def check(loss, ids, tables=TABLE):
    """Against dense gradients; the bytes of the compiled function."""
    ours = jax.jit(optim.value_and_row_grad(loss, tables)).lower(given(), ids).compile()
    value, grads = ours(given(), ids)
    plain, dense = jax.jit(jax.value_and_grad(loss))(given(), ids)
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    got = {"embed": {"table": grads["embed"]["table"].todense()}, "w": grads["w"]}
    for x, y in zip(*map(jax.tree.leaves, (got, dense)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    return ours.memory_analysis().temp_size_in_bytes


@pytest.mark.fast("branch", "one id", "weighted bag")
@pytest.mark.parametrize("name", READS)
def test_as_the_dense_gradient(name):
    """And nothing of the table's size: a row of 512 B for each of at most 100 ids."""
    assert check(stack(READS[name]), layers_of_ids()) < ROWS * WIDTH * 4 / 8


@pytest.mark.parametrize("name", ["embed", "weighted bag"])
def test_recomputed_layers(name):
    loss = stack(READS[name], jax.checkpoint)
    assert check(loss, layers_of_ids()) < ROWS * WIDTH * 4 / 8


def test_ids_and_rows_are_stacked():
    _, grads = optim.value_and_row_grad(stack(READS["embed"]), TABLE)(
        given(), layers_of_ids()
    )
    rows = grads["embed"]["table"]
    assert rows.rows.shape == ((LAYERS + 1) * IDS, WIDTH)
    want = np.sort(np.append(layers_of_ids(), layers_of_ids()[0]) % ROWS)
    np.testing.assert_array_equal(np.sort(rows.ids), want)


def test_casts_in_the_layers_sum_there():
    """In bfloat16 in each layer, as JAX does; then in float32."""
    read = lambda t, ids, h: t.astype(jnp.bfloat16)[ids].astype(jnp.float32)
    ids = layers_of_ids()
    _, grads = optim.value_and_row_grad(stack(read), TABLE)(given(), ids)
    dense = jax.grad(stack(read))(given(), ids)["embed"]["table"]
    got = grads["embed"]["table"].todense()
    # the order of at most IDS sums in bfloat16
    np.testing.assert_allclose(got, dense, rtol=IDS * 2.0**-8, atol=1e-5)


class Layers(linen.Module):
    """Layers of Flax's scan with parameters of their own, given one table's lookup."""

    @linen.compact
    def __call__(self, h, ids, table):
        h = jnp.tanh(linen.Dense(WIDTH)(h) + jnp.take(table, ids, axis=0))
        return h, None


def test_linen_scan():
    scan = linen.scan(
        linen.remat(Layers),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, linen.broadcast),
    )
    model, ids = scan(), jnp.abs(layers_of_ids())
    table, h = given()["embed"]["table"], jnp.ones((IDS, WIDTH))
    inner = model.init(jax.random.key(0), h, ids, table)
    loss = lambda p, ids: jnp.mean(model.apply(p["model"], h, ids, p["table"])[0] ** 2)
    both = {"model": inner, "table": table}
    _, grads = jax.jit(optim.value_and_row_grad(loss, "table"))(both, ids)
    dense = jax.jit(jax.grad(loss))(both, ids)["table"]
    np.testing.assert_allclose(grads["table"].todense(), dense, rtol=1e-5, atol=1e-6)


def test_prints_of_layers_are_kept(capfd):
    def read(table, ids, h):
        jax.debug.print("layer {}", ids[0])
        return table[ids]

    jax.block_until_ready(
        jax.jit(optim.value_and_row_grad(stack(read), TABLE))(given(), layers_of_ids())
    )
    jax.effects_barrier()
    assert capfd.readouterr().out.count("layer") == LAYERS


def test_other_sums_stay_in_the_loop():
    """A histogram in the carry: the rows of all iterations would be larger than it."""

    def loss(params, ids):
        def layer(counts, i):
            return counts.at[i % 4].add(params["embed"]["table"][i]), None

        return jnp.mean(jax.lax.scan(layer, jnp.zeros((4, WIDTH)), ids)[0] ** 2)

    grad = optim.value_and_row_grad(loss, TABLE)
    closed = jax.make_jaxpr(grad)(given(), layers_of_ids())
    forward = next(e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    assert (4, WIDTH) in [v.aval.shape for v in forward.outvars]
    rows = (LAYERS, IDS, WIDTH)
    assert rows not in [v.aval.shape for v in forward.outvars]
    check(loss, layers_of_ids())


def tied(table, ids, h):
    return table[ids] + jnp.tanh(h @ table[:4].T) @ table[:4]


def own_tables(params, ids):
    """A table for each layer."""
    layer = lambda h, x: (jnp.tanh(h + x[0][x[1]]), None)
    xs = params["embed"]["table"], ids
    return jnp.mean(jax.lax.scan(layer, jnp.ones((IDS, WIDTH)), xs)[0] ** 2)


def on_devices(params, ids):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    read = jax.shard_map(
        lambda t, i: t[i], mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec
    )
    return jnp.mean(read(params["embed"]["table"], ids[0]) ** 2)


@pytest.mark.parametrize(
    "loss, why",
    [
        (stack(tied), "in a `scan`, `pad` makes a part of it"),
        (own_tables, "each iteration reads a table of its own"),
        (on_devices, "`shard_map` makes a part of it"),
    ],
)
def test_dense_gradients_are_refused_with_the_reason(loss, why):
    params = given()
    if loss is own_tables:
        params["embed"]["table"] = jnp.ones((LAYERS, 16, WIDTH))
    with pytest.raises(ValueError, match="'embed/table' is dense: ") as error:
        optim.value_and_row_grad(loss, TABLE)(params, layers_of_ids())
    assert why in str(error.value)


# -- schedule


def step_of(loss, tx):
    return train_step(tx, rows=False, loss=loss)


def start(tx):
    return given(), tx.init(given())


@pytest.mark.fast("embed-scan", "branch-scan")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "remat"])
@pytest.mark.parametrize("name", ["embed", "weighted bag", "branch", "one id"])
def test_schedule_updates_the_rows(name, wrap):
    tx, ids = optax.adagrad(0.1), layers_of_ids()
    step = step_of(stack(READS[name], wrap), tx)
    scheduled = jaxmem.schedule(step, donate_argnums=0)
    gradients = scheduled.plan(start(tx), ids).gradients
    assert [g.released for g in gradients if g.shape == (ROWS, WIDTH)] == [True]
    want, _ = jax.jit(step)(start(tx), ids)
    got, _ = scheduled(start(tx), ids)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        # the update divides by the root of squares, at least 0.1
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


def test_schedule_sees_recomputed_layers_without_a_scan():
    layer = jax.checkpoint(lambda table, h, i: jnp.tanh(h + ops.embed(table, i)))

    def loss(params, ids):
        h = jnp.zeros((IDS, WIDTH))
        for i in ids:
            h = layer(params["embed"]["table"], h, i)
        return jnp.mean(h**2)

    tx = optax.sgd(0.1)
    step = jaxmem.schedule(step_of(loss, tx), donate_argnums=0)
    plan = step.plan(start(tx), layers_of_ids())
    assert [g.released for g in plan.gradients] == [True]


@pytest.mark.parametrize(
    "tx, read, why",
    [
        (optax.adam(0.1), READS["embed"], "moves rows without a gradient"),
        (optax.sgd(0.1), tied, "elsewhere too: in a `scan`, `pad` makes a part of it"),
    ],
)
def test_schedule_says_what_stays_dense(tx, read, why):
    step = jaxmem.schedule(step_of(stack(read), tx), donate_argnums=0)
    notes = step.plan(start(tx), layers_of_ids()).notes
    notes = [n for n in notes if "of a table stays dense" in n]
    assert len(notes) == 1 and why in notes[0]


def test_many_ids_do_not_pay():
    """In each layer a tenth of the rows, in all of them more than a quarter."""
    tx = optax.sgd(0.1)
    read = lambda table, ids, h: jnp.sum(table[ids].reshape(IDS, -1, WIDTH), 1)
    ids = jnp.broadcast_to(jnp.arange(ROWS // 8), (LAYERS, ROWS // 8))

    def loss(params, ids):
        layer = lambda h, i: (jnp.tanh(h + read(params["embed"]["table"], i, h)), None)
        return jnp.mean(jax.lax.scan(layer, jnp.ones((IDS, WIDTH)), ids)[0] ** 2)

    plan = jaxmem.schedule(step_of(loss, tx), donate_argnums=0).plan(start(tx), ids)
    assert not [g for g in plan.gradients if g.shape == (ROWS, WIDTH)]


def test_a_table_sharded_over_rows():
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    spec = lambda x: PartitionSpec(*["rows"] * (x.shape[:1] == (ROWS,)))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x)))
    tx = optim.rowwise(optax.adagrad(0.1))
    step = train_step(tx, loss=stack(READS["embed"]))
    state, ids = jax.tree.map(put, start(tx)), layers_of_ids()
    program = jax.jit(step, donate_argnums=0).lower(state, ids).compile()
    assert program.memory_analysis().temp_size_in_bytes < ROWS * WIDTH * 4 / 8
    got, _ = program(state, ids)
    want, _ = jax.jit(step_of(stack(READS["embed"]), optax.adagrad(0.1)))(
        start(optax.adagrad(0.1)), ids
    )
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "remat"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "scheduled"])
def test_bytes_on_a_chip(rows, wrap):
    """262,144 x 128, by three layers on an H100: the dense gradient is 128 MiB."""
    count, width = 262_144, 128
    shape = jax.ShapeDtypeStruct
    given = {"embed": {"table": shape((count, width), jnp.float32)}}

    def loss(params, ids):
        table = params["embed"]["table"]
        layer = lambda h, i: (jnp.tanh(h + ops.embed(table, i)), None)
        return jnp.sum(jax.lax.scan(wrap(layer), jnp.zeros((8, width)), ids)[0] ** 2)

    plain = optax.adagrad(0.1)
    tx = optim.rowwise(plain) if rows else plain
    step = train_step(tx, rows=rows, loss=loss)
    how = {"target": "h100", "donate_argnums": 0}
    args = (given, jax.eval_shape(tx.init, given)), shape((LAYERS, 8), jnp.int32)
    step = step if rows else jaxmem.schedule(step, **how)
    how = how if rows else {"target": "h100"}
    report = jaxmem.estimate(step, *args, **how)
    assert report.temp_bytes < MIB
