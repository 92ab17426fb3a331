"""Muon: beside optax's, its codes, its arguments, and matrices that are sharded."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.optim import LowBit, muon
from jaxmem.optim.low_bit import MomentCodes
from jaxmem.optim.orthogonal.newton_schulz import NewtonSchulz
from tests.arrays import array
from tests.optim.cases.muon import COEFFS, RTOL, orthogonal

LR = 1e-2
SLOW = pytest.mark.slow
Dims = optax.contrib.MuonDimensionNumbers
NUMBERS = {
    **{"up": Dims(1, 2), "down": Dims(1, 2), "heads": Dims(1, (2, 3)), "w": Dims()},
    **{"turned": Dims(2, 0), "odd": Dims(0, 1), "bias": None, "b": None},
}
SHAPES = {
    **{"up": (6, 32, 64), "down": (3, 64, 32), "heads": (6, 32, 4, 16), "w": (64, 32)},
    **{"turned": (32, 3, 48), "odd": (7, 13), "bias": (6, 64), "b": (8,)},
}
optax_muon = functools.partial(
    optax.contrib.muon, LR, muon_weight_dimension_numbers=NUMBERS
)
ours = functools.partial(muon, LR, muon_weight_dimension_numbers=NUMBERS)


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax's counters need it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def params(dtype=jnp.float32):
    r = np.random.default_rng(0)
    return {k: array(r.standard_normal(s), dtype) for k, s in SHAPES.items()}


def run(tx, given, steps=2, dtype=jnp.float32, places=None):
    r = np.random.default_rng(1)
    place = lambda tree: jax.device_put(tree, places) if places else tree
    given = place(given)
    state = tx.init(given)
    update = jax.jit(tx.update)
    for _ in range(steps):
        draw = lambda p: array(0.3 + r.standard_normal(p.shape), dtype)
        updates, state = update(place(jax.tree.map(draw, given)), state, given)
        given = optax.apply_updates(given, updates)
    return given, state


def close(got, want, start, rtol):
    """Within `rtol` of how far each leaf has moved."""
    for k, p in start.items():
        moved = np.abs(np.float64(want[k]) - np.float64(p)).max()
        error = np.abs(np.float64(got[k]) - np.float64(want[k])).max()
        # parameters of order 1 are rounded to float32 once a step, on both sides
        assert error <= rtol * moved + 10 * 2.0**-24, (k, error / moved)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gram": True},
        {"nesterov": False},
        {"weight_decay": 0.1, "adam_weight_decay": 0.2, "adam_learning_rate": 1e-3},
        {"weight_decay": 0.1, "weight_decay_mask": {k: k == "up" for k in SHAPES}},
        pytest.param({"consistent_rms": 0.2, "beta": 0.9, "ns_steps": 3}, marks=SLOW),
        pytest.param({"ns_coeffs": "dion"}, marks=SLOW),
        {"ns_coeffs": ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5)), "ns_steps": 2},
        pytest.param({"preconditioning": "aol"}, marks=SLOW),
        pytest.param({"preconditioning": "schatten", "gram": True}, marks=SLOW),
        pytest.param({"preconditioning": "spectral"}, marks=SLOW),
    ],
    ids=str,
)
def test_as_optax(how):
    start = params()
    want, _ = run(optax_muon(**{k: v for k, v in how.items() if k != "gram"}), start)
    got, _ = run(ours(**how), start)
    # each of the two is off by its own roundings
    close(got, want, start, 2 * RTOL)


def test_adaptive_is_of_each_matrix():
    """optax scales a stack by one number; a leaf that is one matrix is the same."""
    start = {k: params()[k] for k in ("w", "odd")}
    tx = functools.partial(optax.contrib.muon, LR, adaptive=True)
    got, _ = run(muon(LR, adaptive=True), start)
    close(got, run(tx(), start)[0], start, 4 * RTOL)
    stack = {"up": params()["up"]}
    alone = {str(i): w for i, w in enumerate(stack["up"])}
    g = jax.tree.map(jnp.cos, stack)
    each = {str(i): w for i, w in enumerate(g["up"])}
    both = muon(LR, adaptive=True, stacked="up"), muon(LR, adaptive=True)
    of = lambda tx, g, p: tx.update(g, tx.init(p), p)[0]
    one, other = of(both[0], g, stack), of(both[1], each, alone)
    chex.assert_trees_all_close(one["up"], jnp.stack([*other.values()]), rtol=1e-4)


@pytest.mark.parametrize("mu_dtype", [None, jnp.float32, jnp.bfloat16])
def test_bfloat16_gradients_as_optax(mu_dtype):
    start = params(jnp.bfloat16)
    how = {"mu_dtype": mu_dtype}
    want, state = run(optax_muon(**how), start, 3, jnp.bfloat16)
    got, mine = run(ours(**how), start, 3, jnp.bfloat16)
    theirs = state.inner_states["muon"].inner_state[0].mu
    own = mine.inner_states["muon"].inner_state[0].mu
    chex.assert_trees_all_equal_shapes_and_dtypes(own, theirs)
    for k in start:
        assert got[k].dtype == jnp.bfloat16
        step = np.float32(want[k]) - np.float32(got[k])
        # updates of at most a few LR; a parameter below 4 is rounded to 2**-7 a step
        assert np.abs(step).max() <= 3 * 2.0**-6 + LR, k


def test_split_by_default_as_optax():
    start = params()
    want = optax.contrib.muon(LR).init(start)
    got = muon(LR).init(start)
    for label in ("muon", "adam"):
        kept = lambda state, label=label: jax.tree.leaves(
            state.inner_states[label].inner_state[0].mu
        )
        assert [x.shape for x in kept(got)] == [x.shape for x in kept(want)]


def test_stacked_finds_the_matrices():
    """Layers' matrices, and no stacked biases."""
    layers = {"up": jnp.ones((6, 32, 64)), "bias": jnp.ones((6, 64))}
    start = {"layers": layers, "w": jnp.ones((8, 4))}
    state = muon(LR, stacked="layers").init(start)
    found = state.inner_states["muon"].inner_state[0].mu
    assert {x.shape for x in jax.tree.leaves(found)} == {(6, 32, 64), (8, 4)}


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 9), (16, 16)])
def test_iterations_of_ill_conditioned_matrices(shape, gram):
    """Singular values from 1 to 1e-6: what is lost in rounding stays small."""
    r = np.random.default_rng(0)
    u, _, v = np.linalg.svd(r.standard_normal(shape), full_matrices=False)
    x = u * np.geomspace(1, 1e-6, min(shape)) @ v
    rule = NewtonSchulz((COEFFS,) * 5, 1e-8, "frobenius", gram)
    got = np.float64(rule(array(x, jnp.float32), wide=shape[0] <= shape[1]))
    # of the Gram matrix three steps are rounded together
    grown = COEFFS[0] ** 5 * (COEFFS[0] ** 2 if gram else 1)
    assert np.abs(got - orthogonal(x)).max() < 4 * grown * 2.0**-24


