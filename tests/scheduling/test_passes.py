"""A pass plugs in: one class and one line."""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.scheduling import BudgetError, Choice, Plan, _passes
from jaxmem.scheduling._pass import Pass
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.search import search

ROOT = pathlib.Path(jaxmem.__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def named(x):
    return checkpoint_name(jnp.sin(x), "a") * checkpoint_name(x, "b")


def ranked(x, w):
    """A weighted sum of each row's elements by their rank."""
    return jnp.sort(x, 1) @ w


def example() -> dict:
    blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    found: dict = {}
    exec(next(block for block in blocks if "Searched[" in block), found)
    return found


@pytest.fixture
def plugged_in(monkeypatch):
    """The configuration of the guide's pass, which is one line of the list."""
    found = example()
    config, one = found["SortedRows"], found["SortRowsInParts"]
    monkeypatch.setattr(_passes, "PASSES", (one(), *_passes.PASSES))
    monkeypatch.setitem(_passes.CONFIGS, config.name, config)
    return config


def test_the_example_of_the_guide_plugs_in(plugged_in):
    x, w = jax.random.normal(jax.random.key(0), (64, 8)), jnp.arange(16.0).reshape(8, 2)
    closed = jax.make_jaxpr(ranked)(x, w)
    same = _passes.rewrite(closed, {})
    made = _passes.rewrite(closed, {}, None, Choice("h100", (plugged_in(4),)))
    assert made.did(plugged_in) and not same.did(plugged_in)
    assert made.applied[0] == "SortRowsInParts"
    want, got = (jaxprs.evaluate(j, [x, w])[0] for j in (closed, made.jaxpr))
    # sums of eight terms, in whatever order
    most = float((jnp.abs(x) @ jnp.abs(w)).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=8 * 2.0**-24 * most)


def test_a_search_takes_the_example_of_the_guide(plugged_in):
    """It is asked for candidates by nobody who knows its name."""
    n = 256
    args = jnp.ones((n, n)), jnp.ones((n, 1))
    plain = jaxmem.estimate(ranked, *args)
    assert plain.temp_bytes >= 4 * n * n  # the sorted rows
    how = {"target": "cpu", "donate_argnums": (), "progress": False, "tile": False}
    for n, share in ((2, 0.7), (4, 0.3)):
        room = plain.peak_bytes - plain.temp_bytes + int(share * plain.temp_bytes)
        step = jaxmem.schedule(ranked, room, **how)
        plan = step.plan(*args)
        assert plan.choice.get(plugged_in) == plugged_in(n)
        assert plan.scheduled.peak_bytes <= room
        assert Plan.from_json(plan.to_json()) == plan
        np.testing.assert_array_equal(step(*args), ranked(*args))
    with pytest.raises(BudgetError):
        jaxmem.schedule(ranked, plain.peak_bytes - plain.temp_bytes, **how).plan(*args)


def test_a_search_names_no_pass():
    """It knows the list of passes alone; predictions without a compile name some."""
    folder = pathlib.Path(search.__file__).parent
    of_passes = {
        k.__module__ for one in _passes.PASSES for k in (type(one), one.config)
    }
    files = [path for path in folder.glob("*.py") if path.name != "expected.py"]
    assert len(files) > 10
    for path in files:
        nodes = ast.walk(ast.parse(path.read_text()))
        imported = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        assert not imported & of_passes, path


@pytest.mark.parametrize("one", _passes.PASSES, ids=lambda p: p.config.name)
def test_a_default_configuration_is_no_choice(one: Pass):
    """So that adding a pass changes no plan, and no plan's JSON."""
    default = one.config()
    assert Choice("h100", (default,)) == Choice("h100")
    assert Choice("h100").get(one.config) == default


def rows_of_the_page() -> list[tuple[str, ...]]:
    """(pass, configuration, file) of each row of the table of passes."""
    _, _, below = ARCHITECTURE.read_text().partition("| pass | configuration | file |")
    rows = below.partition("\n\n")[0].splitlines()[2:]  # below the rule
    return [tuple(re.findall(r"`([^`]+)` \|", row)[-3:]) for row in rows]


def row_of(one: Pass) -> tuple[str, ...]:
    kinds = type(one), one.config
    file = type(one).__module__.removeprefix("jaxmem.scheduling.")
    return *(kind.__name__ for kind in kinds), f"{file.replace('.', '/')}.py"


def test_the_page_names_the_passes_in_the_order_in_which_they_run():
    assert rows_of_the_page() == [*map(row_of, _passes.PASSES)]


def test_a_choice_comes_back_from_json():
    order = OperationOrder(sequence=(0, 1, 0))
    choice = Choice("h100", (order, Recompute(1e9, offload=4096)))
    loaded = Choice.from_dict(choice.to_dict(), _passes.CONFIGS)
    assert loaded == choice and hash(loaded) == hash(choice)
    unknown = choice.to_dict()
    unknown["passes"]["recompute"]["speed"] = 1
    with pytest.raises(ValueError, match=r"\['recompute'\]=\['speed'\]: no fields"):
        Choice.from_dict(unknown, _passes.CONFIGS)


def test_a_plan_of_an_unknown_pass_is_no_plan():
    plan = jaxmem.schedule(named).plan(jnp.arange(3.0))
    text = plan.to_json().replace('"passes": {}', '"passes": {"tile": {}}')
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json(text)
