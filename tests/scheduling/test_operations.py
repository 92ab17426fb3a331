"""The graph of a jaxpr: what exists in memory, for how long, and the way back."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxmem
from benchmarks import release
from benchmarks.models import transformers as models
from benchmarks.models import vision as vision_models
from benchmarks.models import zoo
from jaxmem.ir import jaxprs
from jaxmem.ir.graph import by_shape
from jaxmem.planning import lifetimes, order, peak, profile
from jaxmem.scheduling.order.given import fences_of, in_given_order
from jaxmem.scheduling.predict.operations import operations_of
from jaxmem.scheduling.predict.prediction import Prediction, predict
from tests.scheduling.problem import array
from tests.sets import some_fast

N = 64
SQUARE = N * N * 4  # bytes of a square matrix of float32


def square(seed=0):
    return array(N, N, seed=seed, scale=N**-0.5, dtype=jnp.float32)


def operations(fn, *args, donate=0):
    """The graph of a function whose first `donate` arguments are donated."""
    traced = jaxprs.trace(fn, *args)
    count = len(jax.tree.leaves(args[:donate]))
    return operations_of(traced.jaxpr, by_shape(traced.jaxpr, range(count)))


def made(ops) -> list[str]:
    """What is run, in program order."""
    return [operation.name for operation in ops.graph.operations]


def written(ops) -> list[int]:
    """Bytes of what each operation makes."""
    return [ops.graph.bytes_of(o.outputs) for o in ops.graph.operations]


def test_a_chain_of_products_holds_two_at_a_time():
    ops = operations(lambda x, u, v, w: x @ u @ v @ w, *map(square, range(4)))
    assert made(ops) == ["dot_general"] * 3
    assert profile(ops.graph) == [SQUARE, 2 * SQUARE, 2 * SQUARE]
    assert [o.flops for o in ops.graph.operations] == [2.0 * N**3] * 3
    assert [o.moved for o in ops.graph.operations] == [3.0 * SQUARE] * 3


def test_an_activation_is_written_over_the_product_it_is_of():
    ops = operations(lambda x, u, v: jax.nn.gelu(x @ u) @ v, *map(square, range(3)))
    assert made(ops) == ["dot_general", "mul", "dot_general"]
    assert profile(ops.graph) == [SQUARE, SQUARE, 2 * SQUARE]


def test_broadcasts_masks_and_random_bits_are_never_written():
    def fn(x, bias, key):
        mask = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, x.shape)
        causal = jnp.tril(jnp.ones((N, N), bool))
        return jnp.sum(jnp.where(mask & causal, x + bias[None], 0))

    key = jax.random.key_data(jax.random.key(0))
    ops = operations(fn, square(), array(N, dtype=jnp.float32), key)
    assert made(ops)[-1] == "reduce_sum"
    assert peak(ops.graph) < N * 4


def test_a_softmax_writes_its_result_alone():
    ops = operations(lambda x: jax.nn.softmax(x), square())
    assert written(ops).count(SQUARE) == 1
    assert SQUARE < peak(ops.graph) <= SQUARE + 3 * N * 4


def residuals(activation) -> int:
    """Bytes of an activation for the backward pass, beside the product it is of."""

    def loss(u, x, v):
        return jnp.sum(jnp.square(activation(x @ u) @ v))

    half = (square(i).astype(jnp.bfloat16) for i in range(3))
    graph = operations(jax.grad(loss, (0, 2)), *half).graph
    forward = {i for i, o in enumerate(graph.operations) if o.path == "jvp()"}
    assert graph.operations[0].name == "dot_general"
    return graph.bytes_of(
        v
        for i in forward - {0}
        for v in graph.operations[i].outputs
        if graph.operations[i].name != "dot_general" and set(graph.readers[v]) - forward
    )


def test_a_cheap_residual_is_computed_again_and_a_costly_one_kept():
    """Beside the product of each layer and what the next reads, which both have."""
    assert residuals(lambda x: jnp.square(jnp.maximum(x, 0))) == SQUARE / 2
    assert residuals(jax.nn.gelu) == 2 * SQUARE / 2  # the hyperbolic tangent as well


def test_transpositions_for_products_are_layouts():
    def fn(x, u):
        return x.T @ u.T

    assert made(operations(fn, square(), square(1))) == ["dot_general"]
    heads = array(2, 8, 4, 16, dtype=jnp.float32)  # batch, length, heads, channels

    def scores(q, k):
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    assert "transpose" not in made(operations(scores, heads, heads))
    mixed = operations(lambda q, k: scores(q, jnp.transpose(k)), heads, heads.T)
    assert "transpose" in made(mixed)  # heads amid length and channels: no matrix


def test_a_product_writes_the_type_it_is_cast_to():
    half = square().astype(jnp.bfloat16)
    ops = operations(lambda x, u: (x @ u).astype(jnp.float32), half, half)
    assert made(ops) == ["dot_general"] and written(ops) == [SQUARE]


def test_several_readers_of_a_cast_do_it_themselves():
    """As the maximum and the sum of a softmax, and its gradient."""

    def fn(x, u):
        y = (x @ u).astype(jnp.float32)
        top = jnp.max(y, -1, keepdims=True)
        return jnp.sum(jnp.exp(y - top), -1)

    half = square().astype(jnp.bfloat16)
    ops = operations(fn, half, half)
    assert made(ops) == ["dot_general", "reduce_max", "reduce_sum"]
    assert written(ops)[0] == SQUARE // 2


def test_donated_state_is_updated_where_it_lies():
    def step(state, x):
        (p, m), g = state, x @ x
        m = 0.9 * m + g
        return (p - m, m), jnp.sum(g)

    state = square(), square(1)
    ops = operations(step, state, square(2), donate=1)
    assert peak(ops.graph) == SQUARE + 4
    assert peak(operations(step, state, square(2)).graph) == 3 * SQUARE + 4
    assert len(ops.graph.aliases) == 2


def test_a_scan_holds_its_stacks_and_one_turn():
    def fn(x, w):
        def body(x, w):
            y = jnp.tanh(x @ w)
            return y, y

        return lax.scan(body, x, w)

    stack = array(5, N, N, dtype=jnp.float32)
    ops = operations(fn, square(), stack)
    (scan,) = ops.graph.operations
    assert ops.graph.bytes_of(scan.outputs) == SQUARE + 5 * SQUARE
    # a slice of the weights, the product, and the carry that it becomes
    assert 2 * SQUARE <= scan.scratch <= 3 * SQUARE
    assert scan.flops == 5 * 2.0 * N**3


def test_the_carry_of_a_loop_lies_where_it_began():
    def fn(x):
        y = x @ x
        return lax.fori_loop(0, 3, lambda _, c: c * 2 + 1, y)

    ops = operations(fn, square())
    assert profile(ops.graph)[-1] == SQUARE


def test_a_loop_hands_a_donated_buffer_on():
    def step(w, x):
        iteration = lambda c, _: (c * 2.0, None)
        w = lax.scan(iteration, w, None, length=3)[0]
        return lax.scan(lambda c, _: (c @ x, None), w, None, length=3)[0]

    given = square(), square(1)
    assert peak(operations(step, *given, donate=1).graph) == 0
    assert peak(operations(step, *given).graph) == SQUARE


def test_updates_of_slices_one_after_another_lie_in_a_donated_buffer():
    def step(x, rows):
        for i, row in enumerate(rows):
            x = lax.dynamic_update_slice_in_dim(x, row[None], i, 0)
        return x

    ops = operations(step, square(), square(1)[:3], donate=1)
    assert made(ops) == ["dynamic_update_slice"] * 3
    assert peak(ops.graph) == 0

    # another reader of what lies there takes a copy of it
    ops = operations(lambda x, rows: (step(x, rows), x @ x), square(), square(1)[:3])
    assert peak(ops.graph) >= SQUARE


def test_branches_take_what_the_larger_takes():
    def fn(flag, x):
        return lax.cond(flag, lambda x: x @ x @ x, lambda x: x, x)

    ops = operations(fn, True, square())
    (branch,) = [o for o in ops.graph.operations if o.name == "cond"]
    assert branch.scratch == SQUARE


def test_calls_custom_derivatives_and_remat_are_written_out():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (double(x), None), lambda _, g: (2 * g,))

    def loss(x, u):
        return jnp.sum(jax.checkpoint(jax.jit(lambda x: double(jnp.sin(x @ u))))(x))

    ops = operations(jax.grad(loss), square(), square(1))
    primitives = {e.primitive.name for e in ops.closed.jaxpr.eqns}
    assert not primitives & {"jit", "pjit", "custom_vjp_call", "checkpoint", "remat2"}
    assert "optimization_barrier" in primitives
    # the recomputation, behind the barrier, is no part of a kernel before it
    assert made(ops).count("dot_general") == 2  # recomputed, and the gradient's


def test_a_barrier_orders_and_takes_no_bytes():
    def fn(x, y):
        u, v = lax.optimization_barrier((x @ x, y @ y))
        return u * 2 + v

    ops = operations(fn, square(), square(1))
    assert made(ops) == ["dot_general", "dot_general", "optimization_barrier", "add"]
    assert peak(ops.graph) == 2 * SQUARE
    with pytest.raises(ValueError, match="order"):
        ops.graph.check_order([0, 1, 3, 2])


def test_side_effects_keep_their_order():
    def fn(x):
        jax.debug.print("{}", jnp.sum(x @ x))
        jax.debug.print("{}", jnp.sum(x))
        return x + 1

    ops = operations(fn, square())
    first, second = (i for i, o in enumerate(ops.graph.operations) if "debug" in o.name)
    assert first in ops.graph.before[second]
    assert not ops.graph.operations[first].recomputable


def test_a_step_is_predicted_with_what_it_gives_back():
    def step(state, x):
        return state - x @ x, x * 2

    x = square()
    found = predict(step, square(1), x, donate_argnums=0)
    assert found == Prediction(2 * SQUARE, SQUARE, SQUARE, SQUARE)
    assert found.peak_bytes == 4 * SQUARE
    assert predict(jax.jit(step, donate_argnums=0), square(1), x) == found
    assert predict(step, square(1), x).output_bytes == 2 * SQUARE


def pool(kernel, bias, x, norm=False):
    """The relu of a convolution with its bias, and its maxima over windows."""
    dims = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)
    y = y * 0.5 + bias if norm else y + bias
    y = jax.nn.relu(y)
    window = (1, 2, 2, 1)
    return y, lax.reduce_window(y, -jnp.inf, lax.max, window, window, "VALID")


def pooled(kernel, bias, x, skip=False, norm=False):
    y, z = pool(kernel, bias, x, norm)
    return jnp.sum(z**2) + (jnp.sum(jnp.concatenate([y, y]) ** 2) if skip else 0.0)


@pytest.mark.parametrize("how", [{}, {"skip": True}, {"norm": True}])
def test_a_pool_makes_the_zeros_of_its_gradient(how):
    fn = jax.grad(functools.partial(pooled, **how), argnums=(0, 1))
    sizes = (3, 3, 4, 8), (1, 1, 1, 8), (2, 16, 16, 4)
    graph = operations(fn, *(array(*s, dtype=jnp.float32) for s in sizes)).graph
    zeros = [n for n, v in enumerate(graph.values) if v.name == "zeros"]
    assert len(zeros) == (0 if how else 1)
    for n in zeros:
        assert graph.values[n].bytes == 4 * 2 * 16 * 16 * 8
        (reader,) = graph.readers[n]
        (maker,) = (i for i, o in enumerate(graph.operations) if n in o.outputs)
        names = [graph.operations[i].name for i in (maker, reader)]
        assert names == ["reduce_window_max", "select_and_scatter_add"]
        assert n in [u for _, u in graph.operations[reader].in_place]


# The way back: the same values to the bit, whatever the order.


def mlp(params, x):
    for w in params:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def block(params, x):
    """A layer of a transformer, with a mask as dropout has it."""
    q, k, v, out, up, down = params
    mask = lax.broadcasted_iota(jnp.int32, x.shape, 2) % 5 < 4
    y = x - jnp.mean(x, -1, keepdims=True)
    heads = [(y @ w).reshape(*x.shape[:-1], 2, -1) for w in (q, k, v)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *heads[:2])
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads[2])
    x = x + jnp.where(mask, y.reshape(x.shape) @ out, 0)
    return jnp.mean((x + jax.nn.gelu(x @ up) @ down) ** 2)


def pools(params, x):
    """The head can be updated while the zeros of the pool's gradient wait."""
    kernel, bias, head = params
    _, z = pool(kernel, bias, x)
    return jnp.mean((z.mean((1, 2)) @ head) ** 2)


