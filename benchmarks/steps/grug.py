"""A train step of marin's Grug mixture of experts, as its canary on eight H100 ran it.

marin-community/marin#5394: 64 experts, four a token, one that all tokens share; layers
in a Python loop, each checkpointed; parameters in float32 spread over the devices, each
of which has all experts for its own examples. Left out: gated norms, windows of
attention, the router's z-loss, and the two first layers' dense MLPs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.models.parallel import pin
from benchmarks.models.transformers import rotate
from benchmarks.steps.devices import placed
from benchmarks.steps.tiles import BF16, F32, SDS, Made, norm
from benchmarks.steps.train import train_step

AXIS = "data"
WIDTH, HIDDEN, SHARED, WORDS = 1024, 512, 1024, 128_256
EXPERTS, CHOSEN, LAYERS, HEADS = 64, 4, 11, 8
BATCH, TOKENS = 16, 4096


def attention(x, w):
    """Causal, by cuDNN."""
    heads = lambda a: a.reshape(*a.shape[:2], HEADS, -1)
    q, k, v = (heads(x @ w[name]) for name in "qkv")
    places = jnp.arange(x.shape[1], dtype=F32)
    q, k = (rotate(a, places) for a in (q, k))
    how = {"is_causal": True, "implementation": "cudnn"}
    y = jax.nn.dot_product_attention(q, k, v, **how)
    return y.reshape(x.shape) @ w["out"]


def swiglu(inner, down):
    """An MLP whose first product gives both halves; `down(x)` is its second."""
    gate, up = jnp.split(inner, 2, -1)
    return down(jax.nn.silu(gate) * up)


def experts(x, router, w13, w2):
    """The mixture for [batch, tokens, width] of one device, which has all experts."""
    rows = x.reshape(-1, WIDTH)
    weights, which = lax.top_k(rows @ router, CHOSEN)
    weights = jax.nn.softmax(weights, -1).astype(x.dtype)
    order = jnp.argsort(which.reshape(-1))
    sizes = jnp.bincount(which.reshape(-1), length=EXPERTS)
    token = order // CHOSEN
    inner = lax.ragged_dot(rows[token], w13, sizes)
    out = swiglu(inner, lambda x: lax.ragged_dot(x, w2, sizes))
    out = out * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[token].add(out).reshape(x.shape)


def layer(mesh, x, w):
    keep, whole = pin(mesh, AXIS), pin(mesh)
    w = jax.tree.map(lambda a: a.astype(BF16), w)
    mixture = jax.shard_map(
        experts, mesh=mesh, in_specs=(P(AXIS), P(), P(), P()), out_specs=P(AXIS)
    )
    x = keep(x + attention(norm(x, w["n1"]), w))
    y = norm(x, w["n2"])
    given = (whole(w[name]) for name in ("router", "w13", "w2"))
    shared = swiglu(y @ w["shared_13"], lambda x: x @ w["shared_2"])
    return keep(x + mixture(y, *given) + shared)


def parameters():
    square = dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))
    shapes = {
        **square,
        "n1": (WIDTH,),
        "n2": (WIDTH,),
        "router": (WIDTH, EXPERTS),
        "w13": (EXPERTS, WIDTH, 2 * HIDDEN),
        "w2": (EXPERTS, HIDDEN, WIDTH),
        "shared_13": (WIDTH, 2 * SHARED),
        "shared_2": (SHARED, WIDTH),
    }
    one = {name: SDS(shape, F32) for name, shape in shapes.items()}
    outside = {"table": (WORDS, WIDTH), "norm": (WIDTH,), "head": (WIDTH, WORDS)}
    return {"layers": [one] * LAYERS} | {n: SDS(s, F32) for n, s in outside.items()}


def _spec_of(name: str, x) -> P:
    del name
    return P() if x.ndim < 2 else P(*(None,) * (x.ndim - 2), AXIS)


def step_of(mesh, *, write: Callable = lambda layer: layer) -> Made:
    """The step on a mesh of one axis, "data"; `write`: done to a layer's function."""
    one, keep = write(functools.partial(layer, mesh)), pin(mesh, AXIS)

    def loss(params, batch):
        ids, labels = batch
        x = keep(params["table"].astype(BF16)[ids])
        for w in params["layers"]:
            x = one(x, w)
        x = norm(x, params["norm"].astype(BF16))
        logits = keep((x @ params["head"].astype(BF16)).astype(F32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params, tx = parameters(), optax.adamw(3e-3)
    state = placed(mesh, (params, jax.eval_shape(tx.init, params)), _spec_of)
    ids = placed(mesh, SDS((BATCH, TOKENS), jnp.int32), lambda *_: P(AXIS))
    return Made(train_step(loss, tx), (state, (ids, ids)), (0,))
