"""The chain of operations that makes a value, in words of jnp and lax.

`x * sigmoid(1.702 * x)` and not six equations: casts and views are left out, the
outputs of products are letters, as is what is written on another line; what would be
longer than a line is cut.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from jaxmem import _compat
from jaxmem._jaxpr import bodies, split

LONGEST = 60  # characters
_SHARED = 24  # of what is read twice, and written out all the same
_DEPTHS = (8, 6, 5, 4, 3, 2, 1)
_LETTERS = "xyzuvwabcdefghijklmnopqrst"
_VIEWS = frozenset(
    """
    broadcast_in_dim convert_element_type copy copy_p expand_dims name pvary
    optimization_barrier reduce_precision reshape squeeze stop_gradient transpose
    """.split()
)
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_INFIX = {
    **{"add": ("+", 1), "add_any": ("+", 1), "sub": ("-", 1)},
    **{"mul": ("*", 2), "div": ("/", 2), "dot_general": ("@", 2)},
    **{"gt": (">", 0), "ge": (">=", 0), "lt": ("<", 0), "le": ("<=", 0)},
    **{"eq": ("==", 0), "ne": ("!=", 0), "and": ("&", 0), "or": ("|", 0)},
}
_NAMES = {
    **{"logistic": "sigmoid", "max": "maximum", "min": "minimum", "select_n": "where"},
    **{"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"},
    **{"conv_general_dilated": "conv", "iota": "arange", "gather": "take"},
    **{"random_bits": "random.bits", "threefry2x32": "random.bits", "not": "~"},
}
_ATOM = 9


@dataclass
class _Scope:
    """A list of equations, and what its arguments are in the one round it."""

    jaxpr: Any
    given: "dict[Any, tuple[_Scope, Any]]" = field(default_factory=dict)

    @cached_property
    def makers(self) -> dict[Any, Any]:
        return {out: eqn for eqn in self.jaxpr.eqns for out in eqn.outvars}

    def inside(self, eqn) -> "_Scope | None":
        """The body that has the equation's outputs."""
        for body in bodies(eqn):
            jaxpr, _ = split(body)
            if len(jaxpr.outvars) == len(eqn.outvars):
                same = len(jaxpr.invars) == len(eqn.invars)
                call = same and eqn.primitive.name not in ("scan", "while")
                pairs = zip(jaxpr.invars, eqn.invars, strict=True) if call else ()
                return _Scope(jaxpr, {v: (self, given) for v, given in pairs})
        return None


def formula_of(jaxpr: Any, var: Any) -> str:
    """What makes `var`, one of the values of an open jaxpr, in at most a line."""
    text = ""
    for depth in _DEPTHS:
        text = _Writer().write(_Scope(jaxpr), var, depth)[0]
        if len(text) <= LONGEST:
            return text
    return text[: LONGEST - 3] + "..."


class _Writer:
    """Writes one formula: a letter stands for one value throughout."""

    def __init__(self):
        self.line = ""
        self.letters: dict[Any, str] = {}
        self.reads: dict[Any, int] = {}

    def write(self, scope: _Scope, var, depth: int, root=True) -> tuple[str, int]:
        """The text, and how tightly it binds."""
        if hasattr(var, "val"):
            return _number(var.val), _ATOM
        scope, var, eqn = _seen(scope, var)
        if hasattr(var, "val"):
            return _number(var.val), _ATOM
        if eqn is None:
            return self._letter(var), _ATOM
        own = _own_op(eqn)
        if own and not root:
            return f"{own}(...)", _ATOM
        line = _line(eqn)
        if root:
            self.line = line
        cut = _is_layer(scope, eqn) or line not in (self.line, "")
        if depth == 0 or (cut and not root):
            return self._letter(var), _ATOM
        self.reads[var] = self.reads.get(var, 0) + 1
        text, tight = self._operation(scope, eqn, depth)
        if not root and self.reads[var] > 1 and len(text) > _SHARED:
            return self._letter(var), _ATOM
        return text, tight

    def _letter(self, var) -> str:
        spare = _LETTERS[len(self.letters) % len(_LETTERS)]
        return self.letters.setdefault(var, spare)

    def _operation(self, scope: _Scope, eqn, depth: int) -> tuple[str, int]:
        name = eqn.primitive.name
        read = list(eqn.invars)
        if name == "select_n" and len(read) == 3:  # where it is so comes first
            read = [read[0], read[2], read[1]]
        parts = [self.write(scope, v, depth - 1, root=False) for v in read]
        if name in _INFIX and len(parts) == 2:
            sign, tight = _INFIX[name]
            left = _wrapped(*parts[0], tight)
            return f"{left} {sign} {_wrapped(*parts[1], tight + 1)}", tight
        if name == "neg":
            return f"-{_wrapped(*parts[0], 3)}", 2
        if name in ("integer_pow", "square"):
            return f"{_wrapped(*parts[0], 4)}**{eqn.params.get('y', 2)}", 3
        if name == "pow":
            return f"{_wrapped(*parts[0], 4)}**{_wrapped(*parts[1], 4)}", 3
        word = _NAMES.get(name, eqn.params.get("name", name))
        return f"{word}({', '.join(text for text, _ in parts)})", _ATOM


def _line(eqn) -> str:
    """File and line alone: a line may have two functions."""
    return _compat.caller_line(eqn, *_compat.INSTALLED).split(" (")[0]


def _seen(scope: _Scope, var) -> tuple[_Scope, Any, Any]:
    """The value itself, below views and inside of calls, and what makes it."""
    while True:
        if hasattr(var, "val"):
            return scope, var, None
        eqn = scope.makers.get(var)
        if eqn is None:
            if var not in scope.given:
                return scope, var, None
            scope, var = scope.given[var]
        elif eqn.primitive.name in _VIEWS:
            var = eqn.invars[0]
        elif (inner := _opened(scope, eqn)) is not None:
            scope, var = inner, inner.jaxpr.outvars[eqn.outvars.index(var)]
        else:
            return scope, var, eqn


def _opened(scope: _Scope, eqn) -> _Scope | None:
    """The body of a call, unless it is a function that everybody knows."""
    name = eqn.params.get("name")
    known = isinstance(name, str) and (
        hasattr(jax.nn, name) or hasattr(jax.numpy, name)
    )
    whole = known and len(eqn.outvars) == 1 and not name.startswith("_")
    return None if whole else scope.inside(eqn)


def _own_op(eqn) -> str:
    """The op of this package that an equation is in, if any."""
    parts = _compat.name_stack(eqn).split("/")
    ops = [part.split("jaxmem.")[1].rstrip(")") for part in parts if "jaxmem." in part]
    return next((op for op in ops if op != "leave"), "")


def _is_layer(scope: _Scope, eqn) -> bool:
    """A product, or one with a bias."""
    if eqn.primitive.name in PRODUCTS:
        return True
    if eqn.primitive.name != "add":
        return False
    makers = [_seen(scope, v)[2] for v in eqn.invars]
    return any(m is not None and m.primitive.name in PRODUCTS for m in makers)


def _wrapped(text: str, tight: int, least: int) -> str:
    return text if tight >= least else f"({text})"


def _number(value: Any) -> str:
    size = getattr(value, "size", 1)
    return f"{float(value):.4g}" if size == 1 and _is_real(value) else "const"


def _is_real(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
