"""A pass plugs in: one class and one line."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.scheduling import Choice, Plan, _passes
from jaxmem.scheduling._pass import Pass
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.recompute.residuals import Recompute

ROOT = pathlib.Path(jaxmem.__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def named(x):
    return checkpoint_name(jnp.sin(x), "a") * checkpoint_name(x, "b")


def names(closed) -> int:
    return sum(e.primitive.name == "name" for e in jaxprs.walk(closed))


def example() -> dict:
    blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    found: dict = {}
    exec(next(block for block in blocks if "Pass[" in block), found)
    return found


def test_the_example_of_the_guide_plugs_in(monkeypatch):
    found = example()
    config, one = found["WithoutNames"], found["RemoveNames"]
    monkeypatch.setattr(_passes, "PASSES", (*_passes.PASSES, one()))
    x = jnp.arange(3.0)
    closed = jax.make_jaxpr(named)(x)
    same = _passes.rewrite(closed, {})
    without = _passes.rewrite(closed, {}, None, Choice("h100", (config(True),)))
    assert names(same.jaxpr) == 2 and names(without.jaxpr) == 0
    assert without.did(config) and not same.did(config)
    want, got = (jaxprs.evaluate(j, [x])[0] for j in (closed, without.jaxpr))
    np.testing.assert_array_equal(got, want)


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
    files = {kind.__module__ for kind in kinds}
    (file,) = (name.removeprefix("jaxmem.scheduling.") for name in files)
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
