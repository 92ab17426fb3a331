"""What generated steps are composed of: functions of [batch, tokens, width].

Each block takes `x`, the weights of one layer and a key, and gives another `x` of the
same shape and dtype. Some go through with an axis, some reduce over it or mix it, and
for some there is no rule: what a tile makes of each has to be what the block gives.
"""

import jax
import jax.numpy as jnp
from jax import lax

HEADS = 2


def dense(x, w, key):
    return jnp.tanh(x @ w["a"] + w["s"])


def mlp(x, w, key):
    return x + jax.nn.gelu(x @ w["b"]) @ w["c"]


def gated(x, w, key):
    up = x @ w["b"]
    return x + (jax.nn.silu(up) * up[..., ::-1]) @ w["c"]


def rms_norm(x, w, key):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + _like(1e-2, x)) * w["s"]


def layer_norm(x, w, key):
    y = x - jnp.mean(x, -1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + _like(1e-2, x)) + w["s"]


def attention(x, w, key, mask=None):
    """Causal, with heads, as in textbooks."""
    q, k, v = (_in_heads(y) for y in (x @ w["a"], x, x @ w["a"].T))
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    mask = _causal(x) if mask is None else mask
    scores = jnp.where(mask, scores, _like(-1e4, x))
    y = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)
    return x + y.reshape(x.shape)


def two_attentions(x, w, key):
    """One mask for both."""
    mask = _causal(x)
    return attention(attention(x, w, key, mask), w, key, mask)


def library_attention(x, w, key):
    q, k = _in_heads(x @ w["a"]), _in_heads(x)
    how = {"is_causal": True, "implementation": "xla"}
    return x + jax.nn.dot_product_attention(q, k, k, **how).reshape(x.shape)


def grouped_attention(x, w, key):
    """All heads read one key and value."""
    q, k = _in_heads(x), _in_heads(x @ w["a"])[:, :, 0]
    scores = jax.nn.softmax(jnp.einsum("bshd,btd->bhst", q, k), -1)
    return x + jnp.einsum("bhst,btd->bshd", scores, k).reshape(x.shape)


def batch_norm(x, w, key):
    """Examples and tokens meet."""
    y = x - jnp.mean(x, (0, 1))
    return y * lax.rsqrt(jnp.mean(y * y, (0, 1)) + _like(1e-2, x)) * w["s"]


def over_tokens(x, w, key):
    return x + jax.nn.softmax(x @ w["a"], 1) * jnp.max(x, 1, keepdims=True)


def log_sum_exp(x, w, key):
    return x - jax.nn.logsumexp(x @ w["b"], -1, keepdims=True)


def running_sum(x, w, key):
    return x + jnp.cumsum(x @ w["a"], 1) / x.shape[1]


def shifted(x, w, key):
    """Each token reads the one before it."""
    before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return x + before @ w["a"]


def padded(x, w, key):
    return x + jnp.pad(x[:, 1:] @ w["a"], ((0, 0), (0, 1), (0, 0)))


def convolution(x, w, key):
    kernel = jnp.stack([w["a"], w["a"].T, w["a"]])
    return x + lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def chosen_tokens(x, w, key):
    """A gather within each example."""
    order = jnp.argsort(lax.stop_gradient(jnp.sum(x, -1)), 1)
    return x @ w["a"] + jnp.take_along_axis(x, order[:, :, None], 1)


def buckets(x, w, key):
    """A scatter with sums, and a gather from what it has made."""
    where = jnp.arange(x.shape[1]) % 3
    sums = jnp.zeros((x.shape[0], 3, x.shape[2]), x.dtype).at[:, where].add(x @ w["a"])
    return x + sums[:, where]


def experts(x, w, key):
    """Each token goes to one of two, all of them through both."""
    gate = jax.nn.softmax(x @ w["a"][:, :2], -1)
    first = jax.nn.one_hot(jnp.argmax(gate, -1), 2, dtype=x.dtype) * gate
    hidden = jnp.einsum("btd,edf->ebtf", x, jnp.stack([w["b"], w["b"][::-1]]))
    out = jnp.einsum("ebtf,fd->ebtd", jax.nn.relu(hidden), w["c"])
    return x + jnp.einsum("ebtd,bte->btd", out, first)


def in_order(x, w, key):
    return jnp.sort(x @ w["a"], -1) + x