@pytest.mark.parametrize("bits, most", [(8, 1 / 127), (4, 0.225 / 2)])
def test_momentum_in_codes(bits, most):
    start = {k: params()[k] for k in ("up", "heads", "turned")}
    numbers = {k: NUMBERS[k] for k in start}
    make = lambda bits: muon(
        LR,
        muon_weight_dimension_numbers=numbers,
        bits=LowBit(bits, least_size=0),
    )
    first, state = run(make(bits), start, 1)
    # the first update is of a momentum that has not been rounded
    close(first, run(make(32), start, 1)[0], start, RTOL)
    _, wide = run(make(32), start, 1)
    for path, codes in jax.tree_util.tree_leaves_with_path(
        state.inner_states["muon"].inner_state[0].mu,
        is_leaf=lambda x: isinstance(x, MomentCodes),
    ):
        assert isinstance(codes, MomentCodes)
        m = wide.inner_states["muon"].inner_state[0].mu[path[0].key]
        each = LowBit(bits, least_size=0)
        got = unpacked(each, codes)
        # half the widest gap between codes
        assert np.abs(got - m).max() <= most * np.abs(m).max() * 1.001
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert size(state) < size(wide) * (0.3 if bits == 8 else 0.17)


def unpacked(how, codes):
    from jaxmem.optim.low_bit.codes import unpack

    return np.float64(unpack(how.formats[0], codes))


