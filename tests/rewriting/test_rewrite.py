"""Where formulas are looked for, what is left alone, and what is put back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxmem._jaxpr import walk
from jaxmem.rewriting import Pattern, find, rewrite

X = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8)), jnp.float32)
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

    def loss(fn):
        return lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(fn(x)))

    for a, b in zip(*(jax.tree.leaves(f(X)) for f in (fn, lean)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    want, got = (jax.jit(jax.grad(loss(f)))(X) for f in (fn, lean))
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

    (site,) = find(fn, X).found
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
    "factor": lambda x: x * jax.nn.sigmoid(1.702 * x),
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
    assert site.pattern == "gelu" and "used elsewhere" in site.why
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
    assert report.counts == {} and "does not give" in report.left[0].why


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


@settings(max_examples=25, deadline=None)
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
