"""A pattern is an example: a plain function, and the lean one that replaces it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._checks import check_callable, check_numbers, check_text, wrong_type
from jaxmem.rewriting._flat_graph import build
from jaxmem.rewriting._match import head
from jaxmem.rewriting._partial_match import TracedFormula

# Sizes of the dimensions while the real ones are not known: no two alike, so that no
# reshape can confuse them, and none 1, which would broadcast.
_SIZES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)


def _always(**scalars: float) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Pattern:
    """A formula as people write it, and the function that replaces it.

    `plain` is traced, never run. It is found wherever a traced function computes the
    same thing, up to shapes, dtypes, the order of operands, the grouping of products
    and sums, casts, and how dimensions are laid out. The lean function is called with
    the arrays and numbers found.

    Attributes:
      name: what reports call it.
      plain: `plain(*arrays, **scalars)`, giving one array; an example of the formula.
      lean: called as `plain` is, with the scalars as Python floats; gives an array of
        the same shape. It should compute at least as precisely as float32.
      examples: the dimensions of each array, as jaxtyping names them: `"*batch d"`;
        `"#n"` may be of size one where the formula broadcasts; `"n=6"` is a size that
        the formula can be traced with; `"bool "` in front for a mask, and `"key"` for
        a random key. Alike names are alike sizes. `"+"` in front: an array that is
        added stands for all terms there are, also subtracted ones; a mask for several,
        one in the other.
      scalars: names of numbers in the formula that may have any value (an epsilon, a
        slope): keyword arguments of `plain` and `lean`.
      when: called with the scalars; False leaves a formula alone.
      uncast: positions of arrays that must arrive through a cast or a transposition,
        and that the lean function takes as they were before it (weights kept in another
        dtype, or used both ways).
      typed: whether the lean function takes the dtype of its output as `dtype`; its
        arguments then stay as narrow as they are.
      gate: a simpler formula that is there wherever this one is: many patterns with one
        gate are looked for where it is found, and nowhere else.
      params: names of parameters of the last operation, a primitive of `jax.lax`, that
        may be others than in `plain` (a window, strides): keyword arguments of `lean`
        and `when`, as the operation has them.

    Example::

      lean_cube = jax.checkpoint(lambda x: x**3)
      cube = jaxmem.rewriting.Pattern(
          "cube", lambda x: x * x * x, lean_cube, examples=("*n",)
      )
      cubes = jaxmem.rewriting.rewrite(lambda x: x * x * x, patterns=[cube])
      y = cubes(x)
    """

    name: str
    plain: Callable[..., jax.Array]
    lean: Callable[..., jax.Array]
    examples: tuple[str, ...] = ("*batch",)
    scalars: tuple[str, ...] = ()
    when: Callable[..., bool] = _always
    uncast: tuple[int, ...] = ()
    params: tuple[str, ...] = ()
    typed: bool = False
    gate: "Pattern | None" = None

    def __post_init__(self):
        check_text("name", self.name)
        for name in ("plain", "lean", "when"):
            check_callable(name, getattr(self, name))
        for name in ("examples", "scalars", "params"):
            texts = getattr(self, name)
            right = isinstance(texts, tuple) and all(isinstance(t, str) for t in texts)
            if not right or (name == "examples" and not texts):
                raise wrong_type(name, texts, f"of {self.name!r}, a tuple of texts")
        if not isinstance(self.uncast, tuple):
            raise wrong_type("uncast", self.uncast, "a tuple of positions, ints")
        check_numbers("uncast", self.uncast)

    @functools.cached_property
    def specs(self) -> "tuple[ArrayExample, ...]":
        return tuple(map(parse, self.examples))

    @functools.cached_property
    def variadic(self) -> bool:
        return any(s.variadic for s in self.specs)

    @functools.cached_property
    def head(self) -> str:
        """The kind of the pattern's last operation, below casts and views."""
        if self.gate is not None:  # its last operation is the same
            return self.gate.head
        return head(_trace(self, 1 if self.variadic else 0, ()).out)

    @functools.cached_property
    def rank(self) -> int:
        """Of the output, without the dimensions that `*` stands for."""
        batch = 1 if self.variadic else 0
        return len(_trace(self, batch, ()).out.shape) - batch

    def trace(self, batch: int, sizes: Mapping[str, int] | None = None):
        """The graph of `plain` with `batch` dimensions for `*`, at these sizes.

        None if `plain` cannot have them; without sizes its error is the author's.
        """
        try:
            return _trace(self, batch, tuple(sorted((sizes or {}).items())))
        except (TypeError, ValueError):
            if sizes:
                return None
            raise


@dataclass(frozen=True)
class ArrayExample:
    """Dimensions of one input: (name, may be broadcast); where `*` stands; its kind."""

    kind: str
    dims: tuple[tuple[str, bool], ...]
    hints: tuple[tuple[str, int], ...] = ()
    gathers: bool = False

    @property
    def variadic(self) -> bool:
        return any(name.startswith("*") for name, _ in self.dims)

    def names(self, batch: int) -> list[tuple[str, bool]]:
        """The dimensions with `*b` written out as `b.0`, `b.1`, ..."""
        out = []
        for name, free in self.dims:
            many = [f"{name[1:]}.{i}" for i in range(batch)]
            out += [(n, free) for n in (many if name.startswith("*") else [name])]
        return out


def parse(text: str) -> ArrayExample:
    """One example: `"bool #*batch n"`."""
    words = text.removeprefix("+").split()
    kind = words.pop(0) if words and words[0] in ("bool", "int", "key") else "float"
    dims, hints = [], []
    for word in words:
        name, _, size = word.replace("#", "").partition("=")
        dims.append((name, "#" in word))
        hints += [(name, int(size))] if size else []
    return ArrayExample(kind, tuple(dims), tuple(hints), text.startswith("+"))


@functools.lru_cache(maxsize=4096)
def _trace(
    pattern: Pattern, batch: int, sizes: tuple[tuple[str, int], ...]
) -> TracedFormula:
    known = dict(h for spec in pattern.specs for h in spec.hints) | dict(sizes)
    names = [[n for n, _ in spec.names(batch)] for spec in pattern.specs]
    free = iter(_SIZES * 4)
    for name in dict.fromkeys(n for ns in names for n in ns):
        known.setdefault(name, next(free))
    arrays = [
        _aval(spec.kind, tuple(known[n] for n in ns))
        for spec, ns in zip(pattern.specs, names, strict=True)
    ]
    scalars = {s: jax.ShapeDtypeStruct((), jnp.float32) for s in pattern.scalars}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(pattern.plain)(*arrays, **scalars)
    top = build(jaxpr).top
    if len(top.outs) != 1:
        raise ValueError(
            f"pattern {pattern.name!r} gives {len(top.outs)} arrays, not 1"
        )
    inputs = dict(zip(top.ins, map(tuple, names), strict=False))
    # Keyword arguments are flattened in the order of their names.
    holes = dict(zip(sorted(pattern.scalars), top.ins[len(names) :], strict=True))
    arrays = zip(top.ins, pattern.specs, strict=False)
    gathers = frozenset(v for v, spec in arrays if spec.gathers)
    return TracedFormula(inputs, holes, top.outs[0], frozenset(pattern.params), gathers)


def _aval(kind: str, shape: tuple[int, ...]) -> Any:
    if kind == "key":
        return jax.eval_shape(lambda: jax.random.key(0))
    dtypes = {"float": jnp.float32, "bool": jnp.bool_, "int": jnp.int32}
    return jax.ShapeDtypeStruct(shape, dtypes[kind])