def test_codes_of_adam_leaves_and_small_ones():
    start = {"e": jnp.ones((4, 64, 64)), "b": jnp.ones(8), "w": jnp.ones((64, 64))}
    state = muon(LR, bits=8).init(start)
    adam = state.inner_states["adam"].inner_state[0]
    assert isinstance(adam.mu["e"], MomentCodes)
    assert adam.mu["b"].dtype == jnp.float32
    assert isinstance(state.inner_states["muon"].inner_state[0].mu["w"], MomentCodes)


# -- sharded

SPECS = {
    **{"up": P(None, "fsdp", "tp"), "down": P(None, ("tp", "fsdp"))},
    **{"heads": P(None, "fsdp", "tp"), "w": P("fsdp"), "turned": P("tp", None, "fsdp")},
    **{"odd": P(), "bias": P(None, "fsdp"), "b": P("fsdp")},
}


def places_on(kind):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind, kind))
    return {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}


@pytest.mark.parametrize(
    "kind, how",
    [
        (AxisType.Auto, {}),
        (AxisType.Auto, {"gram": True}),
        pytest.param(AxisType.Auto, {"deal": False}, marks=SLOW),
        (AxisType.Explicit, {"deal": False, "gram": True}),
        pytest.param(AxisType.Explicit, {}, marks=SLOW),
    ],
    ids=str,
)
def test_sharded_as_on_one_device(kind, how):
    pick = lambda tree: {k: tree[k] for k in ("up", "heads", "w", "turned", "b")}
    start, places, numbers = map(pick, (params(), places_on(kind), NUMBERS))
    make = functools.partial(muon, LR, muon_weight_dimension_numbers=numbers)
    want, _ = run(make(), start)
    got, state = run(make(shardings=places, **how), start, places=places)
    close(got, want, start, 2 * RTOL)
    for k, p in got.items():
        assert p.sharding.is_equivalent_to(places[k], p.ndim), k
    mu = state.inner_states["muon"].inner_state[0].mu
    assert mu["up"].sharding.is_equivalent_to(places["up"], 3)


@pytest.mark.parametrize("spec", [P("fsdp"), P("fsdp", "tp"), P(None, "tp")], ids=str)
def test_matrices_whose_layers_are_sharded(spec):
    """Each device has its layers, and deals none of them to devices with others."""
    start = {
        "x": array(np.random.default_rng(0).standard_normal((8, 16, 24)), "float32")
    }
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    places = {"x": NamedSharding(mesh, spec)}
    want, _ = run(muon(LR, stacked="x"), start, 2)
    for deal in (True, False):
        tx = muon(LR, stacked="x", shardings=places, deal=deal)
        close(run(tx, start, 2, places=places)[0], want, start, 2 * RTOL)


def sent_in(tx, places, name):
    """Messages of the update of one leaf, by kind."""
    tree = {name: jax.ShapeDtypeStruct(SHAPES[name], "float32", sharding=places[name])}
    state = jaxmem.optim.abstract_state(tx, tree)

    @jax.jit
    def step(p, state, g):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    text = step.lower(tree, state, tree).compile().as_text()
    kinds = "all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter"
    return re.findall(rf" ({kinds})(?:-start)?\(", text)


@pytest.mark.parametrize("name", ["up", "down", "heads", "w"])
def test_one_exchange_in_and_one_out(name):
    places = places_on(AxisType.Auto)
    make = lambda **how: muon(
        LR,
        muon_weight_dimension_numbers={name: NUMBERS[name]},
        shardings={name: places[name]},
        **how,
    )
    if name == "w":  # alone: gathered, and each device keeps its part
        assert sent_in(make(), places, name) == ["all-gather"]
        norm_and_two_grams = ["all-reduce"] * 3
        assert sent_in(make(gram=True), places, name) == norm_and_two_grams
    else:
        assert sent_in(make(), places, name) == ["all-to-all"] * 2
    theirs = optax.contrib.muon(LR, muon_weight_dimension_numbers={name: NUMBERS[name]})
    assert len(sent_in(theirs, places, name)) > 5


