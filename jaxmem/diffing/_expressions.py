"""An equation as an expression of plain JAX, found by trying: it is traced back.

Most primitives are called as their function of `jax.lax`, whose keywords have the names
of the parameters. What has no such function is bound as a primitive.
"""

import enum
import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem import _compat
from jaxmem.diffing._opened import opened
from jaxmem.ir import jaxprs

# What a script has under these names.
NAMESPACE = {
    **{"jax": jax, "jnp": jnp, "np": np, "lax": lax},
    "primitives": _compat.PRIMITIVES,
}
# Functions of another name, or with other arguments than the primitive's parameters.
_CALLS = {
    "and": "lax.bitwise_and({0}, {1})",
    "or": "lax.bitwise_or({0}, {1})",
    "xor": "lax.bitwise_xor({0}, {1})",
    "not": "lax.bitwise_not({0})",
    "argmax": "lax.argmax({0}, {axes}[0], {index_dtype})",
    "argmin": "lax.argmin({0}, {axes}[0], {index_dtype})",
    "concatenate": "lax.concatenate([{all}], {dimension})",
    "copy": "jnp.copy({0})",
    "dynamic_slice": "lax.dynamic_slice({0}, [{rest}], {slice_sizes})",
    "dynamic_update_slice": "lax.dynamic_update_slice({0}, {1}, [{rest2}])",
    "iota": "lax.broadcasted_iota({dtype}, {shape}, {dimension})",
    "optimization_barrier": "lax.optimization_barrier({tuple})",
    "random_bits": "jax.random.bits({0}, {shape}, 'uint{bit_width}')",
    "random_fold_in": "jax.random.fold_in({0}, {1})",
    "random_seed": "jax.random.key({0})",
    "random_split": "jax.random.split({0}, {shape})",
    "random_unwrap": "jax.random.key_data({0})",
    "random_wrap": "jax.random.wrap_key_data({0})",
    "reshape": "lax.reshape({0}, {new_sizes}, {dimensions})",
    "scatter-add": "lax.scatter_add({0}, {1}, {2}, {dimension_numbers}, "
    "indices_are_sorted={indices_are_sorted}, unique_indices={unique_indices}, "
    "mode={mode})",
    "stack": "jnp.stack([{all}], {axis})",
    "sort": "lax.sort({tuple}, dimension={dimension}, is_stable={is_stable}, "
    "num_keys={num_keys})",
}
_FOUND: dict[tuple, str] = {}  # equation -> its expression, with holes for operands
_HOLE = re.compile(r"\b_(\d+)_\b")
# Parameters that tell how an equation was traced, or what the types tell as well.
_NOT_COMPARED = frozenset(
    "accuracy ft_in ft_out linear out_sharding preferred_element_type"
    " sharding weak_type".split()
)


class UnwritableError(ValueError):
    """An equation that no expression of plain JAX was found for."""


def expression(eqn: Any, names: Sequence[str | None]) -> str:
    """Python that computes the outputs of an equation.

    Args:
      eqn: an equation without bodies of its own.
      names: of its operands; None for literals.

    Raises:
      UnwritableError: none was found that traces back to this equation.
    """
    literals = [
        None if n else literal(v) for n, v in zip(names, eqn.invars, strict=True)
    ]
    key = signature(eqn), *literals
    if key not in _FOUND:
        _FOUND[key] = _find(
            eqn, [None if one else f"_{i}_" for i, one in enumerate(literals)]
        )
    return _HOLE.sub(lambda found: str(names[int(found[1])]), _FOUND[key])


def _find(eqn: Any, names: Sequence[str | None]) -> str:
    typed = [n or literal(v) for n, v in zip(names, eqn.invars, strict=True)]
    plain = [n or _number(v.val) for n, v in zip(names, eqn.invars, strict=True)]
    for operands in dict.fromkeys(map(tuple, (plain, typed))):
        for text in _candidates(eqn, operands):
            if _traces_back(text, eqn, names):
                return text
    raise UnwritableError(
        f"the operation {eqn.primitive.name!r} cannot be written as plain JAX"
    )


def literal(atom: Any) -> str:
    """A literal with its dtype."""
    dtype = atom.aval.dtype
    return f'np.dtype("{dtype.name}").type({_number(atom.val)})'


