"""SOAP: beside numpy, its first step, what is kept of a matrix, and its codes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.optim import LowBit, MomentCodes, scale_by_soap, soap
from jaxmem.optim.low_bit.codes import unpack
from jaxmem.optim.low_rank.stored import ProjectorCodes, load
from jaxmem.optim.preconditioned.bases import eigenbasis
from jaxmem.optim.preconditioned.symmetric import folded, load_symmetric, unfolded
from tests.arrays import array
from tests.optim.cases.soap import soap_reference

LR = 1e-2
Dims = optax.contrib.MuonDimensionNumbers


def draw(shape, steps, seed=0):
    """A matrix and its gradients, in float32."""
    r = np.random.default_rng(seed)
    noise = lambda *s: r.standard_normal(s).astype(np.float32)
    return 0.3 * noise(*shape), 0.3 * noise(*shape) + noise(steps, *shape)


def run(tx, p, grads, state=None):
    """The parameter and the state after the gradients."""

    @jax.jit
    def step(p, state, g):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    p = jax.tree.map(jnp.asarray, p)
    state = tx.init(p) if state is None else state
    for i in range(len(jax.tree.leaves(grads)[0])):
        p, state = step(p, state, jax.tree.map(lambda g, i=i: jnp.asarray(g[i]), grads))
    return p, state


SIDES = ("left", "right")


@pytest.mark.parametrize(
    "shape, how, sides",
    [
        ((8, 8), {}, SIDES),
        ((7, 12), {"precondition_frequency": 3}, SIDES),
        ((12, 5), {"shampoo_beta": 0.8, "correct_bias": False}, SIDES),
        ((1, 6), {"precondition_frequency": 4}, SIDES),
        ((9, 9), {"one_sided": True}, SIDES[:1]),
        ((12, 5), {"one_sided": True, "precondition_frequency": 1}, SIDES[1:]),
        ((6, 11), {"max_precond_dim": 10}, SIDES[:1]),
        ((20, 11), {"max_precond_dim": 10}, ()),
        ((7, 12), {"factored": True, "precondition_frequency": 3}, SIDES),
        ((12, 5), {"factored": True, "one_sided": True}, SIDES[1:]),
        ((20, 11), {"factored": True, "max_precond_dim": 10}, ()),
    ],
    ids=str,
)
def test_as_the_reference(shape, how, sides):
    p, grads = draw(shape, 25)
    tx = soap(LR, **how)
    _, state = run(tx, p, grads[:1])
    # the larger side's first eigenvectors are not determined by one gradient
    first = [None if s is None else np.float64(s.basis) for s in state[0][3:5]]
    assert [s is not None for s in first] == [side in sides for side in SIDES]
    got, _ = run(tx, p, grads)
    names = {"precondition_frequency": "frequency", "shampoo_beta": "beta"}
    names |= {"correct_bias": "correct", "factored": "factored"}
    same = {names[k]: x for k, x in how.items() if k in names}
    wide = np.float64(p)
    want = soap_reference(wide, np.float64(grads), sides, first, **same)
    error, moved = np.abs(got - want).max(), np.abs(want - wide).max()
    # Adam divides by roots: an element near 0 in the eigenbasis is off by the roundings
    # of larger ones, and QR by those of what it is orthogonal to
    assert error < 1e-4 * moved, error / moved


def test_first_call_makes_the_bases_alone():
    p, grads = draw((6, 9), 1)
    tx = scale_by_soap()
    updates, state = tx.update(grads[0], tx.init(p))
    assert not np.any(updates) and not np.any(state.mu) and not np.any(state.nu)
    for side, g in ((state.left, grads[0]), (state.right, grads[0].T)):
        q = np.float64(side.basis)
        np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-6)
        want = 0.05 * np.float64(g) @ np.float64(g).T
        np.testing.assert_allclose(side.gram, want, atol=1e-6 * want.max())
        turned = q.T @ want @ q
        assert np.abs(turned - np.diag(np.diag(turned))).max() < 1e-6 * want.max()
        assert np.all(np.diff(np.diag(turned)) < 1e-6 * want.max())


def test_matrices_of_stacks_and_of_merged_axes_each_by_itself():
    shapes = {"stack": (3, 6, 9), "heads": (2, 5, 3, 2), "turned": (7, 3, 4)}
    numbers = {"stack": Dims(1, 2), "heads": Dims(1, (2, 3)), "turned": Dims(0, 2)}
    alone = {
        "stack": lambda x, i: x[..., i, :, :],
        "heads": lambda x, i: x[..., i, :, :, :].reshape(*x.shape[:-4], 5, 6),
        "turned": lambda x, i: x[..., :, i, :],
    }
    drawn = {k: draw(s, 6, i) for i, (k, s) in enumerate(shapes.items())}
    start, grads = ({k: x[i] for k, x in drawn.items()} for i in (0, 1))
    how = {"precondition_frequency": 2}
    got, _ = run(soap(LR, weight_dimension_numbers=numbers, **how), start, grads)
    for name, pick in alone.items():
        for i in range(3 if name != "heads" else 2):
            want, _ = run(soap(LR, **how), pick(start[name], i), pick(grads[name], i))
            close = np.testing.assert_allclose
            close(pick(got[name], i), want, rtol=1e-4, atol=1e-5, err_msg=name)
    found = run(soap(LR, stacked="stack", **how), start, grads)[0]["stack"]
    np.testing.assert_allclose(found, got["stack"], rtol=1e-6, atol=1e-7)


def test_other_leaves_take_adam_from_the_second_call_on():
    start = {"b": jnp.ones(5), "s": jnp.float32(2.0), "stack": jnp.ones((2, 3, 4))}
    start |= {"empty": jnp.ones((0, 4)), "layers": jnp.ones((0, 3, 4))}
    r = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda p: r.standard_normal((5, *p.shape)).astype("float32"), start
    )
    got, state = run(soap(LR, weight_decay=0.0), start, grads)
    assert not jax.tree.leaves(state[0].left) and not jax.tree.leaves(state[0].right)
    later = jax.tree.map(lambda g: g[1:], grads)
    with jax.numpy_dtype_promotion("standard"):  # optax's own counters need it
        want, _ = run(optax.adam(LR, 0.95, 0.95, eps=0.0), start, later)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    "how, moments, sides",
    [
        ({}, 8, 8),
        ({"bits": 8}, 2 + 2 * 2 / 32, 8),
        ({"bits": 4}, 1 + 2 * 4 / 128, 8),
        ({"bits": 8, "factored": True}, 1 + 2 / 32 + 4 / 512 + 4 / 768, 8),
        ({"preconditioner_dtype": "bfloat16"}, 8, 4),
        # codes, a scale and a zero for each group of 256, of one matrix and a half; and
        # a diagonal
        (
            {"bits": 8, "preconditioner_dtype": "int8"},
            2.125,
            1.5 * (1 + 5 / 256) + 4 / 512,
        ),
    ],
    ids=str,
)
def test_bytes(how, moments, sides):
    m, n, layers = 512, 768, 2
    shapes = {"w": jax.ShapeDtypeStruct((layers, m, n), jnp.float32)}
    held = lambda **more: sum(
        x.size * x.dtype.itemsize
        for x in jax.tree.leaves(
            jax.eval_shape(soap(LR, stacked="w", **how, **more).init, shapes)
        )
    )
    both = layers * (moments * m * n + sides * (m * m + n * n))
    # the diagonal and groups of the right side are longer
    assert held() == pytest.approx(both, rel=2e-3)
    one = layers * (moments * m * n + sides * m * m)
    assert held(one_sided=True) == pytest.approx(one, rel=2e-3)


# -- codes


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_half_of_a_symmetric_matrix(n):
    """Each pair once, and zeros; the whole matrix comes back."""
    numbers = 1 + np.arange(n * (n - 1) // 2, dtype=np.float32)
    x = np.zeros((n, n), np.float32)
    x[np.triu_indices(n, 1)] = numbers
    half = folded(jnp.asarray(x + x.T + np.eye(n, dtype=np.float32)))
    assert half.shape == (2 * -(-n // 2), -(-n // 2))
    np.testing.assert_array_equal(np.sort(half[half != 0]), numbers)
    np.testing.assert_array_equal(unfolded(half, n), x + x.T)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_gram_matrices_in_few_bits(kind):
    """Rounded without bias: errors add up as those of independent roundings do."""
    p, grads = draw((96, 64), 30)
    _, wide = run(scale_by_soap(), p, grads)
    _, state = run(scale_by_soap(preconditioner_dtype=kind), p, grads)
    beta = 0.95
    pairs = (state.left, wide.left, grads), (state.right, wide.right, grads.mT)
    for got, want, each in pairs:
        gram, mean, gap = np.float64(want.gram), 0.0, 0.0
        error = np.float64(load_symmetric(got.gram)) - gram
        off = ~np.eye(len(gram), dtype=bool)
        for g in each:
            mean = beta * mean + (1 - beta) * g @ g.T
            # of a value of bfloat16 2^-7 at most, of codes a 255th of a row's range
            span = np.pad(np.float64(folded(jnp.asarray(mean))), ((0, 0), (0, 1)))
            codes = np.ptp(span, axis=1).max() / 255
            of_floats = 2.0**-7 * np.abs(span).max()
            gap = max(gap, of_floats if kind == "bfloat16" else codes)
        deviation = gap / (2 * (1 - beta**2) ** 0.5)
        assert np.sqrt(np.mean(error[off] ** 2)) < deviation
        # the mean of n (n - 1) / 2 errors, within five of its standard deviations
        assert abs(error[off].mean()) < 5 * deviation / np.sqrt(off.sum() / 2)
        if kind == "int8":
            np.testing.assert_allclose(got.gram.diagonal, np.diag(gram), rtol=1e-5)
            assert isinstance(got.basis, ProjectorCodes)


def test_bases_in_codes():
    p, grads = draw((24, 24), 1)
    _, state = run(scale_by_soap(preconditioner_dtype="int8"), p, grads)
    for side in (state.left, state.right):
        exact = np.float64(eigenbasis(load_symmetric(side.gram)))
        range_ = exact.max(1) - exact.min(1)
        error = np.abs(np.float64(load(side.basis, 24)) - exact)
        assert np.all(error <= range_[:, None] / 255 * 1.001)


@pytest.mark.parametrize("bits, most", [(8, 1 / 127), (4, 0.225 / 2)])
def test_moments_in_codes(bits, most):
    """The second step's moments are rounded once, and its update is not."""
    p, grads = draw((32, 64), 2)
    make = lambda bits: scale_by_soap(bits=LowBit(bits, least_size=0))
    first = run(make(bits), p, grads[:1])[1]
    updates, state = make(bits).update(jnp.asarray(grads[1]), first)
    start = run(make(32), p, grads[:1])[1]
    want, wide = make(32).update(jnp.asarray(grads[1]), start)
    np.testing.assert_allclose(updates, want, rtol=1e-4, atol=1e-5)
    assert isinstance(state.mu, MomentCodes) and isinstance(state.nu, MomentCodes)
    formats = LowBit(bits, least_size=0).formats
    error = np.abs(unpack(formats[0], state.mu) - wide.mu)
    assert error.max() <= most * np.abs(wide.mu).max() * 1.001