# -- bytes


@pytest.mark.parametrize(
    "shape, most", [((32, 64, 256), 2.3), ((32, 256, 64), 2.3), ((32, 128, 128), 3.1)]
)
def test_products_of_one_matrix_at_a_time(shape, most):
    """X and the next X, and Gram matrices of the smaller side; of optax all layers'."""
    given = {"x": jnp.ones(shape)}

    def temporaries(tx):
        update = jax.jit(lambda g, state: tx.update(g, state, given), donate_argnums=1)
        compiled = update.lower(given, tx.init(given)).compile()
        return compiled.memory_analysis().temp_size_in_bytes / given["x"][0].nbytes

    theirs = optax.contrib.muon(LR, muon_weight_dimension_numbers=Dims(1, 2))
    assert temporaries(muon(LR, stacked="x")) < most
    assert temporaries(theirs) > 2 * shape[0]
    # new codes of all layers beside the old ones, and the momentum that they are of
    assert temporaries(muon(LR, stacked="x", bits=8)) < most + 1.5 + 1.1 * 32 / 4


# -- schedule, micro-batches


def loss(params, x, rng=None):
    layer = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)
    return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()


def layers():
    r = np.random.default_rng(0)
    draw = lambda *shape: array(0.2 * r.standard_normal(shape), "float32")
    return {"up": draw(4, 16, 32), "down": draw(4, 32, 16)}


@pytest.mark.parametrize("bits, gram", [(32, False), (8, True)])
def test_released(bits, gram):
    tx = muon(LR, stacked="*", bits=LowBit(bits, least_size=0), gram=gram)

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state[0], x)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    start = layers()
    state, x = (start, tx.init(start)), jnp.ones((8, 16))
    scheduled = jaxmem.schedule(step, donate_argnums=())
    plan = jaxmem.schedule(step, donate_argnums=0).plan(state, x)
    assert [g.released for g in plan.gradients] == [True] * 2, str(plan)
    want, _ = jax.jit(step)(state, x)
    got, _ = scheduled(state, x)
    close(got[0], want[0], start, 4 * RTOL)


def test_micro_batches():
    tx, start, x = muon(LR, stacked="*"), layers(), array(np.ones((8, 16)), "float32")
    call = lambda n: jaxmem.microbatch(loss, tx, n, donate=False)(
        start, tx.init(start), x, None
    )
    close(call(4)[0], call(1)[0], start, 1e-3)


# -- refused


@pytest.mark.parametrize(
    "how, words",
    [
        ({"muon_weight_dimension_numbers": Dims(), "stacked": "w"}, "both say"),
        ({"bits": 8, "mu_dtype": jnp.bfloat16}, "codes have a dtype"),
        ({"bits": LowBit(8, stochastic=True)}, "nor stochastic"),
        ({"bits": LowBit(8, on_host=True)}, "on_host"),
        ({"ns_coeffs": ((1.0, 1.0, 1.0),) * 2}, "fewer than ns_steps=5"),
        ({"ns_coeffs": (1.0, 1.0)}, "three numbers"),
        ({"ns_coeffs": "banana"}, "standard"),
        ({"shardings": P()}, "NamedSharding"),
    ],
)
def test_arguments(how, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        muon(LR, **how)


@pytest.mark.parametrize(
    "numbers, words",
    [
        ({"w": Dims(0, 0)}, "at least one each"),
        ({"w": Dims(0, 2)}, "axis 2"),
        ({"v": Dims()}, "not of the structure"),
        ({"w": 3}, "MuonDimensionNumbers"),
    ],
)
def test_dimension_numbers(numbers, words):
    with pytest.raises((TypeError, ValueError), match=words):
        muon(LR, muon_weight_dimension_numbers=lambda _: numbers).init(
            {"w": jnp.ones((3, 4))}
        )


def test_shardings_of_other_parameters():
    places = places_on(AxisType.Auto)
    with pytest.raises(ValueError, match="shardings"):
        muon(LR, shardings=places).init({"w": jnp.ones((3, 4))})
