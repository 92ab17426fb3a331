"""Steps drawn at random, to be tiled along whatever axis the pass finds.

A seed says everything: blocks of `generated_blocks`, how they are put together, the
loss, what the step returns, sizes and dtype. A step that fails is drawn once more by
itself: `generated(seed)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.arrays import array
from tests.scheduling.tiling.generated_blocks import BLOCKS, DECIDING

DTYPES = ("float64", "float32", "bfloat16")
BATCHES, TOKENS, WIDTHS = (2, 4, 6, 8, 10), (4, 6, 7, 8, 9, 12), (4, 8, 12)
WORDS = 24  # of the vocabulary: 2, 3, 4 and 8 divide it


@dataclass(frozen=True)
class Generated:
    """A step and its arguments.

    Attributes:
      seed: what it was drawn from.
      step: `(params, batch) -> outputs`, any pytree of them.
      args: its arguments.
      words: what was drawn.
      dtype: that the layers are computed in.
    """

    seed: int
    step: Callable
    args: tuple[Any, Any]
    words: tuple[str, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"seed {self.seed}: {'; '.join(self.words)}"


def generated(seed: int, exact: Any = None) -> Generated:
    """The step of a seed; `exact`: another dtype for its layers."""
    rng = np.random.default_rng(seed)
    pick = lambda table: list(table)[rng.integers(len(table))]
    dtype, batch, tokens, width = map(pick, (DTYPES, BATCHES, TOKENS, WIDTHS))
    # rounding in bfloat16 is so coarse that the two would decide otherwise
    blocks = BLOCKS.keys() - (DECIDING if dtype == "bfloat16" else ())
    names = tuple(pick(sorted(blocks)) for _ in range(rng.integers(1, 4)))
    form, loss, kind = map(pick, (FORMS, LOSSES, KINDS))
    body = _composed(names)
    run, layers = FORMS[form]
    own = jnp.dtype(exact or dtype)
    step = KINDS[kind](_loss(run(body), LOSSES[loss], own))
    args = _params(rng, layers, width), _batch(rng, batch, tokens)
    sizes = f"{batch} x {tokens} x {width}"
    words = " + ".join(names), form, loss, kind, sizes, dtype
    return Generated(seed, step, args, words, own)


def _composed(names: Sequence[str]) -> Callable:
    def body(x, w, key):
        for number, name in enumerate(names):
            x = BLOCKS[name](x, w, jax.random.fold_in(key, number))
        return 4 * jax.nn.soft_sign(x / 4)  # so that no depth makes it large

    return body


def _params(rng, layers: tuple[int, ...], width: int):
    def normal(*shape, scale):
        return array(scale * rng.standard_normal(shape), jnp.float64)

    layer = {
        "a": normal(*layers, width, width, scale=0.5 * width**-0.5),
        "b": normal(*layers, width, 2 * width, scale=0.5 * width**-0.5),
        "c": normal(*layers, 2 * width, width, scale=0.5 * width**-0.5),
        "s": 1 + normal(*layers, width, scale=0.1),
    }
    return {"layers": layer, "table": normal(WORDS, width, scale=1.0)}


def _batch(rng, batch: int, tokens: int):
    words = rng.integers(WORDS, size=(batch, tokens + 1))
    return array(words, jnp.int32)


def _loss(run: Callable, loss: Callable, dtype) -> Callable:
    def whole(params, tokens):
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        x = params["table"][tokens[:, :-1]]
        x = run(x, params["layers"], jax.random.key(7))
        return loss(x, params["table"], tokens[:, 1:])

    return whole


# -- how blocks follow each other


def _once(body):
    return body


def _remat(body):
    return jax.checkpoint(body)


def _scanned(body):
    def run(x, layers, key):
        keys = jax.random.split(key, layers["s"].shape[0])
        return lax.scan(lambda x, wk: (body(x, *wk), None), x, (layers, keys))[0]

    return run


def _scanned_remat(body):
    return _scanned(jax.checkpoint(body))


def _scans_in_scans(body):
    inner = _scanned(body)
    return _scanned(inner)


def _written_out(body):
    def run(x, layers, key):
        for number in range(layers["s"].shape[0]):
            x = body(x, jax.tree.map(lambda w, n=number: w[n], layers), key)
        return x

    return run


def _for_examples(body):
    """`vmap` over the examples of a body that has one."""

    def run(x, w, key):
        return jax.vmap(lambda one: body(one[None], w, key)[0])(x)

    return run


FORMS = {
    "once": (_once, ()),
    "remat": (_remat, ()),
    "scan": (_scanned, (3,)),
    "scan, remat": (_scanned_remat, (2,)),
    "scans in scans": (_scans_in_scans, (2, 2)),
    "written out": (_written_out, (2,)),
    "vmap": (_for_examples, ()),
}


# -- losses of [batch, tokens, width], the table of words and the next words


def _mean_square(x, table, labels):
    return jnp.mean(jnp.square(_wide(x)))


def _cross_entropy(x, table, labels):
    return jnp.mean(_each(_logits(x, table), labels))


def _masked(x, table, labels):
    """The mean over words that count."""
    counts = (labels % 3 > 0).astype(_wide(x).dtype)
    return jnp.sum(counts * _each(_logits(x, table), labels)) / jnp.sum(counts)


def _smoothed(x, table, labels):
    logits = _logits(x, table)
    log_probs = jax.nn.log_softmax(logits)
    return jnp.mean(0.9 * _each(logits, labels) - 0.1 * jnp.mean(log_probs, -1))


def _z_loss(x, table, labels):
    logits = _logits(x, table)
    z = jax.nn.logsumexp(logits, -1)
    return jnp.mean(_each(logits, labels)) + 1e-2 * jnp.mean(z**2)


def _cast_late(x, table, labels):
    """Log-softmax in the layers' dtype."""
    return jnp.mean(_each(x @ table.T, labels).astype(_wide(x).dtype))


