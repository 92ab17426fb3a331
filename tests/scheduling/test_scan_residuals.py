"""Residuals of a forward scan that the backward scan makes itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem import _compat, schedule
from jaxmem.ir import jaxprs
from jaxmem.scheduling._passes import rewrite
from tests.scheduling.problem import array

L, B, D = 5, 4, 6
X0 = array(B, D, seed=1, dtype=jnp.float32)
WS = array(L, D, D, seed=2, scale=0.4, dtype=jnp.float32)


def scans(closed):
    eqns = jaxprs.split(closed)[0].eqns
    return [e for e in eqns if e.primitive.name == "scan"]


def stacked(closed) -> list[int]:
    """Bytes of what the forward scan stacks, the first one of a jaxpr."""
    first = scans(closed)[0]
    ys = first.outvars[_compat.scan_counts(first)[1] :]
    return [v.aval.size * v.aval.dtype.itemsize for v in ys]


def one_by_one(eqn, args):
    """A rule that does each iteration alone: no compiler fuses across operations."""
    bodies = jaxprs.bodies(eqn)
    if eqn.primitive.name == "jit":
        return jaxprs.evaluate(bodies[0], args, one_by_one)
    if eqn.primitive.name != "scan":
        return None
    n_consts, n_carry = _compat.scan_counts(eqn)
    consts, carry = args[:n_consts], args[n_consts:][:n_carry]
    iterations, stacks = list(range(eqn.params["length"])), {}
    for j in reversed(iterations) if eqn.params["reverse"] else iterations:
        xs = [np.asarray(x)[j] for x in args[n_consts + n_carry :]]
        outs = jaxprs.evaluate(bodies[0], [*consts, *carry, *xs], one_by_one)
        carry, stacks[j] = outs[:n_carry], outs[n_carry:]
    rows = zip(*(stacks[j] for j in iterations), strict=True)
    return [*carry, *(np.stack(list(map(np.asarray, r))) for r in rows)]


def same_bits(closed, other, leaves):
    """Every operation on its own makes the same bits; what XLA fuses may round less."""
    got, want = (jaxprs.evaluate(c, leaves, one_by_one) for c in (other, closed))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def looked_at(fn, *args):
    """(plan, stacks of the forward scan before, after); the results are the same."""
    plan = schedule(fn, donate_argnums=()).plan(*args)
    before = jax.make_jaxpr(fn)(*args)
    after = rewrite(before, {}).jaxpr
    same_bits(before, after, jax.tree.leaves(args))
    return plan, stacked(before), stacked(after)


def pair(make, use, start=X0, xs=WS):
    """A forward scan that keeps what `make` says, and one back that reads it.

    `make(c, x)` is (next carry, residuals), `use(residuals)` has the carry's shape.
    """

    def fn(start, xs):
        end, residuals = lax.scan(make, start, xs)
        back = lambda c, r: (c * 0.5 + use(r), c)
        return lax.scan(back, end, residuals, reverse=True)

    return looked_at(fn, start, xs)


def bf16(x):
    return x.astype(jnp.bfloat16)


def f32(x):
    return x.astype(jnp.float32)


def grow(c, w):
    return jnp.sin(c @ w)


WEIGHT, ROW = 4 * L * D * D, 4 * L * B * D


# -- what is recomputed


def test_a_cast_of_a_parameter():
    plan, before, after = pair(
        lambda c, w: (grow(c, w), bf16(w)), lambda r: X0 @ f32(r)
    )
    assert before == [WEIGHT // 2]
    assert after == []
    (made,) = plan.residuals
    assert (made.bytes, made.shape) == (WEIGHT // 2, (L, D, D))
    assert (made.dtype, made.how) == ("bfloat16", "an input of the forward scan")
    assert plan.residual_bytes == WEIGHT // 2


@pytest.mark.parametrize(
    ("move", "back"),
    [
        (lambda w: w.T, lambda r: r.T),
        (lambda w: bf16(w.T), lambda r: f32(r).T),
        (lambda w: w.reshape(D * D), lambda r: r.reshape(D, D)),
        (lambda w: w[:, :2], lambda r: jnp.concatenate([r, r, r], 1)),
        (lambda w: lax.rev(w, (1,)), lambda r: r),
        (lambda w: bf16(w[None, ::2].mT)[0], lambda r: jnp.concatenate([f32(r).T] * 2)),
    ],
    ids=["transpose", "cast of it", "reshape", "slice", "reverse", "all"],
)
def test_moves_of_a_parameter(move, back):
    plan, before, after = pair(
        lambda c, w: (grow(c, w), move(w)), lambda r: X0 @ back(r)
    )
    assert after == []
    assert plan.residual_bytes == sum(before) > 0


def test_the_parameter_itself():
    """jax sees that one by itself: nothing was stacked."""
    plan, before, after = pair(lambda c, w: (grow(c, w), w), lambda r: X0 @ r)
    assert before == after == []
    assert plan.residuals == ()


def test_several_of_one_parameter():
    plan, before, after = pair(
        lambda c, w: (grow(c, w), (bf16(w), w.T, w.reshape(-1))),
        lambda r: X0 @ (f32(r[0]) + r[1] + r[2].reshape(D, D)),
    )
    assert (before, after) == ([WEIGHT // 2, WEIGHT, WEIGHT], [])
    assert plan.residual_bytes == sum(before)


def test_something_that_is_the_same_for_all_layers():
    """A cast of a constant of the scan: it was stacked L times."""
    shared = array(D, D, seed=8, dtype=jnp.float32)

    def fn(start, xs, shared):
        make = lambda c, w: (jnp.sin(c @ w @ shared), bf16(shared))
        end, residuals = lax.scan(make, start, xs)
        back = lambda c, r: (jnp.sin(c @ f32(r)), c)
        return lax.scan(back, end, residuals, reverse=True)

    plan, before, after = looked_at(fn, X0, WS, shared)
    assert (before, after) == ([WEIGHT // 2], [])
    assert plan.residual_bytes == WEIGHT // 2


def test_of_two_residuals_one_is_kept():
    """A reshape of another: neither is an input of the scan."""

    def make(c, w):
        y = jnp.cos(c @ w)
        return grow(c, w), (y, y.reshape(B, 2, D // 2))

    plan, before, after = pair(make, lambda r: r[0] + r[1].reshape(B, D))
    assert (before, after) == ([ROW, ROW], [ROW])
    assert plan.residual_bytes == ROW
    assert plan.residuals[0].how == "another residual"


def test_the_wider_of_two_is_kept():
    """A narrow copy is made of the wide one, and not the other way."""

    def make(c, w):
        y = jnp.cos(c @ w)
        return grow(c, w), (bf16(y), y)

    plan, before, after = pair(make, lambda r: f32(r[0]) + r[1])
    assert (before, after) == ([ROW // 2, ROW], [ROW])
    assert plan.residual_bytes == ROW // 2
    assert plan.residuals[0].dtype == "bfloat16"


def test_the_smallest_that_all_come_from():
    """Two that begin with the same cast: what is kept is the cast."""

    def make(c, w):
        y = bf16(jnp.cos(c @ w))
        return grow(c, w), (y.T, y.reshape(-1))

    plan, before, after = pair(make, lambda r: f32(r[0]).T + f32(r[1]).reshape(B, D))
    assert (before, after) == ([ROW // 2, ROW // 2], [ROW // 2])
    assert plan.residual_bytes == ROW // 2


def test_a_layers_output_is_the_next_layers_input():
    def make(c, w):
        after = grow(c, w)
        return after, (c, after)

    plan, before, after = pair(make, lambda r: r[0] * r[1])
    assert (before, after) == ([ROW, ROW], [ROW])
    assert plan.residual_bytes == ROW
    assert "next layer's input" in plan.residuals[0].how


def test_casts_of_input_and_output():
    """Both are kept in half the bytes: that is what is handed on."""

    def make(c, w):
        after = grow(c, w)
        return after, (bf16(c), bf16(after))

    plan, before, after = pair(make, lambda r: f32(r[0]) * f32(r[1]))
    assert (before, after) == ([ROW // 2, ROW // 2], [ROW // 2])
    assert plan.residual_bytes == ROW // 2


def test_two_carries():
    """Each carry's output is its own next input."""

    def fn(start, xs):
        def make(carry, w):
            a, b = carry
            after = jnp.sin(a @ w + b), jnp.cos(b @ w)
            return after, (a, b, *after)

        end, residuals = lax.scan(make, (start, start * 2), xs)
        back = lambda c, r: (c * 0.5 + r[0] * r[1] - r[2] * r[3], None)
        return lax.scan(back, end[0] * end[1], residuals, reverse=True)

    plan, before, after = looked_at(fn, X0, WS)
    assert (before, after) == ([ROW] * 4, [ROW] * 2)
    assert plan.residual_bytes == 2 * ROW


