"""Storage by module path, MS norms and In-place ABN as Flax modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxmem.nn
from jaxmem.nn import linen as lean
from jaxmem.nn import nnx as lean_nnx
from tests.nn import linen_models as models
from tests.nn.compare import drawn, initialized, kept_bytes
from tests.sets import some_fast

TOKENS = jax.random.randint(jax.random.key(7), (2, 32), 0, 11)
X = jax.random.normal(jax.random.key(8), (2, 8, 16))


def _distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    sums = jnp.asarray([(jnp.sum((x - y) ** 2), jnp.sum(y**2)) for x, y in pairs])
    off, size = sums.sum(0)
    return float((off / size) ** 0.5)


@pytest.mark.slow
def test_a_scanned_bert_in_8_and_4_bits():
    plain = models.Bert(style="scan", width=64, layers=1)
    variables = initialized(plain, TOKENS)

    def loss(model):
        return lambda v: jnp.sin(model.apply(v, TOKENS)).sum()

    def grads(model):
        return jax.jit(jax.value_and_grad(loss(model)))(variables)

    words, eight, four = (jaxmem.nn.substitute(plain, save=s) for s in ("output", 8, 4))
    (value, exact), (lean_value, got) = grads(words), grads(eight)
    # A sum of 704 sines, each with a rounding of float32 or so.
    np.testing.assert_allclose(lean_value, value, atol=704 * 1.2e-7)
    # Half a step of 1/50 of the values' spread, summed as the squares of independents.
    assert _distance(got, exact) < 0.01
    # float32: a byte or half of one, and the steps, in place of four bytes.
    kept = [kept_bytes(loss(m), variables) for m in (words, eight, four)]
    assert kept[1] < 0.45 * kept[0]
    assert kept[2] < 0.3 * kept[0]


class Mlp(nn.Module):
    """gelu between dense layers, after a norm."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm")(x)
        h = nn.gelu(nn.Dense(64, name="up")(h))
        return nn.Dense(16, name="down")(h)


def test_neighbours_share_their_codes():
    """The norm and `up` store one array, gelu and `down` another."""
    model, how = Mlp(), jaxmem.ops.Quantization(8, 16, symmetric=True)
    variables = drawn(model, X)
    new = jaxmem.nn.substitute(model, save=how)
    rows = 16
    norm, hidden = rows * (16 + 4), rows * (64 + 4 * 4)
    kept = kept_bytes(lambda v, x: new.apply(v, x), variables, X)
    assert kept == norm + 4 * rows + hidden


def quick_gelu(x):
    return x * nn.sigmoid(1.702 * x)


ACTIVATIONS = {
    "swiglu": lambda gate, up: nn.silu(gate) * up,
    "geglu": lambda gate, up: up * nn.gelu(gate, approximate=False),
    "gelu": lambda gate, up: nn.gelu(gate + up),
    "silu": lambda gate, up: nn.silu(gate + up),
    "quick gelu": lambda gate, up: quick_gelu(gate + up),
    "mish": lambda gate, up: jax.nn.mish(gate + up),
    "squared relu": lambda gate, up: nn.relu(gate + up) ** 2,
    "softplus": lambda gate, up: nn.softplus(gate + up),
    "elu": lambda gate, up: nn.elu(gate + up, 0.7),
    "leaky relu": lambda gate, up: nn.leaky_relu(gate + up, 0.2),
    "relu": lambda gate, up: nn.relu(gate + up),
}


class Gated(nn.Module):
    """A block as in Llama, or with another activation of the two projections."""

    kind: str

    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm(name="norm")(x)
        gate, up = (nn.Dense(64, name=n, use_bias=False)(h) for n in ("gate", "up"))
        return nn.Dense(16, name="down")(ACTIVATIONS[self.kind](gate, up))


@pytest.mark.parametrize("kind", some_fast(ACTIVATIONS, "swiglu", "gelu"))
def test_an_activation_and_the_layer_after_it_store_one_array(kind):
    """Of a gated one: the two projections, and not their product beside them."""
    model, how = Gated(kind), jaxmem.ops.Quantization(8, 16, symmetric=True)
    variables = drawn(model, X)
    words, codes = (jaxmem.nn.substitute(model, save=s) for s in ("output", how))
    loss = lambda m: lambda v: jnp.sin(m.apply(v, X)).sum()
    (value, want), (other, got) = (
        jax.jit(jax.value_and_grad(loss(m)))(variables) for m in (model, codes)
    )
    np.testing.assert_allclose(other, value, rtol=1e-6, atol=1e-5)
    assert _distance(got, want) < 0.01  # steps of 1/127 of a block's largest
    rows = 16
    norm, hidden = rows * (16 + 4) + 4 * rows, rows * (64 + 4 * 4)
    bits = rows * 64 // 8 if kind in ("relu", "leaky relu") else 0
    arrays = 2 if kind in ("swiglu", "geglu") else 1
    kept = {
        m: kept_bytes(lambda v, x, m=m: m.apply(v, x), variables, X)
        for m in (words, codes)
    }
    assert kept[codes] == norm + arrays * hidden + bits < kept[words]