def test_low_bits_train_as_float32():
    """A quadratic, whose curvature has eigenvectors that are no axes."""
    r = np.random.default_rng(0)
    turn = np.linalg.qr(r.standard_normal((64, 64)))[0]
    curved = jnp.asarray((turn * np.geomspace(1, 1e-2, 64)) @ turn.T, jnp.float32)
    start = jnp.asarray(r.standard_normal((64, 64)), jnp.float32)
    loss = lambda w: 0.5 * jnp.sum(w * (curved @ w))

    def trained(**how):
        tx = soap(optax.linear_schedule(0.3, 0.0, 60), weight_decay=0.0, **how)

        def step(carry, _):
            w, state = carry
            updates, state = tx.update(jax.grad(loss)(w), state, w)
            return (optax.apply_updates(w, updates), state), None

        return float(loss(jax.lax.scan(step, (start, tx.init(start)), None, 60)[0][0]))

    codes, most = LowBit(8, least_size=0), 0.03 * float(loss(start))
    assert trained() < most
    assert trained(bits=codes, preconditioner_dtype="int8") < most
    assert trained(bits=codes, preconditioner_dtype="bfloat16") < most


# -- schedule


def layers():
    r = np.random.default_rng(0)
    new = lambda *shape: array(0.2 * r.standard_normal(shape), "float32")
    return {"up": new(6, 32, 64), "down": new(6, 64, 32)}


