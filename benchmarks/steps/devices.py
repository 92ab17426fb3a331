"""The steps of `benchmarks.devices`: transformers spread over eight devices, AdamW.

"pinned" holds the activations to the examples of each device, by one
`with_sharding_constraint` a layer; without, XLA chooses where they lie.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks.models.transformers import (
    Bert,
    BertConfig,
    Layer,
    abstract_params,
    masked_loss,
)
from benchmarks.release import KEY
from benchmarks.steps.tiles import (
    BF16,
    F32,
    SDS,
    Made,
    cross_entropy,
    layer,
    softmax_attention,
    weights,
)
from benchmarks.steps.train import train_step

LAYERS, WIDTH, HIDDEN, HEADS, WORDS = 16, 2048, 8192, 16, 32_000
BATCH, TOKENS = 16, 2048
DATA, FSDP, BOTH = "data parallel", "FSDP", "FSDP x tensor"
MESHES: Mapping[str, tuple[Sequence[int], Sequence[str]]] = {
    DATA: ((8,), ("data",)),
    FSDP: ((8,), ("data",)),
    BOTH: ((4, 2), ("data", "model")),
}
_COLUMNS = {"qkv", "up"}  # whose outputs are divided in tensor parallelism
_ROWS = {"out", "down"}


def mesh_of(way: str, target: str):
    return jaxmem.target_mesh(target, *MESHES[way])


def placed(mesh, tree: Any, spec_of: Callable[[str, Any], P]) -> Any:
    """The arrays of a tree, each under the sharding for its name and type."""

    def place(path, x):
        name = next((k.key for k in reversed(path) if hasattr(k, "key")), "")
        where = NamedSharding(mesh, spec_of(name, x))
        return SDS(x.shape, x.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(place, tree)


def held(mesh, pinned: bool) -> Callable:
    """Where the activations lie."""
    where = NamedSharding(mesh, P("data"))
    keep = lambda x: jax.lax.with_sharding_constraint(x, where)
    return keep if pinned else lambda x: x


def llama(way: str, pinned: bool, target: str) -> Made:
    return llama_on(mesh_of(way, target), way, pinned)


def llama_on(
    mesh, way: str, pinned: bool, layers: int = LAYERS, batch: int = BATCH
) -> Made:
    """The layers on any number of devices."""
    tensor = "model" if way == BOTH else None

    def spec_of(name: str, x) -> P:
        if way == DATA or x.ndim < 2 or name in ("n1", "n2"):
            return P()
        if name == "table":
            return P(tensor, "data")
        columns, rows = P(None, "data", tensor), P(None, tensor, "data")
        return columns if name in _COLUMNS else rows if tensor else columns

    keep = held(mesh, pinned)
    one = functools.partial(layer, softmax_attention, HEADS)

    def loss(params, tokens):
        x = keep(params["table"].astype(BF16)[tokens[:, :-1]])
        layers = lambda x, w: (keep(one(keep(x), w)), None)
        x, _ = jax.lax.scan(layers, x, params["layers"])
        labels = tokens[:, 1:]
        return cross_entropy(x, params["table"], labels) / labels.size

    params = {
        "layers": weights(layers, WIDTH, HIDDEN),
        "table": SDS((WORDS, WIDTH), F32),
    }
    tx = optax.adamw(3e-4)
    state = placed(mesh, (params, jax.eval_shape(tx.init, params)), spec_of)
    tokens = placed(mesh, SDS((batch, TOKENS + 1), jnp.int32), lambda *_: P("data"))
    return Made(train_step(loss, tx), (state, tokens), (0,))


def bert(way: str, pinned: bool, target: str) -> Made:
    """BERT-Large in Flax, 64 x 512; parameters are divided along their last axis."""
    mesh = mesh_of(way, target)
    keep = held(mesh, pinned)

    class Pinned(Layer):
        def __call__(self, x, _):
            return keep(super().__call__(keep(x), _)[0]), None

    def spec_of(name: str, x) -> P:
        del name
        large = x.ndim > 1 and x.shape[-1] % 8 == 0 and x.size >= 2**16
        return P(*[None] * (x.ndim - 1), "data") if way == FSDP and large else P()

    model = Bert(BertConfig(), layer=Pinned if pinned else Layer)
    tokens = SDS((64, 512), jnp.int32)
    params, tx = abstract_params(model, tokens), optax.adamw(1e-4)
    loss = masked_loss(model)
    of_words = lambda p, x, key: loss(p, x, jax.random.wrap_key_data(key))
    step = train_step(of_words, tx)
    state = placed(mesh, (params, jax.eval_shape(tx.init, params)), spec_of)
    tokens = placed(mesh, tokens, lambda *_: P("data"))
    return Made(step, (state, tokens, placed(mesh, KEY, lambda *_: P())), (0,))


def _named(model: str, make: Callable, way: str, pinned: bool):
    pins = "" if way == DATA else ", pinned" if pinned else ", unpinned"
    return f"{model}, {way}{pins}", functools.partial(make, way, pinned)


# name -> what makes the step for a target
STEPS: Mapping[str, Callable[[str], Made]] = dict(
    _named(model, make, way, pinned)
    for model, make, ways in (
        ("16 Llama-like layers", llama, (DATA, FSDP, BOTH)),
        ("BERT-Large", bert, (DATA, FSDP)),
    )
    for way in ways
    for pinned in (True, False)
    if pinned or way != DATA
)
