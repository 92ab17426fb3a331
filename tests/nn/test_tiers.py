"""MultiTierAdapter: the formulas by hand, and what a stack with frozen layers keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.nn import _tiers
from jaxmem.nn import linen as lean_linen
from jaxmem.nn import nnx as lean_nnx
from tests.nn.compare import assert_close, drawn, kept_bytes
from tests.sets import some_fast

N, B, D, NARROW = 4, 6, 16, 8
TIERS = jnp.asarray(np.random.default_rng(0).standard_normal((N, B, D)), "float32")
LAYER = lean_linen.MultiTierAdapter()
PARAMS = {**drawn(LAYER, TIERS)["params"], "gate": jnp.float32(0.05)}  # half open
VARIABLES = {"params": PARAMS}


def normed(x, epsilon):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


def by_hand(params, tiers):
    """In numpy, row by row, with all that the authors' code adds."""
    p, tiers = jax.tree.map(np.float64, (params, np.asarray(tiers)))
    norm, relu = np.linalg.norm, lambda x: max(x, 0.0)
    cosine, rows = lambda a, b: a @ b / (norm(a) * norm(b)), []
    for x in np.moveaxis(tiers, 0, 1):
        h = [normed(x[i] @ p["down"][i] + p["down_bias"][i], 1e-5) for i in range(N)]
        h = [h[i] * p["norm_scale"][i] + p["norm_bias"][i] for i in range(N)]
        weights = [
            relu(float((a * h[-1]) @ p["weigh"][:, 0] + p["weigh_bias"][0]))
            / sum(relu(cosine(a, b)) for b in h[:-1])
            for a in h[:-1]
        ]
        total = sum(weights) + 1e-8
        merged = sum(w / total * a for w, a in zip(weights, h, strict=False)) + h[-1]
        y = normed(np.maximum(merged, 0) @ p["up"] + p["up_bias"], 1e-12)
        y = y * p["out_scale"] + p["out_bias"]
        rows.append(y + np.tanh(p["gate"] / 0.1) * x[-1])
    return np.stack(rows)


def as_nnx(params, **options):
    layer = lean_nnx.MultiTierAdapter(D, N, rngs=nnx.Rngs(0), **options)
    nnx.update(layer, nnx.State(jax.tree.map(nnx.Param, dict(params))))
    return layer


FORMS = {
    "linen": lambda params, tiers: LAYER.apply({"params": params}, tiers),
    "nnx": lambda params, tiers: as_nnx(params)(tiers),
}


@pytest.mark.parametrize("of_list", [False, True], ids=["stack", "list"])
@pytest.mark.parametrize("form", FORMS)
def test_is_the_formula(form, of_list):
    tiers = [*TIERS] if of_list else TIERS
    got = jax.jit(FORMS[form])(PARAMS, tiers)
    assert_close(by_hand(PARAMS, TIERS).astype("float32"), got)


def test_some_weights_are_positive():
    """Else neither redundancy nor similarity were tested above."""
    changed = {**PARAMS, "weigh": -PARAMS["weigh"]}
    assert not np.allclose(by_hand(changed, TIERS), by_hand(PARAMS, TIERS), atol=1e-2)


def test_a_tier_that_says_what_others_say_counts_less():
    """Three tiers that are one array, and another one."""
    same, other, last = TIERS[:3]
    h = jnp.stack([same, same, same, other, last])
    alike = {"weigh": jnp.zeros((D, 1)), "weigh_bias": jnp.ones(1)}
    weights = _tiers.weights_of(alike, h)
    norms = jnp.linalg.norm(h, axis=-1)
    c = jnp.maximum((same * other).sum(-1) / (norms[0] * norms[3]), 0)
    alone, one_of_three = 1 / (1 + 3 * c), 1 / (3 + c)
    total = alone + 3 * one_of_three
    # cosines are sums of 16 products, rounded once each
    np.testing.assert_allclose(weights[3], alone / total, rtol=1e-5)
    np.testing.assert_allclose(weights[0], one_of_three / total, rtol=1e-5)


def test_gate_passes_the_last_tier():
    open_ = lean_linen.MultiTierAdapter(gate_init=jax.nn.initializers.ones)
    params = open_.init(jax.random.key(0), TIERS)["params"]
    passed = open_.apply({"params": params}, TIERS)
    shut = open_.apply({"params": {**params, "gate": jnp.zeros(())}}, TIERS)
    # tanh(10) is 1 but for 4e-9
    np.testing.assert_allclose(passed - shut, TIERS[-1], rtol=1e-5, atol=1e-5)
    assert LAYER.init(jax.random.key(0), TIERS)["params"]["gate"] == 0


