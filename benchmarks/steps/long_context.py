"""Train steps of published transformers on very long sequences, AdamW.

One sequence is spread over all devices by its tokens, and so are the parameters (FSDP).
Attention is cuDNN's: before it the tokens are exchanged for heads, after it the heads
for tokens (Jacobs et al. 2023, "DeepSpeed Ulysses"), which two sharding constraints
say. With more devices than there are keys and values, each of those would lie on
several. Parameters and moments are in float32, layers compute in bfloat16.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from benchmarks.models.parallel import pin
from benchmarks.models.transformers import rotate
from benchmarks.steps.devices import placed
from benchmarks.steps.published import HEAD, Model, parameters
from benchmarks.steps.tiles import BF16, F32, SDS, Made, norm
from benchmarks.steps.train import train_step

AXIS, INPUT = "tokens", "layer_input"
_POSITIONS = 1e6  # the longest wave of rotary positions
_CHUNKS = 32  # of the loss head of recipes that compute it in chunks


QWEN3_8B = Model(36, 4096, 12_288, 32, 8, 151_936, norms=True)
LLAMA3_8B = Model(32, 4096, 14_336, 32, 8, 128_256)


def layer(model: Model, mesh, x, w):
    """A layer of [batch, tokens, width]; `w`: its weights in float32."""
    by_token, by_head = pin(mesh, None, AXIS), pin(mesh, None, None, AXIS)
    w = jax.tree.map(lambda a: a.astype(BF16), w)
    x = checkpoint_name(by_token(x), INPUT)
    y = norm(x, w["n1"])
    heads = lambda a: a.reshape(*a.shape[:2], -1, HEAD)
    q, k, v = (heads(y @ w[name]) for name in "qkv")
    if model.norms:
        q, k = norm(q, w["nq"]), norm(k, w["nk"])
    places = jnp.arange(x.shape[1], dtype=F32)
    q, k = (rotate(a, places, _POSITIONS) for a in (q, k))
    q, k, v = map(by_head, (q, k, v))
    how = {"is_causal": True, "implementation": "cudnn"}
    y = by_token(jax.nn.dot_product_attention(q, k, v, **how))
    x = by_token(x + y.reshape(*x.shape[:2], -1) @ w["out"])
    y = norm(x, w["n2"])
    return by_token(x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"])


def head_loss(x, head, labels):
    """The sum of the tokens' losses."""
    logits = (x @ head.astype(BF16)).astype(F32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def head_loss_in_chunks(mesh, x, head, labels):
    """The same for some tokens of every device after others, logits computed twice."""

    def chunks(a):
        a = a.reshape(mesh.size, _CHUNKS, -1, *a.shape[2:]).swapaxes(0, 1)
        return pin(mesh, None, AXIS)(a)

    one = jax.checkpoint(lambda x, labels: head_loss(x, head, labels))
    add = lambda total, part: (total + one(*part), None)
    return jax.lax.scan(add, jnp.zeros((), F32), (chunks(x), chunks(labels)))[0]


def _offloaded(layer: Callable) -> Callable:
    """The recipe of those who publish such rows: layer inputs wait on the host."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(layer, policy=policy)


# How a step is written -> what is done to its layers; whether its head is in chunks.
WRITTEN: dict[str, tuple[Callable, bool]] = {
    "plain": (lambda layer: layer, False),
    "checkpoint": (jax.checkpoint, False),
    "offload, chunks": (_offloaded, True),
}


def _spec_of(name: str, x) -> P:
    """A weight lies spread along its first axis, the embedding along its last."""
    if x.ndim < 2 or name.startswith("n"):
        return P()
    return P(*(None,) * (x.ndim - 2), *((None, AXIS) if name == "table" else (AXIS,)))


def step_of(
    model: Model,
    mesh,
    tokens: int,
    code: str = "plain",
    unrolled: bool = False,
    tx: optax.GradientTransformation | None = None,
    dtype=F32,
) -> Made:
    """A train step on one sequence.

    Args:
      mesh: with the one axis "tokens".
      code: of `WRITTEN`.
      unrolled: a loop of Python over the layers instead of a scan.
      tx: AdamW by default.
      dtype: of the parameters.
    """
    write, chunked = WRITTEN[code]
    one = write(functools.partial(layer, model, mesh))
    by_token = pin(mesh, None, AXIS)
    whole_loss = functools.partial(head_loss_in_chunks, mesh) if chunked else head_loss

    def loss(params, batch):
        ids, labels = batch
        x = by_token(params["table"].astype(BF16)[ids])
        if unrolled:
            for w in params["layers"]:
                x = one(x, w)
        else:
            x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, params["layers"])
        x = norm(x, params["norm"].astype(BF16))
        return whole_loss(x, params["head"], labels) / labels.size

    params = parameters(model, dtype)
    if unrolled:
        slices = lambda a: [SDS(a.shape[1:], a.dtype)] * model.layers
        each = {name: slices(a) for name, a in params["layers"].items()}
        rows = zip(*each.values(), strict=True)
        params["layers"] = [dict(zip(each, w, strict=True)) for w in rows]
    tx = optax.adamw(1e-5) if tx is None else tx
    state = placed(mesh, (params, jax.eval_shape(tx.init, params)), _spec_of)
    ids = placed(mesh, SDS((1, tokens), jnp.int32), lambda *_: P(None, AXIS))
    return Made(train_step(loss, tx), (state, (ids, ids)), (0,))
