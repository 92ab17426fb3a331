"""One leaf's moments, out of their codes and back, round an elementwise rule.

The moments are never there as a whole: what unpacks them, the rule and what packs them
are one elementwise pass a leaf, or a chunk of its rows.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, PyTree

from jaxmem._checks import shown
from jaxmem.optim.low_bit.codes import Codes, pack, shapes, unpack
from jaxmem.optim.low_bit.low_bit import LowBit
from jaxmem.optim.low_bit.random import counter_bits, seed_of, uniform
from jaxmem.optim.low_bit.rows import by_rows, chunks_of

Rule = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def is_codes(x: Any) -> bool:
    """Whether this is a moment in codes."""
    return isinstance(x, Codes)


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
        update is of the dtype of `g`, or None where there is none.
      path: the leaf's.
      counts: int32[], what numbers the step, for stochastic rounding.
      g: the gradient.
      m, v: the moments.
    """
    formats = how.formats
    if not is_codes(m) or formats is None:
        return rule(g, m, v)
    first, second, block = formats
    seeds = [seed_of(path, how.seed + i, *counts) for i in (0, 1)]

    def draw(i: int, like, lead):
        return (
            uniform(counter_bits(seeds[i], like.shape, lead))
            if how.stochastic
            else None
        )

    def rows(lead, stored, g):
        g = stored[0] if g is None else g
        u, m, v = rule(g, unpack(first, stored[-2]), unpack(second, stored[-1]))
        packed = (
            pack(first, block, m, draw(0, m, lead)),
            pack(second, block, v, draw(1, v, lead)),
        )
        return (*(() if u is None else (u,)), *packed)

    chunks = chunks_of(g.shape) if how.by_rows else None
    if chunks is None:
        out = rows(None, (m, v), g)
    elif _has_update(rule, g):
        out = by_rows(lambda lead, x, _: rows(lead, x, None), chunks, (g, m, v), ())
    else:
        out = by_rows(rows, chunks, (m, v), g)
    return (None, *out) if len(out) == 2 else out


def read(how: LowBit, rule: Callable[[Any, Any, Any], Any], g: Array, m, v) -> Any:
    """The update that `rule(g, m, v)` makes of moments that stay as they are."""
    formats = how.formats
    if not is_codes(m) or formats is None:
        return rule(g, m, v)
    first, second, _ = formats
    one = lambda lead, g, s: rule(g, unpack(first, s[0]), unpack(second, s[1]))
    chunks = chunks_of(g.shape) if how.by_rows else None
    return one(None, g, (m, v)) if chunks is None else by_rows(one, chunks, g, (m, v))


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
                _check_moment(how, which, f"{name}{jax.tree_util.keystr(path)}", g, moment)


def _check_moment(how: LowBit, which: int, name: str, g, moment) -> None:
    formats = how.formats
    types = lambda tree: [(x.shape, str(x.dtype)) for x in jax.tree.leaves(tree)]
    if formats is None or not how.fits(g.shape):
        wanted = [(g.shape, "float32")]
    else:
        wanted = types(shapes(formats[which], formats[2], g.shape))
    if types(moment) != wanted:
        raise ValueError(
            f"state.{name}={shown(moment)}: for a gradient of shape {g.shape} "
            f"{how} has {wanted}; the state is one of other parameters or other options"
        )