def train_step(tx):
    def loss(params, x):
        layer = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)
        return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()

    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state[0], x)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    return step


CODES = {"bits": LowBit(8, least_size=0), "preconditioner_dtype": "int8"}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="float32", marks=pytest.mark.slow),
        pytest.param(CODES, id="codes", marks=pytest.mark.slow),
        pytest.param({"one_sided": True}, id="one-sided"),
        pytest.param(CODES | {"factored": True}, id="factored", marks=pytest.mark.slow),
    ],
)
def test_released(how):
    """In the backward scan over layers: the same values, and no more bytes."""
    tx = soap(LR, stacked="*", precondition_frequency=2, **how)
    step, start = train_step(tx), layers()
    state, x = (start, tx.init(start)), jnp.ones((8, 32))
    scheduled = jaxmem.schedule(step, donate_argnums=0)
    plan = scheduled.plan(state, x)
    assert [g.released for g in plan.gradients] == [True] * 2, str(plan)
    plain = jaxmem.estimate(jax.jit(step, donate_argnums=0), state, x)
    assert jaxmem.estimate(scheduled, state, x).peak_bytes < plain.peak_bytes
    ours = jaxmem.schedule(step, donate_argnums=())
    got = state
    for _ in range(4):  # the first call, a step, a refresh, a step
        state, got = jax.jit(step)(state, x)[0], ours(got, x)[0]
    chex.assert_trees_all_close(got[0], state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
@pytest.mark.parametrize("how", [{}, CODES], ids=["float32", "codes"])
def test_compiles_for_absent_chips(target, how):
    """QR and eigendecompositions are calls of libraries on GPU and TPU."""
    compiles_in_place(soap(LR, stacked="*", **how), target)


def compiles_in_place(tx, target):
    """A step compiles for the chip, and its state is updated where it lies."""
    params = jax.eval_shape(layers)
    state = params, jax.eval_shape(tx.init, params)
    x = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    step = jax.jit(train_step(tx), donate_argnums=0)
    report = jaxmem.estimate(step, state, x, target=target)
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state))
    assert report.alias_bytes >= held


# -- refused


@pytest.mark.parametrize(
    "how, words",
    [
        ({"stacked": "w", "weight_dimension_numbers": Dims()}, "both say"),
        ({"bits": LowBit(8, on_host=True)}, "on_host"),
        ({"preconditioner_dtype": "int4"}, "preconditioner_dtype='int4'.*'int8'"),
        ({"precondition_frequency": 0}, "precondition_frequency=0.*at least 1"),
        ({"shampoo_beta": 1.0}, "shampoo_beta=1.0"),
    ],
)
def test_arguments(how, words):
    with pytest.raises((TypeError, ValueError), match=words):
        soap(LR, **how)


def test_dimension_numbers_are_named():
    with pytest.raises(ValueError, match="weight_dimension_numbers of.*axis 2"):
        soap(LR, weight_dimension_numbers=Dims(0, 2)).init(jnp.ones((3, 4)))
    with pytest.raises(ValueError, match="scale_by_soap: stacked"):
        soap(LR, stacked="v").init({"w": jnp.ones((3, 4))})
