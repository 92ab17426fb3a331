"""The steps of `benchmarks.tiles`, as functions of abstract arguments.

Nothing in them asks for tiles. `code` says how a step is written: "plain"; "remat",
with `jax.checkpoint` around each layer; "by hand", with `jax.lax.map` over the examples
in each layer and a scan over them around the head.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks import accumulation
from benchmarks.blocks import made
from benchmarks.models.transformers import Bert, BertConfig, abstract_params
from benchmarks.release import KEY, adam_step
from benchmarks.steps.train import train_step

SDS = jax.ShapeDtypeStruct
BF16, F32 = jnp.bfloat16, jnp.float32
LAYERS, WIDTH, HIDDEN, HEADS, WORDS = 16, 2048, 8192, 16, 128_256
LONG = 131_072  # tokens, and words of the head alone


class Made(NamedTuple):
    """A step, its arguments, and the positions of those that are donated."""

    step: Callable
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


# -- Llama-like layers, a tied head and AdamW


def norm(x, scale):
    square = jnp.mean(jnp.square(x.astype(F32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype) * scale


def softmax_attention(q, k, v):
    """Causal attention as it is in textbooks; [batch, tokens, heads, channels]."""
    tokens = q.shape[1]
    scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(F32) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e30)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1).astype(q.dtype), v)


def library_attention(q, k, v):
    """The same by JAX's own function, in XLA's operations."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def attended(attention: Callable, heads: int, x, w):
    """A layer's first half."""
    qkv = jnp.split(norm(x, w["n1"]) @ w["qkv"], 3, -1)
    q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in qkv)
    return x + attention(q, k, v).reshape(x.shape) @ w["out"]


def layer(attention: Callable, heads: int, x, w):
    w = jax.tree.map(lambda a: a.astype(x.dtype), w)
    x = attended(attention, heads, x, w)
    return x + jax.nn.gelu(norm(x, w["n2"]) @ w["up"]) @ w["down"]


def weights(layers: int, width: int, hidden: int):
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, hidden),
        "down": (hidden, width),
        "n1": (width,),
        "n2": (width,),
    }
    return {name: SDS((layers, *shape), F32) for name, shape in shapes.items()}


def cross_entropy(x, table, labels):
    logits = (x @ table.astype(x.dtype).T).astype(F32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def head_by_hand(x, table, labels):
    """The sum of the examples' losses, one after another."""
    one = jax.checkpoint(cross_entropy)
    add = lambda total, pair: (total + one(pair[0], table, pair[1]), None)
    return jax.lax.scan(add, jnp.zeros((), F32), (x, labels))[0]


def one_by_one(layer: Callable) -> Callable:
    """A layer that takes one example after another."""
    one = jax.checkpoint(layer)
    return lambda x, w: jax.lax.map(lambda example: one(example[None], w)[0], x)


WRITTEN = {
    "plain": lambda layer: layer,
    "remat": jax.checkpoint,
    "by hand": one_by_one,
}


def llama_loss(code: str, heads: int = HEADS, place: Callable = lambda x: x):
    """The mean cross entropy; parameters {"layers", "table"}, tokens [batch, 1 + n].

    `place`: where what the embedding gives lies on a mesh.
    """
    one = WRITTEN[code](functools.partial(layer, softmax_attention, heads))
    head = head_by_hand if code == "by hand" else cross_entropy

    def loss(params, tokens):
        x = place(params["table"].astype(BF16)[tokens[:, :-1]])
        x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, params["layers"])
        labels = tokens[:, 1:]
        return head(x, params["table"], labels) / labels.size

    return loss


def llama(batch: int, tokens: int, code: str) -> Made:
    params = {
        "layers": weights(LAYERS, WIDTH, HIDDEN),
        "table": SDS((WORDS, WIDTH), F32),
    }
    tx = optax.adamw(3e-4)
    state = params, jax.eval_shape(tx.init, params)
    batch_of = SDS((batch, tokens + 1), jnp.int32)
    return Made(train_step(llama_loss(code), tx), (state, batch_of), (0,))


# -- the head alone, and layers of very many tokens


def head(dtype, code: str) -> Made:
    """Mean cross entropy with both gradients: 8,192 rows of 4,096, 131,072 words."""
    del code

    def loss(x, w, labels):
        logits = (x @ w.astype(BF16)).astype(F32)
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)
        return -found.mean()

    args = SDS((8192, 4096), BF16), SDS((4096, LONG), dtype), SDS((8192,), jnp.int32)
    return Made(jax.value_and_grad(loss, argnums=(0, 1)), args)


