"""Checks of arrays, dtypes, precisions and random keys."""

from typing import Any

import numpy as np

from jaxmem._checks.messages import wrong_type, wrong_value


def check_dtype(name: str, value: Any, kind: str = "floating") -> np.dtype:
    """A dtype of one of NumPy's kinds: "floating", "inexact", "integer"."""
    import jax.numpy as jnp

    allowed = f"a {kind} dtype" if kind != "inexact" else "a floating or complex dtype"
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):  # numpy's, by version
        wrong = wrong_value if isinstance(value, str) else wrong_type
        raise wrong(name, value, allowed) from None
    if value is None or not jnp.issubdtype(dtype, getattr(jnp, kind)):
        raise wrong_value(name, value, allowed)
    return dtype


def check_array(name: str, value: Any, kind: str | None = None) -> Any:
    """An array; of one of NumPy's kinds, such as "floating", if `kind` is given."""
    import jax
    import jax.numpy as jnp

    texts = {None: "an array", "bool_": "an array of bools"}
    allowed = texts.get(kind, f"an array of a {kind} dtype")
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(value, type | jax.ShapeDtypeStruct):
        raise wrong_type(name, value, allowed)
    if kind is not None and not jnp.issubdtype(dtype, getattr(jnp, kind)):
        raise wrong_type(name, value, allowed)
    return value


def check_precision(name: str, value: Any) -> Any:
    """A precision as `jax.lax` takes it: one, or one for each operand."""
    both = type(value) is tuple and len(value) == 2
    if not all(map(_is_precision, value if both else (value,))):
        wrong = wrong_value if isinstance(value, str) else wrong_type
        raise wrong(name, value, "a jax.lax.PrecisionLike, such as 'highest'")
    return value


def _is_precision(value: Any) -> bool:
    from jax import lax

    if not isinstance(value, str):
        kinds = lax.Precision | lax.DotAlgorithm | lax.DotAlgorithmPreset | None
        return isinstance(value, kinds)
    try:
        lax.Precision(value)
    except ValueError:
        return value in lax.DotAlgorithmPreset.__members__
    return True


def check_key(name: str, value: Any) -> Any:
    """One random key, typed or raw."""
    import jax

    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    allowed = (
        "is not a key: pass one of jax.random.key(...), or a raw one of "
        "jax.random.PRNGKey"
    )
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != np.uint32:
        raise wrong_type(name, value, allowed)
    if len(shape or ()) != (0 if typed else 1):
        raise wrong_value(name, value, allowed)
    return value
