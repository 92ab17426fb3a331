"""`Plan.from_json` holds every field to what it may be, before anything is traced."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import _adviser
from jaxmem.scheduling import Plan, _passes
from jaxmem.scheduling.plan import plan as plans

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def plain_plan():
    return json.loads(jaxmem.schedule(step, donate_argnums=0).plan(W, X).to_json())


# where in the JSON, the value, and words of the message
NONSENSE = [
    (("choice", "passes"), {"micro_batches": {"n": "x"}}, r"\.n='x': an int"),
    (("choice", "passes"), {"micro_batches": {"n": -2}}, r"\.n=-2: an int, at least 1"),
    (("choice", "passes"), {"micro_batches": {"n": True}}, r"\.n=True: an int"),
    (("choice", "passes"), {"micro_batches": {"m": 2}}, r"\['m'\]: no fields"),
    (("choice", "passes"), {"tiles": {"limit": -1}}, r"\.limit=-1: .*at least 0"),
    (("choice", "passes"), {"barriers": {"enabled": 1}}, "enabled=1: True or False"),
    (("choice", "passes"), {"recompute": {"rate": float("nan")}}, "rate=nan"),
    (("choice", "passes"), {"first_layers": {"fraction": 3}}, "at most 1"),
    (("choice", "passes"), {"order": {"sequence": [0, "a"]}}, r"sequence\[1\]='a'"),
    (("choice", "passes"), {"moon": {}}, r"passes=\['moon'\]: of \['barriers'"),
    (("choice", "passes"), 3, "passes=3"),
    (("choice", "target"), "moon", "target='moon': one of 'cpu'"),
    (("choice", "compared"), None, "compared=None"),
    (("target",), "moon", "plan.target='moon': one of ''"),
    (("budget",), -4, "budget=-4: an int, at least 1"),
    (("budget",), "14GiB", "budget='14GiB': an int"),
    (("tried",), [{}], r"tried\[0\].*'choice' is missing"),
    (("notes",), "text", "notes='text'"),
    (("mesh",), [["data", "b"]], r"mesh\[0\]\[1\]='b': an int"),
    (("plain",), 3, "plain=3"),
    (("gradients",), [{"bytes": 1.5}], r"gradients\[0\]"),
    (("no_such_field",), 3, r"\['no_such_field'\]: no fields of Plan"),
]


@pytest.mark.parametrize("path, value, words", NONSENSE, ids=[c[2] for c in NONSENSE])
def test_nonsense_is_named(path, value, words):
    plain = plain_plan()
    inner = plain
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=f"text: not a plan: .*{words}"):
        Plan.from_json(json.dumps(plain))


@pytest.mark.parametrize("text", ["[]", "{}", "3", "null", "none"])
def test_what_is_no_plan_at_all(text):
    with pytest.raises(ValueError, match="text: not a plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("config", _passes.CONFIGS.values(), ids=lambda c: c.name)
def test_every_field_of_every_configuration_is_checked(config):
    """None has a form that the one reader of JSON does not know."""
    for name in (field.name for field in dataclasses.fields(config)):
        plain = plain_plan()
        plain["choice"]["passes"] = {config.name: {name: {"no": "such"}}}
        with pytest.raises(ValueError, match=rf"\.{name}=.*no"):
            Plan.from_json(json.dumps(plain))


@pytest.mark.parametrize("sequence", [[0, 1, 999], [1], [2, 1, 0]])
def test_a_sequence_of_other_operations(sequence):
    plain = plain_plan()
    plain["choice"]["passes"] = {"order": {"sequence": sequence}}
    plan = Plan.from_json(json.dumps(plain))
    with pytest.raises(ValueError, match=r"sequence.*operation \d+"):
        jaxmem.schedule(step, plan=plan, donate_argnums=0)(W * 1, X)


def test_what_was_written_is_read():
    plan = jaxmem.schedule(step, donate_argnums=0).plan(W, X)
    assert plans.Plan.from_json(plan.to_json()) == plan


SINCE_0_1_0 = ("tiles", "mesh", "budget_met", "jaxmem_version")


def test_a_plan_of_0_1_0_is_read_and_used():
    """Its keys, and of a configuration the fields that there were."""
    plain = plain_plan()
    assert all(plain.pop(name, name) != name for name in SINCE_0_1_0)
    recompute = {"rate": 1e9, "named": False, "offload": None}
    plain["choice"]["passes"] = {"recompute": recompute}
    plan = Plan.from_json(json.dumps(plain))
    assert plan.choice.to_dict()["passes"]["recompute"].items() >= recompute.items()
    jaxmem.schedule(step, plan=plan, donate_argnums=0)(W * 1, X)


@pytest.mark.parametrize(
    "version, words",
    [
        ("0.0.1", "jaxmem 0.0.1 wrote it"),
        (None, "it names no version, as plans of jaxmem 0.1"),
    ],
)
def test_a_plan_that_cannot_be_read_names_who_wrote_it(version, words):
    plain = plain_plan() | {"moon": 1, "jaxmem_version": version}
    with pytest.raises(ValueError, match=rf"moon.*\({words}.*; this is jaxmem \d"):
        Plan.from_json(json.dumps(plain))
    plain |= {"jaxmem_version": plain_plan()["jaxmem_version"]}
    with pytest.raises(ValueError) as raised:
        Plan.from_json(json.dumps(plain))
    assert "this is jaxmem" not in str(raised.value)


def test_a_plan_without_a_fingerprint_is_refused():
    plan = Plan.from_json(json.dumps(plain_plan() | {"fingerprint": ""}))
    with pytest.raises(ValueError, match="does not tell which step.*0.1.0.*plan again"):
        jaxmem.schedule(step, plan=plan, donate_argnums=0)(W * 1, X)


@pytest.mark.parametrize("target", [None, "cpu"])
def test_a_plan_without_a_search_can_be_given_back(target):
    """Of a step without a budget or a target of its own."""
    first = jaxmem.schedule(step, donate_argnums=0)
    plan = Plan.from_json(first.plan(W, X, target=target).to_json())
    assert plan.fingerprint
    second = jaxmem.schedule(step, plan=plan, donate_argnums=0)
    assert second.plan(W, X).choice == plan.choice
    assert jnp.array_equal(second(W * 1, X), first(W * 1, X))
    with pytest.raises(ValueError, match="made for another step"):
        jaxmem.schedule(step, plan=plan, donate_argnums=0)(W * 1, X[:2])


def test_the_text_of_a_plan_asks_for_no_advice(monkeypatch):
    """It would take as long as a search; what somebody has read is in the text."""
    asked = []
    monkeypatch.setattr(_adviser, "adviser", lambda step: asked.append(step) or ("x",))
    x = jnp.ones((1024, 8))
    plan = jaxmem.schedule(step, donate_argnums=0, cache=False).plan(W, x, target="cpu")
    assert Plan.from_json(plan.to_json()) == plan
    assert not asked
    assert plan.plain.advice == ("x",)
    assert Plan.from_json(plan.to_json()).plain.advice == ("x",)