def value(x: Any) -> str:
    """Python of a parameter."""
    if x is None or isinstance(x, bool | int | str):
        return repr(x)
    if isinstance(x, float | np.number):
        return _number(x)
    if isinstance(x, jax.memory.Space):
        return f"jax.memory.Space.{x.name}"
    if isinstance(x, enum.Enum):
        return f"lax.{type(x).__name__}.{x.name}"
    if isinstance(x, np.dtype) or isinstance(x, type) and issubclass(x, np.generic):
        return f'"{np.dtype(x).name}"'
    fields = getattr(x, "_fields", None) or getattr(x, "__dataclass_fields__", None)
    if fields and hasattr(lax, type(x).__name__):
        inside = ", ".join(f"{f}={value(getattr(x, f))}" for f in fields)
        return f"lax.{type(x).__name__}({inside})"
    if isinstance(x, tuple | list):
        return tuple_of([value(one) for one in x])
    raise UnwritableError(f"a parameter {x!r} cannot be written as plain JAX")


def tuple_of(texts: Sequence[str]) -> str:
    """A tuple of expressions."""
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _number(x: Any) -> str:
    x = np.asarray(x).item()  # jax has classes of its own for typed numbers
    special = isinstance(x, float) and not np.isfinite(x)
    return f'float("{x}")' if special else repr(x)


def _candidates(eqn: Any, operands: Sequence[str]) -> Iterator[str]:
    name = eqn.primitive.name
    for write in (_call, _function, _with_types, _bound):
        try:
            if text := write(name, eqn, operands):
                yield text
        except UnwritableError:  # a parameter: another form may not need it
            pass


def _call(name: str, eqn: Any, operands: Sequence[str]) -> str:
    if name not in _CALLS:
        return ""
    params = {k: value(v) for k, v in eqn.params.items() if f"{{{k}}}" in _CALLS[name]}
    lists = {"all": operands, "rest": operands[1:], "rest2": operands[2:]}
    joined = {k: ", ".join(v) for k, v in lists.items()} | {"tuple": tuple_of(operands)}
    return _CALLS[name].format(*operands, **params, **joined)


def _function(
    name: str, eqn: Any, operands: Sequence[str], left: frozenset[str] = _NOT_COMPARED
) -> str:
    parameters = _parameters(name)
    if parameters is None:
        return ""
    found = {p.name: p.default for p in [*parameters.values()][len(operands) :]}
    params = {k: eqn.params[k] for k in found if k in eqn.params and k not in left}
    given = [f"{k}={value(v)}" for k, v in params.items() if not _equal(v, found[k])]
    return f"lax.{name}({', '.join([*operands, *given])})"


def _with_types(name: str, eqn: Any, operands: Sequence[str]) -> str:
    return _function(name, eqn, operands, _NOT_COMPARED - {"preferred_element_type"})


def _equal(x: Any, default: Any) -> bool:
    return x is default or (type(x) is type(default) and x == default)


@functools.cache
def _parameters(name: str) -> Any:
    try:
        return inspect.signature(getattr(lax, name)).parameters
    except (AttributeError, TypeError, ValueError):
        return None


def _bound(name: str, eqn: Any, operands: Sequence[str]) -> str:
    public = vars(_compat.PRIMITIVES).items()
    found = next((n for n, one in public if one is eqn.primitive), "")
    dtype = lambda v: f"np.dtype({value(v)})" if isinstance(v, np.dtype) else value(v)
    given = (f"{k}={dtype(v)}" for k, v in eqn.params.items())
    inside = ", ".join([*operands, *given])
    return f"primitives.{found}.bind({inside})" if found else ""


def _traces_back(text: str, eqn: Any, names: Sequence[str | None]) -> bool:
    """Whether an expression is traced to one equation like this one."""
    given = {n: v.aval for n, v in zip(names, eqn.invars, strict=True) if n}
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given.values()]
    try:
        fn = eval(f"lambda {', '.join(given)}: {text}", dict(NAMESPACE))
        made = opened(jax.make_jaxpr(fn)(*avals)).jaxpr.eqns
    except Exception:  # not a form of this primitive
        return False
    return len(made) == 1 and _alike(made[0], eqn)


def _alike(one: Any, other: Any) -> bool:
    return one.primitive is other.primitive and signature(one) == signature(other)


def signature(eqn: Any) -> tuple:
    """Equal for equations that compute the same, each from its own operands."""
    of = lambda atoms: tuple((v.aval.shape, str(v.aval.dtype)) for v in atoms)
    params = ((k, v) for k, v in sorted(eqn.params.items()) if k not in _NOT_COMPARED)
    told = [(k, _told(v)) for k, v in params if not callable(v)]
    return eqn.primitive.name, of(eqn.invars), of(eqn.outvars), str(told)


def _told(x: Any) -> str:
    if jaxprs.is_body(x) or isinstance(x, tuple | list) and jaxprs.has_body(x):
        return ""
    try:
        return value(x)
    except UnwritableError:
        return repr(x)
