"""What holds of every model, whoever wrote it."""

import functools

import jax
import numpy as np

import jaxmem
from benchmarks.models.foreign import (
    KEY,
    LIBRARIES,
    SMALL,
    Loss,
    Model,
    build,
    state,
    train_step,
)
from tests.nn.compare import assert_close

__all__ = ["LIBRARIES", "built", "every_check"]
STEPS = 3
TARGET = "h100"
# Float32 roundings of the largest number of a tree by which two versions may differ. A
# layer of these nets rounds some ten times in either version, and those with an encoder
# and a decoder, or of 18 and more convolutions, have six times the layers of the nets
# for which `assert_close` allows 64.
ROUNDINGS = 6 * 64


@functools.cache
def built(library: str, family: str) -> Model:
    """The small model; its batch is part of it."""
    return build(library, family, SMALL)


def shapes(model: Model):
    return jax.eval_shape(lambda: state(model))


def alike(one, other) -> bool:
    """Whether two trees have the same structure, shapes and dtypes."""
    typed = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    return typed(one) == typed(other)


def substituted_is_the_same(model: Model) -> None:
    """Loss and gradients, without dropout: it draws other masks."""
    params, statistics, _ = state(model)

    def run(loss: Loss):
        def scored(params):
            return loss(params, statistics, model.batch, None)[0]

        return jax.jit(jax.value_and_grad(scored))(params)

    (value, grads), (lean_value, lean_grads) = run(model.loss), run(model.lean)
    assert np.isfinite(value)
    assert_close(value, lean_value, ROUNDINGS)
    assert_close(grads, lean_grads, ROUNDINGS)


def kept(model: Model, loss: Loss, params, statistics) -> int:
    def scored(params, statistics):
        return loss(params, statistics, model.batch, KEY)[0]

    return jaxmem.residuals(scored, params, statistics).total_bytes


def substituted_keeps_less(model: Model) -> None:
    """As it trains, with dropout; the report names what is left, by bytes."""
    params, statistics, _ = shapes(model)
    plain = kept(model, model.loss, params, statistics)
    lean = kept(model, model.lean, params, statistics)
    assert lean < plain
    report = model.report(params, statistics, model.batch)
    assert report.replaced() > 0
    assert report.residuals is not None and report.residuals.total_bytes > 0
    sizes = [row.bytes for row in report.left]
    assert sizes == sorted(sizes, reverse=True)
    assert all(row.formula and row.array for row in report.left)


def losses(step, model: Model) -> list[float]:
    now, found = state(model), []
    for _ in range(STEPS):
        now, loss = step(now, model.batch, KEY)
        found.append(float(loss))
    return found


def scheduled_trains_the_same(model: Model) -> None:
    """With dropout and donation; the operations are those of the step, moved."""
    plain = losses(jax.jit(train_step(model.loss), donate_argnums=0), model)
    scheduled = jaxmem.schedule(train_step(model.loss), donate_argnums=0)
    assert len(set(plain)) == STEPS  # it trains; two examples' loss may rise at first
    allowed = ROUNDINGS * np.finfo("f4").eps
    np.testing.assert_allclose(losses(scheduled, model), plain, rtol=allowed)


def compiled(model: Model, step) -> int:
    args = (shapes(model), model.batch, KEY)
    return jaxmem.estimate(step, *args, target=TARGET).temp_bytes


def scheduled_takes_no_more(model: Model) -> None:
    """On the chip it is scheduled for, of the plain model and of the substituted."""
    for loss in (model.loss, model.lean):
        step = train_step(loss)
        plain = compiled(model, jax.jit(step, donate_argnums=0))
        there = jaxmem.schedule(step, target=TARGET, donate_argnums=0, progress=False)
        assert compiled(model, there) <= plain


def lint_is_quiet(model: Model) -> None:
    """It says nothing of the substituted model that it does not say of the plain."""

    def found(loss: Loss) -> set[str]:
        step = train_step(loss)
        args = (shapes(model), model.batch, KEY)
        return {f.check for f in jaxmem.lint(step, *args, donate_argnums=0)}

    assert found(model.lean) <= found(model.loss)


VALUES = (
    substituted_is_the_same,
    substituted_keeps_less,
    scheduled_trains_the_same,
    lint_is_quiet,
)
every_check = {check.__name__: check for check in (*VALUES, scheduled_takes_no_more)}
