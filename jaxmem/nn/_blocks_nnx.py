"""Transformer blocks for `flax.nnx`, of the layers in `nnx.py`; see `blocks.py`."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Bool, Float, Int

from jaxmem import ops
from jaxmem.nn import _layers_nnx as nnx
from jaxmem.nn._blocks import activated_dense, attend, residual_pair
from jaxmem.nn._constructor import check_heads, check_llama, check_transformer

_KERNEL_INIT = flax_nnx.initializers.lecun_normal()


class _ActivatedLinear(flax_nnx.Linear):
    """A linear layer of an activation; keeps the inputs of the activation."""

    def __init__(self, *args, activation: Callable[..., Array], **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = activation

    def of(self, *inputs: Float[Array, "*batch d"]) -> Float[Array, "*batch f"]:
        """The layer of the activation of `inputs`."""
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        dtype = self.dtype or jnp.result_type(inputs[0], kernel)
        return activated_dense(self.activation, inputs, kernel, bias, dtype)


class _NnxAttention(flax_nnx.Module):
    """Projections, `jaxmem.ops.dot_product_attention`, projection."""

    def __init__(
        self,
        width: int,
        heads: tuple[int, int],  # of queries; of keys and values
        causal: bool,
        dropout_rate: float,
        rope_theta: float | None,
        rngs: flax_nnx.Rngs,
        **options: Any,
    ):
        general = functools.partial(nnx.LinearGeneral, rngs=rngs, **options)
        queries, keys = ((n, width // heads[0]) for n in heads)
        self.query = general(width, queries)
        self.key = general(width, keys)
        self.value = general(width, keys)
        self.out = general(queries, width, axis=(-2, -1))
        self.causal = causal
        self.dropout_rate = dropout_rate
        self.rope_theta = rope_theta
        self.rngs = rngs.dropout.fork() if dropout_rate else None

    def __call__(self, x, mask, positions, deterministic: bool):
        y = attend(
            *((self.query(x), self.key(x), self.value(x)), mask, positions),
            rope_theta=self.rope_theta,
            causal=self.causal,
            rate=0.0 if deterministic else self.dropout_rate,
            rng=lambda: None if self.rngs is None else self.rngs(),
        )
        return self.out(y)


class TransformerBlock(flax_nnx.Module):
    """`jaxmem.nn.linen.TransformerBlock` for nnx: pre-LN (GPT, ViT) or post-LN (BERT).

    Args:
        width: D, of the inputs; `num_heads` divides it.
        rngs: streams "params" and, for dropout, "dropout".

    The other arguments, and errors, as of that block.

    Saves:
        As `jaxmem.nn.linen.TransformerBlock`.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_dim: int | None = None,
        *,
        norm: str = "pre",
        causal: bool = False,
        activation: Callable[[Array], Array] = ops.gelu,
        dropout_rate: float = 0.0,
        attention_dropout_rate: float | None = None,
        epsilon: float = 1e-6,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = _KERNEL_INIT,
        rngs: flax_nnx.Rngs,
    ):
        check_transformer(locals())
        check_heads(width, num_heads)
        rate = (
            dropout_rate if attention_dropout_rate is None else attention_dropout_rate
        )
        types = {"dtype": dtype, "param_dtype": param_dtype}
        dense = {"use_bias": use_bias, "kernel_init": kernel_init, **types}
        hidden = mlp_dim or 4 * width
        norms = {"epsilon": epsilon, "save": "output", "rngs": rngs, **types}
        self.norm = norm
        self.attention_norm = nnx.LayerNorm(width, **norms)
        self.attention = _NnxAttention(
            width, (num_heads, num_heads), causal, rate, None, rngs, **dense
        )
        self.mlp_norm = nnx.LayerNorm(width, **norms)
        self.up = nnx.Linear(width, hidden, rngs=rngs, **dense)
        self.down = _ActivatedLinear(
            hidden, width, activation=activation, rngs=rngs, **dense
        )
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs if dropout_rate else None)
        self.deterministic = False

    def __call__(
        self,
        x: Float[Array, "batch length width"],
        mask: Bool[Array, "..."] | None = None,
        *,
        deterministic: bool | None = None,
    ) -> Float[Array, "batch length width"]:
        """`mask`: true where a query may attend, `[batch, heads or 1, length, length]`.

        `deterministic`: None for what `model.train()` or `model.eval()` set.
        """
        still = self.deterministic if deterministic is None else deterministic

        def drop(y):
            return self.dropout(y, deterministic=still or not self.dropout.rate)

        def attended(y):
            return drop(self.attention(y, mask, None, still))

        def mlp(y):
            return drop(self.down.of(self.up(y)))

        norms = self.attention_norm, self.mlp_norm
        return residual_pair(self.norm, x, norms, (attended, mlp))


class LlamaBlock(flax_nnx.Module):
    """`jaxmem.nn.linen.LlamaBlock` for nnx: RMSNorm, rotary attention, SwiGLU.

    Args:
        width: D, of the inputs; `num_heads` divides it.
        rngs: stream "params".

    The other arguments, and errors, as of that block.

    Saves:
        As `jaxmem.nn.linen.LlamaBlock`.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_dim: int,
        *,
        num_kv_heads: int | None = None,
        rope_theta: float = 10_000.0,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = _KERNEL_INIT,
        rngs: flax_nnx.Rngs,
    ):
        check_llama(locals())
        kv_heads = num_kv_heads or num_heads
        check_heads(width, num_heads, kv_heads)
        types = {"dtype": dtype, "param_dtype": param_dtype}
        dense = {"use_bias": False, "kernel_init": kernel_init, **types}
        norms = {"epsilon": epsilon, "save": "output", "rngs": rngs, **types}
        self.attention_norm = nnx.RMSNorm(width, **norms)
        self.attention = _NnxAttention(
            width, (num_heads, kv_heads), True, 0.0, rope_theta, rngs, **dense
        )
        self.mlp_norm = nnx.RMSNorm(width, **norms)
        self.gate = nnx.Linear(width, mlp_dim, rngs=rngs, **dense)
        self.up = nnx.Linear(width, mlp_dim, rngs=rngs, **dense)
        self.down = _ActivatedLinear(
            mlp_dim, width, activation=ops.swiglu, rngs=rngs, **dense
        )

    def __call__(
        self,
        x: Float[Array, "batch length width"],
        mask: Bool[Array, "..."] | None = None,
        *,
        positions: Int[Array, "*#batch length"] | None = None,
    ) -> Float[Array, "batch length width"]:
        """`mask` as in `TransformerBlock`; `positions`: None for 0, 1, 2, ..."""
        x = x + self.attention(self.attention_norm(x), mask, positions, True)
        y = self.mlp_norm(x)
        return x + self.down.of(self.gate(y), self.up(y))
