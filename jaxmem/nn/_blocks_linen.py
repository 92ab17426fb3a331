"""Transformer blocks for `flax.linen`, of the layers in `linen.py`: see `_blocks`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Bool, Float, Int

from jaxmem import ops
from jaxmem.nn import _layers_linen as linen
from jaxmem.nn._blocks import activated_dense, attend, residual_pair
from jaxmem.nn._constructor import check_heads, check_llama, check_transformer


class _ActivatedDense(nn.Dense):
    """A dense layer of an activation; keeps the inputs of the activation."""

    activation: Callable[..., Array] = ops.gelu

    @nn.compact
    def __call__(self, *inputs: Float[Array, "*batch d"]) -> Float[Array, "*batch f"]:
        shape = inputs[0].shape[-1], self.features
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype)
        dtype = self.dtype or jnp.result_type(inputs[0], kernel)
        return activated_dense(self.activation, inputs, kernel, bias, dtype)


class _LinenAttention(nn.Module):
    """Projections, `jaxmem.ops.dot_product_attention`, projection."""

    num_heads: int
    num_kv_heads: int
    causal: bool
    dropout_rate: float
    rope_theta: float | None
    use_bias: bool
    dtype: Dtype | None
    param_dtype: Dtype
    kernel_init: Initializer

    @nn.compact
    def __call__(self, x, mask, positions, deterministic: bool):
        head = x.shape[-1] // self.num_heads

        def dense(features, name: str, axis: Any = -1):
            return linen.DenseGeneral(
                features,
                axis,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=self.kernel_init,
                name=name,
            )

        q = dense((self.num_heads, head), "query")(x)
        k = dense((self.num_kv_heads, head), "key")(x)
        v = dense((self.num_kv_heads, head), "value")(x)
        y = attend(
            *((q, k, v), mask, positions),
            rope_theta=self.rope_theta,
            causal=self.causal,
            rate=0.0 if deterministic else self.dropout_rate,
            rng=lambda: self.make_rng("dropout"),
        )
        return dense(x.shape[-1], "out", (-2, -1))(y)


class TransformerBlock(nn.Module):
    """Attention and an MLP with residuals: pre-LN (GPT, ViT) or post-LN (BERT).

    Args:
        num_heads: heads of the attention; divides the width D of the input.
        mlp_dim: width F of the MLP; None: 4 D.
        norm: "pre" normalises what goes into attention and MLP, "post" the sum after.
        causal: no position attends to a later one.
        activation: elementwise, between the two layers of the MLP.
        dropout_rate: of attention's and the MLP's outputs.
        attention_dropout_rate: of the attention weights; None: as `dropout_rate`.
        epsilon: of the norms.
        use_bias: whether dense layers have one.
        dtype: to compute in; None: what inputs and parameters promote to.
        param_dtype: of the parameters.
        kernel_init: of all kernels.
        deterministic: no dropout; here or in the call.

    Raises:
        ValueError: another word for `norm`, or heads that do not divide the width.

    Saves:
        For N tokens in 2 bytes a number: the outputs of both norms (2 N D numbers),
        query, key, value and the output of attention (4 N D), the input of the
        activation (N F), and a few float32 a token: 6 N D + N F in all, half of the
        4 N F and more that plain layers keep. Post-LN in a scan keeps the last norm's
        output twice (as its output, and as the next layer's input), unless
        `jaxmem.schedule` is round the step, which keeps it once. Dropout: a key.

    Source:
        Vaswani et al., arXiv 1706.03762, section 3.1; pre-LN: Xiong et al., arXiv
        2002.04745; what is kept: Tempo, arXiv 2210.10246.
    """

    num_heads: int
    mlp_dim: int | None = None
    norm: str = "pre"
    causal: bool = False
    activation: Callable[[Array], Array] = ops.gelu
    dropout_rate: float = 0.0
    attention_dropout_rate: float | None = None
    epsilon: float = 1e-6
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        check_transformer(vars(self))
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length width"],
        mask: Bool[Array, "..."] | None = None,
        *,
        deterministic: bool | None = None,
    ) -> Float[Array, "batch length width"]:
        """`mask`: true where a query attends, `[batch, heads or 1, length, length]`."""
        width = x.shape[-1]
        check_heads(width, self.num_heads)
        rates = self.dropout_rate, self.attention_dropout_rate
        if any(rates):
            deterministic = nn.merge_param(
                "deterministic", self.deterministic, deterministic
            )
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        dense = {"use_bias": self.use_bias, "kernel_init": self.kernel_init, **types}
        attention = _LinenAttention(
            self.num_heads,
            self.num_heads,
            self.causal,
            rates[0] if rates[1] is None else rates[1],
            None,
            **dense,
            name="attention",
        )
        up = linen.Dense(self.mlp_dim or 4 * width, name="up", **dense)
        down = _ActivatedDense(width, activation=self.activation, name="down", **dense)

        def norm(name: str):
            return linen.LayerNorm(self.epsilon, name=name, save="output", **types)

        def drop(y):
            return linen.Dropout(self.dropout_rate)(y, deterministic or not rates[0])

        def attended(y):
            return drop(attention(y, mask, None, deterministic or not any(rates)))

        norms = norm("attention_norm"), norm("mlp_norm")
        return residual_pair(
            self.norm, x, norms, (attended, lambda y: drop(down(up(y))))
        )


class LlamaBlock(nn.Module):
    """RMSNorm, grouped causal attention with rotary embedding, RMSNorm, SwiGLU.

    Args:
        num_heads: heads of the queries; divides the width D of the input.
        num_kv_heads: heads of keys and values, K; None: as `num_heads`.
        mlp_dim: width F of the MLP.
        rope_theta: base of the rotary embedding.
        epsilon: of the norms.
        dtype: to compute in; None: what inputs and parameters promote to.
        param_dtype: of the parameters; there are no biases.
        kernel_init: of all kernels.

    Raises:
        ValueError: heads that do not divide the width, or each other.

    Saves:
        For N tokens: the outputs of both norms, query and attention's output (4 N D
        numbers), key and value (2 N D K / heads), both projections of the MLP (2 N F;
        their product is recomputed), and a few float32 a token.

    Source:
        Touvron et al., LLaMA, arXiv 2302.13971, section 2.2.
    """

    num_heads: int
    mlp_dim: int
    num_kv_heads: int | None = None
    rope_theta: float = 10_000.0
    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.linear.default_kernel_init

    def __post_init__(self) -> None:
        check_llama(vars(self))
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length width"],
        mask: Bool[Array, "..."] | None = None,
        *,
        positions: Int[Array, "*#batch length"] | None = None,
    ) -> Float[Array, "batch length width"]:
        """`mask` as in `TransformerBlock`; `positions`: None for 0, 1, 2, ..."""
        width = x.shape[-1]
        kv_heads = self.num_kv_heads or self.num_heads
        check_heads(width, self.num_heads, kv_heads)
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        dense = {"use_bias": False, "kernel_init": self.kernel_init, **types}
        attention = _LinenAttention(
            self.num_heads,
            kv_heads,
            True,
            0.0,
            self.rope_theta,
            **dense,
            name="attention",
        )

        def norm(name: str):
            return linen.RMSNorm(self.epsilon, name=name, save="output", **types)

        y = norm("attention_norm")(x)
        x = x + attention(y, mask, positions, True)
        y = norm("mlp_norm")(x)
        gate, up = (linen.Dense(self.mlp_dim, name=n, **dense) for n in ("gate", "up"))
        down = _ActivatedDense(width, activation=ops.swiglu, name="down", **dense)
        return x + down(gate(y), up(y))
