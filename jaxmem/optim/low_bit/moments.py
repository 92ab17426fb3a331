"""One leaf's moments, out of their codes and back, round an elementwise rule.

The moments are never there as a whole: what unpacks them, the rule and what packs them
are one elementwise pass a leaf, or a chunk of its rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxmem._checks import shown
from jaxmem.ir.row_chunks import Chunks, by_rows, chunks_of, on_platforms
from jaxmem.optim._memory_space import to_device, to_host
from jaxmem.optim.low_bit.codes import MomentCodes, pack, shapes, unpack
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.low_bit.random import counter_bits, seed_of, uniform

Rule = Callable[[Any, Any, Any], Any]


def is_codes(x: Any) -> bool:
    """Whether this is a moment in codes."""
    return isinstance(x, MomentCodes)


def is_leaf(x: Any) -> bool:
    """Whether a tree of moments, or of gradients with gaps, ends here."""
    return x is None or is_codes(x)


def map_moments(fn: Callable[..., tuple], grads: PyTree, mu: PyTree, nu: PyTree) -> Any:
    """`fn(path, g, m, v)` of each leaf, its results as trees; None where g is."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_leaf)
    firsts, seconds = (jax.tree.leaves(t, is_leaf=is_leaf) for t in (mu, nu))
    paired = zip(leaves, firsts, seconds, strict=True)
    done = [
        (None, m, v) if g is None else fn(path, g, m, v) for (path, g), m, v in paired
    ]
    return tuple(tree.unflatten([x[i] for x in done]) for i in range(3))


def moved(
    how: LowBit, rule: Rule, path: Any, counts: tuple, g: Array, m: Any, v: Any
) -> tuple[Any, Any, Any]:
    """(update, first, second) of one leaf by `rule`, in codes where they were.

    Args:
      how: the options the moments were made with.
      rule: `(g, m, v) -> (update, m, v)`, elementwise; the moments are float32, the
        update is of the dtype of `g`.
      path: the leaf's.
      counts: int32[], what numbers the step, for stochastic rounding.
      g: the gradient.
      m, v: the moments.
    """
    if not is_codes(m) and not how.on_host:
        return rule(g, m, v)

    def rows(lead, carried, _):
        g, *stored = carried
        u, *new = rule(g, *_unpacked(how, stored))
        return u, *_packed(how, path, counts, lead, stored, new)

    # the updates take the gradient's place
    return _everywhere(how, rows, (g, m, v), ())


def accumulated(
    how: LowBit, rule: Rule, path: Any, counts: tuple, g: Array, m: Any, v: Any
) -> tuple[Any, Any]:
    """(first, second) of one leaf by `rule`, `(g, m, v) -> (m, v)`; see `moved`."""
    if not is_codes(m) and not how.on_host:
        return rule(g, m, v)

    def rows(lead, stored, g):
        new = rule(g, *_unpacked(how, stored))
        return _packed(how, path, counts, lead, stored, new)

    return _everywhere(how, rows, (m, v), g)


def applied(how: LowBit, rule: Rule, g: Array, m: Any, v: Any) -> Any:
    """The update that `rule(g, m, v)` makes of moments that stay as they are."""
    if not is_codes(m) and not how.on_host:
        return rule(g, m, v)
    rows = lambda lead, g, stored: rule(g, *_unpacked(how, stored))
    return _everywhere(how, rows, g, (m, v))


def _everywhere(how: LowBit, rows: Callable, carried: PyTree, read: PyTree) -> Any:
    """`rows(None, carried, read)`, in a loop over chunks where that takes less."""
    chunks = chunks_of(jax.tree.leaves(carried)[0].shape) if how.by_rows else None
    whole = functools.partial(rows, None)
    if chunks is None:
        return whole(carried, read)
    if how.on_host:
        # a reshaped array would be fetched whole
        looped = functools.partial(by_rows, rows, Chunks(1, chunks.outer * chunks.rows))
        # TPU sends rows of the host's arrays in tiles of 8
        ragged = jax.tree.leaves(carried)[0].shape[0] % 8
        on_tpu = whole if ragged else looped
        return jax.lax.platform_dependent(carried, read, tpu=on_tpu, default=looped)
    cheap = how.formats is not None and how.formats[0].cheap  # one kernel on a GPU
    platforms = ("tpu",) if cheap else ("tpu", "cuda", "rocm")
    return on_platforms(rows, chunks, platforms, carried, read)


def _unpacked(how: LowBit, stored) -> list:
    if how.on_host:
        stored = jax.tree.map(to_device, stored)
    if not is_codes(stored[0]):
        return list(stored)
    assert how.formats is not None
    return [unpack(fmt, x) for fmt, x in zip(how.formats, stored, strict=True)]


def _packed(how: LowBit, path, counts, lead, like, new) -> tuple[Any, Any]:
    """New moments as those were: in codes of the same blocks, in the same memory."""
    done = _coded(how, path, counts, lead, like, new) if is_codes(like[0]) else new
    first, second = jax.tree.map(to_host, done) if how.on_host else done
    return first, second


def _coded(how: LowBit, path, counts, lead, like, new) -> list[MomentCodes]:
    assert how.formats is not None
    done = []
    for i, (fmt, x, old) in enumerate(zip(how.formats, new, like, strict=True)):
        draw = None
        if how.stochastic:
            seed = seed_of(path, how.seed, *counts, jnp.int32(i))
            draw = uniform(counter_bits(seed, x.shape, lead))
        done.append(pack(fmt, x.shape[-1] // old.scale.shape[-1], x, draw))
    return done


def check_moments(how: LowBit, grads: PyTree, mu: PyTree, nu: PyTree) -> None:
    """ValueError for moments that these options would not make of such gradients."""
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_leaf)
    for which, (name, tree) in enumerate((("mu", mu), ("nu", nu))):
        moments = jax.tree.leaves(tree, is_leaf=is_leaf)
        if len(moments) != len(leaves):
            raise ValueError(
                f"updates={shown(grads)}: {len(leaves)} leaves, the state has "
                f"{len(moments)} moments: it was made for other parameters"
            )
        for (path, g), moment in zip(leaves, moments, strict=True):
            if g is not None:
                _check_moment(
                    how, which, f"{name}{jax.tree_util.keystr(path)}", g, moment
                )


def _check_moment(how: LowBit, which: int, name: str, g, moment) -> None:
    formats, block = how.formats, how.block_of(g.shape)
    types = lambda tree: [(x.shape, str(x.dtype)) for x in jax.tree.leaves(tree)]
    if formats is None or block is None:
        wanted = [(g.shape, "float32")]
    else:
        wanted = types(shapes(formats[which], block, g.shape))
    if types(moment) != wanted:
        raise ValueError(
            f"state.{name}={shown(moment)}: for a gradient of shape {g.shape} "
            f"{how} has {wanted}; the state is one of other parameters or other options"
        )
