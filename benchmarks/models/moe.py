"""Transformers whose MLPs are mixtures of experts, by default two experts a token.

"one-hot" (GShard, Lepikhin et al. 2020) sends tokens to experts by products with a
table of zeros and ones, where each expert takes a fixed number of an example's tokens
and drops the others. "ragged" sorts the tokens by expert and drops none.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.models.parallel import (
    Model,
    Sizes,
    by_name,
    dense,
    language_loss,
    pin,
)
from benchmarks.steps.tiles import F32, SDS, attended, norm, softmax_attention

CHOSEN = 2  # experts of a token
ROOM = 1.25  # tokens that an expert takes, in terms of its even share
BALANCE = 0.01
DATA, EXPERT = "data", "expert"
BOTH = (DATA, EXPERT)


def chosen(x, router, count: int = CHOSEN):
    """Weights [..., count], numbers of the experts of each token, and probabilities."""
    p = jax.nn.softmax((x @ router).astype(F32), -1)
    weight, expert = lax.top_k(p, count)
    return weight / weight.sum(-1, keepdims=True), expert, p


def imbalance(p, expert):
    """Least where the experts have the same number of tokens (Fedus et al. 2022)."""
    count = p.shape[-1]
    first = jax.nn.one_hot(expert[..., 0], count, dtype=F32)
    axes = tuple(range(p.ndim - 1))
    return count * (first.mean(axes) * p.mean(axes)).sum()


def gelu_mlp(product: Callable, x, w):
    """An MLP of each expert; `product(x, weights)` is that of their tokens."""
    return product(jax.nn.gelu(product(x, w["up"])), w["down"])


def gated_mlp(product: Callable, x, w):
    inner = jax.nn.silu(product(x, w["gate"])) * product(x, w["up"])
    return product(inner, w["down"])


# -- one-hot


def table_of(expert, count: int, room: int):
    """Where in an expert's room each choice of a token goes: [b, s, k, e, room].

    First choices come first, each in the order of the tokens; a choice for which there
    is no room left goes nowhere.
    """
    batch, tokens, choices = expert.shape
    takes = jax.nn.one_hot(expert, count, dtype=jnp.int32)
    order = takes.swapaxes(1, 2).reshape(batch, -1, count)
    place = (jnp.cumsum(order, 1) - 1).reshape(batch, choices, tokens, count)
    place = place.swapaxes(1, 2)
    return jax.nn.one_hot(jnp.where(takes > 0, place, -1), room, dtype=jnp.int32)


def one_hot(mlp: Callable, x, w, by_expert=lambda x: x, by_example=lambda x: x):
    """The tokens of one example share the experts' room.

    `by_expert`, `by_example`: hold what experts take to one way to lie on the mesh;
    one after the other is the way from device to device, in both directions.
    """
    count = w["router"].shape[-1]
    room = math.ceil(CHOSEN * ROOM * x.shape[1] / count)
    weight, expert, p = chosen(x, w["router"])
    table = table_of(expert, count, room).astype(x.dtype)
    mixed = jnp.einsum("bskec,bsk->bsec", table, weight.astype(x.dtype))
    inner = by_expert(by_example(jnp.einsum("bskec,bsd->ebcd", table, x)))
    product = lambda x, m: by_expert(jnp.einsum("ebcd,edf->ebcf", x, m))
    out = by_example(mlp(product, inner, w))
    return jnp.einsum("bsec,ebcd->bsd", mixed, out), imbalance(p, expert)


# -- ragged


def ragged(mlp: Callable, x, w):
    """All experts on the tokens that are given, sorted by expert."""
    rows = x.reshape(-1, x.shape[-1])
    weight, expert, p = chosen(rows, w["router"])
    sizes = jnp.bincount(expert.reshape(-1), length=p.shape[-1])
    out = _sorted_experts(mlp, rows, weight, expert, sizes, w)
    return out.reshape(x.shape), imbalance(p, expert)


def _sorted_experts(mlp: Callable, rows, weight, expert, sizes, w):
    """The experts' outputs for each token; rows after those of `sizes` have none."""
    order, choices = jnp.argsort(expert.reshape(-1)), expert.shape[-1]
    product = lambda x, m: lax.ragged_dot(x, m, sizes)
    out = mlp(product, rows[order // choices], w)
    known = jnp.arange(len(order)) < sizes.sum()
    out = jnp.where(known[:, None], out, jnp.zeros_like(out))
    out = out * weight.reshape(-1)[order].astype(out.dtype)[:, None]
    return jnp.zeros_like(rows).at[order // choices].add(out)


def ragged_shards(mlp: Callable, x, w, choices: int = CHOSEN):
    """The same inside of `shard_map`, where each device has a part of the experts.

    A device takes the tokens of all that share the experts, does those for its own,
    and the outputs are summed and scattered back. `choices`: experts of a token.
    """
    rows = lax.all_gather(x, EXPERT, tiled=True).reshape(-1, x.shape[-1])
    weight, expert, p = chosen(rows, w["router"], choices)
    count, own = p.shape[-1], len(w["up"])
    expert = (expert - lax.axis_index(EXPERT) * own) % count  # its own come first
    sizes = jnp.bincount(expert.reshape(-1), length=count)[:own]
    out = _sorted_experts(mlp, rows, weight, expert, sizes, w)
    out = out.reshape(-1, *x.shape[1:])
    out = lax.psum_scatter(out, EXPERT, tiled=True)
    return out, lax.pmean(imbalance(p, expert), BOTH)


# -- models


def parameters(sizes: Sizes):
    params = dense(sizes)
    layers = dict(params["layers"])
    experts = lambda x: SDS((len(x), sizes.experts, *x.shape[1:]), x.dtype)
    layers |= {name: experts(layers[name]) for name in ("up", "down")}
    layers["router"] = SDS((sizes.layers, sizes.width, sizes.experts), F32)
    return params | {"layers": layers}


def mixture(mixer: Callable, mesh, sizes: Sizes, batch, experts) -> Model:
    keep = pin(mesh, batch)

    def layer(x, w):
        w = jax.tree.map(lambda a: a.astype(x.dtype), w)
        x = attended(softmax_attention, sizes.heads, keep(x), w)
        y, more = mixer(norm(x, w["n2"]), w)
        return keep(x + y), more

    def layers(params, x):
        x, more = lax.scan(layer, x, params)
        return x, BALANCE * more.mean()

    loss = language_loss(sizes, keep, layers)
    specs = dict.fromkeys(("up", "down"), P(None, experts))
    return Model(loss, parameters(sizes), by_name(specs), P(batch))


def one_hot_experts(mesh, sizes: Sizes) -> Model:
    by_expert, by_example = pin(mesh, EXPERT, DATA), pin(mesh, None, BOTH)
    how = {"by_expert": by_expert, "by_example": by_example}
    mixer = functools.partial(one_hot, gelu_mlp, **how)
    return mixture(mixer, mesh, sizes, BOTH, EXPERT)


def ragged_data(mesh, sizes: Sizes) -> Model:
    """Every device has all experts, for its own examples."""
    mixer = functools.partial(ragged, gelu_mlp)
    return mixture(mixer, mesh, sizes, DATA, None)


def mapped(
    mesh, mixer: Callable, batch, experts, names: Sequence[str] = ("up", "down")
) -> Callable:
    """A mixer of one device's tokens, in `shard_map`; `names`: the experts' weights."""
    names = ("router", *names)
    specs = dict.fromkeys(names, P(experts)) | {"router": P()}
    here = jax.shard_map(
        mixer, mesh=mesh, in_specs=(P(batch), specs), out_specs=(P(batch), P())
    )
    return lambda x, w: here(x, {name: w[name] for name in names})


def ragged_mapped(mesh, sizes: Sizes) -> Model:
    def mixer(x, w):
        out, more = ragged(gelu_mlp, x, w)
        return out, lax.pmean(more, DATA)

    return mixture(mapped(mesh, mixer, DATA, None), mesh, sizes, DATA, None)


def ragged_experts(mesh, sizes: Sizes) -> Model:
    mixer = functools.partial(ragged_shards, gelu_mlp)
    return mixture(mapped(mesh, mixer, BOTH, EXPERT), mesh, sizes, BOTH, EXPERT)