def test_carries_that_change_places():
    """The output of one is the next input of the other."""

    def fn(start, xs):
        def make(carry, w):
            a, b = carry
            after = b, jnp.sin(a @ w + b)
            return after, (a, *after)

        end, residuals = lax.scan(make, (start, start * 2), xs)
        back = lambda c, r: (c * 0.5 + r[0] * r[1] - r[2], None)
        return lax.scan(back, end[0] * end[1], residuals, reverse=True)

    looked_at(fn, X0, WS)


@pytest.mark.parametrize("length", [1, 2])
def test_short_scans(length):
    def make(c, w):
        after = grow(c, w)
        return after, (c, after, bf16(w))

    _, before, after = pair(make, lambda r: r[0] * r[1] @ f32(r[2]), xs=WS[:length])
    assert sum(after) < sum(before)


def test_a_scan_from_the_end_and_one_from_the_start():
    def fn(start, xs):
        def make(c, w):
            after = grow(c, w)
            return after, (c, after, bf16(w))

        end, residuals = lax.scan(make, start, xs, reverse=True)
        back = lambda c, r: (c * 0.5 + r[0] * r[1] @ f32(r[2]), c)
        return lax.scan(back, end, residuals)

    plan, before, after = looked_at(fn, X0, WS)
    assert after == [ROW]
    assert plan.residual_bytes == sum(before) - ROW


