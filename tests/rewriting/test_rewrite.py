"""Where formulas are looked for, what is left alone, and what is put back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxmem.ir.jaxprs import walk
from jaxmem.rewriting import Pattern, find, rewrite
from tests.arrays import array
from tests.references import kept_bytes
from tests.rewriting.formulas import hugging_face_rms_norm

X = array(np.random.default_rng(1).standard_normal((4, 8)), jnp.float32)
GELU = (Pattern("gelu", jax.nn.gelu, lambda x: jnp.tanh(x) * 0 + jax.nn.gelu(x)),)


def counts(fn, *args):
    return find(fn, *args).counts


def primitives(fn, *args):
    return [eqn.primitive.name for eqn in walk(jax.make_jaxpr(fn)(*args))]


def scanned(x):
    return jax.lax.scan(lambda c, y: (jax.nn.gelu(c + y), c), x[0], x, unroll=2)


def mapped(x):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("i")
    fn = jax.shard_map(jax.nn.gelu, mesh=mesh, in_specs=spec, out_specs=spec)
    return fn(x)


CONTAINERS = {
    "jit": jax.jit(lambda x: jax.nn.gelu(x) + 1),
    "nested jit": jax.jit(lambda x: jax.jit(jax.nn.gelu)(x) + 1),
    "scan": scanned,
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jax.nn.gelu(x))),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 9, jnp.sin, jax.nn.gelu, x),
    "vmap": jax.vmap(jax.nn.gelu),
    "shard_map": mapped,
    "scan of checkpoint": lambda x: jax.lax.scan(
        jax.checkpoint(lambda c, y: (jax.nn.gelu(c * y), None)), x[0], x
    )[0],
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_is_found_inside(name):
    fn = CONTAINERS[name]
    assert counts(fn, X) == {"gelu": 1}
    lean = rewrite(fn)

    def both(fn):
        total = lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(fn(x)))
        return jax.jit(lambda x: (fn(x), jax.grad(total)(x)))(X)

    (plain, want), (values, got) = both(fn), both(lean)
    for a, b in zip(*map(jax.tree.leaves, (plain, values)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-5)


def test_is_found_in_while():
    def fn(x):
        return jax.lax.while_loop(lambda x: x.sum() > 9, jax.nn.gelu, x)

    assert counts(fn, X) == {"gelu": 1}
    np.testing.assert_array_equal(rewrite(fn)(X), fn(X))


def test_works_under_every_transform():
    lean = rewrite(jax.nn.gelu)
    want = jax.vmap(jax.grad(lambda x: jax.nn.gelu(x).sum()))(X)
    got = jax.jit(jax.vmap(jax.grad(lambda x: lean(x).sum())))(X)
    np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-6)


def test_closed_over_tracers_are_differentiated():
    def loss(w, rewriter):
        return rewriter(lambda x: jax.nn.gelu(x * w).sum())(X)

    want = jax.grad(loss)(2.0, lambda f: f)
    np.testing.assert_allclose(jax.grad(loss)(2.0, rewrite), want, rtol=1e-5)


@pytest.mark.parametrize("name", ["scan", "checkpoint", "jit", "cond"])
def test_what_holds_a_formula_keeps_its_parameters(name):
    fn = CONTAINERS[name]

    def holder(fn):
        jaxpr = jax.make_jaxpr(fn)(X)
        kinds = ("scan", "checkpoint", "remat2", "jit", "pjit", "cond")
        return next(e for e in jaxpr.jaxpr.eqns if e.primitive.name in kinds)

    before, after = holder(fn), holder(rewrite(fn))
    assert before.primitive is after.primitive
    plain = [k for k in before.params if "jaxpr" not in k and k != "branches"]
    for key in plain:
        assert str(before.params[key]) == str(after.params[key]), key


def test_names_and_lines_are_reported():
    def fn(x):
        with jax.named_scope("mlp"):
            return jax.jit(jax.nn.gelu)(x)

    (site,) = find(fn, X).replaced
    assert site.path.startswith("mlp")
    assert "test_rewrite.py" in site.source
    assert (site.shape, site.dtype) == ((4, 8), "float32")
    scopes = [
        str(e.source_info.name_stack) for e in walk(jax.make_jaxpr(rewrite(fn))(X))
    ]
    assert any("mlp" in s for s in scopes)


def test_without_a_formula_the_jaxpr_stays():
    def fn(x):
        y, _ = jax.lax.scan(lambda c, y: (c * y, jnp.sin(c)), x[0], x)
        return jax.jit(jnp.cos)(y) + jax.checkpoint(jnp.sin)(y)

    assert str(jax.make_jaxpr(rewrite(fn))(X)) == str(jax.make_jaxpr(fn)(X))


def test_arguments_of_any_kind():
    def fn(tree, *, scale, name, train: bool):
        assert train and name == "a"
        return {"y": jax.nn.gelu(tree["x"] * scale)}

    args = dict(scale=2.0, name="a", train=True)
    out = rewrite(fn)({"x": X}, **args)
    np.testing.assert_allclose(out["y"], jax.nn.gelu(X * 2), rtol=1e-6)
    assert rewrite(fn).__name__ == "fn"


NEAR_MISSES = {
    "constant": lambda x: 0.5 * x * (1 + jnp.tanh(0.7979 * (x + 0.0457 * x**3))),
    "negative factor": lambda x: x * jax.nn.sigmoid(-1.702 * x),
    "shifted sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x + 1),
    "batch norm over the rows alone": lambda x: (
        (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(0, keepdims=True) + 1e-6)
    ),
    "other input": lambda x: x * jax.nn.sigmoid(x[::-1]),
    "softmax of two axes": lambda x: (
        jnp.exp(x - x.max(-1, keepdims=True))
        / jnp.exp(x - x.max(-1, keepdims=True)).sum(0, keepdims=True)
    ),
    "mean over another axis": lambda x: (
        (x - x.mean(0, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    ),
    "sample variance": lambda x: (
        (x - x.mean(-1, keepdims=True))
        / jnp.sqrt(x.var(-1, keepdims=True, ddof=1) + 1e-6)
    ),
    "cut gradient": lambda x: x * jax.nn.sigmoid(jax.lax.stop_gradient(x)),
    "slope 1/2 at 0": lambda x: jnp.maximum(x, 0),
    "relu at one": lambda x: jnp.maximum(x, 1),
    "cube": lambda x: 0.5 * x * (1 + jnp.tanh(0.79788456 * (x + 0.044715 * x**2))),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left(name):
    assert counts(NEAR_MISSES[name], X) == {}


OPERATIONS = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": jnp.multiply,
    "div": jnp.divide,
}
NUMBERS = (-np.inf, -1.0, 0.0, 1.0, np.inf)
SILU = Pattern("silu", lambda x: x / (1 + jnp.exp(-x)), jax.nn.silu)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("constant_first", [False, True])
def test_an_operation_is_looked_through_where_it_changes_nothing(name, constant_first):
    """silu of op(x, c) is x's own if op(x, c) is x, and else no silu of x at all."""

    def changed(x, c):
        return OPERATIONS[name](*((c, x) if constant_first else (x, c)))

    for c in NUMBERS:
        number = jnp.float32(c)
        fn = lambda x, c=number: x / (1 + jnp.exp(-changed(x, c)))
        same = bool((changed(X, number) == X).all())
        found = find(fn, X, patterns=[SILU]).counts
        assert found == ({"silu": 1} if same else {}), c


