"""Sums and maxima of what is recomputed: kept as few bytes, or recomputed with it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.shards import of_shardings
from jaxmem.scheduling import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.first_layers import FirstLayers
from jaxmem.scheduling.recompute.front import front_with_reductions, pareto_front
from jaxmem.scheduling.recompute.minimum_cut import price_at
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import scans_in, space_of
from jaxmem.scheduling.search.driver import Driver
from jaxmem.scheduling.search.result import ReportedTrial
from tests.scheduling.test_budget import close

L, B, T, H, C = 4, 2, 128, 2, 8  # layers, examples, tokens, heads, channels
BUDGET = 2**20  # bytes
FORMS = {False: "first", True: "other"}
RATE = 1e10  # bytes a second, at which products are recomputed and sums are not


def layer(x, w):
    """Attention with a softmax that is written out."""
    q, k, v = jnp.einsum("btd,cdhe->cbthe", x, w)
    p = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k), -1)
    return x + jnp.einsum("bhst,bthe->bshe", p, v).reshape(x.shape), None


def problem(layer=layer):
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 3)

    ws, x = (jax.random.key(seed) for seed in (0, 1))
    ws = jax.random.normal(ws, (L, 3, H * C, H, C)) / (H * C) ** 0.5
    return jax.grad(loss), (ws, jax.random.normal(x, (B, T, H * C)))


def made(*configs):
    fn, args = problem()
    closed = jax.make_jaxpr(fn)(*args)
    return rewrite(closed, {}, None, Choice("h100", configs)), fn, args


def space(target="h100", layer=layer):
    fn, args = problem(layer)
    closed = jax.make_jaxpr(fn)(*args)
    return space_of(scans_in(rewrite(closed, {}, None, Choice(target))), (), target)


@pytest.mark.parametrize("reductions", [False, True])
def test_values_and_what_is_kept(reductions):
    found, fn, args = made(Recompute(RATE, reductions=reductions))
    close(fn, found.jaxpr, args)
    again = [row.operation for row in found.description.recomputed]
    assert ("reduce_max" in again) == reductions


@pytest.mark.parametrize("layers", [1, 3])
def test_values_of_the_first_layers(layers):
    front = front_with_reductions(space())
    poor, rich = (front[i].choice.get(Recompute).rate for i in (-1, 0))
    found, fn, args = made(FirstLayers(poor, layers / L, rich, reductions=True))
    close(fn, found.jaxpr, args)
    assert "reduce_max" in [row.operation for row in found.description.recomputed]


def test_what_is_kept_of_a_softmax():
    """At most rates a maximum and a sum for each row of scores, in float32."""
    fronts = (pareto_front(space()), front_with_reductions(space()))
    ends = [front[-1] for front in fronts]
    kept = [made(*one.choice.configs)[0].description.recomputed for one in ends]
    assert [len(rows) for rows in kept] == [4, 4]  # both products, and both sums
    front = [c for c in pareto_front(space()) if not c.choice.get(Recompute).once]
    assert front[-2].bytes - ends[1].bytes == 2 * 4 * L * B * H * T
    assert ends[1].seconds < ends[0].seconds


def no_sums(x, w):
    return jnp.tanh(x @ w[0].reshape(H * C, -1)), None


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(lambda: space("cpu"), id="nothing says which is faster"),
        pytest.param(lambda: space(layer=no_sums), id="nothing is summed"),
    ],
)
def test_there_is_one_form_where(found):
    assert front_with_reductions(found()) == []


def test_a_sum_over_devices_is_paid_for():
    mesh = jaxmem.target_mesh("h100", (8,), ("x",))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    closed = jax.make_jaxpr(lambda x: jnp.max(x, -1))(x)
    (eqn,) = closed.eqns
    price = price_at(1.0, "h100", reductions=True)
    for spec, free in ((P("x"), True), (P(None, "x"), False)):
        given = of_shardings(closed, [NamedSharding(mesh, spec)])
        assert (price(eqn, shardings_in(closed, given)) == 0.0) == free


@pytest.mark.parametrize("faster", [False, True])
def test_the_compiled_step_says_which(faster, monkeypatch):
    """Both are compiled where the first candidate is, and then the faster one's."""
    seen = []

    def answer(driver, ask):
        if ask.ahead:
            return None
        other = ask.choice.get(Recompute).reductions
        seconds = 1.0 if other == faster else 2.0
        # what was compiled first does not fit, so that the search goes on
        peak = 2 * BUDGET if len(seen) < 2 else BUDGET
        trial = ReportedTrial(ask.choice, peak, None, ask.seconds, seconds)
        driver.trials.tried.append(trial)
        seen.append(ask.choice.get(Recompute))
        return trial

    monkeypatch.setattr(Driver, "_answer", answer)
    fn, args = problem()
    step = jaxmem.schedule(fn, BUDGET, target="h100", donate_argnums=(), cache=False)
    found = step.find(args, {})
    assert [one.reductions for one in seen[:2]] == [False, True]
    assert seen[2].reductions == faster
    assert found.choice.get(Recompute).reductions == faster


# of the step as it is given, of what keeps all, and of candidates in both forms
TIMES = {"given": 4.0, "all": 3.0, "first": 2.0, "other": 1.0, "second": 1.01}


def test_without_a_budget_what_keeps_less_than_the_fastest_is_compiled(monkeypatch):
    """Of both forms the faster one's next: few bytes times seconds."""
    seen = {}

    def name_of(choice):
        if choice.unchanged or choice.get(Recompute).rate is None:
            return "given" if choice.unchanged else "all"
        other = choice.get(Recompute).reductions
        return "second" if seen.get("other", choice) != choice else FORMS[other]

    def answer(driver, ask):
        name = name_of(ask.choice)
        seen[name] = ask.choice
        peak = BUDGET // 2 if name == "second" else BUDGET
        trial = ReportedTrial(ask.choice, peak, None, ask.seconds, TIMES[name])
        driver.trials.tried.append(trial)
        return trial

    monkeypatch.setattr(Driver, "_answer", answer)
    monkeypatch.setattr(ReportedTrial, "sent_bytes", 0)
    ws = jax.ShapeDtypeStruct((L, 3, 1024, 16, 64), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
    step = jaxmem.schedule(problem()[0], target="h100", donate_argnums=(), cache=False)
    found = step.find((ws, x), {})
    assert seen.keys() == TIMES.keys()
    assert found.choice == seen["second"]
    assert found.choice.get(Recompute).rate < seen["other"].get(Recompute).rate