def _contrastive(x, table, labels):
    """Examples meet in the loss."""
    y = _wide(jnp.mean(x, 1)) + _wide(jnp.mean(table, 0))
    scores = jax.nn.log_softmax(y @ jnp.roll(y, 1, -1).T, -1)
    return -jnp.mean(jnp.diagonal(scores))


def _balanced(x, table, labels):
    """A number made of all tokens stands between the passes."""
    logits = _logits(x, table)
    share = jnp.mean(jax.nn.softmax(logits), (0, 1))
    return jnp.mean(_each(logits, labels)) + jnp.sum(share**2)


def _logits(x, table):
    return _wide(x @ table.T)


def _each(logits, labels):
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


LOSSES = {
    "mean square": _mean_square,
    "cross entropy": _cross_entropy,
    "masked": _masked,
    "smoothed": _smoothed,
    "z-loss": _z_loss,
    "cast late": _cast_late,
    "contrastive": _contrastive,
    "balanced": _balanced,
}


# -- what a step does with its loss


def _forward(loss):
    return loss


def _gradient(loss):
    return jax.value_and_grad(loss)


def _sgd(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(jnp.subtract, params, grads), value, norm

    return step


def _adam(loss):
    """With large epsilon: a quotient of two small numbers would magnify rounding."""
    tx = optax.adam(1e-2, eps=1.0)

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), state, value

    return step


def _per_example(loss):
    """A gradient for each example, beside the same words in another order."""

    def one(params, example):
        return jax.grad(loss)(params, jnp.stack([example, example[::-1]]))

    return lambda params, batch: jax.vmap(one, (None, 0))(params, batch)


def _accumulated(loss):
    """Two micro-batches in a loop."""

    def step(params, batch):
        parts = jnp.stack([batch[::2], batch[1::2][: len(batch[::2])]])
        zeros = jax.tree.map(jnp.zeros_like, params)
        add = lambda total, part: jax.tree.map(
            jnp.add, total, jax.grad(loss)(params, part)
        )
        return lax.scan(lambda total, part: (add(total, part), None), zeros, parts)[0]

    return step


KINDS = {
    "forward": _forward,
    "gradient": _gradient,
    "SGD": _sgd,
    "Adam": _adam,
    "gradient of each example": _per_example,
    "micro-batches": _accumulated,
}
