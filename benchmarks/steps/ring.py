"""Train steps of published transformers on TPUs, context parallel by a ring, AdamW.

The tokens of an example are spread over the axis "context", examples over "fsdp", and
parameters and moments, in float32, over both. Layers compute in bfloat16. Tokens and
labels are given in the order in which the devices have them.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from benchmarks.models.parallel import pin
from benchmarks.models.splash_ring import CONTEXT, KEPT, places, ring_attention
from benchmarks.models.transformers import rotate
from benchmarks.steps.devices import placed
from benchmarks.steps.long_context import head_loss
from benchmarks.steps.published import FSDP, HEAD, Model, parameters
from benchmarks.steps.tiles import BF16, F32, SDS, Made, norm
from benchmarks.steps.train import train_step

_POSITIONS = 500_000.0  # the longest wave of rotary positions
TOKENS = P(FSDP, CONTEXT)

# How a step is written -> what is done to its layers. MaxText's "custom" policy of such
# runs keeps a layer's input and what its attention gave.
_POLICY = jax.checkpoint_policies.save_only_these_names(KEPT)
WRITTEN = {
    "plain": lambda layer: layer,
    "checkpoint": jax.checkpoint,
    "context": functools.partial(jax.checkpoint, policy=_POLICY),
}


def layer(mesh, x, w):
    """A layer of [batch, tokens, width]; `w`: its weights in float32."""
    keep = pin(mesh, *TOKENS)
    w = jax.tree.map(lambda a: a.astype(BF16), w)
    x = checkpoint_name(keep(x), "layer_input")
    y, devices = norm(x, w["n1"]), mesh.shape[CONTEXT]
    heads = lambda a: a.reshape(*a.shape[:2], -1, HEAD)
    q, k, v = (heads(y @ w[name]) for name in "qkv")
    q, k = (rotate(a, places(x.shape[1], devices), _POSITIONS) for a in (q, k))
    spread = {"mesh": mesh, "in_specs": (TOKENS,) * 3, "out_specs": TOKENS}
    one = functools.partial(ring_attention, devices)
    y = jax.shard_map(one, check_vma=False, **spread)(q, k, v)
    x = keep(x + y.reshape(*x.shape[:2], -1) @ w["out"])
    y = norm(x, w["n2"])
    return keep(x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"])


def _spec_of(name: str, x) -> P:
    """A weight lies spread along its first axis, the embedding along its last."""
    if x.ndim < 2 or name.startswith("n"):
        return P()
    both = (FSDP, CONTEXT)
    return P(*(None,) * (x.ndim - 2), *((None, both) if name == "table" else (both,)))


def step_of(model: Model, mesh, tokens: int, batch: int, code: str = "plain") -> Made:
    """A train step.

    Args:
      mesh: with the axes "fsdp" and "context".
      tokens: of an example.
      batch: examples of each index along "fsdp".
      code: of `WRITTEN`.
    """
    one = WRITTEN[code](functools.partial(layer, mesh))
    keep = pin(mesh, *TOKENS)

    def loss(params, given):
        ids, labels = given
        x = keep(params["table"].astype(BF16)[ids])
        x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, params["layers"])
        x = norm(x, params["norm"].astype(BF16))
        return head_loss(x, params["head"], labels) / labels.size

    params, tx = parameters(model, F32), optax.adamw(1e-5)
    state = placed(mesh, (params, jax.eval_shape(tx.init, params)), _spec_of)
    examples = batch * mesh.shape[FSDP], tokens
    ids = placed(mesh, SDS(examples, jnp.int32), lambda *_: TOKENS)
    return Made(train_step(loss, tx), (state, (ids, ids)), (0,))