def attention(t_axis="bhqk,bkhd->bqhd", fill=-1e9, flip=False):
    def fn(q):
        w = jnp.einsum("bqhd,bkhd->bhqk", q, q)
        t = jnp.arange(q.shape[1])
        keep = t[:, None] <= t[None, :] if flip else t[:, None] >= t[None, :]
        w = jnp.where(keep[None, None], w, fill)
        return jnp.einsum(t_axis, jax.nn.softmax(w), q)

    return fn


def test_attention_near_misses():
    q = jnp.ones((2, 5, 5, 8))
    name = {"dot_product_attention": 1}
    assert counts(attention(), q) == name
    assert counts(attention(fill=-1.0), q) == {"softmax": 1}
    # Heads and positions are of one size here: only their roles tell them apart.
    assert counts(attention("bhqk,bhkd->bqhd"), q) == {"softmax": 1}


def softmaxed(masked):
    def fn(q, *extra):
        w = masked(jnp.einsum("bqhd,bkhd->bhqk", q, q), *extra)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(w), q)

    return fn


def test_masks_that_differ_are_left():
    """Numbers that differ, one that is not low, and one that a bias can reach."""
    q, m = jnp.ones((2, 5, 3, 8)), jnp.ones((2, 1, 5, 5), bool)
    bias = jnp.ones((2, 1, 1, 5))
    inner = lambda low, high: lambda w, m, n: jnp.where(m, jnp.where(n, w, low), high)
    after = lambda fill: lambda w, m, b: jnp.where(m, w, fill) + b
    name = {"dot_product_attention": 1}
    assert counts(softmaxed(inner(-1e9, -1e9)), q, m, m) == name
    assert counts(softmaxed(inner(-1e9, -1e30)), q, m, m) == {"softmax": 1}
    assert counts(softmaxed(lambda w, m: jnp.where(m, 1.0, w)), q, m) == {"softmax": 1}
    assert counts(softmaxed(after(-1e9)), q, m, bias) == name
    assert counts(softmaxed(after(-1e4)), q, m, bias) == {"softmax": 1}