def adam(loss):
    def step(state, x):
        params, mu, nu = state
        value, grads = jax.value_and_grad(loss)(params, x)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
        nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, nu, grads)

        def new(p, m, n):
            return p - 0.01 * m / (jnp.sqrt(n) + 1e-3)

        return (jax.tree.map(new, params, mu, nu), mu, nu), value

    return step


def problem(name):
    """(step, arguments): the state first, to be donated."""
    shapes = {
        "mlp": [(16, 16)] * 4,
        "block": [(16, 16)] * 4 + [(16, 64), (64, 16)],
        "pools": [(3, 3, 4, 8), (1, 1, 1, 8), (8, 5)],
    }
    params = [
        array(*shape, seed=i, scale=0.3, dtype=jnp.float32)
        for i, shape in enumerate(shapes[name])
    ]
    size = (2, 16, 16, 4) if name == "pools" else (2, 8, 16)
    x = array(*size, seed=9, dtype=jnp.float32)
    moments = [[0.1 * jnp.square(p) for p in params] for _ in "mn"]
    loss = {"mlp": mlp, "block": block, "pools": pools}
    return adam(loss[name]), ((params, *moments), x)


@functools.cache
def prepared(name):
    """(operations, leaves, the step's own values) of a problem."""
    step, args = problem(name)
    ops = operations(step, *args, donate=1)
    leaves = jax.tree.leaves(args)
    return ops, leaves, jaxprs.evaluate(jaxprs.trace(step, *args).jaxpr, leaves)


