"""A selective state space model: a linear recurrence by an associative scan.

After Gu and Dao 2023: the step length, the input and the output weights of the
recurrence depend on the token. Layers in one `lax.scan`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, dense, of_size, training_step


class Size(NamedTuple):
    batch: int
    length: int
    width: int
    states: int
    layers: int
    vocabulary: int


def initial(key, s: Size):
    k = jax.random.split(key, 8)
    inner, n = 2 * s.width, s.layers
    layers = {
        "scale": jnp.ones((n, s.width)),
        "in": dense(k[0], n, s.width, 2 * inner),
        "conv": dense(k[1], n, 4, inner),
        "select": dense(k[2], n, inner, 2 * s.states + 1),
        "delta": dense(k[3], n, 1, inner),
        "rates": jnp.log(
            jnp.broadcast_to(jnp.arange(1.0, s.states + 1), (n, inner, s.states))
        ),
        "skip": jnp.ones((n, inner)),
        "out": dense(k[4], n, inner, s.width),
    }
    embedding = 0.02 * jax.random.normal(k[5], (s.vocabulary, s.width))
    return {"layers": layers, "embedding": embedding, "scale": jnp.ones(s.width)}


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def causal_convolution(x, kernel):
    """Each channel of x [B, T, C] with its own taps [K, C]."""
    taps = kernel.shape[0]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    return sum(padded[:, i : i + x.shape[1]] * kernel[i] for i in range(taps))


def recurrence(x, layer, states: int):
    """h[t] = exp(delta a) h[t-1] + delta b[t] x[t], read by c[t]."""
    delta, b, c = jnp.split(x @ layer["select"], [1, 1 + states], axis=-1)
    delta = jax.nn.softplus(delta @ layer["delta"])[..., None]
    decay = jnp.exp(-delta * jnp.exp(layer["rates"]))
    given = delta * b[:, :, None] * x[..., None]

    def joined(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, h = jax.lax.associative_scan(joined, (decay, given), axis=1)
    return (h * c[:, :, None]).sum(-1) + layer["skip"] * x


def loss(params, tokens):
    states = params["layers"]["rates"].shape[-1]

    def block(x, layer):
        inner = rms_norm(x, layer["scale"]) @ layer["in"]
        y, gate = jnp.split(inner, 2, axis=-1)
        y = jax.nn.silu(causal_convolution(y, layer["conv"]))
        y = recurrence(y, layer, states) * jax.nn.silu(gate)
        return x + y @ layer["out"], None

    x = params["embedding"][tokens[:, :-1]]
    x, _ = jax.lax.scan(block, x, params["layers"])
    logits = rms_norm(x, params["scale"]) @ params["embedding"].T
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(logits, tokens[:, 1:]).mean()


def make(size: str):
    s = of_size(
        size,
        small=Size(2, 9, 6, 3, 2, 11),
        big=Size(4, 513, 512, 16, 8, 16_384),
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 10, 1000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))

    def init(key):
        k = jax.random.split(key)
        params = initial(k[0], s)
        tokens = jax.random.randint(k[1], (s.batch, s.length), 0, s.vocabulary)
        return (params, tx.init(params)), tokens

    return training_step(loss, tx), arguments(size, init), (0,)