def test_a_row_without_a_key_to_see_is_the_mean_as_before():
    """All masks of the fully masked row put the same number there."""
    q = array(np.random.default_rng(2).standard_normal((1, 6, 2, 4)), jnp.float32)
    m = jnp.ones((1, 1, 6, 6), bool).at[..., 2, :].set(False)
    fn = softmaxed(lambda w, m, n: jnp.where(m, -1e9, jnp.where(n, w, -1e9)))
    for masks in ((~m, jnp.ones_like(m)), (jnp.zeros_like(m), m)):
        assert counts(fn, q, *masks) == {"dot_product_attention": 1}
        np.testing.assert_allclose(rewrite(fn)(q, *masks), fn(q, *masks), atol=1e-6)


LARGE = jnp.ones((64, 256))


def statistics_too(x):
    """A batch norm whose statistics are averaged, as in training."""
    mean = x.mean(0)
    var = jnp.maximum(0, jnp.square(x).mean(0) - jnp.square(mean))
    y = (x - mean[None]) * jax.lax.rsqrt(var + 1e-5)[None]
    return jnp.sin(y), 0.9 + 0.1 * mean, 0.1 * var


def test_statistics_that_are_read_elsewhere_hold_nothing_back():
    """They are recomputed of the input, and keep nothing else."""
    assert counts(statistics_too, X) == {"batch_norm": 1}
    lean = rewrite(statistics_too)
    for a, b in zip(statistics_too(X), lean(X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)

    def loss(fn):
        return lambda x: sum(jnp.sum(jnp.cos(y)) for y in fn(x))

    want, got = (jax.grad(loss(fn))(X) for fn in (statistics_too, lean))
    np.testing.assert_allclose(want, got, rtol=2e-5, atol=2e-5)
    plain, kept = (kept_bytes(fn, (LARGE,), {0}) for fn in (statistics_too, lean))
    assert kept <= 1.1 * LARGE.nbytes < plain  # the sine's derivative, and statistics


def test_statistics_in_float32_keep_no_copy_of_a_bfloat16_input():
    """As Flax takes them; the sine keeps its derivative, and they the input itself."""

    def fn(x):
        wide = x.astype(jnp.float32)
        y, *statistics = statistics_too(wide)
        return y.astype(x.dtype), *statistics

    def of_product(fn):
        return lambda x: fn(x * 2)

    x = LARGE.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        assert counts(fn, x) == {"batch_norm": 1}
        kept = kept_bytes(of_product(rewrite(fn)), (x,), {0})
        assert kept <= 1.1 * (2 * x.nbytes + x.nbytes)


@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
def test_an_rms_norm_in_bfloat16_keeps_no_float32_copy_of_its_input(scale):
    """As transformers writes it, the input made by another layer."""
    x, w = LARGE.astype(jnp.bfloat16), jnp.ones(256, scale)
    fn = lambda x, w: hugging_face_rms_norm((x * 2).reshape(4, 16, 256), w)
    with jax.numpy_dtype_promotion("standard"):
        assert counts(fn, x, w) == {"rms_norm": 1}
        plain, kept = (kept_bytes(f, (x, w), {0, 1}) for f in (fn, rewrite(fn)))
    # the input and a float32 number a row; plain three float32 arrays of that size
    assert kept == x.nbytes + 64 * 4 < plain / 5


def test_what_is_dear_and_read_elsewhere_is_left():
    """The sum of a softmax over a product would cost a second product."""

    def fn(q):
        w = jnp.einsum("bqhd,bkhd->bhqk", q, q)
        top = w.max(-1, keepdims=True)
        e = jnp.exp(w - top)
        total = e.sum(-1, keepdims=True)
        return jnp.einsum("bhqk,bkhd->bqhd", e / total, q), jnp.log(total) + top

    report = find(fn, jnp.ones((2, 64, 3, 8)))
    assert report.counts == {"softmax": 1}


def test_what_is_left_is_no_part_of_what_was_replaced():
    """The cast after a dropout is read twice, and so is the dropout itself."""

    def fn(x, key):
        y = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)
        z = y.astype(jnp.float32)
        return y + jnp.sum(z, -1, keepdims=True).astype(y.dtype), jnp.cos(z)

    x = jnp.ones((4, 8), jnp.bfloat16)
    report = find(fn, x, jax.random.key(0))
    assert report.counts == {"dropout": 1} and not report.left


