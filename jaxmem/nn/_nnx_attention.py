"""`flax.nnx.dot_product_attention` on the lean op, with Flax's own as the fallback."""

import functools

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from jaxtyping import Array, Float

from jaxmem.nn._fallback import fall_back
from jaxmem.nn._functions import attend
from jaxmem.ops.codes import Quantization, SaveLike


def dot_product_attention(
    query: Float[Array, "*batch q heads d"],
    key: Float[Array, "*batch k kv_heads d"],
    value: Float[Array, "*batch k kv_heads d"],
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype=None,
    precision=None,
    module: nnx.Module | None = None,
    promote_dtype=flax_promote_dtype,
    is_causal: bool = False,
    *,
    save: SaveLike | None = None,
) -> Float[Array, "*batch q heads d"]:
    """As `flax.nnx.dot_product_attention`, without anything of size length squared.

    The softmax is always in float32. With a `precision`, or a `module` to sow the
    weights into, Flax's own function runs.

    Args:
        query: of shape `[batch..., q_length, heads, d]`.
        key: of shape `[batch..., k_length, kv_heads, d]`.
        value: as `key`.
        bias: added to the logits; broadcasts to `[batch..., heads, q_length,
            k_length]`.
        mask: False where a query must not see a key; broadcasts like `bias`.
        broadcast_dropout: one dropout mask for the whole batch and all heads.
        dropout_rng: the key of the mask.
        dropout_rate: of the probabilities.
        deterministic: True switches dropout off.
        dtype: of the computation; that of the inputs if None.
        precision: of the products, for Flax's function.
        module: a module to sow the weights into, for Flax's function.
        promote_dtype: as in Flax.
        is_causal: query t sees keys 0..t.
        save: bits a value, to keep query, key, value and the output as codes.

    Returns:
        The attended values, of the shape of `query`.
    """
    reason = None
    if precision is not None:
        reason = "a precision of its own"
    elif module is not None:
        reason = "sow_weights=True asks for the weights"
    elif value.shape != key.shape:
        reason = "values of another shape than keys"
    if reason:
        fall_back("dot_product_attention", reason)
        return nnx.dot_product_attention(
            *(query, key, value, bias, mask, broadcast_dropout, dropout_rng),
            *(dropout_rate, deterministic, dtype, precision, module),
            *(promote_dtype, is_causal),
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    return attend(
        *(query, key, value, bias, mask),
        is_causal=is_causal,
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        save=save,
    )


@functools.cache
def attention_saving(save: Quantization):
    """The function with its `save` given; one and the same for equal models."""
    return functools.partial(dot_product_attention, save=save)
