"""`choose_codes`: for each leaf the code with the smallest error, and who takes it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem import optim
from jaxmem.optim import LowBit, choose_codes

SHAPE, LR = (64, 256), 1e-2
SPREADS = {"even": 0.0, "heavy": 3.0}
MEASURED = {8: ["companding", "float8", "mxfp8"], 4: ["dynamic", "mxfp4", "nvfp4"]}


def gradient(spread, i, seed=0):
    """Noise round a mean, of one size or of sizes that are log-normal."""
    key = jax.random.key(seed)
    sizes = 1e-2 * jnp.exp(spread * jax.random.normal(key, SHAPE))
    return sizes * (0.3 + jax.random.normal(jax.random.fold_in(key, i), SHAPE))


def tree(i):
    return {**{k: gradient(s, i) for k, s in SPREADS.items()}, "b": jnp.ones(8)}


GRADIENTS = [tree(i) for i in range(6)]


@functools.cache
def chosen(bits=8):
    return choose_codes(GRADIENTS, bits)


@functools.partial(jax.jit, static_argnums=(0, 1))
def error(how, spread):
    """On other gradients than those of the choice, none of which comes twice."""
    tx, wide = optim.scale_by_adam(bits=how), optim.scale_by_adam(bits=32)

    def step(states, i):
        g = gradient(spread, 100 + i, seed=1)
        u, coded = tx.update(g, states[0])
        w, plain = wide.update(g, states[1])
        return (coded, plain), jnp.linalg.norm(u - w) / jnp.linalg.norm(w)

    zeros = jnp.zeros(SHAPE)
    states = tx.init(zeros), wide.init(zeros)
    return jax.lax.scan(step, states, jnp.arange(100))[1][50:].mean()


@pytest.mark.fast("even-8", "heavy-8")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", SPREADS)
def test_the_code_with_the_smaller_error_is_chosen(kind, bits):
    errors = {
        code: float(error(LowBit(bits, code=code), SPREADS[kind]))
        for code in MEASURED[bits]
    }
    best = min(errors, key=lambda code: errors[code])
    assert chosen(bits)[kind] == best
    if bits == 8:
        # the two differ by far, each way
        assert (best == "companding") == (kind == "even")
        assert errors[best] < 0.5 * max(errors.values())


def test_the_result_says_what_was_measured():
    assert chosen()["b"] == "float32" and [*chosen()] == ["b", "even", "heavy"]
    lines = str(chosen()).splitlines()
    assert lines[0].split() == [
        *("leaf", "code", "error:", "companding", "error:", "float8"),
        *("error:", "mxfp8"),
    ]
    assert lines[1].split(maxsplit=2)[:2] == ["b", "float32"]
    assert lines[1].endswith("fewer than 4,096 elements")
    by_name = {leaf.path: leaf for leaf in chosen().leaves}
    for name in SPREADS:
        errors = dict(by_name[name].errors)
        assert list(errors) == MEASURED[8]
        assert errors[by_name[name].code] == min(errors.values())
        (line,) = (x for x in lines if x.startswith(name))
        assert line.split() == [
            *(name, by_name[name].code),
            *(f"{x:.3g}" for x in errors.values()),
        ]


def test_codes_to_choose_from():
    one = choose_codes(GRADIENTS, codes=["dynamic"])
    assert dict(one) == {"b": "float32", "even": "dynamic", "heavy": "dynamic"}
    odd = [{"x": jax.random.normal(jax.random.key(i), (512, 9))} for i in range(4)]
    found = choose_codes(odd)
    assert dict(found) == {"x": "float32"} and "no block divides" in str(found)
    every = choose_codes(GRADIENTS, LowBit(8, least_size=0, block=8))
    assert every["b"] != "float32"


def test_rows_without_a_gradient_say_nothing():
    """Of a table some rows, between which all are zero."""
    few = [jnp.zeros((4096, 256)).at[7::64].set(g["heavy"]) for g in GRADIENTS]
    found = choose_codes([{"heavy": x} for x in few]).leaves[0]
    heavy = next(x for x in chosen().leaves if x.path == "heavy")
    assert found.code == heavy.code
    for (_, x), (_, y) in zip(found.errors, heavy.errors, strict=True):
        # the same rows; of mxfp8 other numbers of the stochastic rounding
        assert x == pytest.approx(y, rel=0.05)


# -- who takes it

RULES = {
    "adam": lambda bits: optim.adam(LR, bits=bits),
    "adamw": lambda bits: optim.adamw(LR, bits=bits),
    "adama": lambda bits: optim.adama(LR, bits=bits),
    "lion": lambda bits: optim.lion(LR, bits=bits),
    "schedule_free": lambda bits: optim.schedule_free_adamw(LR, bits=bits),
}


@functools.partial(jax.jit, static_argnums=0)
def run(tx, params, grads):
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def codes_in(state):
    is_codes = lambda x: isinstance(x, optim.MomentCodes)
    return [x for x in jax.tree.leaves(state, is_leaf=is_codes) if is_codes(x)]


@pytest.mark.fast("adamw", "adama", "schedule_free")
@pytest.mark.parametrize("name", RULES)
def test_each_leaf_is_as_with_its_code_alone(name):
    make, given = RULES[name], tree(0)
    got, state = run(make(chosen()), given, GRADIENTS[:3])
    for leaf, code in chosen().items():
        alone = [{leaf: g[leaf]} for g in GRADIENTS[:3]]
        how = LowBit(32) if code == "float32" else LowBit(8, code=code)
        want, own = run(make(how), {leaf: given[leaf]}, alone)
        # float32's roundings in another fusion, of which some flip a code; the codes
        # themselves are apart by a hundredth
        moved = np.linalg.norm(want[leaf] - given[leaf])
        assert np.linalg.norm(got[leaf] - want[leaf]) <= 1e-3 * moved
        types = lambda codes: [jax.tree.map(lambda x: x.dtype, c) for c in codes]
        assert all(t in types(codes_in(state)) for t in types(codes_in(own)))
        assert bool(codes_in(own)) == (code != "float32")
    kinds = {x.codes.dtype.name for x in codes_in(state)}
    assert {"float8_e4m3fn", "float8_e5m2"} & kinds and kinds & {"int8", "uint8"}


def test_a_dict_from_a_file_makes_the_same_state():
    kept = json.loads(json.dumps(dict(chosen())))
    again = optim.adamw(LR, bits=LowBit(8, code=kept, seed=3))
    first = optim.adamw(LR, bits=LowBit(8, code=chosen(), seed=3))
    given = tree(0)
    assert hash(LowBit(8, code=kept)) == hash(LowBit(8, code=dict(kept)))
    for x, y in zip(
        *(jax.tree.leaves(run(tx, given, GRADIENTS[:2])) for tx in (again, first)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


def test_nnx_has_the_same_names_everywhere():
    """Gradients of Variables, an nnx.Optimizer, and the pure state of a microbatch."""
    model = nnx.Linear(64, 256, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (8, 4, 64))
    loss = lambda model, batch, rng=None: jnp.mean(jnp.tanh(model(batch)) ** 2)
    grads = [nnx.grad(loss)(model, batch) for batch in x]
    codes = choose_codes(grads)
    assert set(codes) == {"kernel", "bias"} and codes["bias"] == "float32"
    assert set(choose_codes([nnx.as_pure(g) for g in grads])) == set(codes)
    optimizer = nnx.Optimizer(model, optim.adamw(LR, bits=codes), wrt=nnx.Param)
    before = np.array(model.kernel[...])
    nnx.jit(lambda m, o, g: o.update(m, g))(model, optimizer, grads[0])
    step = jaxmem.microbatch(loss, optimizer.tx, 2)
    step(model, optimizer, x[0], None)
    assert np.abs(before - model.kernel[...]).max() > 0.5 * LR


# -- what cannot be measured


def without(**leaves):
    return [{**g, **leaves} for g in GRADIENTS[:4]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (without(even=jnp.zeros(SHAPE)), "leaf 'even' are all zero"),
        (without(heavy=jnp.full(SHAPE, jnp.nan)), "leaf 'heavy' are not all finite"),
        (GRADIENTS[:3], "of 4 batches or more"),
        ([*GRADIENTS[:3], {"even": 1.0}], r"gradients\[3\]="),
    ],
    ids=["zeros", "nan", "few", "others"],
)
def test_gradients_that_say_nothing(given, message):
    with pytest.raises(ValueError, match=message):
        choose_codes(given)


def test_traced_gradients_are_refused():
    with pytest.raises(ValueError, match="outside of jax.jit"):
        jax.jit(lambda g: choose_codes([g] * 4) and 0)(tree(0))


def test_codes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"choose_codes\(gradients\) returns"):
        LowBit(8, code="auto")
    with pytest.raises(ValueError, match=r"code\['even'\]='mxfp4'"):
        LowBit(8, code={"even": "mxfp4"})
    with pytest.raises(ValueError, match=r"code\['even'\]='companding': with bits=4"):
        LowBit(4, code=chosen())
    tx = optim.adamw(LR, bits=LowBit(8, code={"evne": "float8"}))
    with pytest.raises(ValueError, match="has none for the leaf 'even'; .*'evne'"):
        tx.init({"even": jnp.zeros(SHAPE)})
    for make in (optim.muon, optim.soap, optim.shampoo):
        with pytest.raises(ValueError, match="one code for all leaves"):
            make(LR, bits=chosen())
