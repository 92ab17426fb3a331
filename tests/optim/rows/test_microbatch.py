"""`jaxmem.microbatch(tables=...)`: rows of tables over micro-batches.

The rows of all micro-batches are those of the whole batch, so each rule has the step of
the whole batch, to the order of sums.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import optim
from tests.optim.rows.problem import LR, TABLE, batches, params, train_step
from tests.optim.rows.problem import loss as plain_loss

DENSE = optax.chain(optim.scale_by_rowwise_adagrad(), optax.scale_by_learning_rate(LR))
N, STEPS = 4, 3
ROWS, WIDTH, IDS = 16384, 32, 32
RULES = {
    "sgd": optim.rowwise_sgd(LR),
    "adagrad": optim.rowwise(optax.adagrad(LR)),
    "one accumulator a row": optim.rowwise_adagrad(LR),
    "lazy adam": optim.lazy_adam(LR),
    "clipped": optim.rowwise(
        optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(LR))
    ),
}
EACH = pytest.mark.parametrize("name", RULES)


@pytest.fixture(autouse=True)
def loose_promotion():
    """Optax multiplies numbers of several dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss(params, ids, rng):
    return plain_loss(params, ids)


def micro_step(tx, n=N, loss=loss, **options):
    options = {"tables": TABLE, "donate": False} | options
    return jaxmem.microbatch(loss, tx, n, **options)


def trained(step, tx, ids, given=None):
    given = params() if given is None else given
    state = tx.init(given)
    for batch in ids:
        given, state, metrics = step(given, state, batch, None)
    return given, state, metrics


