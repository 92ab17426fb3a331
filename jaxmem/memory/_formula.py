"""The operations that compute a value, as a formula of jnp and lax.

The formula of six equations is `x * sigmoid(1.702 * x)`: casts and views are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import bodies, is_var, split

LONGEST = 60  # characters of a formula
_SHARED = 24  # characters up to which a value that is read twice is written out
_DEPTHS = (8, 6, 5, 4, 3, 2, 1)  # tried until a formula is short enough
_LETTERS = "xyzuvwabcdefghijklmnopqrst"
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
    **{"position_bits": "random.bits"},
}
_ATOM = 9  # binds tighter than any operator


@dataclass
class _Scope:
    """A list of equations, and what its arguments are in the list around it."""

    jaxpr: Any
    given: "Mapping[Any, tuple[_Scope, Any]]" = field(default_factory=dict)
    op: str = ""  # of this package that the list is in

    @cached_property
    def makers(self) -> dict[Any, Any]:
        return {out: eqn for eqn in self.jaxpr.eqns for out in eqn.outvars}

    def inside(self, eqn) -> "_Scope | None":
        """The body of a call, with the equation's outputs."""
        for body in bodies(eqn):
            jaxpr, _ = split(body)
            if len(jaxpr.outvars) == len(eqn.outvars):
                same = len(jaxpr.invars) == len(eqn.invars)
                call = same and not primitives.is_loop(eqn)
                pairs = zip(jaxpr.invars, eqn.invars, strict=True) if call else ()
                inputs = {v: (self, given) for v, given in pairs}
                return _Scope(jaxpr, inputs, self.op_of(eqn))
        return None

    def op_of(self, eqn) -> str:
        """The op of this package that an equation is in, if any."""
        # the name scopes of a call are not those of the equations in it
        parts = _compat.name_stack(eqn).split("/")
        ops = [p.split("jaxmem.")[1].rstrip(")") for p in parts if "jaxmem." in p]
        return next((op for op in ops if op != "leave"), self.op)


def formula_of(jaxpr: Any, var: Any) -> str:
    """The formula of `var`, a value of an open jaxpr, in at most a line."""
    _, root, eqn = _definition(_Scope(jaxpr), var)
    if eqn is None and not is_var(root):  # one number, as an array
        return f"full({_number(root.val)})"
    text = ""
    for depth in _DEPTHS:
        text = _Writer().write(_Scope(jaxpr), var, depth)[0]
        if len(text) <= LONGEST:
            return text
    return text[: LONGEST - 3] + "..."


class _Writer:
    """Writes one formula, in which a letter stands for one value."""

    def __init__(self):
        self.line = ""
        self.letters: dict[Any, str] = {}
        self.reads: dict[Any, int] = {}

    def write(self, scope: _Scope, var, depth: int, root=True) -> tuple[str, int]:
        """The text, and how tightly it binds."""
        scope, var, eqn = _definition(scope, var)
        if not is_var(var):
            return _number(var.val), _ATOM
        if eqn is None:
            return self._letter(var), _ATOM
        op = scope.op_of(eqn)
        if op and not root:
            return f"{op}(...)", _ATOM
        # Without the function: a lambda shares the line of another.
        line = _compat.caller_line(eqn, *_compat.INSTALLED).split(" (")[0]
        if root:
            self.line = line
        # Outputs of products and values written on another line are letters.
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
        if name == "select_n" and len(read) == 3:  # jnp.where is (yes, no)
            read = [read[0], read[2], read[1]]
        parts = [self.write(scope, v, depth - 1, root=False) for v in read]
        if {text for text, _ in parts} == {f"{scope.op_of(eqn)}(...)"}:
            return parts[0]  # made in an op of values in it: the op says more
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


def _definition(scope: _Scope, var) -> tuple[_Scope, Any, Any]:
    """The value below views and inside of calls, and the equation that computes it."""
    while True:
        if not is_var(var):
            return scope, var, None
        eqn = scope.makers.get(var)
        if eqn is None:
            if var not in scope.given:
                return scope, var, None
            scope, var = scope.given[var]
        elif primitives.of(eqn).shows:
            var = eqn.invars[eqn.outvars.index(var)]
        elif (inner := _opened(scope, eqn)) is not None:
            scope, var = inner, inner.jaxpr.outvars[eqn.outvars.index(var)]
        else:
            return scope, var, eqn


def _opened(scope: _Scope, eqn) -> _Scope | None:
    """The body of a call, unless it is a function of `jax.nn` or `jax.numpy`."""
    name = eqn.params.get("name")
    known = isinstance(name, str) and (
        hasattr(jax.nn, name) or hasattr(jax.numpy, name)
    )
    whole = known and len(eqn.outvars) == 1 and not name.startswith("_")
    return None if whole else scope.inside(eqn)


def _is_layer(scope: _Scope, eqn) -> bool:
    """A product, or one with a bias."""
    if primitives.is_product(eqn):
        return True
    if eqn.primitive.name != "add":
        return False
    makers = [_definition(scope, v)[2] for v in eqn.invars]
    return any(m is not None and primitives.is_product(m) for m in makers)


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
