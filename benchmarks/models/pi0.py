"""A step of pi0 (Black et al. 2024): PaliGemma-3B, and an action expert beside it.

SigLIP So400m/14 sees three images, Gemma-2B their tokens and the words, and a
transformer a tenth of its size the robot's state and noisy actions. Both have layers of
their own and attend together: each token sees those of its own part of the sequence and
of the parts before. The loss is that of flow matching. Parts of it that take no memory
are left out: augmentation, masks of missing images, Adam's clipping.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.transformers import rotate
from benchmarks.steps.tiles import BF16, F32, SDS, Made, norm
from benchmarks.steps.train import train_step

IMAGES, WORDS, HORIZON, ACTIONS = 3, 48, 50, 32
_PATCH, _SIDE = 14, 16  # pixels and patches along a side of an image
_HEADS, _CHANNELS = 8, 256
_RANKS = {"language": 16, "expert": 32}  # of adapters
Tree = Any


def _vision(layers: int, width: int = 1152, hidden: int = 4304) -> Mapping[str, tuple]:
    square = {name: (layers, width, width) for name in ("q", "k", "v", "out")}
    scales = {name: (layers, width) for name in ("n1", "n2")}
    mlp = {"up": (layers, width, hidden), "down": (layers, hidden, width)}
    return {**square, **scales, **mlp}


def _gemma(layers: int, width: int, hidden: int) -> Mapping[str, tuple]:
    return {
        "q": (layers, width, _HEADS * _CHANNELS),
        "k": (layers, width, _CHANNELS),
        "v": (layers, width, _CHANNELS),
        "out": (layers, _HEADS * _CHANNELS, width),
        "gate": (layers, width, hidden),
        "up": (layers, width, hidden),
        "down": (layers, hidden, width),
        "n1": (layers, width),
        "n2": (layers, width),
    }


def parameters(layers: int = 18, images: int = 27, dtype=F32) -> Tree:
    """Shapes; `layers`, `images`: of the transformers, and of the vision tower."""
    patch = _PATCH**2 * 3
    shapes = {
        "images": {"patch": (patch, 1152), "place": (_SIDE**2, 1152)},
        "vision": _vision(images),
        "to_language": (1152, 2048),
        "table": (257_152, 2048),
        "language": _gemma(layers, 2048, 16_384),
        "expert": _gemma(layers, 1024, 4096),
        "state": (ACTIONS, 1024),
        "actions": (ACTIONS, 1024),
        "time_1": (2048, 1024),
        "time_2": (1024, 1024),
        "norm": (1024,),
        "out": (1024, ACTIONS),
    }
    is_shape = lambda x: isinstance(x, tuple)
    return jax.tree.map(lambda s: SDS(s, dtype), shapes, is_leaf=is_shape)


def adapters(params: Tree) -> Tree:
    """LoRA's two factors of each matrix of both transformers, in float32."""
    found: Tree = {}
    for part, rank in _RANKS.items():
        found[part] = {}
        for name, w in params[part].items():
            if len(w.shape) == 3:
                layers, rows, columns = w.shape
                found[part][f"{name}_a"] = SDS((layers, rows, rank), F32)
                found[part][f"{name}_b"] = SDS((layers, rank, columns), F32)
    return found


def _product(x, w: Mapping[str, Any], name: str):
    y = x @ w[name]
    return y + (x @ w[f"{name}_a"]) @ w[f"{name}_b"] if f"{name}_a" in w else y


def _narrow(w: Tree) -> Tree:
    return jax.tree.map(lambda a: a.astype(BF16), w)


def _centred(x, scale):
    x32 = x.astype(F32)
    return norm((x32 - x32.mean(-1, keepdims=True)).astype(x.dtype), scale)


def _vision_layer(x, w):
    w, heads = _narrow(w), (*x.shape[:2], 16, -1)
    y = _centred(x, w["n1"])
    q, k, v = ((y @ w[name]).reshape(heads) for name in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, implementation="xla")
    x = x + y.reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(_centred(x, w["n2"]) @ w["up"]) @ w["down"], None


def _joint_layer(mask, xs, ws):
    """A layer of both: weights of their own, one attention over all tokens."""
    ws = [_narrow(w) for w in ws]
    ys = [norm(x, 1 + w["n1"]) for x, w in zip(xs, ws, strict=True)]

    def together(name: str, heads: int):
        parts = (_product(y, w, name) for y, w in zip(ys, ws, strict=True))
        parts = [a.reshape(*a.shape[:2], heads, _CHANNELS) for a in parts]
        return jnp.concatenate(parts, 1)

    q, k, v = together("q", _HEADS), together("k", 1), together("v", 1)
    q, k = (rotate(a, jnp.arange(a.shape[1], dtype=F32)) for a in (q, k))
    how = {"mask": mask, "implementation": "xla"}
    seen = jax.nn.dot_product_attention(q, k, v, **how)
    parts = jnp.split(seen.reshape(*seen.shape[:2], -1), [xs[0].shape[1]], 1)
    own = lambda x, w, part: _mlp(x + _product(part, w, "out"), w)
    return tuple(map(own, xs, ws, parts)), None


