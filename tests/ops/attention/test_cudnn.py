"""cuDNN's attention: what it is handed, and that both passes mean what ours mean.

No GPU is here. The library's part, as its documentation has it, is done by a stand-in;
`benchmarks.device` runs the same cases by cuDNN itself.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import _compat, ops
from jaxmem.ops.attention import blockwise, cudnn
from jaxmem.ops.attention.block import Extras, Rules
from jaxmem.ops.attention.cudnn_rules import CudnnForm, form_of, refusal, suits

SDS = jax.ShapeDtypeStruct
B, T, N, H = 3, 128, 4, 16
WANTED = frozenset("qkv")


def seen_by(form, arrays):
    t, s = arrays["q"].shape[1], arrays["k"].shape[1]
    times, keys = np.arange(t)[:, None], np.arange(s)
    seen = np.ones((1, 1, t, s), bool)
    if form.causal:
        seen = seen & (keys <= times)
    if form.window is not None:
        seen = seen & (keys > times - form.window)
    if form.padded:
        seen = seen & (keys[None, None, None] < arrays["kv_len"][:, None, None, None])
    return seen


def logits_of(form, scale, arrays):
    q, k = arrays["q"], arrays["k"]
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    return jnp.where(seen_by(form, arrays), logits, -jnp.inf)


def stand_in(form, scale, arrays):
    logits, v = logits_of(form, scale, arrays), arrays["v"]
    total = jax.nn.logsumexp(logits, axis=-1)
    v = jnp.repeat(v, logits.shape[1] // v.shape[2], axis=2)
    p = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", p, v), total


def stand_in_grads(form, scale, arrays):
    """By the formulas of FlashAttention: from the output and the row statistics."""
    p = jnp.exp(logits_of(form, scale, arrays) - arrays["total"][..., None])
    q, k, v, o, g = (arrays[name] for name in "qkvog")
    groups, kv = q.shape[2] // k.shape[2], k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    delta = jnp.einsum("btnh,btnh->bnt", g, o)
    ds = p * (jnp.einsum("btnh,bsnh->bnts", g, v) - delta[..., None]) * scale
    summed = lambda x: x.reshape(*x.shape[:2], kv, groups, -1).sum(axis=3)
    return {
        "q": jnp.einsum("bnts,bsnh->btnh", ds, k),
        "k": summed(jnp.einsum("bnts,btnh->bsnh", ds, q)),
        "v": summed(jnp.einsum("bnts,btnh->bsnh", p, g)),
    }


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setattr(_compat, "cudnn_attention", stand_in)
    monkeypatch.setattr(_compat, "cudnn_attention_grads", stand_in_grads)
    for made in (cudnn._forward, cudnn._backward):
        made.cache_clear()
    yield
    for made in (cudnn._forward, cudnn._backward):
        made.cache_clear()


def drawn(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def inputs(heads=N, keys=T, size=H):
    q = drawn(0, B, T, N, size)
    k, v = (drawn(seed, B, keys, heads, size) for seed in (1, 2))
    return q, k, v, drawn(3, B, T, N, size)


LENGTHS = jnp.asarray([T, 0, 5], jnp.int32)
PLAIN = Rules(1 / math.sqrt(H), False, None, 0.0, False)
CAUSAL = PLAIN._replace(causal=True)

CASES = {
    "plain": (PLAIN, Extras()),
    "causal": (CAUSAL, Extras()),
    "window behind": (PLAIN._replace(window=(9, 0)), Extras()),
    "window and causal": (CAUSAL._replace(window=(9, 4)), Extras()),
    "lengths of keys": (PLAIN, Extras(kv_len=LENGTHS)),
    "lengths of queries": (PLAIN, Extras(q_len=LENGTHS)),
    "both lengths": (PLAIN, Extras(q_len=LENGTHS, kv_len=LENGTHS)),
}
FORMS = {
    "plain": CudnnForm(),
    "causal": CudnnForm(causal=True),
    "window behind": CudnnForm(causal=True, window=10),
    "window and causal": CudnnForm(causal=True, window=10),
    "lengths of keys": CudnnForm(padded=True),
    "lengths of queries": CudnnForm(),
    "both lengths": CudnnForm(padded=True),
}


def by_blocks(rules, q, k, v, extras, g):
    blocks = blockwise.make_blocks(rules, q, k, None)
    found = blockwise.forward(blocks, q, k, v, None, extras)
    return found, gradients(
        partial(blockwise.backward, blocks), q, k, v, extras, found, g
    )


def gradients(backward, q, k, v, extras, results, g):
    named = dict(zip(("o", "top", "log_total"), results, strict=True))
    saved = {"q": q, "k": k, "v": v, "bias": None, **named, **extras._asdict()}
    return backward(WANTED, saved, g)


def close(got, want):
    """float32 sums of up to 128 terms, in another order."""
    atol = 1e-5 * float(jnp.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=max(atol, 1e-6))


@pytest.mark.fast(
    "plain-4",
    "causal-2",
    "window behind-4",
    "window and causal-4",
    "lengths of keys-4",
    "lengths of queries-4",
    "both lengths-2",
)
@pytest.mark.parametrize("heads", [N, 2])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, heads):
    rules, extras = CASES[name]
    q, k, v, g = inputs(heads)
    assert form_of(rules, extras) == FORMS[name]
    plain, want = by_blocks(rules, q, k, v, extras, g)
    found = cudnn.forward(rules, q, k, v, None, extras)
    close(found[0], plain[0])
    inside = np.ones((B, 1, T), bool)
    if extras.q_len is not None:  # what is said of rows beyond it is never read
        inside = (np.arange(T)[None] < np.asarray(extras.q_len)[:, None])[:, None]
    rows = lambda stats: jnp.where(inside, stats[1] + stats[2], 0)
    close(rows(found), rows(plain))
    passes = {
        "cuDNN after cuDNN": (partial(cudnn.backward, rules), found),
        "cuDNN after XLA": (partial(cudnn.backward, rules), plain),
    }
    blocks = blockwise.make_blocks(rules, q, k, None)
    passes["XLA after cuDNN"] = partial(blockwise.backward, blocks), found
    for backward, results in passes.values():
        got = gradients(backward, q, k, v, extras, results, g)
        assert set(got) == WANTED
        for which in WANTED:
            close(got[which], want[which])


def test_gradients_that_nobody_wants_are_not_there():
    q, k, v, g = inputs()
    found = cudnn.forward(PLAIN, q, k, v, None, Extras())
    named = dict(zip(("o", "top", "log_total"), found, strict=True))
    saved = {"q": q, "k": k, "v": v, **named, **Extras()._asdict()}
    assert set(cudnn.backward(PLAIN, frozenset("q"), saved, g)) == {"q"}


@pytest.mark.fast("48", "80")
@pytest.mark.parametrize("size", [24, 48, 64, 80])
def test_heads_are_padded(size, monkeypatch):
    seen = []

    def watched(form, scale, arrays):
        seen.append(arrays["q"].shape[-1])
        return stand_in(form, scale, arrays)

    monkeypatch.setattr(_compat, "cudnn_attention", watched)
    cudnn._forward.cache_clear()
    q, k, v, _ = inputs(size=size)
    got = cudnn.forward(PLAIN, q, k, v, None, Extras())
    close(got[0], by_blocks(PLAIN, q, k, v, Extras(), q)[0][0])
    assert seen == [64 if size <= 64 else 128]


@pytest.mark.fast(
    "axes0-plain",
    "axes1-both lengths",
    "axes2-plain",
    "axes2-lengths of keys",
)
@pytest.mark.parametrize("name", ["plain", "lengths of keys", "both lengths"])
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0), (None, 0, 1)])
def test_mapped_axis_joins_the_batch(name, axes):
    rules, extras = CASES[name]
    arrays = [
        x if axis is None else jnp.stack([x, -x], axis=axis)
        for x, axis in zip(inputs()[:3], axes, strict=True)
    ]
    run = lambda q, k, v: cudnn.forward(rules, q, k, v, None, extras)[0]
    plain = lambda q, k, v: blockwise.forward(
        blockwise.make_blocks(rules, q, k, None), q, k, v, None, extras
    )[0]
    close(*(jax.vmap(fn, in_axes=axes)(*arrays) for fn in (run, plain)))


# -- what it takes

BF16 = jnp.bfloat16
Q = SDS((2, 256, 4, 64), BF16)


def why(rules=PLAIN, q=Q, k=Q, bias=None, **extras):
    return refusal(rules, q, k, bias, Extras(**extras))


@pytest.mark.parametrize(
    "word, given",
    [
        ("dropout", {"rules": PLAIN._replace(rate=0.1)}),
        ("float32", {"q": SDS(Q.shape, jnp.float32)}),
        ("heads of 192", {"q": SDS((2, 256, 4, 192), BF16)}),
        ("a bias", {"bias": SDS((1, 4, 256, 256), BF16)}),
        ("one query", {"q": SDS((2, 1, 4, 64), BF16)}),
        ("192 queries", {"q": SDS((2, 192, 4, 64), BF16), "rules": CAUSAL}),
        ("a mask", {"mask": SDS((2, 1, 256, 256), jnp.bool_)}),
        ("a mask", {"q_segments": SDS((2, 256), jnp.int32)}),
        ("both sides", {"rules": PLAIN._replace(window=(9, 4))}),
        ("sees no key", {"rules": CAUSAL, "kv_len": SDS((2,), jnp.int32)}),
    ],
)
def test_what_is_refused(word, given):
    assert word in why(**given)


def test_what_is_taken():
    assert not why() and not why(CAUSAL)
    assert not why(q=SDS((2, 250, 4, 40), jnp.float16), k=SDS((2, 77, 2, 40), BF16))
    assert not why(PLAIN._replace(window=(9, 0))) and not why(
        CAUSAL._replace(window=(9, 4))
    )
    assert not why(kv_len=SDS((2,), jnp.int32))


class Gpu:
    platform = "gpu"

    def __init__(self, kind):
        self.device_kind = kind


def test_device_and_version():
    h100, t4 = Gpu("NVIDIA H100 80GB HBM3"), Gpu("Tesla T4")
    plain, causal = CudnnForm(), CudnnForm(causal=True)
    assert suits(plain, 512, h100, None) and not suits(plain, 512, t4, None)
    assert suits(plain, 512, h100, 91002) and not suits(plain, 512, h100, 90100)
    assert not suits(plain, 2048, h100, 91400) and suits(plain, 512, h100, 91400)
    assert suits(causal, 2048, h100, 91400)


# -- what is compiled


def loss(q, k, v, **how):
    out = ops.dot_product_attention(q, k, v, **how)
    return jnp.square(out.astype(jnp.float32)).sum()


def calls_in(fn, *args, target="h100"):
    report = jaxmem.estimate(fn, *args, target=target)
    return [op.what for op in report.time.operations if "custom-call" in op.what]


@pytest.mark.fast("vmap", "checkpoint")
@pytest.mark.parametrize("name", ["plain", "vmap", "checkpoint", "scan"])
def test_compiled_for_an_absent_gpu(name, monkeypatch):
    monkeypatch.undo()
    q = SDS((2, 256, 4, 64), BF16)
    grad = jax.grad(loss, (0, 1, 2))
    made = {
        "plain": grad,
        "vmap": jax.vmap(grad),
        "checkpoint": jax.grad(jax.checkpoint(loss), (0, 1, 2)),
        "scan": jax.grad(
            lambda q, k, v: (
                jax.lax.scan(
                    lambda c, _: (ops.dot_product_attention(c, k, v), None), q, None, 3
                )[0]
                .astype(jnp.float32)
                .sum()
            )
        ),
    }
    args = [SDS((3, *x.shape), x.dtype) if name == "vmap" else x for x in (q, q, q)]
    calls = calls_in(made[name], *args)
    assert any("fwd" in call for call in calls) and any("bwd" in call for call in calls)


def test_xla_where_it_is_asked_for_and_elsewhere(monkeypatch):
    monkeypatch.undo()
    q = SDS((2, 256, 4, 64), BF16)
    grad = jax.grad(partial(loss, implementation="xla"), (0, 1, 2))
    assert not calls_in(grad, q, q, q)
    wide = SDS(q.shape, jnp.float32)
    assert not calls_in(jax.grad(loss), wide, wide, wide)


def test_calls_of_jax_nn_compile_for_an_absent_gpu_too(monkeypatch):
    """`implementation="cudnn"` asks the process for its cuDNN while it is traced."""
    monkeypatch.undo()
    q = SDS((2, 256, 4, 64), BF16)
    attend = partial(jax.nn.dot_product_attention, implementation="cudnn")
    grad = jax.grad(lambda q: jnp.square(attend(q, q, q).astype(jnp.float32)).sum())
    assert len(calls_in(grad, q)) == 2
    step = jaxmem.schedule(grad, donate_argnums=())
    assert "h100" in str(step.plan(q, target="h100"))
    with pytest.raises(Exception, match="cuDNN|GPU|gpu"):
        jax.make_jaxpr(grad)(q)
