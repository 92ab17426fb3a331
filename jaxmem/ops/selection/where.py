"""`where` that keeps its condition in one bit an element.

Plain JAX keeps a byte an element of the condition (XLA's booleans).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxmem._bits import pack_bits, unpack_bits
from jaxmem._checks import check_array, shown, wrong_type
from jaxmem.ops.codes.stored import is_nonzero


def where(
    condition: Bool[ArrayLike, "..."],
    x: Float[ArrayLike, "..."],
    y: Float[ArrayLike, "..."],
) -> Float[Array, "..."]:
    """x where the condition holds, else y, as `jax.numpy.where`.

    Args:
        condition: booleans, broadcastable with x and y.
        x: floating array or number.
        y: floating array or number.

    Returns:
        An array of the broadcast shape.

    Raises:
        TypeError: a condition that is not boolean, or an x and y that are not floating.

    Saves:
        The condition, an eighth of a byte an element of its own shape. For a condition
        that costs nothing to recompute (from positions, as a causal mask), `jnp.where`
        under `jax.checkpoint` keeps nothing.

    Source:
        The packed mask of Bhatia and Dangel, arXiv 2404.12406, section 3.
    """
    if not isinstance(condition, bool):
        check_array("where: condition", condition, "bool_")
    condition = jnp.asarray(condition)
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, int | float) or isinstance(value, bool):
            check_array(f"where: {name}", value, "floating")
    dtype = jnp.result_type(x, y)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise wrong_type("where: x", x, f"and y={shown(y)}: one of a floating dtype")
    x, y = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    try:
        shape = jnp.broadcast_shapes(condition.shape, x.shape, y.shape)
    except ValueError:
        raise ValueError(
            f"where: condition={shown(condition)}, x={shown(x)}, y={shown(y)}: shapes "
            "that broadcast to one"
        ) from None
    with jax.named_scope("jaxmem.where"):
        x, y = jnp.broadcast_to(x, shape), jnp.broadcast_to(y, shape)
        return _where(condition, x, y)


def _select(condition, x, y):
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, y)


@jax.custom_jvp
def _where(condition, x, y):
    return _select(condition, x, y)


@functools.partial(_where.defjvp, symbolic_zeros=True)
def _where_jvp(primals, tangents):
    condition, x, y = primals
    dots = [t if is_nonzero(t) else None for t in tangents[1:]]

    def linear(packed, x_dot, y_dot):
        some = x_dot if y_dot is None else y_dot
        mask = unpack_bits(packed, condition.shape)
        sides = (jnp.zeros_like(some) if t is None else t for t in (x_dot, y_dot))
        return _select(mask, *sides)

    packed = checkpoint_name(pack_bits(condition), "jaxmem_where_condition")
    return _select(condition, x, y), jax.checkpoint(linear, prevent_cse=False)(
        packed, *dots
    )