def assert_near(got, want):
    """Sums of some 24 terms in another order, over a few steps: the bound of rows."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.fast("adagrad-plain", "lazy adam-skipping")
@pytest.mark.parametrize(
    "options", [{}, {"skip_nonfinite": "gradients"}], ids=["plain", "skipping"]
)
@EACH
def test_it_is_the_step_of_the_whole_batch(name, options):
    tx, ids = RULES[name], batches(STEPS)
    got = trained(micro_step(tx, **options), tx, ids)
    carry, whole = (params(), tx.init(params())), jax.jit(train_step(tx))
    for batch in ids:
        carry, value = whole(carry, batch)
    assert_near(got[:2], carry)
    np.testing.assert_allclose(got[2]["loss"], value, rtol=1e-5)
    one = trained(micro_step(tx, 1, **options), tx, ids)
    assert_near(one[:2], carry)


@pytest.mark.fast("lazy adam-skip_nonfinite")
@pytest.mark.parametrize("options", ["plain", "skip_nonfinite", "weight_fn"])
@EACH
def test_no_array_is_as_large_as_a_table(name, options):
    """Some arrays of a row for each id of the mini-batch, and all state in place."""
    options = {
        "plain": {},
        "skip_nonfinite": {"skip_nonfinite": "gradients"},
        "weight_fn": {"weight_fn": lambda ids: jnp.float32(ids.size)},
    }[options]
    tx, given = RULES[name], params(ROWS, WIDTH)
    state, ids = tx.init(given), batches(1, ROWS, IDS)[0]
    step = micro_step(tx, donate=True, **options)
    sizes = step.lower(given, state, ids, None).compile().memory_analysis()
    assert sizes.temp_size_in_bytes < 24 * IDS * WIDTH * 4 < ROWS * WIDTH * 4 / 16
    nbytes = sum(x.nbytes for x in jax.tree.leaves((given, state)))
    assert sizes.alias_size_in_bytes >= nbytes


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
@EACH
def test_a_large_table_on_a_chip(name, target):
    """200,000 x 256 and 512 ids: an accumulator would have 195 MiB."""
    shape = jax.ShapeDtypeStruct
    given = {"embed": {"table": shape((200_000, 256), jnp.float32)}}
    given["w"] = shape((256, 256), jnp.float32)
    tx = RULES[name]
    state, ids = jax.eval_shape(tx.init, given), shape((512,), jnp.int32)
    step = micro_step(tx, donate=True)
    report = jaxmem.estimate(step, given, state, ids, None, target=target)
    assert report.temp_bytes <= 4 * 2**20
    assert report.output_bytes - report.alias_bytes <= 1024


def test_sums_of_narrow_rows_are_rounded_once():
    """A row that comes 48 times: in bfloat16 its sum would stop growing."""
    table = jnp.ones((64, 4), jnp.bfloat16)
    weights = jnp.asarray(np.linspace(0.5, 1.5, 48), jnp.bfloat16)

    def loss(params, batch, rng):
        return jnp.mean(params["embed"]["table"][batch["ids"]].sum(1) * batch["w"])

    tx = optim.rowwise(optax.sgd(1.0))
    batch = {"ids": jnp.zeros(48, jnp.int32), "w": weights}
    step = micro_step(tx, 12, loss)
    new, _, _ = trained(step, tx, [batch], {"embed": {"table": table}})
    # a gradient of each micro-batch is rounded, as the accumulator's are
    parts = np.float64(weights).reshape(4, 12).T / 4
    rounded = np.float64(jnp.asarray(parts, jnp.bfloat16)).sum() / 12
    want = np.float64(jnp.asarray(1 - np.float32(rounded), jnp.bfloat16))
    moved = np.float64(new["embed"]["table"][0])
    assert np.abs(moved - want).max() <= 2.0**-9  # the order of sums may round over
    np.testing.assert_array_equal(new["embed"]["table"][1:], table[1:])


def test_the_accumulators_dtype_is_that_of_the_rows():
    """Bytes of what the scan over micro-batches stacks."""
    tx, ids = RULES["sgd"], batches(1, ROWS, IDS)[0]
    given = params(ROWS, WIDTH)

    def stacked(dtype):
        step = micro_step(tx, accumulator_dtype=dtype)
        traced = step.trace(given, tx.init(given), ids, None).jaxpr
        shape = (N, IDS // N, WIDTH)
        outs = (v.aval for e in traced.eqns for v in e.outvars)
        return {str(a.dtype) for a in outs if getattr(a, "shape", None) == shape}

    assert "float32" in stacked(None)
    assert "bfloat16" in stacked(jnp.bfloat16)


def of_examples(params, batch, rng):
    rows = params["embed"]["table"][batch["ids"]]
    per_example = jnp.sum(jnp.tanh(rows @ params["w"]) ** 2, axis=-1)
    return jnp.sum(per_example * batch["weight"]) / jnp.sum(batch["weight"])


@pytest.mark.filterwarnings("ignore:microbatch. the loss takes")
@pytest.mark.fast("lazy adam")
@EACH
def test_micro_batches_that_do_not_count_touch_no_rows(name):
    """Of weight 0 or not finite; others count by their weights."""
    tx, ids = RULES[name], batches(1)[0] % 200
    weight = jnp.asarray(np.tile([1.0, 0.0, jnp.nan, 3.0], 6), jnp.float32)
    batch = {"ids": ids, "weight": weight}
    sums = lambda batch: jnp.nan_to_num(batch["weight"]).sum()
    step = micro_step(tx, N, of_examples, weight_fn=sums, skip_nonfinite=True)
    given, state, metrics = trained(step, tx, [batch])
    counts = jnp.array([0, 3])  # micro-batch i has the examples i, i + 4, ...
    kept = jax.tree.map(lambda x: x.reshape(6, 4)[:, counts].reshape(-1), batch)
    whole = micro_step(tx, 1, of_examples)
    want = trained(whole, tx, [kept])
    assert_near(given, want[0])
    assert_near(state, want[1])
    assert int(metrics["skipped"]) == 2
    nothing = batch | {"weight": jnp.zeros(24)}
    again = step(given, state, nothing, None)
    jax.tree.map(np.testing.assert_array_equal, again[:2], (given, state))


# -- frameworks

WORDS, EXAMPLES = 50, jnp.asarray(np.random.default_rng(0).integers(0, 50, (8, 6)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.BatchNorm(use_running_average=False)(nn.Embed(WORDS, 4)(ids))
        return nn.Dense(3)(x)


class WithStats(TrainState):
    batch_stats: dict


def test_linen_with_a_model_state():
    tx = optim.rowwise_adagrad(LR)
    variables = Linen().init(jax.random.key(0), EXAMPLES)

    def loss(params, stats, ids, rng):
        given = {"params": params, "batch_stats": stats}
        out, new = Linen().apply(given, ids, mutable=["batch_stats"])
        return jnp.mean(out**2) + jnp.mean(out), new["batch_stats"]

    rest = variables["batch_stats"]
    state = WithStats.create(
        apply_fn=None, params=variables["params"], tx=tx, batch_stats=rest
    )
    options = {"has_model_state": True, "donate": False}
    step = jaxmem.microbatch(loss, tx, N, tables="Embed_0", **options)
    same = jaxmem.microbatch(loss, DENSE, N, **options)
    want = variables["params"], DENSE.init(variables["params"]), rest
    for _ in range(2):
        state, metrics = step(state, EXAMPLES, None)
        *want, found = same(*want, EXAMPLES, None)
    assert_near(state.params, want[0])
    assert_near(state.batch_stats, want[2])
    assert_near(metrics, found)
    assert not np.allclose(state.params["Embed_0"]["embedding"], 0)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.dropout(self.embed(ids)))


def test_nnx_in_place():
    loss = lambda model, ids, rng: jnp.mean(model(ids) ** 2)
    models = [Nnx(nnx.Rngs(0)) for _ in range(2)]
    before = np.array(models[0].embed.embedding[...])
    rows, dense = (
        nnx.Optimizer(m, tx, wrt=nnx.Param)
        for m, tx in zip(models, (optim.rowwise_adagrad(LR), DENSE), strict=True)
    )
    ours = jaxmem.microbatch(loss, rows.tx, N, tables="embed")
    theirs = jaxmem.microbatch(loss, dense.tx, N)
    for _ in range(2):
        got = ours(models[0], rows, EXAMPLES, None)
        want = theirs(models[1], dense, EXAMPLES, None)
    assert_near(got, want)
    states = [nnx.as_pure(nnx.state(m, nnx.Param)) for m in models]
    assert_near(*states)
    assert np.abs(before - models[0].embed.embedding[...]).max() > 0.1


def test_equinox():
    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        head: eqx.nn.Linear

        def __call__(self, ids):
            return jax.vmap(lambda i: self.head(self.embed(i)))(ids)

    keys = jax.random.split(jax.random.key(0))
    model = Model(
        eqx.nn.Embedding(WORDS, 4, key=keys[0]), eqx.nn.Linear(4, 3, key=keys[1])
    )
    loss = lambda model, ids, rng: jnp.mean(jax.vmap(model)(ids) ** 2)
    tx, options = optim.rowwise_adagrad(LR), {"donate": False}
    step = jaxmem.microbatch(loss, tx, N, tables="embed/weight", **options)
    same = jaxmem.microbatch(loss, DENSE, N, **options)
    got, want = (model, tx.init(model)), (model, DENSE.init(model))
    for _ in range(2):
        *got, _ = step(*got, EXAMPLES, None)
        *want, _ = same(*want, EXAMPLES, None)
    assert_near(got[0], want[0])


def test_parameters_that_their_gradient_overwrites():
    """`rowwise_sgd` takes dense gradients too, and is compared with itself."""
    key = "_overwrite_with_gradient"
    given = {"params": params(), key: {"scale": jnp.float32(2.0)}}
    loss = lambda p, ids, rng: plain_loss(p["params"], ids) * p[key]["scale"]
    tx, ids = optim.rowwise_sgd(LR), batches(1)[0]
    run = lambda **options: micro_step(tx, N, loss, **options)(
        given, tx.init(given["params"]), ids, None
    )
    assert_near(run(), run(tables=None))


def test_a_lookup_in_a_scan_that_is_recomputed():
    def loss(params, ids, rng):
        table = params["embed"]["table"]
        layer = lambda x, i: (jnp.tanh((x + table[i]) @ params["w"]), None)
        x, _ = jax.lax.scan(jax.checkpoint(layer), jnp.ones((len(ids), 4)), ids.T)
        return jnp.mean(x**2)

    tx, ids = optim.rowwise_sgd(LR), batches(1)[0].reshape(8, 3)
    got = trained(micro_step(tx, N, loss, remat=True), tx, [ids])
    want = trained(micro_step(tx, N, loss, tables=None), tx, [ids])
    assert_near(got, want)


# -- devices


@pytest.mark.fast("lazy adam-False", "lazy adam-mesh")
@pytest.mark.parametrize("check_vma", [True, False, "mesh"])
@EACH
def test_rows_of_all_devices(name, check_vma):
    """Two micro-batches on each of four devices are the step of the whole batch."""
    tx, ids = RULES[name], batches(1)[0]
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    options = {"axis_name": "data"}
    if check_vma == "mesh":
        step = micro_step(tx, 2, mesh=mesh, **options)
    else:
        specs = (P(), P(), P("data"), P())
        step = jax.jit(
            jax.shard_map(
                micro_step(tx, 2, **options),
                mesh=mesh,
                in_specs=specs,
                out_specs=P(),
                check_vma=check_vma,
            )
        )
    got = trained(step, tx, [ids])
    (want, state), _ = jax.jit(train_step(tx))((params(), tx.init(params())), ids)
    assert_near(got[:2], (want, state))


# -- calls that do not fit


@pytest.mark.parametrize(
    ("tx", "options", "message"),
    [
        (jaxmem.adama(LR), {}, "accumulates in its own state"),
        (optax.adam(LR), {}, "is given RowGradients of tables, which a rule for rows"),
        (RULES["lazy adam"], {"tables": "tabel"}, "tables: 'tabel' matches no path"),
        (RULES["lazy adam"], {"tables": None}, r"pass it tables=\.\.\."),
        (RULES["sgd"], {"tables": "w"}, "gradient of 'w' is dense"),
        (RULES["sgd"], {"tables": {"w": True}}, "tables=.*no tree of bools"),
        (RULES["sgd"], {"tables": lambda path, x: False}, "selects none of the"),
    ],
    ids=["adama", "adam", "pattern", "none", "dense", "tree", "nothing"],
)
def test_what_does_not_fit(tx, options, message):
    given = params()
    with pytest.raises(ValueError, match=message):
        micro_step(tx, **options)(given, tx.init(given), batches(1)[0], None)
