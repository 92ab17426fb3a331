"""What a search makes of findings on the modules that it compiles."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem import schedule
from jaxmem.auditing import AuditFinding
from jaxmem.memory import CompileError
from jaxmem.scheduling import BudgetError
from jaxmem.scheduling.search import result

FINDING = AuditFinding(
    "shared_bytes", "b is written over a, which is still to be read", "b", "mul", "x.py"
)


def step(weights, x):
    def loss(weights):
        body = lambda h, w: (jnp.tanh(h @ w), None)
        return (jax.lax.scan(body, x, weights)[0] ** 2).sum()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


ARGS = jnp.ones((4, 16, 16)), jnp.ones((8, 16))
HOW = {"target": "cpu", "donate_argnums": 0, "cache": False, "progress": False}


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_no_module_with_a_finding_is_taken_unless_asked(budget, monkeypatch):
    audited = []
    monkeypatch.setattr(
        result, "findings_of", lambda report: audited.append(report) or (FINDING,)
    )
    wrong = CompileError if budget is None else BudgetError
    with pytest.raises(wrong, match=r"(?s)WRONG VALUES: b is written .*audit=False"):
        schedule(step, budget, **HOW).plan(*ARGS)
    assert audited
    audited.clear()
    plan = schedule(step, budget, audit=False, **HOW).plan(*ARGS)
    assert plan.scheduled is not None and not audited


def test_a_plan_tells_of_what_was_not_taken(monkeypatch):
    audited = []

    def first_is_wrong(report):
        audited.append(report)
        return (FINDING,) if len(audited) == 1 else ()

    monkeypatch.setattr(result, "findings_of", first_is_wrong)
    notes = schedule(step, **HOW).plan(*ARGS).notes
    (note,) = [one for one in notes if "wrong values" in one]
    assert note.startswith("1 choice not taken") and FINDING.what in note
    assert len(audited) > 1