@pytest.mark.fast("False-shape0", "False-shape2", "True-shape1")
@pytest.mark.parametrize("shape", [(1, 1, 8, 4), (3, 3, 8, 4), (3, 3, 2, 4)])
@pytest.mark.parametrize("first", [False, True])
def test_convolutions_keep_no_cast_kernel(shape, first):
    """Of any window, stride, groups and layout."""
    layout = ("NCHW", "OIHW", "NCHW") if first else ("NHWC", "HWIO", "NHWC")
    x = array(np.random.default_rng(0).standard_normal((2, 6, 6, 8)), "bfloat16")
    w = array(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    groups = 8 // shape[2]
    x = x.transpose(0, 3, 1, 2) if first else x
    w = w.transpose(3, 2, 0, 1) if first else w

    def fn(x, w):
        return jax.lax.conv_general_dilated(
            *(x, w.astype(x.dtype), (2, 1), ((1, 0), (0, 1))),
            rhs_dilation=(1, 2),
            dimension_numbers=layout,
            feature_group_count=groups,
        )

    assert counts(fn, x, w) == {"conv": 1}
    assert kept_bytes(fn, (x, w), {0, 1}) == w.size * 2
    assert kept_bytes(rewrite(fn), (x, w), {0, 1}) == 0
    loss = lambda fn: lambda x, w: jnp.sum(jnp.sin(fn(x, w).astype(jnp.float32)))
    gradients = (jax.grad(loss(f), (0, 1))(x, w) for f in (fn, rewrite(fn)))
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_tied_head_keeps_no_copy_of_the_embedding():
    """Neither a transposed one nor a cast one."""
    x, w = jnp.ones((4, 8)), jnp.ones((16, 8))
    for dtype in (jnp.float32, jnp.bfloat16):
        fn = lambda x, w, dtype=dtype: x.astype(dtype) @ w.astype(dtype).T
        assert counts(fn, x, w) == {"dense": 1}
        inputs = 0 if dtype == x.dtype else x.size * 2
        assert kept_bytes(fn, (x, w), {0, 1}) == inputs + w.size * dtype.dtype.itemsize
        assert kept_bytes(rewrite(fn), (x, w), {0, 1}) == inputs


def test_a_mask_that_is_not_causal_stays_a_mask():
    fn, q = attention(flip=True), jnp.asarray(X.reshape(1, 4, 1, 8))
    assert counts(fn, q) == {"dot_product_attention": 1}
    np.testing.assert_allclose(rewrite(fn)(q), fn(q), rtol=1e-5, atol=1e-6)


def test_interior_used_elsewhere_is_left_and_said():
    def fn(x):
        t = jnp.tanh(0.7978845608 * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + t), t

    report = find(fn, X)
    assert report.counts == {}
    (site,) = report.left
    assert site.pattern == "gelu" and "used elsewhere" in site.reason
    assert "left: gelu" in str(report)


def test_dead_uses_hold_nothing_back():
    def fn(x):
        t = jnp.tanh(0.7978845608 * (x + 0.044715 * x**3))
        jnp.sin(t)
        return 0.5 * x * (1 + t)

    assert counts(fn, X) == {"gelu": 1}


def test_own_derivatives_stay():
    @jax.custom_vjp
    def fn(x):
        return jax.nn.gelu(x)

    fn.defvjp(lambda x: (jax.nn.gelu(x), x), lambda x, g: (g * 7,))

    @jax.custom_jvp
    def half(x):
        return jnp.sin(jax.nn.gelu(x))

    half.defjvp(lambda x, t: (half(*x), t[0] * 5))
    for f, slope in ((fn, 7), (half, 5)):
        assert counts(f, X) == {}
        gradient = jax.grad(lambda x, f=f: rewrite(f)(x).sum())(X)
        np.testing.assert_array_equal(gradient, jnp.full_like(X, slope))


def test_a_rule_of_its_own_is_part_of_the_formula():
    @jax.custom_jvp
    def straight_through(x):
        return jnp.maximum(x, 0)

    straight_through.defjvp(lambda x, t: (straight_through(*x), t[0]))
    assert counts(straight_through, X) == {}
    assert counts(jax.nn.relu, X) == {"relu": 1}


def test_a_formula_of_what_has_a_rule_of_its_own():
    """The call of relu is a formula itself, or none; it need not be laid open."""
    fn = lambda x: jax.nn.gelu(jax.nn.relu(x))
    assert counts(fn, X) == {"gelu": 1, "relu": 1}
    for lean in (rewrite(fn), rewrite(fn, GELU)):
        np.testing.assert_allclose(lean(X), fn(X), rtol=1e-6)
    assert find(fn, X, patterns=GELU).counts == {"gelu": 1}


def test_more_precision_than_the_op_has_is_left():
    def fn(q):
        w = jnp.einsum("bqhd,bkhd->bhqk", q, q, precision="highest")
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(w), q)

    assert counts(fn, jnp.ones((2, 5, 3, 8))) == {"softmax": 1}