def test_patterns_name_modules_and_say_what_matched_nothing():
    variables = drawn(Mlp(), X)
    new = jaxmem.nn.substitute(Mlp(), save={"do*": 4, "norm": "input", "nobody": 8})
    with pytest.warns(UserWarning, match=r"save\['nobody'\] matched nothing"):
        jax.eval_shape(new.apply, variables, X)
    notes = {m.path: m.reason for m in jaxmem.nn.report(new).modules}
    assert notes["down"] == 'save="4 bits"'
    assert notes["norm"] == 'save="input"'
    assert notes["up"] == ""


def test_random_rounding_takes_a_key():
    variables = drawn(Mlp(), X)
    new = jaxmem.nn.substitute(Mlp(), save=3)

    @jax.jit
    def grads(key):
        run = lambda v: jnp.sin(new.apply(v, X, rngs={"storage": key})).sum()
        return jax.grad(run)(variables)

    a, b, c = (grads(jax.random.key(k)) for k in (0, 1, 0))
    assert _distance(a, c) == 0.0 < _distance(a, b)


class Model(nnx.Module):
    """A norm, a dense layer and attention."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs)])
        self.attend = nnx.MultiHeadAttention(2, 16, rngs=rngs, decode=False)

    def __call__(self, x):
        return self.attend(self.layers[0](self.norm(x)))


def test_nnx():
    model = Model(nnx.Rngs(0))
    kept = {}
    for save in ("output", 8):
        new = jaxmem.nn.substitute(model, save=save)
        graph, state = nnx.split(new)
        run = lambda state, x, graph=graph: nnx.merge(graph, state)(x)
        kept[save] = kept_bytes(run, state, X)
        want = nnx.jit(lambda m: m(X))(model)
        np.testing.assert_allclose(jax.jit(run)(state, X), want, atol=1e-5)
    assert kept[8] < 0.5 * kept["output"]


class Pair(nn.Module):
    """A norm read by attention and a dense layer."""

    ms: bool

    @nn.compact
    def __call__(self, x):
        norm = lean.MSLayerNorm if self.ms else lean.LayerNorm
        h = norm(name="norm")(x)
        y = lean.MultiHeadDotProductAttention(2, name="attend")(h)
        return lean.Dense(16, name="dense")(h) + y


READERS = ("dense", "attend/query", "attend/key", "attend/value")


@pytest.fixture(scope="module")
def pair():
    variables = initialized(Pair(False), X)
    noise = lambda p: p + 0.2 * jax.random.normal(jax.random.key(1), p.shape)
    return jax.tree.map(noise, variables)


@pytest.mark.slow
def test_ms_norm_takes_the_place_of_layer_norm(pair):
    def outcome(ms):
        loss = lambda v, x: jnp.sin(Pair(ms).apply(v, x)).sum()
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(pair, X)

    assert _distance(outcome(True), outcome(False)) < 1e-5


@pytest.mark.slow
def test_merge_norm_and_back(pair):
    params = pair["params"]
    merged = jaxmem.nn.merge_norm(params, "norm", READERS)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    np.testing.assert_array_equal(merged["norm"]["scale"], 1.0)
    apply = lambda p: Pair(False).apply({"params": p}, X)
    np.testing.assert_allclose(apply(merged), apply(params), atol=1e-4)
    norm = params["norm"]
    back = jaxmem.nn.unmerge_norm(merged, "norm", READERS, norm["scale"], norm["bias"])
    assert _distance(back, params) < 1e-5
    with pytest.raises(KeyError, match="no 'normal'"):
        jaxmem.nn.merge_norm(params, "normal", READERS)


def test_merge_norm_of_an_nnx_module():
    model = Model(nnx.Rngs(0))
    model.norm.scale[...] = jnp.linspace(0.5, 2.0, 16)
    model.norm.bias[...] = jnp.linspace(-1.0, 1.0, 16)
    merged = jaxmem.nn.merge_norm(model, "norm", "layers/0")
    np.testing.assert_array_equal(merged.norm.bias[...], 0.0)
    np.testing.assert_allclose(merged(X), model(X), atol=1e-4)
    ms = lean_nnx.MSLayerNorm(16, rngs=nnx.Rngs(0))
    dense = lean_nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    plain = nnx.LayerNorm(16, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(dense(ms(X)), dense(plain(X)), atol=1e-5)


def test_inplace_abn_modules():
    options = dict(use_running_average=False)
    plain, abn = nn.BatchNorm(**options), lean.InPlaceABN(activation="silu", **options)
    variables = drawn(plain, X)
    want, stats = plain.apply(variables, X, mutable=["batch_stats"])
    got, own = abn.apply(variables, X, mutable=["batch_stats"])
    np.testing.assert_allclose(got, jax.nn.silu(want), atol=1e-5)
    assert _distance(own, stats) < 1e-6
    layer = lean_nnx.InPlaceABN(16, activation="elu", rngs=nnx.Rngs(0))
    reference = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(X), jax.nn.elu(reference(X)), atol=1e-5)
    np.testing.assert_allclose(layer.mean[...], reference.mean[...], atol=1e-6)


def test_bad_arguments():
    with pytest.raises(ValueError, match="save='both'"):
        jaxmem.nn.substitute(Mlp(), save={"*": "both"})
    with pytest.raises(ValueError, match="save=9"):
        jaxmem.nn.substitute(Mlp(), save=9)
    with pytest.raises(TypeError, match="no pattern"):
        jaxmem.nn.substitute(Mlp(), save={3: 8})
    with pytest.raises(ValueError, match="only the last axis"):
        lean.MSLayerNorm(reduction_axes=(1, 2)).init(jax.random.key(0), X)
