"""Measures in order, the bytes of the compiled step, and the lines to write."""

import dataclasses
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.advising import Advice, CompiledMeasure, measures
from jaxmem.advising.errors import gradient_error, update_error
from jaxmem.advising.forms import step_args, step_of
from jaxmem.advising.measures import Goal, of_loss

LAYERS, B, WIDTH, HIDDEN = 2, 64, 32, 256
TX = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def as_users():
    """With jax's own promotion, which optax's Adam takes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(params, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0]))


def params(key=None):
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    if key is None:
        return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    keys = jax.random.split(key, 2)
    pairs = zip(keys, shapes.items(), strict=True)
    return {k: 0.1 * jax.random.normal(key, s) for key, (k, s) in pairs}


X = jax.ShapeDtypeStruct((B, WIDTH), jnp.float32)


def advised(budget, **options) -> Advice:
    how = {"tx": TX, "target": "cpu", "budget": budget, **options}
    return jaxmem.advise(loss_fn, params(), X, **how)


@functools.cache
def every() -> Advice:
    return advised("1GiB", every=True)


@functools.cache
def fitted() -> Advice:
    """In the budget that it takes to do both, of what costs nothing."""
    peaks = {one.name: one.peak_bytes for one in every().measures}
    return advised(peaks["substitute, schedule"])


@pytest.fixture
def known(as_users):
    return {one.name: one for one in every().measures}


def test_measures_come_in_the_order_of_their_cost(known):
    assert list(known) == [
        *("nothing", "substitute", "substitute, schedule", "schedule"),
        "substitute, schedule with a budget",
        "substitute, schedule with a budget, the host",
    ]
    assert all(one.exact and one.fits for one in known.values())
    peaks = [known[n].peak_bytes for n in ("nothing", "substitute, schedule")]
    assert peaks[1] < peaks[0]


def test_the_first_that_fits_ends_the_search(known):
    """Budgets between the bytes of one measure and of the next."""
    assert advised("1GiB").taken.name == "nothing"
    assert advised("1GiB").code == ""
    both = known["substitute, schedule"].peak_bytes
    least = min(known[n].peak_bytes for n in ("nothing", "substitute", "schedule"))
    assert both < least
    advice = fitted()
    assert advice.budget_bytes == both
    assert advice.taken is advice.measures[-1]
    assert advice.taken.name == "substitute, schedule"
    assert [one.fits for one in advice.measures] == [
        False,
        False,
        True,
    ]


def test_the_lines_make_the_step_whose_bytes_are_printed():
    advice = fitted()
    first, second = advice.code.splitlines()
    env = {"jaxmem": jaxmem, "loss_fn": loss_fn}
    exec(first, env)
    env["step"] = step_of(env["loss_fn"], TX)
    exec(second, env)
    args = step_args(TX, (params(), X))
    how = {"target": "cpu", "donate_argnums": (0, 1)}
    report = jaxmem.estimate(env["step"], *args, **how)
    assert report.peak_bytes == advice.taken.peak_bytes
    state = params(jax.random.key(0))
    plain, moments = jax.jit(step_of(loss_fn, TX)), TX.init(state)
    x = jax.random.normal(jax.random.key(1), X.shape)
    # three steps; the formula of GELU is exchanged for an op: rounding of float32
    copy = lambda tree: jax.tree.map(jnp.copy, tree)
    got, want = (copy(state), copy(moments)), (state, moments)
    for _ in range(3):
        *got, a = env["step"](*got, x)
        *want, b = plain(*want, x)
        np.testing.assert_allclose(a, b, rtol=1e-4)


@pytest.mark.slow
def test_a_budget_makes_the_backward_pass_recompute():
    """Below what costs nothing, products are done a second time."""
    free = next(r for r in every().measures if r.name == "substitute, schedule")
    advice = advised(free.peak_bytes - 2**16)
    assert advice.taken.name == "substitute, schedule with a budget"
    assert advice.taken.peak_bytes <= advice.budget_bytes
    # recomputed, in tiles or in micro-batches: what it costs, and what was done
    assert advice.taken.seconds > 0 and advice.taken.done[0] in str(advice)


@pytest.mark.slow
def test_a_budget_that_nothing_fits():
    nothing = advised("64KiB")
    assert nothing.taken is None and nothing.code == ""
    last = nothing.measures[-1]
    assert not last.fits and "cannot be reached" in last.why
    assert "no technique that was tried fits 64.0 KiB on cpu" in str(nothing)


def test_approximate_measures_come_last_alone_and_together(monkeypatch):
    for error in ("update_error", "gradient_error"):  # measured in tests of their own
        monkeypatch.setattr(measures, error, lambda *args, **how: 0.1)
    allow, names = ("adama", "moments", "bits"), []
    goal = Goal("h100", 2**30, "1GiB")
    for measure in of_loss(loss_fn, TX, (params(), X), goal, allow):
        names.append((measure.name, measure.error == "none"))
        if measure.name == "substitute":
            jax.eval_shape(measure.step, *measure.args)  # tells what there is
    bits, moments = "substitute with derivatives in 2 bits", "8-bit moments"
    ends = "schedule", "schedule with a budget", "schedule with a budget, the host"
    host = "substitute, moments on the host"
    assert names == [
        *((name, True) for name in ("nothing", "substitute")),
        ("substitute, schedule", True),
        ("schedule", True),
        *((f"substitute, {end}", True) for end in ends[1:]),
        *((f"{host}, {end}", True) for end in ends),
        *((f"{one}, schedule", False) for one in (bits, f"substitute, {moments}")),
        *((f"{bits}, {moments}, {end}", False) for end in ends),
        *(
            (f"{bits}, {moments}, AdamA over {n} micro-batches", False)
            for n in (2, 4, 8, 16)
        ),
        *(
            (f"{bits}, {moments}, AdamA over 16 micro-batches, {end}", False)
            for end in ends[1:]
        ),
    ]


@pytest.mark.slow
def test_moments_in_8_bits_where_they_are_allowed():
    advice = advised("64KiB", allow="moments")
    low = [one for one in advice.measures if not one.exact]
    assert len(low) == 3 and all("8-bit moments" in one.name for one in low)
    assert all("% of an update" in one.error for one in low)
    assert low[0].code[1] == "tx = jaxmem.adama(learning_rate, bits=8)"
    same = next(r for r in advice.measures if r.name == "substitute, schedule")
    # two moments of float32 in a quarter of the bytes, and scales; those of one of the
    # two parameters are decoded at a time
    moments = 2 * 4 * sum(x.size for x in jax.tree.leaves(params()))
    assert low[0].peak_bytes < same.peak_bytes - 0.6 * moments + moments / 2


def test_the_error_of_moments_in_8_bits_is_measured():
    assert 0 < update_error(bits=8, rows=16) < 0.1


def test_the_error_of_adama_is_that_of_its_longer_steps():
    """Of one micro-batch it is Adam; with more of them the second moment differs."""
    assert update_error(n=1, rows=16) == 0
    assert 0 < update_error(n=2, rows=16) < 1


def test_the_error_of_few_bits_is_measured():
    assert 0 < gradient_error({"save": 8}) < 0.1
    assert gradient_error({}) == 0


def step(state, x):
    weights, moments = state
    grads = jax.grad(loss_fn)(weights, x)
    updates, moments = TX.update(grads, moments, weights)
    return optax.apply_updates(weights, updates), moments


def test_a_step_is_scheduled():
    state = jax.eval_shape(lambda: (p := params(jax.random.key(0)), TX.init(p)))
    how = {"target": "cpu", "donate_argnums": 0}
    plain = jaxmem.estimate(step, state, X, **how).peak_bytes
    advice = jaxmem.advise(step, state, X, budget=plain - 1, **how)
    assert advice.measures[0].peak_bytes == plain
    assert advice.code == (
        'step = jaxmem.schedule(step, target="cpu", donate_argnums=0)'
    )
    jitted = jax.jit(step, donate_argnums=0)
    advice = jaxmem.advise(jitted, state, X, budget=plain - 1, target="cpu")
    assert advice.measures[0].peak_bytes == plain
    assert advice.code == 'step = jaxmem.schedule(step, target="cpu")'


def test_a_step_of_nnx_and_one_of_equinox():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(model, optimizer, x):
        loss = lambda model: jnp.mean(jnp.square(model(x)))
        optimizer.update(model, nnx.grad(loss)(model))

    x = jnp.ones((4, 8))
    assert jaxmem.advise(nnx_step, model, optimizer, x, budget="1GiB").taken
    net = eqx.nn.Linear(8, 8, key=jax.random.key(0))

    @eqx.filter_jit
    def eqx_step(net, x):
        loss = lambda net: jnp.mean(jnp.square(jax.vmap(net)(x)))
        return eqx.apply_updates(net, eqx.filter_grad(loss)(net))

    assert jaxmem.advise(eqx_step, net, x, budget="1GiB").taken


def test_moments_lie_where_their_parameters_do():
    mesh = jaxmem.target_mesh("h100", (2,), ("data",))
    where = NamedSharding(mesh, P(None, "data"))
    weights = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=where)
    _, state, _ = step_args(TX, ({"w": weights}, X))
    assert state[0].mu["w"].sharding == where == state[0].nu["w"].sharding
    assert state[0].count.sharding is None


def test_results_are_shown_and_saved(tmp_path, known):
    advice = Advice("step", "h100", 2**30, tuple(known.values()))
    for name in ("a.html", "a.txt", "a.json", "a.png"):
        advice.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size
    fits = dataclasses.replace(known["nothing"], fits=True, code=("a < b",))
    page = dataclasses.replace(advice, measures=(fits,))._repr_html_()
    assert "<pre>a &lt; b</pre>" in page and "<li></li>" not in page
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["measures"][0]["peak_bytes"] == known["nothing"].peak_bytes
    refused = CompiledMeasure("nothing", (), None, False, why="it needs 74.8 GiB")
    text = str(Advice("step", "tpu-v5e", 2**30, (refused,)))
    assert "refused" in text and "nothing: it needs 74.8 GiB" in text
    with pytest.raises(ValueError, match="refused every technique"):
        Advice("step", "tpu-v5e", 2**30, (refused,)).plot(tmp_path / "b.png")


def test_bad_calls():
    with pytest.raises(ValueError, match="allow='moments': a step has its optimizer"):
        jaxmem.advise(step, 1, X, budget="1GiB", allow="moments")
    with pytest.raises(ValueError, match=r"allow='few'"):
        advised("1GiB", allow="few")
    with pytest.raises(ValueError, match="allow='bits': no argument of the step has"):
        jaxmem.advise(step, 1, X, budget="1GiB", allow="bits")
    with pytest.raises(ValueError, match="budget=None: must be .*cpu has no memory"):
        advised(None)
    with pytest.raises(TypeError, match="a loss takes params first"):
        jaxmem.advise(loss_fn, tx=TX, budget="1GiB")
    with pytest.raises(TypeError, match="donate_argnums=: with tx="):
        advised("1GiB", donate_argnums=0)
    with pytest.raises(TypeError, match="tx"):
        advised("1GiB", tx="adam")
