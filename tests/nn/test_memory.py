"""ProductKeyMemory: the best of all pairs of keys, and one pool for several layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxmem import optim
from jaxmem.nn import linen as lean_linen
from jaxmem.nn import nnx as lean_nnx
from tests.arrays import array
from tests.nn.compare import initialized, kept_bytes

KEYS, HEADS, K, KEY, WIDTH, LAYERS = 64, 2, 3, 8, 128, 3  # 4,096 values, 2 MiB
X = array(np.random.default_rng(0).standard_normal((2, 5, WIDTH)), "float32")
SIZES = {"heads": HEADS, "k": K, "key_features": KEY}
POOL = 0.1 * jax.random.normal(jax.random.key(1), (KEYS**2, WIDTH))
TABLE_BYTES = KEYS**2 * WIDTH * 4


@pytest.fixture(autouse=True)
def loose_promotion():
    """Optax multiplies numbers of several dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def linen_layer(**options):
    return lean_linen.ProductKeyMemory(KEYS, **SIZES, **options)


def nnx_layer(**options):
    rngs = nnx.Rngs(0)
    return lean_nnx.ProductKeyMemory(WIDTH, KEYS, rngs=rngs, **SIZES, **options)


def by_hand(params, x):
    """In numpy: every pair of keys of every head is scored."""
    p = jax.tree.map(np.float64, params)
    query = np.float64(x) @ p["query"]["kernel"] + p["query"]["bias"]
    halves = query.reshape(-1, HEADS, 2, KEY // 2)
    y = np.zeros((halves.shape[0], WIDTH))
    for at in np.ndindex(halves.shape[:2]):
        first, second = (p["keys"][at[1], i] @ halves[at][i] for i in (0, 1))
        scores = (first[:, None] + second[None]).reshape(-1)
        best = np.argsort(-scores)[:K]
        weights = np.exp(scores[best] - scores[best].max())
        y[at[0]] += weights / weights.sum() @ p["values"][best]
    if "gate" in p:
        gate = np.float64(x).reshape(-1, WIDTH) @ p["gate"]["kernel"]
        y = (gate / (1 + np.exp(-gate)) * y) @ p["out"]["kernel"]
    return y.reshape(x.shape)


@pytest.mark.parametrize("gated", [False, True])
def test_linen_reads_the_best_of_all_pairs(gated):
    layer = linen_layer(gated=gated)
    params = initialized(layer, X)["params"]
    got = layer.apply({"params": params}, X)
    # sums of 128 products of the query and of the values, about 1 each
    np.testing.assert_allclose(got, by_hand(params, X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_nnx_is_the_same(gated):
    layer = nnx_layer(gated=gated)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    np.testing.assert_allclose(layer(X), by_hand(params, X), rtol=1e-4, atol=1e-5)


def test_a_pool_takes_the_place_of_values():
    layer = linen_layer()
    variables = layer.init(jax.random.key(0), X, POOL)
    assert set(variables["params"]) == {"query", "keys"}
    own = {"params": {**variables["params"], "values": POOL}}
    np.testing.assert_array_equal(layer.apply(variables, X, POOL), layer.apply(own, X))
    of_nnx = nnx_layer(use_values=False)
    assert of_nnx.values is None and of_nnx(X, POOL).shape == X.shape
    with pytest.raises(ValueError, match="values=None"):
        of_nnx(X)


def test_queries_are_normalized():
    norm = nn.LayerNorm(use_bias=False, use_scale=False)
    layer = linen_layer(query_norm=norm)
    variables = initialized(layer, X)
    # a norm of the queries does not see how large the input is
    query = variables["params"]["query"]
    np.testing.assert_array_equal(query["bias"], jnp.zeros(HEADS * KEY))
    scaled = [layer.apply(variables, c * X) for c in (1.0, 1000.0)]
    np.testing.assert_allclose(*scaled, rtol=1e-3, atol=1e-4)


def test_half_precision_leaves_the_pool_as_it_is():
    """No copy of the table in another dtype: its rows alone are cast."""
    layer = linen_layer(dtype=jnp.bfloat16)
    variables = layer.init(jax.random.key(0), X, POOL)
    y = jax.eval_shape(layer.apply, variables, X, POOL)
    assert y.dtype == jnp.bfloat16
    compiled = jax.jit(layer.apply).lower(variables, X, POOL).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < TABLE_BYTES / 8


def test_keeps_ids_weights_and_queries():
    layer, inputs = linen_layer(), X.shape[0] * X.shape[1]
    variables = layer.init(jax.random.key(0), X, POOL)
    loss = lambda v, pool: layer.apply(v, X, pool).sum()
    a_head = K * (4 + 4) + KEY * 4
    assert kept_bytes(loss, variables, POOL) == inputs * HEADS * a_head


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, pool):
        memory = linen_layer(gated=True)
        return x + memory(nn.LayerNorm()(x), pool), None


STACK = nn.scan(
    nn.remat(Layer),
    variable_axes={"params": 0},
    split_rngs={"params": True},
    in_axes=nn.broadcast,
    length=LAYERS,
)()


def linen_loss(params, x):
    y, _ = STACK.apply({"params": params["layers"]}, x, params["pool"])
    return jnp.mean((y - jnp.flip(x)) ** 2)


def linen_params():
    variables = STACK.init(jax.random.key(0), X, POOL)
    return {"layers": variables["params"], "pool": POOL}


def test_one_pool_under_a_scan_has_a_gradient_of_rows():
    params = linen_params()
    ours = jax.jit(optim.value_and_row_grad(linen_loss, "pool"))
    ours = ours.lower(params, X).compile()
    assert ours.memory_analysis().temp_size_in_bytes < TABLE_BYTES / 4
    value, grads = ours(params, X)
    plain, dense = jax.jit(jax.value_and_grad(linen_loss))(params, X)
    rows = grads["pool"]
    assert rows.rows.shape == (LAYERS * X[..., 0].size * HEADS * K, WIDTH)
    grads["pool"] = rows.todense()
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    for got, want in zip(*map(jax.tree.leaves, (grads, dense)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_training_by_rows_is_that_of_dense_gradients():
    """Adagrad, whose rows without a gradient do not move; and the loss falls."""
    plain, params = optax.adagrad(0.1, 1e-4), linen_params()

    def trained(tx, grad):
        @jax.jit
        def step(state, _):
            params, opt_state = state
            loss, grads = grad(params, X)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.lax.scan(step, (params, tx.init(params)), length=8)

    by_rows = optim.value_and_row_grad(linen_loss, "pool")
    (got, _), losses = trained(optim.rowwise(plain), by_rows)
    (want, _), others = trained(plain, jax.value_and_grad(linen_loss))
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, others, rtol=1e-4)
    moved = jnp.any(want["pool"] != POOL, axis=1)
    np.testing.assert_array_equal(jnp.any(got["pool"] != POOL, axis=1), moved)
    assert 0 < int(moved.sum()) < KEYS**2


class Nnx(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0)
        def layers(rngs):
            sizes = {**SIZES, "use_values": False}
            return lean_nnx.ProductKeyMemory(WIDTH, KEYS, rngs=rngs, **sizes)

        self.layers, self.pool = layers(rngs), nnx.Param(POOL)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0, None))
        def scan(x, layer, pool):
            return x + layer(x, pool), None

        return scan(x, self.layers, self.pool[...])[0]


def test_nnx_scan():
    model = Nnx(nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    grads = nnx.jit(optim.value_and_row_grad(loss, "pool"))(model, X)[1]
    dense = nnx.jit(nnx.grad(loss))(model, X)
    got = nnx.to_pure_dict(nnx.state(grads))["pool"].todense()
    np.testing.assert_allclose(got, dense["pool"][...], rtol=1e-4, atol=1e-6)