def test_epsilon_is_handed_on():
    seen = []

    def lean(x, *, epsilon):
        seen.append(epsilon)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)

    def plain(x, *, epsilon):
        return lean(x, epsilon=epsilon)

    pattern = Pattern("norm", plain, lean, ("*b n",), ("epsilon",))

    def fn(x):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 3e-4)

    rewrite(fn, [pattern])(X)
    assert seen[-1] == pytest.approx(3e-4, rel=1e-6)


def test_own_patterns_and_the_report():
    reports = []
    other = Pattern("cube", lambda x: x * x * x, lambda x: x**3, ("*n",))
    lean = rewrite(lambda x: jax.nn.gelu(x), [*GELU, other], on_report=reports.append)
    lean(X)
    (report,) = reports
    assert report.counts == {"gelu": 1} and report.unused == ("cube",)


def test_a_lean_function_of_another_shape_is_left():
    wrong = Pattern("sine", jnp.sin, lambda x: jnp.sin(x).sum(), ("*n",))
    report = find(jnp.sin, X, patterns=[wrong])
    assert report.counts == {} and "does not give" in report.left[0].reason


def test_bad_arguments():
    with pytest.raises(TypeError, match="fn=3: a function"):
        rewrite(3)
    with pytest.raises(TypeError, match="Pattern objects"):
        rewrite(jnp.sin, [jnp.sin])
    with pytest.raises(TypeError, match="examples=.*a tuple of texts"):
        Pattern("sine", jnp.sin, jnp.sin, "*n")
    with pytest.raises(ValueError, match="gives 2 arrays"):
        find(jnp.sin, X, patterns=[Pattern("two", lambda x: (x, x), jnp.sin)])


UNARY = (jnp.sin, jnp.tanh, jax.nn.sigmoid, jnp.exp, jnp.square, jax.nn.silu)
BINARY = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum)
steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)))


@settings(max_examples=15, deadline=None)
@given(steps.filter(lambda s: 0 < len(s) < 9))
def test_any_elementwise_program_means_the_same(program):
    def fn(x):
        values = [x, x * 0.5 + 0.25]
        for op, a, b in program:
            a, b = values[a % len(values)], values[b % len(values)]
            ops = UNARY + BINARY
            op = ops[op % len(ops)]
            out = op(a) if op in UNARY else op(a, b)
            values.append(jnp.clip(out, -3, 3))
        return values[-1]

    x = X[0, :5]
    np.testing.assert_allclose(rewrite(fn)(x), fn(x), rtol=1e-5, atol=1e-6)
    slopes = [jax.grad(lambda x, f=f: f(x).sum())(x) for f in (fn, rewrite(fn))]
    np.testing.assert_allclose(*slopes, rtol=1e-4, atol=1e-5)


def test_what_is_dropped_under_a_mesh_is_found():
    """Flax asks for a mask sharded as it is: an equation, which does nothing."""
    drop, key = nnx.Dropout(0.5), jax.random.key(0)
    plain = lambda x: drop(x, rngs=key)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        step = jax.jit(lambda x: plain(jnp.sin(x)))
        assert "reshard" in primitives(step, X)
        assert counts(step, X) == {"dropout": 1}
        y, kept = rewrite(step)(X), jnp.sin(X)
    dropped = y == 0
    assert 0 < dropped.sum() < y.size
    np.testing.assert_allclose(y, jnp.where(dropped, 0, 2 * kept), rtol=1e-6)