def any_order(graph, seed: int) -> list[int]:
    """An order drawn from all."""
    draw = random.Random(seed)
    missing = [len(before) for before in graph.before]
    ready, drawn = [i for i, n in enumerate(missing) if not n], []
    while ready:
        drawn.append(i := ready.pop(draw.randrange(len(ready))))
        for j in graph.after[i]:
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
    return drawn


def assert_bits(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


@pytest.mark.parametrize("name", some_fast(["mlp", "block", "pools"], "mlp"))
def test_any_order_with_barriers_gives_the_same_bits(name):
    ops, leaves, want = prepared(name)
    for seed in range(3):
        shuffled = any_order(ops.graph, seed)
        fences = range(2, len(shuffled), 2)
        ordered = in_given_order(ops, shuffled, fences, least=16)
        barriers = [e.primitive.name for e in ordered.jaxpr.eqns]
        assert barriers.count("optimization_barrier") > 1
        assert_bits(jaxprs.evaluate(ordered, leaves), want)


def test_a_barrier_of_the_step_round_a_literal_is_carried_over():
    """What others' steps hold behind barriers may be a plain number."""

    def step(a, b):
        x, two = lax.optimization_barrier((a @ b, 2.0))
        return [(x * two) @ b, x @ a, (x @ b) @ a]

    leaves = [jnp.eye(4) + i for i in range(2)]
    ops, want = operations(step, *leaves), step(*leaves)
    everything = range(len(ops.graph.operations))
    ordered = in_given_order(ops, everything, everything, least=16)
    assert_bits(jaxprs.evaluate(ordered, leaves), want)


def test_an_order_that_is_none_is_refused():
    ops, *_ = prepared("mlp")
    with pytest.raises(ValueError, match="order"):
        in_given_order(ops, range(len(ops.graph.operations))[::-1])


@pytest.mark.parametrize("name", ["mlp", "block", "pools"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_lifetimes_hold_what_the_profile_counts(name, seed):
    graph = prepared(name)[0].graph
    shuffled = any_order(graph, seed)
    alive = [0] * len(shuffled)
    for buffer in lifetimes(graph, shuffled).buffers:
        for t in range(buffer.lower, buffer.upper):
            alive[t] += buffer.size
    assert alive == profile(graph, shuffled)


# Against the compiler (pytest -m slow).


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "scanned", "convolutions", "pools"])
def test_predicted_peaks_are_those_of_the_compiler(name, standard_jax):
    step, args, donate = compiled_problem(name)
    report = jaxmem.estimate(step, *args, target="h100", donate_argnums=donate)
    found = predict(step, *args, donate_argnums=donate)
    assert found.argument_bytes == report.argument_bytes
    assert found.peak_bytes == pytest.approx(report.peak_bytes, rel=0.1)


@pytest.mark.slow
def test_barriers_make_the_compiler_keep_an_order(standard_jax):
    """Sixteen dense layers with Adam, unrolled: at most 200 MiB."""
    step, args, donate = compiled_problem("dense")
    leaves, state = jax.tree.leaves(args), len(jax.tree.leaves(args[:2]))
    closed = jaxprs.trace(step, *args).jaxpr
    ops = operations_of(closed, by_shape(closed, range(state)))
    found = order(ops.graph, time_limit=10)
    new = in_given_order(ops, found.operations, fences_of(ops.graph, found.operations))

    def run(*leaves):
        return jaxprs.evaluate(new, leaves)

    ours = jaxmem.estimate(run, *leaves, target="h100", donate_argnums=range(state))
    plain = jaxmem.estimate(step, *args, target="h100", donate_argnums=donate)
    assert ours.temp_bytes / 2**20 <= min(200, plain.temp_bytes / 2**20)
    assert ours.temp_bytes == pytest.approx(found.peak, rel=0.1)


def compiled_problem(name):
    """(step, arguments, donated) of a training step with Adam."""
    if name == "dense":
        return *release.dense_step(), (0, 1)
    if name == "pools":
        return zoo.step("vgg16", 8)
    tx = optax.adam(1e-3)
    if name == "scanned":
        config = models.BertConfig(layers=2, vocabulary=8192)
        model, tokens = models.Bert(config), jax.ShapeDtypeStruct((8, 256), jnp.int32)
        params, loss = models.abstract_params(model, tokens), models.masked_loss(model)
        args = tokens, jax.ShapeDtypeStruct((2,), jnp.uint32)
    else:
        config = vision_models.ResNetConfig((1, 1, 1), dtype=jnp.float32)
        model = vision_models.ResNet(config)
        x = jax.ShapeDtypeStruct((32, 128, 128, 3), jnp.float32)
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        args = (x,)

        def loss(params, x):
            return jnp.mean(model.apply(params, x, mutable=["batch_stats"])[0] ** 2)

    def step(params, state, *args):
        if name == "scanned":
            args = args[0], jax.random.wrap_key_data(args[1])
        value, grads = jax.value_and_grad(loss)(params, *args)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.eval_shape(tx.init, params), *args), (0, 1)
