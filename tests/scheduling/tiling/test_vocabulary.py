"""A head with its loss in loops over the vocabulary: the same step, less at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.chips import rates_of
from jaxmem.ir import jaxprs
from jaxmem.scheduling import Choice, _passes, schedule
from jaxmem.scheduling.tiling import vocabulary
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles
from tests.sets import some_fast

TOKENS, WIDTH, WORDS = 24, 16, 131  # a prime: the last block is smaller
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-8}


def logits_of(p, x):
    w = p["w"].astype(x.dtype)
    return (x @ w + p["b"].astype(x.dtype)[None]).astype(jnp.float32)


def nll(logp, labels):
    return -jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]


def log_softmax(p, x, labels):
    return nll(jax.nn.log_softmax(logits_of(p, x)), labels).mean()


def narrow_log_softmax(p, x, labels):
    """All of it in the dtype of the activations."""
    logp = jax.nn.log_softmax(x @ p["w"].astype(x.dtype))
    return nll(logp, labels).mean().astype(jnp.float32)


def integer_labels(p, x, labels):
    each = optax.softmax_cross_entropy_with_integer_labels(logits_of(p, x), labels)
    return each.mean()


def masked(p, x, labels):
    mask = (labels % 3 > 0).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits_of(p, x), labels)
    return (each * mask).sum() / mask.sum()


def weighted_with_z_loss(p, x, labels):
    logits = logits_of(p, x)
    lse = jax.nn.logsumexp(logits, -1)
    weights = jnp.linspace(0.1, 1, len(labels))
    each = nll(jax.nn.log_softmax(logits), labels) + 1e-2 * lse**2
    return (weights * each).sum()


def smoothed(p, x, labels):
    target = jax.nn.one_hot(labels, WORDS) * 0.9 + 0.1 / WORDS
    return -(target * jax.nn.log_softmax(logits_of(p, x))).sum(-1).mean()


def soft_targets(p, x, labels):
    target = jax.nn.one_hot(labels, WORDS)
    return optax.softmax_cross_entropy(logits_of(p, x), target).mean()


def capped(p, x, labels):
    logits = 5 * jnp.tanh(logits_of(p, x) * 0.7 / 5)
    return nll(jax.nn.log_softmax(logits), labels).mean()


def of_places(p, x, labels):
    logp = jax.nn.log_softmax(logits_of(p, x))
    return -logp[jnp.arange(len(labels)), labels].mean()


def of_real_words(p, x, labels):
    """The first words, which a first block has alone, are none."""
    real = jnp.arange(WORDS) >= 60
    logits = jnp.where(real[None], logits_of(p, x), -jnp.inf)
    labels = jnp.maximum(labels, 60)
    return nll(jax.nn.log_softmax(logits), labels).mean()


def of_words_far_below(p, x, labels):
    """A masked first half: what scales its sums to those of the others is infinite."""
    real = jnp.arange(WORDS) > WORDS // 2
    logits = jnp.where(real[None], logits_of(p, x) - 200, -jnp.inf)
    labels = jnp.maximum(labels, WORDS // 2 + 1)
    return nll(jax.nn.log_softmax(logits), labels).mean()


def of_columns(p, x, labels):
    """The gradient of the activations is moved behind its sum."""
    return log_softmax(p, -(-x.T).T, labels)


def tied(p, x, labels):
    """The head's weight is the embedding's; tokens in a batch of sequences."""
    table = p["w"].T
    x = (table.astype(x.dtype)[labels] + x).reshape(4, -1, WIDTH)
    logits = jnp.einsum("bsd,vd->bsv", x, table.astype(x.dtype)).astype(jnp.float32)
    return nll(jax.nn.log_softmax(logits[:, :-1]), labels.reshape(4, -1)[:, 1:]).mean()


FEW = [
    *(log_softmax, integer_labels, weighted_with_z_loss, tied),
    *(of_columns, of_real_words, of_words_far_below),
]
LOSSES = [
    *(*FEW, narrow_log_softmax, masked, smoothed, soft_targets, capped, of_places),
]


def example(dtype):
    r = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(r.standard_normal(shape), jnp.float32)
    p = {"w": normal(WIDTH, WORDS), "b": normal(WORDS)}
    labels = jnp.asarray(r.integers(0, WORDS, TOKENS), jnp.int32)
    return p, normal(TOKENS, WIDTH).astype(dtype), labels


def tiled(fn, args, config):
    """A function that does as `fn`, and what the passes have done."""
    traced = jaxprs.trace(fn, *args)
    done = _passes.rewrite(traced.jaxpr, {}, None, Choice("h100", (config,)))

    def run(*args):
        outs = jaxprs.evaluate(done.jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(traced.out_tree, outs)

    return run, done


def largest(closed) -> int:
    return max(
        jaxprs.elements(v.aval.shape) for e in jaxprs.walk(closed) for v in e.outvars
    )


def check(step, args, n, eps):
    run, done = tiled(step, args, VocabularyTiles(n=n))
    assert done.did(VocabularyTiles)
    got, want = jax.jit(lambda *args: (run(*args), step(*args)))(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        scale = float(jnp.abs(w).max())
        np.testing.assert_allclose(
            np.asarray(g, np.float32),
            np.asarray(w, np.float32),
            rtol=0,
            atol=eps * scale,
        )
    return done


def check_loss(loss, dtype, n):
    step = jax.value_and_grad(loss, argnums=(0, 1))
    # float32: a sum over all words, in another order. bfloat16: of two results that are
    # rounded to it, and of the logits' gradients in them.
    eps = WORDS * EPS["float32"] if dtype == "float32" else 4 * EPS["bfloat16"]
    done = check(step, example(dtype), n, eps)
    # the weight and its gradient are the largest of what is left
    assert largest(done.jaxpr) == WIDTH * WORDS < TOKENS * WORDS


@pytest.mark.fast(
    "log_softmax",
    "weighted_with_z_loss",
    "tied",
    "of_real_words",
    "of_words_far_below",
)
@pytest.mark.parametrize("loss", FEW, ids=lambda f: f.__name__)
def test_loss_and_gradients_are_the_same(loss):
    check_loss(loss, "float32", 4)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "n"), [("float32", 7), ("bfloat16", 3)])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_all_losses_and_gradients_are_the_same(loss, n, dtype):
    check_loss(loss, dtype, n)


def with_accuracy(p, x, labels):
    logits = logits_of(p, x)
    right = (logits.argmax(-1) == labels).mean()
    return nll(jax.nn.log_softmax(logits), labels).mean(), right


def test_the_most_likely_word_is_found_in_the_blocks():
    p, x, labels = example("float32")
    p = {**p, "b": p["b"].at[7].set(9).at[90].set(9)}
    # two words as likely as one another: the first counts
    p = {**p, "w": p["w"].at[:, 90].set(p["w"][:, 7])}
    step = jax.value_and_grad(with_accuracy, argnums=(0, 1), has_aux=True)
    done = check(step, (p, x, labels.at[:6].set(7)), 4, WORDS * EPS["float32"])
    assert largest(done.jaxpr) < TOKENS * WORDS


def test_a_logit_that_is_no_number_is_the_most_likely_word():
    """As for `argmax`, wherever the blocks of it and of the largest logit are."""

    def step(p, x):
        logits = logits_of(p, x)
        return jax.nn.log_softmax(logits).sum(-1), logits.argmax(-1)

    p, x, _ = example("float32")
    for words in ([40], [100, 70], [0, 130]):
        b = p["b"].at[3].set(9).at[90].set(9).at[jnp.asarray(words)].set(jnp.nan)
        args = {**p, "b": b}, x
        run, done = tiled(step, args, VocabularyTiles(n=4))
        assert done.did(VocabularyTiles)
        assert (jax.jit(run)(*args)[1] == min(words)).all()


def along(logp, labels, **how):
    return jnp.take_along_axis(logp, labels[:, None], -1, **how)[:, 0]


def at_places(logp, labels, **how):
    return logp.at[jnp.arange(len(labels)), labels].get(**how)


@pytest.mark.fast("fill--7.0-along", "clip-None-along")
@pytest.mark.parametrize(
    "how", some_fast([along, at_places], along), ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    ("mode", "fill"), [("fill", None), ("fill", -7.0), ("clip", None)], ids=str
)
def test_labels_out_of_bounds_are_what_they_were(how, mode, fill):
    def step(p, x, labels):
        def loss(p, x):
            logp = jax.nn.log_softmax(logits_of(p, x))
            each = how(logp, labels, mode=mode, fill_value=fill)
            return -jnp.where(jnp.isnan(each), 1, each).mean()

        return jax.value_and_grad(loss, argnums=(0, 1))(p, x)

    p, x, labels = example("float32")
    labels = labels.at[0].set(WORDS + 5).at[1].set(-1)
    check(step, (p, x, labels), 4, WORDS * EPS["float32"])


def gives_logits(p, x, labels):
    logits = logits_of(p, x)
    return nll(jax.nn.log_softmax(logits), labels).mean(), logits


def sorts(p, x, labels):
    logits = logits_of(p, x)
    return nll(jax.nn.log_softmax(logits), labels).mean(), jnp.sort(logits)[:, -3:]


def padded(p, x, labels):
    logits = logits_of(p, x)[:, : WORDS - 3]
    return nll(jax.nn.log_softmax(logits), labels % (WORDS - 3)).mean(), 0


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (gives_logits, "an array of all of it is an output"),
        (sorts, "`sort` needs all of it"),
        (padded, "`slice` needs all of it"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_what_needs_all_logits_is_left_and_named(loss, why):
    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    args = example("float32")
    _, done = tiled(step, args, VocabularyTiles(n=4))
    assert not done.did(VocabularyTiles)
    assert any(why in note for note in done.notes), done.notes


def test_what_has_no_softmax_is_left_without_a_word():
    def loss(p, x, labels):
        del labels
        return jnp.tanh(logits_of(p, x)).sum()

    _, done = tiled(jax.grad(loss), example("float32"), VocabularyTiles(n=4))
    assert not done.did(VocabularyTiles)
    assert not any("softmax" in note for note in done.notes)


def test_products_that_lead_to_no_maximum_are_not_looked_at(monkeypatch):
    """Of a layer before the head, and of the gradients, there is no softmax."""

    def loss(p, x, labels):
        return integer_labels(p, jnp.tanh(x @ jnp.eye(WIDTH, dtype=x.dtype)), labels)

    looked_at = []
    result = vocabulary._Growth.result
    told = lambda self: looked_at.append(self.product) or result(self)
    monkeypatch.setattr(vocabulary._Growth, "result", told)
    _, done = tiled(jax.grad(loss), example("float32"), VocabularyTiles(n=4))
    assert done.did(VocabularyTiles)
    assert len(set(looked_at)) == 1


def test_a_limit_takes_the_least_number_of_blocks_that_holds_less():
    args = example("float32")
    step = jax.value_and_grad(log_softmax, argnums=(0, 1))
    many = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    labels = jax.ShapeDtypeStruct((4096,), jnp.int32)
    p = {"w": jnp.zeros((WIDTH, 8192)), "b": jnp.zeros(8192)}
    notes = {}
    for limit in (2**40, 2**26, 2**25, 1):
        _, done = tiled(step, (p, many, labels), VocabularyTiles(limit=limit))
        notes[limit] = [n for n in done.notes if "blocks of the vocabulary" in n]
    assert notes[2**40] == []
    blocks = {k: v[0].split(" blocks")[0].split()[-1] for k, v in notes.items() if v}
    assert int(blocks[2**26]) < int(blocks[2**25]) < int(blocks[1]) == 32
    del args


def test_each_block_reads_and_writes_the_sums():
    """Where blocks are so small that their products wait for the sum of a gradient."""
    tokens, width, words, n = 2**16, 4096, 2**15, 32

    def loss(w, x, labels):
        return nll(jax.nn.log_softmax(x @ w), labels).mean()

    like = jax.ShapeDtypeStruct
    args = like((width, words), "bfloat16"), like((tokens, width), "bfloat16")
    args = *args, like((tokens,), jnp.int32)
    machine = rates_of("h100")
    summed = 2 * 4 * tokens * width / machine.bandwidth
    for block in (words // n, words // n // 2):
        one = 2 * tokens * width * block / machine.narrow
        read = 2 * tokens * width / machine.bandwidth
        assert read < one < summed

    def seconds(n):
        _, done = tiled(jax.grad(loss, (0, 1)), args, VocabularyTiles(n=n))
        (row,) = done.description.tiles
        return row.seconds

    assert n * summed <= seconds(2 * n) - seconds(n) <= 1.05 * n * summed


def test_a_step_with_an_optimizer_keeps_its_updates():
    tx = optax.adamw(1e-2)

    def step(p, state, x, labels):
        loss, grads = jax.value_and_grad(smoothed)(p, x, labels)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, loss

    p, x, labels = example("float32")
    # the first update is a sign of the gradient: rounding shows where it is near zero
    state = jax.tree.map(lambda v: v + 1 if v.ndim else v, tx.init(p))
    with jax.numpy_dtype_promotion("standard"):
        done = check(step, (p, state, x, labels), 4, WORDS * EPS["float32"])
    assert largest(done.jaxpr) < TOKENS * WORDS


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
def test_a_device_does_its_own_tokens_in_blocks(check_vma):
    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("x")
    mesh = jax.make_mesh(
        (4,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )

    def shards(p, x, labels):
        loss, grads = jax.value_and_grad(weighted_with_z_loss, (0, 1))(p, x, labels)
        return jax.lax.pmean(loss, "x"), jax.lax.pmean(grads[0], "x"), grads[1]

    step = jax.shard_map(
        shards,
        mesh=mesh,
        in_specs=(whole, rows, rows),
        out_specs=(whole, whole, rows),
        check_vma=check_vma,
    )
    done = check(step, example("float32"), 4, WORDS * EPS["float32"])
    assert largest(done.jaxpr) == WIDTH * WORDS


@pytest.mark.parametrize("loss", [log_softmax, integer_labels, with_accuracy])
def test_a_map_that_is_differentiated_outside_keeps_its_loss_in_the_first(loss):
    """One loop would do it together with the gradients, which come after it."""
    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("x")
    mesh = jax.make_mesh(
        (4,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )

    def shards(p, x, labels):
        layer = lambda x, w: (jnp.sin(x @ w), None)
        x, _ = jax.lax.scan(layer, x, p["layers"])
        return jax.lax.pmean(loss(p, x, labels), "x")

    mapped = jax.shard_map(
        shards, mesh=mesh, in_specs=(whole, rows, rows), out_specs=whole
    )

    def step(p, x, labels):
        of = lambda p, x: jax.tree.leaves(mapped(p, x, labels))[0] ** 2
        return jax.value_and_grad(of, argnums=(0, 1))(p, x)

    p, *others = example("float32")
    args = {**p, "layers": jnp.stack([p["w"][:, :WIDTH]] * 2)}, *others
    run, _ = tiled(step, args, VocabularyTiles(n=4))
    got, want = jax.jit(lambda *args: (run(*args), step(*args)))(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        most = WORDS * EPS["float32"] * float(jnp.abs(w).max())
        np.testing.assert_allclose(g, w, rtol=0, atol=most)


def test_what_is_sharded_along_the_vocabulary_by_its_type():
    kind = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("x",), kind, devices=jax.devices()[:2])
    columns = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))

    def loss(w, x, target):
        return -(target * jax.nn.log_softmax(x @ w)).mean()

    with jax.set_mesh(mesh):
        rng = np.random.default_rng(0)
        normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        w, target = (jax.device_put(normal(n, 128), columns) for n in (WIDTH, 24))
        args = w, normal(24, WIDTH), target
        choice = Choice("h100", (VocabularyTiles(n=4),))
        done = schedule(jax.grad(loss), donate_argnums=()).rewritten(choice, *args)
        (got,) = jax.jit(lambda *xs: done.run(xs))(*args)
        want = jax.jit(jax.grad(loss))(*args)
    assert done.did(VocabularyTiles)
    assert jax.typeof(got) == jax.typeof(want)
    # a sum over 24 rows and 128 words, in another order
    most = 24 * 128 * EPS["float32"] * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=most)


def test_a_recomputed_head_is_put_in_blocks_too():
    loss = jax.checkpoint(integer_labels)
    check_loss(loss, "float32", 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_head_takes_what_its_sum_and_a_block_take(dtype):
    def loss(w, x, labels):
        return nll(jax.nn.log_softmax(x @ w.astype(x.dtype)), labels).mean()

    tokens, width, words, n = 8192, 4096, 131072, 32
    shapes = (width, words), (tokens, width), (tokens,)
    dtypes = dtype, "bfloat16", "int32"
    args = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    run, _ = tiled(jax.grad(loss, (0, 1)), args, VocabularyTiles(n=n))
    report = jaxmem.estimate(run, *args, target="h100")
    block = tokens * words // n * 2  # of logits, in bfloat16
    assert report.temp_bytes < 4 * tokens * width + block + 2**20 < 250 * 2**20
