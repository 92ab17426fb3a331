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
from jaxmem.optim.low_bit.codes import MomentCodes, pack, shapes, types_of, unpack
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.low_bit.random import counter_bits, seed_of, uniform

BOTH = (0, 1)  # the first and the second moment, of `LowBit.formats`
Rule = Callable[..., Any]


def is_codes(x: Any) -> bool:
    """Whether this is a moment in codes."""
    return isinstance(x, MomentCodes)


def is_leaf(x: Any) -> bool:
    """Whether a tree of moments, or of gradients with gaps, ends here."""
    return x is None or is_codes(x)


def map_moments(fn: Callable[..., tuple], grads: PyTree, *moments: PyTree) -> Any:
    """`fn(path, g, *moments)` of each leaf, its results as trees; None where g is."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_leaf)
    kept = [jax.tree.leaves(t, is_leaf=is_leaf) for t in moments]
    done = [
        (None, *old) if g is None else fn(path, g, *old)
        for (path, g), *old in zip(leaves, *kept, strict=True)
    ]
    count = 1 + len(moments)
    return tuple(tree.unflatten([x[i] for x in done]) for i in range(count))


def moved(
    how: LowBit,
    rule: Rule,
    path: Any,
    counts: tuple,
    g: Array,
    *moments: Any,
    which: tuple[int, ...] = BOTH,
) -> tuple[Any, ...]:
    """(update, *moments) of one leaf by `rule`, in codes where they were.

    Args:
      how: the options the moments were made with.
      rule: `(g, m, v) -> (update, m, v)`, elementwise; the moments are float32, the
        update is of the dtype of `g`.
      path: the leaf's.
      counts: int32[], what numbers the step, for stochastic rounding.
      g: the gradient.
      moments: as many as `which`.
      which: of each, whether it is stored as a first (0) or a second moment (1).
    """
    how = how.at(path)
    if not is_codes(moments[0]) and not how.on_host:
        return rule(g, *moments)

    def rows(lead, carried, _):
        g, *stored = carried
        u, *new = rule(g, *_unpacked(how, stored, which))
        return u, *_packed(how, path, counts, lead, stored, new, which)

    # the updates take the gradient's place
    return _everywhere(how, rows, (g, *moments), ())


def accumulated(
    how: LowBit, rule: Rule, path: Any, counts: tuple, g: Array, m: Any, v: Any
) -> tuple[Any, Any]:
    """(first, second) of one leaf by `rule`, `(g, m, v) -> (m, v)`; see `moved`."""
    how = how.at(path)
    if not is_codes(m) and not how.on_host:
        return rule(g, m, v)

    def rows(lead, stored, g):
        new = rule(g, *_unpacked(how, stored))
        return _packed(how, path, counts, lead, stored, new)

    return _everywhere(how, rows, (m, v), g)


def applied(how: LowBit, rule: Rule, path: Any, g: Array, m: Any, v: Any) -> Any:
    """The update that `rule(g, m, v)` makes of moments that stay as they are."""
    how = how.at(path)
    if not is_codes(m) and not how.on_host:
        return rule(g, m, v)
    rows = lambda lead, g, stored: rule(g, *_unpacked(how, stored))
    return _everywhere(how, rows, g, (m, v))


def _everywhere(how: LowBit, rows: Callable, carried: PyTree, read: PyTree) -> Any:
    """`rows(None, carried, read)`, in a loop over chunks where that takes less."""
    shape = jax.tree.leaves(carried)[0].shape
    chunks = chunks_of(shape) if how.row_by_row else None
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


def _unpacked(how: LowBit, stored, which=BOTH) -> list:
    if how.on_host:
        stored = jax.tree.map(to_device, stored)
    if not is_codes(stored[0]):
        return list(stored)
    assert how.formats is not None
    return [unpack(how.formats[i], x) for i, x in zip(which, stored, strict=True)]


def _packed(how: LowBit, path, counts, lead, like, new, which=BOTH) -> Any:
    """New moments as those were: in codes of the same blocks, in the same memory."""
    if is_codes(like[0]):
        new = _coded(how, path, counts, lead, like, new, which)
    return tuple(jax.tree.map(to_host, new) if how.on_host else new)


def _coded(how: LowBit, path, counts, lead, like, new, which) -> list[MomentCodes]:
    assert how.formats is not None
    done = []
    for i, x, old in zip(which, new, like, strict=True):
        fmt = how.formats[i]
        draw = None
        if how.draws(i):
            seed = seed_of(path, how.seed, *counts, jnp.int32(i))
            draw = uniform(counter_bits(seed, x.shape, lead))
        done.append(pack(fmt, x.shape[-1] // old.scale.shape[-1], x, draw))
    return done


def check_moments(
    how: LowBit,
    grads: PyTree,
    *trees: PyTree,
    names: tuple[str, ...] = ("mu", "nu"),
    which: tuple[int, ...] = BOTH,
) -> None:
    """ValueError for moments that these options would not make of such gradients.

    `names` are what the state calls them.
    """
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_leaf)
    for i, name, tree in zip(which, names, trees, strict=True):
        moments = jax.tree.leaves(tree, is_leaf=is_leaf)
        if len(moments) != len(leaves):
            raise ValueError(
                f"updates={shown(grads)}: {len(leaves)} leaves, the state has "
                f"{len(moments)} moments: it was made for other parameters"
            )
        for (path, g), moment in zip(leaves, moments, strict=True):
            if g is not None:
                where = f"{name}{jax.tree_util.keystr(path)}"
                _check_moment(how.at(path), i, where, g, moment)


def _check_moment(how: LowBit, which: int, name: str, g, moment) -> None:
    formats, block = how.formats, how.block_of(g.shape)
    if formats is None or block is None:
        wanted = [(g.shape, "float32")]
    else:
        wanted = types_of(shapes(formats[which], block, g.shape))
    if types_of(moment) != wanted:
        raise ValueError(
            f"state.{name}={shown(moment)}: for a gradient of shape {g.shape} "
            f"{how} has {wanted}; the state is one of other parameters or other options"
        )