def _mlp(x, w):
    y = norm(x, 1 + w["n2"])
    inside = jax.nn.gelu(_product(y, w, "gate")) * _product(y, w, "up")
    return x + _product(inside, w, "down")


def _seen_images(params, images, write: Callable):
    """[batch, tokens, 2048] of [batch x images, pixels, pixels, 3]."""
    w = _narrow(params["images"])
    cut = images.reshape(-1, _SIDE, _PATCH, _SIDE, _PATCH, 3).swapaxes(2, 3)
    x = cut.reshape(-1, _SIDE**2, _PATCH**2 * 3).astype(BF16) @ w["patch"] + w["place"]
    x, _ = jax.lax.scan(write(_vision_layer), x, params["vision"])
    x = x @ params["to_language"].astype(BF16)
    return x.reshape(-1, IMAGES * _SIDE**2, x.shape[-1])


def _suffix(params, state, noisy, time):
    """The robot's state, and noisy actions with their time."""
    w = _narrow({name: params[name] for name in ("state", "actions")})
    rates = jnp.geomspace(4e-3, 4.0, 512) / (2 * jnp.pi)
    at = time[:, None] / rates
    at = jnp.concatenate([jnp.sin(at), jnp.cos(at)], -1).astype(BF16)[:, None]
    actions = noisy.astype(BF16) @ w["actions"]
    both = jnp.concatenate([actions, jnp.broadcast_to(at, actions.shape)], -1)
    both = jax.nn.silu(both @ params["time_1"].astype(BF16))
    both = both @ params["time_2"].astype(BF16)
    state = (state.astype(BF16) @ w["state"])[:, None]
    return jnp.concatenate([state, both], 1)


def loss_fn(params, batch, write: Callable = lambda layer: layer):
    """Flow matching; `write`: what is done to layers, as `jax.checkpoint`."""
    images, words, state, actions, noise, time = batch
    seen = _seen_images(params, images, write)
    read = params["table"][words].astype(BF16) * 2048**0.5
    prefix = jnp.concatenate([seen, read], 1)
    t = time[:, None, None]
    suffix = _suffix(params, state, t * noise + (1 - t) * actions, time)
    # images and words, then the state, then the actions
    sizes = prefix.shape[1], 1, HORIZON
    count = sum(sizes)
    part = jnp.repeat(jnp.arange(3), jnp.array(sizes), total_repeat_length=count)
    mask = (part <= part[:, None])[None, None]
    one = write(functools.partial(_joint_layer, mask))
    both = params["language"], params["expert"]
    (_, y), _ = jax.lax.scan(one, (prefix, suffix), both)
    y = norm(y[:, 1:], 1 + params["norm"].astype(BF16)).astype(F32)
    return jnp.mean(jnp.square(y @ params["out"].astype(F32) - (noise - actions)))


def batch_of(size: int) -> tuple:
    pixels = _PATCH * _SIDE
    actions = SDS((size, HORIZON, ACTIONS), F32)
    return (
        SDS((IMAGES * size, pixels, pixels, 3), F32),
        SDS((size, WORDS), jnp.int32),
        SDS((size, ACTIONS), F32),
        actions,
        actions,
        SDS((size,), F32),
    )


def full_step(
    tx: optax.GradientTransformation,
    batch: int,
    dtype=F32,
    write: Callable = lambda layer: layer,
    change: Callable = lambda loss: loss,
    **sizes,
) -> Made:
    """Everything is trained; `change`: what is done to the loss."""
    loss = change(functools.partial(loss_fn, write=write))
    params = parameters(dtype=dtype, **sizes)
    state = params, jax.eval_shape(tx.init, params)
    return Made(train_step(loss, tx), (state, batch_of(batch)), (0,))


def lora_step(
    tx: optax.GradientTransformation,
    batch: int,
    write: Callable = lambda layer: layer,
    change: Callable = lambda loss: loss,
    **sizes,
) -> Made:
    """Of both transformers adapters alone are trained, as in openpi.

    What is frozen is given with the batch. `change`: what is done to the loss.
    """

    def loss(trained, given):
        (own, extra), (frozen, batch) = trained, given
        both = {name: frozen[name] | extra[name] for name in _RANKS}
        return loss_fn(own | frozen | both, batch, write)

    params = parameters(**sizes)
    base = {name: params.pop(name) for name in (*_RANKS, "table")}
    frozen = jax.tree.map(lambda a: SDS(a.shape, BF16), base)
    trained = params, adapters(base)
    state = trained, jax.eval_shape(tx.init, trained)
    step = train_step(change(loss), tx)
    return Made(step, (state, (frozen, batch_of(batch))), (0,))
