"""Rules for tables against numpy in float64, over 50 steps with repeated ids."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem import optim
from tests.optim.rows.problem import (
    LR,
    STEPS,
    batches,
    dense_gradient,
    loss,
    params,
    run,
    train_step,
)

EPS = 1e-8


@pytest.fixture(autouse=True)
def loose_promotion():
    """Optax multiplies numbers of several dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def sgd(p, g, s, touched, t):
    return p - LR * g, s


def adagrad(p, g, s, touched, t):
    s = {"v": s.get("v", 0.1) + g**2}
    return p - LR * g / np.sqrt(s["v"] + 1e-7), s


def row_adagrad(p, g, s, touched, t):
    s = {"v": s.get("v", 0.0) + (g**2).mean(1)}
    root = np.sqrt(s["v"])[:, None] + EPS
    return p - LR * g / root, s


def adam(p, g, s, touched, t):
    """Moments and parameters of the touched rows, each by its own arithmetic."""
    m, v = (s.get(k, np.zeros_like(p)).copy() for k in "mv")
    p = p.copy()
    for r in touched:
        m[r] += 0.1 * (g[r] - m[r])
        v[r] += 0.001 * (g[r] ** 2 - v[r])
        p[r] -= LR * (m[r] / (1 - 0.9**t)) / (np.sqrt(v[r] / (1 - 0.999**t)) + EPS)
    return p, {"m": m, "v": v}


RULES = {
    "sgd": (optim.rowwise_sgd(LR), sgd),
    "sgd, deduplicated": (optim.rowwise(optax.sgd(LR)), sgd),
    "adagrad": (optim.rowwise(optax.adagrad(LR)), adagrad),
    "one accumulator a row": (optim.rowwise_adagrad(LR), row_adagrad),
    "lazy adam": (optim.lazy_adam(LR), adam),
}


def reference(rule):
    given = params()
    p, w = (np.float64(x) for x in jax.tree.leaves(given))
    states = {}, {}
    for t, ids in enumerate(np.asarray(batches()), 1):
        ids = ids % len(p)
        gp, gw = dense_gradient(p, w, ids)
        p, new = rule(p, gp, states[0], np.unique(ids), t)
        w, other = rule(w, gw, states[1], range(len(w)), t)
        states = new, other
    return p, w


@pytest.mark.parametrize("name", RULES)
def test_as_the_reference(name):
    tx, rule = RULES[name]
    got, _ = run(tx, batches())
    given = jax.tree.leaves(params())
    for p, x, want in zip(given, jax.tree.leaves(got), reference(rule), strict=True):
        # float32's part of the way, and one rounding of a parameter below 4 a step
        allowed = 1e-5 * np.abs(want - np.float64(p)).max() + STEPS * 2.0**-23
        assert np.abs(np.float64(x) - want).max() <= allowed
        assert np.abs(want - np.float64(p)).max() > 100 * allowed


DENSE = {
    "sgd": (optim.rowwise_sgd(LR), optax.sgd(LR)),
    "adagrad": (optim.rowwise(optax.adagrad(LR)), optax.adagrad(LR)),
    "one accumulator a row": (
        optim.rowwise_adagrad(LR),
        optax.chain(optim.scale_by_rowwise_adagrad(), optax.scale_by_learning_rate(LR)),
    ),
}


@pytest.mark.fast("adagrad", "one accumulator a row")
@pytest.mark.parametrize("name", DENSE)
def test_without_decay_it_is_the_rule_with_dense_gradients(name):
    sparse, dense = DENSE[name]
    got, want = run(sparse, batches()), run(dense, batches(), False)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # sums of rows in another order, over 50 steps
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_norms_are_those_of_dense_gradients():
    """Rows of an id that comes twice are summed before, and empty slots are zero."""
    rule = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(LR))
    got, _ = run(optim.rowwise(rule), batches(5))
    want, _ = run(rule, batches(5), False)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_lazy_adam_leaves_moments_of_other_rows():
    tx = optim.lazy_adam(LR)
    given = params()
    step = jax.jit(train_step(tx))
    first, _ = step((given, tx.init(given)), jnp.array([3, 3, 5]))
    second, _ = step(first, jnp.array([5]))
    mu = lambda carry: carry[1][0].mu["embed"]["table"]
    assert jnp.abs(mu(first)[3]).max() > 0
    np.testing.assert_array_equal(mu(first)[3], mu(second)[3])
    tables = [c[0]["embed"]["table"] for c in (first, second)]
    np.testing.assert_array_equal(tables[0][3], tables[1][3])
    assert jnp.abs(tables[0][5] - tables[1][5]).max() > 0


def test_each_table_has_its_optimizer():
    labels = {"embed": "table", "w": "rest"}
    own = {"table": optim.rowwise_adagrad(LR), "rest": optax.adam(LR)}
    tx = optax.partition(own, labels)
    got, _ = run(tx, batches(5))
    alone, _ = run(optim.lazy_adam(LR), batches(1))
    both, _ = run(tx, batches(1))
    np.testing.assert_allclose(both["w"], alone["w"], rtol=1e-6)
    table, _ = run(optim.rowwise_adagrad(LR), batches(1))
    np.testing.assert_allclose(
        both["embed"]["table"], table["embed"]["table"], rtol=1e-6
    )
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(got))


def test_with_schedules_masks_and_injected_rates():
    want, _ = run(optim.rowwise(optax.adagrad(LR)), batches(3))
    forms = (
        optim.rowwise(optax.adagrad(optax.constant_schedule(LR))),
        optim.rowwise(optax.inject_hyperparams(optax.adagrad)(learning_rate=LR)),
        optim.rowwise(optax.masked(optax.adagrad(LR), {"embed": True, "w": True})),
    )
    for tx in forms:
        got, _ = run(tx, batches(3))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_what_mixes_rows_or_counts_calls_is_refused():
    def update(tx):
        given = params()
        jax.eval_shape(train_step(tx), (given, tx.init(given)), batches(1)[0])

    factored = optax.adafactor(LR, min_dim_size_to_factor=4)
    with pytest.raises(
        ValueError, match=r"state\[0\]\.v_row\['embed'\].*mixes the rows"
    ):
        update(optim.rowwise(factored))
    steps = optax.MultiSteps(optax.sgd(LR), 2).gradient_transformation()
    with pytest.raises(ValueError, match=r"optax.MultiSteps, whose calls touch other"):
        update(optim.rowwise(steps))


def test_dense_gradients_of_micro_batches_are_refused():
    tx = optim.lazy_adam(LR)
    step = jaxmem.microbatch(lambda p, ids, key: loss(p, ids), tx, 2, donate=False)
    with pytest.raises(ValueError, match="no RowGradients among them.*microbatch"):
        step(params(), tx.init(params()), batches(1)[0], None)
    tx = optim.rowwise_sgd(LR)
    step = jaxmem.microbatch(lambda p, ids, key: loss(p, ids), tx, 2, donate=False)
    got = step(params(), tx.init(params()), batches(1)[0], None)[0]
    want, _ = run(tx, batches(1))
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5, atol=1e-6)


def test_another_state_or_table_is_refused():
    tx = optim.rowwise(optax.adagrad(LR))
    given = params()
    grad = jax.jit(optim.value_and_row_grad(loss, "embed"))
    _, grads = grad(given, batches(1)[0])
    with pytest.raises(ValueError, match="state=.*not the state of this"):
        tx.update(grads, optax.adam(LR).init(given), given)
    other = params(rows=7)
    with pytest.raises(ValueError, match=r"params\['embed'\]\['table'\].*\(200, 4\)"):
        tx.update(grads, tx.init(given), other)