def test_half_precision():
    layer = lean_linen.MultiTierAdapter(dtype=jnp.bfloat16)
    got = jax.jit(layer.apply)(VARIABLES, TIERS)
    assert got.dtype == jnp.bfloat16
    want = by_hand(PARAMS, TIERS)
    # five roundings to 8 bits, in values of a few units
    np.testing.assert_allclose(got.astype("float32"), want, atol=0.1, rtol=0.05)


# -- a stack of frozen layers, some of them tiers, and trained ones behind them


def layer(p, x):
    return x + jnp.tanh(jax.nn.standardize(x) @ p["w1"]) @ p["w2"]


def stack(depth, seed):
    draw = np.random.default_rng(seed)
    shapes = {"w1": (depth, D, 4 * D), "w2": (depth, 4 * D, D)}
    return {k: jnp.asarray(0.1 * draw.standard_normal(s)) for k, s in shapes.items()}


def scanned(params, x):
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def early_by_scan(params, x):
    """The layers in N groups, a scan over scans: of each group the output is a tier."""
    groups = jax.tree.map(lambda p: p.reshape(N, -1, *p.shape[1:]), params)
    body = lambda x, group: (scanned(group, x),) * 2
    return jax.lax.scan(body, x, groups)[1]


def early_written_out(params, x):
    depth, tiers = len(params["w1"]), []
    for i in range(depth):
        x = layer(jax.tree.map(lambda p, i=i: p[i], params), x)
        if (i + 1) % (depth // N) == 0:
            tiers.append(x)
    return tiers


def whole_model(depth):
    return {"early": stack(depth, 1), "adapter": dict(PARAMS), "late": stack(2, 2)}


EARLY = {"scan": early_by_scan, "written out": early_written_out}


def loss_of(early, form="linen"):
    def loss(params, x):
        x = FORMS[form](params["adapter"], early(params["early"], x))
        return jnp.mean(scanned(params["late"], x) ** 2)

    return loss


def trained_part(depth):
    return jaxmem.trainable(whole_model(depth), ["late", "adapter"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("early", EARLY)
def test_keeps_tiers_and_nothing_else_of_frozen_layers(early, form):
    """Whatever the number of early layers: the tiers, and what late layers keep."""
    loss, x = loss_of(EARLY[early], form), TIERS[0]

    def kept(depth):
        trained, frozen = trained_part(depth)
        return kept_bytes(lambda t: loss(frozen.merge(t), x), trained)

    late = lambda late, x: jnp.mean(scanned(late, x) ** 2)
    behind = kept_bytes(late, stack(2, 2), x) + x.nbytes  # an argument there
    assert kept(N) == kept(4 * N) <= TIERS.nbytes + behind
    everything = kept_bytes(lambda params: loss(params, x), whole_model(N))
    assert everything > kept(N) + TIERS.nbytes


@pytest.mark.parametrize("early", some_fast(EARLY, "scan"))
def test_compiled_bytes_do_not_grow_with_frozen_layers(early):
    x, loss = jnp.ones((4096, D)), loss_of(EARLY[early])

    def temporaries(depth):
        def grads(trained, frozen, x):
            return jax.grad(lambda t: loss(frozen.merge(t), x))(trained)

        compiled = jax.jit(grads).lower(*trained_part(depth), x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # the weights of a group of layers may be copied; one activation is larger
    assert temporaries(4 * N) - temporaries(N) < x.nbytes


def test_gradients_are_those_of_the_whole_model():
    params = whole_model(N)
    trained, frozen = jaxmem.trainable(params, ["late", "adapter"])
    loss = loss_of(early_by_scan)
    part = jax.jit(jaxmem.value_and_grad(loss))
    value, got = part(trained, frozen, TIERS[0])
    plain, want = jax.jit(jax.value_and_grad(loss))(params, TIERS[0])
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    assert_close(want["adapter"], got["adapter"])
    assert_close(want["late"], got["late"])
    assert all(x is None for x in got["early"].values())


NO_TIERS = [TIERS[0][0], TIERS[:1], [TIERS[0]], [], [*TIERS[:2], TIERS[0][:2]]]


@pytest.mark.parametrize("tiers", NO_TIERS)
def test_refuses_what_are_no_tiers(tiers):
    with pytest.raises(ValueError, match="MultiTierAdapter: tiers"):
        LAYER.apply(VARIABLES, tiers)


def test_refuses_other_types():
    with pytest.raises(TypeError, match="MultiTierAdapter: tiers"):
        LAYER.apply(VARIABLES, 3)
    with pytest.raises(TypeError, match="MultiTierAdapter: tiers"):
        LAYER.apply(VARIABLES, [TIERS[0], TIERS[1].astype(int)])
    with pytest.raises(ValueError, match="tiers and their features"):
        as_nnx(PARAMS)(TIERS[:3])
    with pytest.raises(ValueError, match="reduction"):
        lean_linen.MultiTierAdapter(reduction=D + 1).init(jax.random.key(0), TIERS)
