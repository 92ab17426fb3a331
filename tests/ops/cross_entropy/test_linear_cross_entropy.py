"""Linear cross entropy: its options, its bytes, sharded vocabularies, its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import cross_entropy as benchmark
from benchmarks.cost import matmul_flops
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ops import linear_cross_entropy
from jaxmem.ops.common.lean import widen
from tests import references
from tests.arrays import array
from tests.references import Comparison, kept_bytes

V = 40
LABELS_OUT = -100


def plain(x, kernel, bias, labels, weights, **options):
    """The formula on whole logits, as people write it."""
    o = options.get
    kernel = kernel.T if o("vocab_axis") == 0 else kernel
    logits = x @ kernel + jnp.broadcast_to(bias, (*x.shape[:-1], V))
    logits = widen(logits)
    if cap := o("softcap"):
        logits = cap * jnp.tanh(logits / cap)
    log_p, lse = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, -1)
    e = o("label_smoothing", 0.0)
    target = (1 - e) * jax.nn.one_hot(labels, V, dtype=log_p.dtype) + e / V
    loss = -(target * log_p).sum(-1) + o("z_loss", 0.0) * lse**2
    counted = labels != o("ignore_index", LABELS_OUT)
    share = jnp.where(counted, weights.astype(loss.dtype), 0.0)
    loss = jnp.where(share != 0, loss, 0.0) * share
    result = {
        "none": loss,
        "sum": loss.sum(),
        "mean": loss.sum() / jnp.where(share.sum() == 0, 1.0, share.sum()),
    }[o("reduction", "mean")]
    return (result, lse) if o("return_lse") else result


def lean(x, kernel, bias, labels, weights, **options):
    options = {"block_size": 8, "ignore_index": LABELS_OUT} | options
    return linear_cross_entropy(x, kernel, labels, bias, weights=weights, **options)


def args(vocab_axis=-1):
    def make(shape, dtype, rng):
        *batch, d = shape
        normal = lambda *s: array(rng.standard_normal(s), dtype)
        labels = rng.integers(0, V, batch)
        labels[..., 0] = LABELS_OUT
        kernel = normal(d, V) if vocab_axis else normal(V, d)
        weights = array(rng.uniform(0, 2, batch), dtype)
        return normal(*shape), kernel, normal(V), jnp.asarray(labels, "i4"), weights

    return make


def comparison(name, **options):
    return Comparison(
        name,
        functools.partial(lean, **options),
        functools.partial(plain, **options),
        args(options.get("vocab_axis", -1)),
        diff=(0, 1, 2),
    )


DEFAULTS = comparison("defaults")
EVERYTHING = comparison(
    "everything",
    block_size=7,  # the last block is a part of one
    vocab_axis=0,
    label_smoothing=0.2,
    z_loss=0.1,
    softcap=3.0,
    return_lse=True,
    reduction="sum",
)
ONE_BLOCK = comparison(
    "one block", block_size=64, reduction="none", label_smoothing=1.0
)


@pytest.mark.fast("defaults", "everything")
@pytest.mark.parametrize("case", [DEFAULTS, ONE_BLOCK, EVERYTHING], ids=str)
def test_options(case):
    references.check_equal(case, (3, 5), "float32", "scan")


@pytest.mark.fast("remat", "shard_map")
@pytest.mark.parametrize("transform", ["vmap", "remat", "shard_map"])
def test_under_transform(transform):
    references.check_equal(EVERYTHING, (3, 5), "float32", transform)


@pytest.mark.parametrize("wanted", [{0}, {1}, {2}], ids=str)
def test_frozen_inputs(wanted):
    references.check_equal(DEFAULTS, (3, 5), "float32", "scan", frozenset(wanted))


def arrays(tokens=6, d=5, v=V, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *s: array(rng.standard_normal(s), dtype)
    labels = array(rng.integers(0, v, tokens), jnp.int32)
    return normal(tokens, d), normal(d, v), labels, normal(v)


# -- what the arguments mean


def test_tokens_that_do_not_count():
    """Ignored by label, masked out, or of weight zero: the same loss and gradient."""
    x, kernel, labels, bias = arrays()
    counted = jnp.arange(6) % 3 > 0
    out = jnp.where(counted, labels, -100)
    variants = (
        (out, {"ignore_index": -100}),
        (labels, {"where": counted, "ignore_index": -1}),
        (out, {"weights": counted.astype(jnp.float32)}),
    )

    def outcome(labels, options):
        loss = lambda x: linear_cross_entropy(
            x, kernel, labels, bias, block_size=8, **options
        )
        return jax.jit(jax.value_and_grad(loss))(x)

    first, *others = (outcome(*variant) for variant in variants)
    few = x[counted], kernel, labels[counted], bias
    chosen = linear_cross_entropy(*few)
    np.testing.assert_allclose(first[0], chosen, rtol=1e-6)
    np.testing.assert_array_equal(first[1][~counted], 0.0)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_a_label_out_of_range_is_loud():
    x, kernel, labels, _ = arrays()
    for wrong in (-1, V):
        loss = linear_cross_entropy(
            x, kernel, labels.at[2].set(wrong), reduction="none", block_size=8
        )
        np.testing.assert_array_equal(np.isnan(loss), np.arange(6) == 2)


@pytest.mark.parametrize("tokens", [6, 0])
def test_nothing_counts(tokens):
    x, kernel, labels, _ = arrays(tokens)
    loss = lambda x: linear_cross_entropy(x, kernel, labels, where=labels < 0)
    value, gradient = jax.value_and_grad(loss)(x)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, jnp.zeros_like(x))


def test_a_bias_of_minus_infinity_takes_columns_out():
    """The first block is out altogether."""
    x, kernel, labels, bias = arrays()
    first = 20
    labels = first + labels % (V - first)
    out = bias.at[:first].set(-jnp.inf)
    loss = lambda k, b, y: linear_cross_entropy(x, k, y, b, block_size=8)
    step = jax.jit(jax.value_and_grad(loss))
    got = step(kernel, out, labels)
    want = step(kernel[:, first:], bias[first:], labels - first)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_array_equal(got[1][:, :first], 0.0)
    np.testing.assert_allclose(got[1][:, first:], want[1], rtol=1e-5, atol=1e-7)


def test_large_logits_cost_no_digits():
    """The loss is a small difference of logits near 1e4, where eps is 1e-3."""
    x, kernel, labels, bias = arrays()
    loss = lambda b: linear_cross_entropy(
        0 * x, kernel, labels, b, reduction="none", block_size=8
    )
    spread = jnp.round(bias * 8) / 8  # exact when 1e4 is added
    np.testing.assert_allclose(loss(spread + 1e4), loss(spread), rtol=1e-6)


def test_second_derivatives():
    x, kernel, labels, bias = arrays()
    ours = lambda k: linear_cross_entropy(x, k, labels, bias, block_size=8)
    theirs = lambda k: plain(x, k, bias, labels, jnp.ones(6))
    along = jnp.flip(kernel)

    @jax.jit
    def products(kernel):
        forward = jax.jvp(jax.grad(ours), (kernel,), (along,))[1]
        slope = lambda k: jnp.vdot(jax.grad(ours)(k), along)
        want = jax.jvp(jax.grad(theirs), (kernel,), (along,))[1]
        return forward, jax.grad(slope)(kernel), want

    forward, reverse, want = products(kernel)
    # a dozen float32 roundings of terms up to one
    np.testing.assert_allclose(forward, want, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(reverse, want, rtol=1e-4, atol=2e-6)


def rms_error(loss, args, reference):
    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)
    off = lambda g, r: np.sqrt(np.mean((np.asarray(g, "f8") - r) ** 2))
    return jax.tree.map(off, got, reference)


def test_bfloat16_errs_no_more_than_float32_logits():
    """Against float64: root mean square of the gradients of x and kernel."""
    x, kernel, labels, _ = arrays(100, 64, 704, "bfloat16")
    kernel = kernel / 8
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, "f4"), "f8") for a in (x, kernel)]
        exact = jax.grad(_whole, argnums=(0, 1))(*wide, labels)
        exact = jax.tree.map(np.asarray, exact)
    ours = functools.partial(linear_cross_entropy, block_size=64)
    errors, plain_errors = (
        rms_error(loss, (x, kernel, labels), exact) for loss in (ours, _whole)
    )
    assert errors[0] <= plain_errors[0]
    assert errors[1] <= plain_errors[1]


def _whole(x, kernel, labels):
    log_p = jax.nn.log_softmax(widen(x @ kernel))
    return -jnp.take_along_axis(log_p, labels[:, None], 1).mean()


def test_float16_gradients_of_a_mean_do_not_underflow():
    """1 / 512 of 1 / 4,096 is eight times the least float16: three bits are left."""
    x, kernel, labels, _ = arrays(4096, 4, 512)
    kernel = kernel / 64
    loss = functools.partial(linear_cross_entropy, block_size=128)
    want = jax.jit(jax.grad(loss, 1))(x, kernel, labels)
    narrow = functools.partial(loss, dtype="float16")
    got = jax.jit(jax.grad(narrow, 1))(x, kernel, labels)
    # half a unit in the last place of each factor
    assert jnp.abs(got - want).max() <= 2**-10 * jnp.abs(want).max()


# -- what is kept, what exists, what is computed


@pytest.mark.parametrize("wanted", references.subsets((0, 1, 2)), ids=str)
def test_keeps_eight_bytes_a_token(wanted):
    """No copy of the float32 kernel, and x in the dtype of the product."""
    x, kernel, labels, bias = arrays(24)
    x, labels = x.reshape(4, 6, -1).astype("bfloat16"), labels.reshape(4, 6)

    def loss(x, kernel, bias):
        options = dict(dtype="bfloat16", block_size=8, reduction="sum")
        return linear_cross_entropy(x, kernel, labels, bias, **options)

    assert kept_bytes(loss, (x, kernel, bias), wanted) == 24 * 8


def test_logits_never_exist_whole():
    """Not in a differentiated scan either, that has the labels as a constant."""
    tokens, words = 512, 1024
    x, kernel, labels, _ = arrays(tokens, 8, words)

    def step(kernel, xs):
        def body(kernel, x):
            loss = linear_cross_entropy(x, kernel, labels, block_size=64)
            return kernel * loss, loss

        return jax.lax.scan(body, kernel, xs)[1].sum()

    jaxpr = jax.make_jaxpr(jax.grad(step))(kernel, jnp.stack([x, x, x]))
    largest = max(v.aval.size for e in _jaxpr.walk(jaxpr) for v in e.outvars)
    assert largest < tokens * words / 8


def dots(wanted, wrap=lambda f: f):
    args = benchmark.arguments(sizes=(256, 64, 1024))
    loss = wrap(functools.partial(linear_cross_entropy, block_size=100))
    step = jax.grad(lambda x, k: loss(x, k, jnp.zeros(256, jnp.int32)), wanted)
    return matmul_flops(jax.make_jaxpr(step)(*args[:2]).jaxpr) / (2 * 256 * 64 * 1024)


def test_products():
    """Logits twice, and one for each gradient that somebody asked for."""
    assert dots((0, 1)) == 4  # whole logits: 3
    assert dots((0,)) == dots((1,)) == 3
    assert dots((0, 1), jax.checkpoint) == 5
    names = (f"jaxmem_linear_cross_entropy_row_{n}" for n in ("max", "log_sum"))
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    keep_rows = functools.partial(jax.checkpoint, policy=policy)
    assert dots((0, 1), keep_rows) == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", benchmark.THRESHOLDS)
@pytest.mark.parametrize(
    "variant", [w for w in benchmark.variants() if w[-1]], ids=lambda w: w[0]
)
def test_bytes_of_a_large_vocabulary(variant, target):
    _, loss, axis, _ = variant
    with jax.numpy_dtype_promotion("standard"):
        assert round(benchmark.temp(loss, axis, target)) <= benchmark.THRESHOLDS[target]


# -- many devices


def mesh_of_8(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("d", "v"), axis_types=(kind,) * 2)


@pytest.mark.fast("True")
@pytest.mark.parametrize("check_vma", [True, False])
def test_vocabulary_divided_inside_shard_map(check_vma):
    x, kernel, labels, bias = arrays(v=40)
    options = dict(label_smoothing=0.1, z_loss=0.1, softcap=3.0, return_lse=True)

    def loss(x, kernel, bias, **more):
        value, lse = linear_cross_entropy(
            x, kernel, labels, bias, block_size=3, **options, **more
        )
        return value + (lse**2).mean()

    divided = jax.shard_map(
        functools.partial(loss, axis_name=("d", "v")),
        mesh=mesh_of_8(),
        in_specs=(P(), P(None, ("d", "v")), P(("d", "v"))),
        out_specs=P(),
        check_vma=check_vma,
    )
    got, want = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(x, kernel, bias)
        for f in (divided, loss)
    )
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(same, got, want)


def test_sharded_jit_gathers_no_kernel():
    x, kernel, labels, _ = arrays(64, 32, 1024)
    mesh = mesh_of_8()
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    args = put(x, "d"), put(kernel, None, "v"), put(labels, "d")
    step = jax.value_and_grad(
        functools.partial(linear_cross_entropy, block_size=64), argnums=(0, 1)
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(*args).compile()
    assert "all-gather" not in compiled.as_text()
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(same, compiled(*args), step(x, kernel, labels))


def test_explicit_axes():
    x, kernel, labels, _ = arrays(8, 4, 16)
    spec = NamedSharding(mesh_of_8(AxisType.Explicit), P("d"))
    x = jax.device_put(x, spec)
    with pytest.raises(ValueError, match="auto_axes"):
        linear_cross_entropy(x, kernel, labels)
    with jax.set_mesh(spec.mesh):
        wrapped = jax.sharding.auto_axes(linear_cross_entropy, out_sharding=P())
        got = jax.jit(jax.grad(wrapped))(x, kernel, labels)
    assert jax.typeof(got).sharding.spec == P("d", None)


# -- errors


X, KERNEL, LABELS, BIAS = arrays()
BAD = [
    ((X, KERNEL.T, LABELS), {}, "vocab_axis=0"),
    ((X, KERNEL, LABELS), {"vocab_axis": 2}, "vocab_axis=2"),
    ((X, KERNEL[:, :0], LABELS), {}, "empty vocabulary"),
    ((X, KERNEL, LABELS[:3]), {}, "batch axes"),
    ((X, KERNEL, LABELS, BIAS[:3]), {}, "bias"),
    ((X, KERNEL, LABELS), {"where": LABELS[:3] > 0}, "where"),
    ((X, KERNEL, LABELS), {"weights": BIAS}, "weights"),
    ((X, KERNEL, LABELS), {"reduction": "avg"}, "reduction='avg'"),
    ((X, KERNEL, LABELS), {"label_smoothing": 1.5}, "label_smoothing=1.5"),
    ((X, KERNEL, LABELS), {"z_loss": -1.0}, "z_loss"),
    ((X, KERNEL, LABELS), {"softcap": 0.0}, "softcap=0.0"),
    ((X, KERNEL, LABELS), {"block_size": 0}, "block_size=0"),
    ((X, KERNEL, LABELS), {"dtype": "int32"}, "dtype='int32'"),
    ((X, KERNEL, LABELS), {"accumulator_dtype": "int8"}, "accumulator_dtype='int8'"),
    ((X, KERNEL, LABELS.astype("f4")), {}, "labels=float32"),
    ((LABELS[:, None], KERNEL, LABELS), {}, "x=int32"),
    ((X, KERNEL, LABELS), {"where": LABELS}, "where=.*bools"),
]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("args,options,message", BAD, ids=[m for *_, m in BAD])
def test_bad_input(args, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        linear_cross_entropy(*args, **options)