def flat(x, w, key):
    """Examples and tokens are one axis."""
    y = jnp.reshape(x, (-1, x.shape[-1]))
    return x + jnp.reshape(jnp.sin(y @ w["b"]) @ w["c"], x.shape)


def transposed(x, w, key):
    y = jnp.moveaxis(x, 0, 2)  # [tokens, width, batch]
    return x + jnp.moveaxis(jnp.einsum("tdb,de->teb", jnp.cos(y), w["a"]), 2, 0)


def between_examples(x, w, key):
    """Every example reads all others."""
    y = jnp.mean(x, 1)
    return x + (jax.nn.softmax(y @ y.T, -1) @ y @ w["a"])[:, None]


def valid_tokens(x, w, key):
    """Lengths that differ by example."""
    lengths = 1 + jnp.arange(x.shape[0]) % x.shape[1]
    valid = jnp.arange(x.shape[1])[None] < lengths[:, None]
    return jnp.where(valid[..., None], x @ w["a"], x)


def window(x, w, key):
    """A slice from a place that the values decide, written back."""
    half = max(1, x.shape[1] // 2)
    start = jnp.argmax(lax.stop_gradient(x[0, : x.shape[1] - half + 1, 0]))
    part = lax.dynamic_slice_in_dim(x, start, half, 1)
    return lax.dynamic_update_slice_in_dim(x, part @ w["a"], start, 1)


# -- bodies in which others lie


def either(x, w, key):
    positive = jnp.sum(x * w["s"]) > 0
    return lax.cond(positive, lambda x: mlp(x, w, key), lambda x: dense(x, w, key), x)


def recurrent(x, w, key):
    """A scan over tokens."""

    def cell(carry, token):
        carry = jnp.tanh(carry @ w["a"] + token)
        return carry, carry * w["s"]

    _, out = lax.scan(cell, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
    return x + jnp.swapaxes(out, 0, 1)


def one_by_one(x, w, key):
    """A scan over examples, each with attention."""
    return lax.map(lambda one: attention(one[None], w, key)[0], x)


def repeated(x, w, key):
    return lax.fori_loop(0, 2, lambda _, x: mlp(x, w, key) / _like(2, x), x)


def called(x, w, key):
    return jax.jit(mlp)(x, w, key)


@jax.custom_jvp
def _own_slope(x):
    return jnp.sin(x)


@_own_slope.defjvp
def _own_slope_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.sin(x), t * jnp.cos(x) / _like(2, x)


def own_slope(x, w, key):
    return x + _own_slope(x @ w["b"]) @ w["c"]


@jax.custom_vjp
def _own_gradient(x, weight):
    return jnp.tanh(x @ weight)


def _own_forward(x, weight):
    y = jnp.tanh(x @ weight)
    return y, (x, y, weight)


def _own_backward(kept, g):
    x, y, weight = kept
    g = g * (1 - y * y)
    return g @ weight.T, jnp.einsum("btd,bte->de", x, g).astype(weight.dtype)


_own_gradient.defvjp(_own_forward, _own_backward)


def own_gradient(x, w, key):
    return x + _own_gradient(x, w["a"])


def dropout(x, w, key):
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.where(keep, x @ w["a"] / _like(0.8, x), _like(0, x))


def noisy_attention(x, w, key):
    """Dropout on the probabilities, by another generator than the default."""
    own = jax.random.key(3, impl="rbg")
    keep = jax.random.bernoulli(own, 0.9, (x.shape[0], x.shape[1], x.shape[1]))
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", x @ w["a"], x), -1)
    return x + jnp.where(keep, scores, _like(0, x)) @ x


def _in_heads(x):
    return jnp.reshape(x, (*x.shape[:2], HEADS, -1))


def _causal(x):
    return jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))


def _like(number, x):
    return jnp.asarray(number, x.dtype)


BLOCKS = {
    f.__name__: f
    for f in (
        *(dense, mlp, gated, rms_norm, layer_norm, attention, two_attentions),
        *(library_attention, grouped_attention, batch_norm, over_tokens, log_sum_exp),
        *(running_sum, shifted, padded, convolution, chosen_tokens, buckets, experts),
        *(in_order, flat, transposed, between_examples, valid_tokens, window),
        *(either, recurrent, one_by_one, repeated, called),
        *(own_slope, own_gradient, dropout, noisy_attention),
    )
}
# whose result jumps where two numbers are nearly equal
DECIDING = {"chosen_tokens", "window", "experts", "either", "in_order", "over_tokens"}
