"""The steps of `benchmarks.pod`: Llama-70B, and a mixture of experts of 8 x 22B, AdamW.

Parameters and moments are in float32, spread over the whole mesh; layers compute in
bfloat16, with attention as it is in textbooks. Constraints hold the activations to the
examples of each device, and bring what the experts get to the experts of each device.

Not optimal: keys and values have 8 heads, and tensor parallelism goes over 8 devices at
most, so that each has a head of its own. With 16, XLA would spread parts of heads.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks.steps.devices import placed
from benchmarks.steps.tiles import BF16, F32, SDS, Made, norm
from benchmarks.steps.train import train_step

TOKENS = 2048
FSDP, TENSOR = "FSDP", "FSDP x tensor"
EXPERT = "FSDP x tensor x expert"
# way -> chip -> devices along each axis
MESHES: Mapping[str, Mapping[str, Sequence[int]]] = {
    FSDP: {"tpu-v5e": (256,), "h100": (64,), "a100": (8,)},
    TENSOR: {"tpu-v5e": (32, 8), "h100": (8, 8)},
    EXPERT: {"tpu-v5e": (16, 2, 8), "h100": (4, 2, 8)},
}
_AXES = ("fsdp", "tensor", "expert")
_ROUTED, _SPARE = 2, 1.25  # experts of a token, and their room above the mean


def mesh_of(way: str, target: str):
    shape = MESHES[way][target]
    return jaxmem.target_mesh(target, shape, _AXES[: len(shape)])


# -- layers


def attention(x, w, groups: int, channels: int = 128):
    """Causal attention with as many keys and values as there are groups of queries."""
    batch, tokens, _ = x.shape
    q = (x @ w["q"]).reshape(batch, tokens, groups, -1, channels)
    k, v = ((x @ w[n]).reshape(batch, tokens, groups, channels) for n in "kv")
    scores = jnp.einsum("bsghd,btgd->bghst", q, k).astype(F32) / channels**0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e30)
    weights = jax.nn.softmax(scores, -1).astype(x.dtype)
    y = jnp.einsum("bghst,btgd->bsghd", weights, v)
    return y.reshape(batch, tokens, -1) @ w["out"]


def swiglu(x, w):
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def routes(x, w):
    """How much of a token goes to each place of each expert, and what comes back.

    One-hot dispatch with as many places an expert as `_SPARE` says, as in GShard
    (Lepikhin et al. 2020): [batch, tokens, experts, places], twice.
    """
    batch, tokens, _ = x.shape
    experts = w["router"].shape[-1]
    places = int(_SPARE * _ROUTED * tokens / experts)
    scores = jax.nn.softmax((x @ w["router"]).astype(F32), -1)
    best, which = jax.lax.top_k(scores, _ROUTED)
    best = best / best.sum(-1, keepdims=True)
    taken = jax.nn.one_hot(which, experts, dtype=F32)  # [batch, tokens, 2, experts]
    # all first choices come before all second ones
    queue = taken.swapaxes(1, 2).reshape(batch, -1, experts)
    at = jnp.cumsum(queue, 1) - queue
    at = at.reshape(batch, _ROUTED, tokens, experts).swapaxes(1, 2)
    at = (at * taken).sum(-1)  # a token beyond the last place is dropped
    place = jax.nn.one_hot(at.astype(jnp.int32), places, dtype=x.dtype)
    taken = taken.astype(x.dtype)
    sent = jnp.einsum("bsre,bsrp->bsep", taken, place)
    back = jnp.einsum("bsre,bsrp,bsr->bsep", taken, place, best.astype(x.dtype))
    return sent, back


def experts(x, w, to_experts: Callable, to_examples: Callable):
    """The mixture of what [experts, batch, places, channels] give.

    `to_experts`, `to_examples`: put it on the devices of the experts, and of `x`.
    """
    sent, back = routes(x, w)
    given = to_experts(to_examples(jnp.einsum("bsep,bsd->ebpd", sent, x)))
    gate = jnp.einsum("ebpd,edf->ebpf", given, w["gate"])
    up = jnp.einsum("ebpd,edf->ebpf", given, w["up"])
    made = to_experts(jnp.einsum("ebpf,efd->ebpd", jax.nn.silu(gate) * up, w["down"]))
    return jnp.einsum("bsep,ebpd->bsd", back, to_examples(made))


def layer(mlp: Callable, groups: int, keep: Callable, x, w):
    w, x = jax.tree.map(lambda a: a.astype(BF16), w), keep(x)
    x = x + attention(norm(x, w["n1"]), w, groups)
    return keep(x + mlp(norm(x, w["n2"]), w)), None


def loss_of(layer: Callable, keep: Callable) -> Callable:
    def loss(params, tokens):
        x = keep(params["table"].astype(BF16)[tokens[:, :-1]])
        x, _ = jax.lax.scan(layer, x, params["layers"])
        x = norm(x, params["norm"].astype(BF16))
        logits = (x @ params["head"].astype(BF16)).astype(F32)
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


# -- models


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer."""

    layers: int
    width: int
    hidden: int
    heads: int
    words: int
    experts: int = 0  # none: each layer has one MLP
    groups: int = 8  # of queries that share their keys and values