def long_sequence(layers: int, code: str) -> Made:
    """Loss gradient of Llama-like layers on one sequence of 131,072 tokens."""
    one = WRITTEN[code](functools.partial(layer, library_attention, HEADS))

    def loss(x, params):
        x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, params)
        return jnp.square(x.astype(F32)).mean()

    args = SDS((1, LONG, WIDTH), BF16), weights(layers, WIDTH, HIDDEN)
    return Made(jax.value_and_grad(loss, argnums=(0, 1)), args)


# -- models of the other benchmarks


def stack(name: str, code: str) -> Made:
    """The loss gradient of a model of `benchmarks.blocks`."""
    policy = jax.checkpoint_policies.nothing_saveable if code == "remat" else None
    gradient, model = made(name, policy)
    return Made(*gradient(model))


MICRO_BATCHES = 8


def bert(batch: int, code: str) -> Made:
    """One Adam step of BERT-Large with 512 tokens an example, in Flax.

    `code`: "microbatch" for `jaxmem.microbatch`, which is told what the step here is
    to be found to have.
    """
    model, tx = Bert(BertConfig()), optax.adam(1e-3)
    tokens = SDS((batch, 512), jnp.int32)
    if code == "microbatch":
        step = accumulation.adam(accumulation.loss_of(model), MICRO_BATCHES)[0]
        params = abstract_params(model, SDS((1, 512), jnp.int32))
        args = params, jax.eval_shape(tx.init, params), tokens, KEY
        return Made(step, args, (0, 1))
    step, (state, *_) = adam_step(model)
    return Made(step, (state, tokens, KEY), (0,))


# -- eight devices

DEVICES = 8
_COLUMNS = {"qkv", "up"}  # whose outputs are divided in tensor parallelism
_ROWS = {"out", "down"}
SHARDINGS: Mapping[str, tuple[Sequence[int], Sequence[str]]] = {
    "data": ((DEVICES,), ("data",)),
    "FSDP": ((DEVICES,), ("data",)),
    "FSDP and tensor parallel": ((4, 2), ("data", "model")),
}


def spec_of(way: str, path, x) -> P:
    """How a parameter, or a moment of it, lies on the mesh."""
    name = next((k.key for k in reversed(path) if hasattr(k, "key")), "")
    tensor = "model" if way == "FSDP and tensor parallel" else None
    if way == "data" or x.ndim < 2 or name in ("n1", "n2"):
        return P()
    if name == "table":
        return P(tensor, "data")
    if name in _COLUMNS:
        return P(None, "data", tensor)
    return P(None, tensor, "data") if name in _ROWS else P()


def sharded(way: str, code: str) -> Made:
    """4 layers of width 1,024; 8 examples of 1,024 tokens for each part of the data."""
    shape, names = SHARDINGS[way]
    mesh = jaxmem.target_mesh("h100", shape, names)
    params = {"layers": weights(4, 1024, 4096), "table": SDS((32_768, 1024), F32)}
    tx = optax.adamw(3e-4)
    state = params, jax.eval_shape(tx.init, params)
    place = lambda path, x: SDS(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(way, path, x))
    )
    state = jax.tree_util.tree_map_with_path(place, state)
    where = NamedSharding(mesh, P("data"))
    tokens = SDS((8 * shape[0], 1025), jnp.int32, sharding=where)
    keep = lambda x: jax.lax.with_sharding_constraint(x, where)
    return Made(train_step(llama_loss(code, 8, keep), tx), (state, tokens), (0,))


LLAMA, LLAMA_TPU = "16 Llama-like layers, 8 x 2048", "16 Llama-like layers, 2 x 2048"
HEAD_F32, HEAD_BF16 = "head, float32 weights", "head, bfloat16 weights"
BERT = "BERT-Large with Adam, 64 x 512"
LONG_ONE, LONG_FOUR = "one layer, 1 x 131,072", "4 layers, 1 x 131,072"
STACKS = ("BERT-Large, 8 x 512", "GPT-2 medium, 4 x 1024", "Llama-1B blocks, 2 x 2048")
STEPS: Mapping[str, Callable[[str], Made]] = {
    LLAMA: functools.partial(llama, 8, 2048),
    LLAMA_TPU: functools.partial(llama, 2, 2048),
    HEAD_F32: functools.partial(head, F32),
    HEAD_BF16: functools.partial(head, BF16),
    **{name: functools.partial(stack, name) for name in STACKS},
    BERT: functools.partial(bert, 64),
    LONG_ONE: functools.partial(long_sequence, 1),
    LONG_FOUR: functools.partial(long_sequence, 4),
    **{f"8 devices, {way}": functools.partial(sharded, way) for way in SHARDINGS},
}