# -- of gradients


def gradient_of(body, params=WS):
    def loss(params, x):
        return jnp.mean(lax.scan(body, x, params)[0] ** 2)

    return looked_at(jax.grad(loss), params, X0)


def test_gradient_of_bell_layers():
    """exp keeps its output, the product its input: the same but for one layer."""
    plan, before, after = gradient_of(lambda x, w: (jnp.exp(-((x @ w) ** 2)), None))
    assert plan.residual_bytes == ROW
    assert sum(before) - sum(after) == ROW


def test_gradient_of_layers_in_bf16():
    """The bf16 copy of the weights is not kept."""

    def body(x, w):
        y = bf16(x) @ bf16(w)
        return f32(jnp.tanh(y)), None

    plan, before, after = gradient_of(body)
    assert WEIGHT // 2 in [r.bytes for r in plan.residuals]
    assert sum(before) - sum(after) == plan.residual_bytes


def test_gradient_of_heads():
    """Queries in heads and as rows."""

    def body(x, w):
        y = jnp.sin(x @ w)
        heads = y.reshape(B, 2, D // 2)
        return x + (heads * jnp.cos(heads)).reshape(B, D) * y, None

    plan, before, after = gradient_of(body)
    assert sum(after) < sum(before)
    assert sum(before) - sum(after) == plan.residual_bytes


# -- what is not


def untouched(fn, *args):
    plan, before, after = looked_at(fn, *args)
    assert plan.residuals == ()
    assert before == after


def casts(c, w):
    return grow(c, w), bf16(w)


def test_a_residual_that_is_returned():
    def fn(start, xs):
        end, residuals = lax.scan(casts, start, xs)
        back = lambda c, r: (jnp.sin(c @ f32(r)), None)
        return lax.scan(back, end, residuals, reverse=True), residuals

    untouched(fn, X0, WS)


def test_a_residual_that_is_read_elsewhere():
    def fn(start, xs):
        end, residuals = lax.scan(casts, start, xs)
        back = lambda c, r: (jnp.sin(c @ f32(r)), None)
        return lax.scan(back, end, residuals, reverse=True), f32(residuals[0])

    untouched(fn, X0, WS)


def test_a_scan_of_another_length():
    """Two layers an iteration."""

    def fn(start, xs):
        end, residuals = lax.scan(casts, start, xs[:4])
        back = lambda c, r: (jnp.sin(c @ f32(r[0] + r[1])), None)
        return lax.scan(back, end, residuals.reshape(2, 2, D, D), reverse=True)

    untouched(fn, X0, WS)


def test_two_scans_in_one_direction():
    def fn(start, xs):
        end, residuals = lax.scan(casts, start, xs)
        return lax.scan(lambda c, r: (jnp.sin(c @ f32(r)), None), end, residuals)

    untouched(fn, X0, WS)


@pytest.mark.parametrize(
    "make",
    [
        lambda c, w: (grow(c, w), jnp.sin(c)),
        lambda c, w: (grow(c, w), (c, jnp.cos(c @ w))),
        lambda c, w: (grow(c, w), bf16(c)),
    ],
    ids=["computed", "two", "narrow alone"],
)
def test_what_only_computing_would_bring(make):
    def fn(start, xs):
        end, residuals = lax.scan(make, start, xs)
        use = lambda r: sum(f32(leaf) for leaf in jax.tree.leaves(r))
        back = lambda c, r: (c * 0.5 + use(r), None)
        return lax.scan(back, end, residuals, reverse=True)

    untouched(fn, X0, WS)


def test_the_output_alone():
    """The input is not kept, so that there is nothing to hand on."""

    def make(c, w):
        after = grow(c, w)
        return after, after

    plan, before, after = pair(make, lambda r: r)
    assert plan.residual_bytes == 0
    assert before == after == [ROW]


def test_a_scan_with_effects():
    def make(c, w):
        jax.debug.callback(lambda v: None, c[0, 0])
        return grow(c, w), bf16(w)

    plan, before, after = pair(make, lambda r: X0 @ f32(r))
    assert plan.residuals == ()
    assert before == after


def test_what_is_elementwise_of_the_next_layers_input():
    """The slope of a curve at a layer's end: some versions of jax keep it beside."""

    @jax.custom_vjp
    def curve(x):
        return jnp.tanh(x)

    def forward(x):
        y = jnp.tanh(x)
        return y, 1.0 - y * y

    curve.defvjp(forward, lambda slope, g: (g * slope,))

    def loss(ws, x):
        layer = lambda x, w: (curve(x @ w), None)
        return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)

    ws = jax.random.normal(jax.random.key(0), (5, 8, 8))
    x = jax.random.normal(jax.random.key(1), (16, 8))
    _, before, after = looked_at(jax.grad(loss), ws, x)
    assert before == [4 * 5 * 16 * 8] * 2
    assert after == [4 * 5 * 16 * 8]


@jax.custom_jvp
def bell(x):
    return jnp.exp(-(x**2))


bell.defjvp(lambda x, t: (bell(*x), -2 * x[0] * bell(*x) * t[0]))


def test_a_call_of_a_function_with_its_own_derivative_is_recomputed():
    """As jax 0.12 has `exp(-x**2)` in the derivative of exact gelu."""

    def make(c, x):
        y = c @ x
        return jnp.tanh(y), (y, bell(y))

    plan, before, after = pair(make, lambda kept: kept[0] * kept[1])
    assert before == [ROW, ROW] and after == [ROW]
    assert plan.residual_bytes == ROW