LLAMA = Model(80, 8192, 28_672, 64, 128_256)
MIXTRAL = Model(56, 6144, 16_384, 48, 32_768, experts=8)


def parameters(model: Model):
    """Shapes in float32: {"layers", "table", "norm", "head"}."""
    width, hidden, words = model.width, model.hidden, model.words
    few = width * model.groups // model.heads
    each = (model.experts,) if model.experts else ()
    shapes = {
        **{"q": (width, width), "k": (width, few), "v": (width, few)},
        **{"out": (width, width), "n1": (width,), "n2": (width,)},
        **{"gate": (*each, width, hidden), "up": (*each, width, hidden)},
        "down": (*each, hidden, width),
    }
    if model.experts:
        shapes["router"] = (width, model.experts)
    layers = {n: SDS((model.layers, *shape), F32) for n, shape in shapes.items()}
    outside = {"table": (words, width), "norm": (width,), "head": (width, words)}
    return {"layers": layers, **{n: SDS(s, F32) for n, s in outside.items()}}


def spec_of(tensor: str | None, expert: str | None, name: str, x) -> P:
    """Along which axes of the mesh a parameter, or a moment of it, is spread."""
    data = ("fsdp", expert) if expert else "fsdp"
    if x.ndim < 2 or name in ("n1", "n2", "router"):
        return P()
    if name in ("table", "head"):
        return P(tensor, data) if name == "table" else P(data, tensor)
    is_row = name in ("out", "down")
    if x.ndim == 4:  # of experts
        rest = (tensor, "fsdp") if is_row else ("fsdp", tensor)
        return P(None, expert, *rest)
    return P(None, tensor, data) if is_row and tensor else P(None, data, tensor)


def step_of(
    model: Model,
    way: str,
    target: str,
    batch: int,
    *,
    write: Callable = lambda layer: layer,
) -> Made:
    """A step with AdamW.

    Args:
      model: its sizes.
      way: one of `MESHES`.
      target: the chip.
      batch: examples of `TOKENS` tokens, of all devices.
      write: what is made of the function of a layer, as `jax.checkpoint` does.
    """
    mesh = mesh_of(way, target)
    tensor, expert = (n if n in mesh.axis_names else None for n in _AXES[1:])
    examples = ("fsdp", expert) if expert else "fsdp"
    place = lambda *spec: functools.partial(
        jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P(*spec))
    )
    keep, moves = place(examples), (place(expert, "fsdp"), place(None, examples))
    mixture = lambda x, w: experts(x, w, *moves)
    mlp = mixture if expert else swiglu
    one = functools.partial(layer, mlp, model.groups, keep)
    loss, tx = loss_of(write(one), keep), optax.adamw(3e-4)
    params = parameters(model)
    state = params, jax.eval_shape(tx.init, params)
    state = placed(mesh, state, functools.partial(spec_of, tensor, expert))
    tokens = SDS((batch, TOKENS + 1), jnp.int32)
    tokens = placed(mesh, tokens, lambda *_: P(examples))
    return Made(train_step(loss, tx), (state, tokens), (0,))


# name -> (model, way)
STEPS: Mapping[str, tuple[Model, str]] = {
    "Llama-70B, FSDP": (LLAMA, FSDP),
    "Llama-70B, FSDP x tensor": (LLAMA, TENSOR),
    "8 x 22B experts, FSDP x tensor x expert": (MIXTRAL, EXPERT),
}
