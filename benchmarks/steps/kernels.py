"""The ops that have kernels, at sizes that training has, as functions of arrays.

`CASES` maps a name to what makes a `Case` of a `Size` and a dtype: that of
`benchmarks.kernels` by default, smaller ones and other dtypes by argument.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem import ops

SDS = jax.ShapeDtypeStruct
BF16, F32 = jnp.bfloat16, jnp.float32
KEY = SDS((2,), jnp.uint32)


@dataclass(frozen=True)
class Size:
    """How large a case is: `elements` of an optimizer, the others of an op.

    Attributes:
      tokens: rows of an op, the length of attention.
      width: elements of a row.
      heads: of attention.
      head: elements of a head.
      words: of a loss head.
      elements: parameters of an optimizer.
    """

    tokens: int = 8192
    width: int = 4096
    heads: int = 16
    head: int = 64
    words: int = 32 * 1024
    elements: int = 2**26

    def divided(self, by: int) -> "Size":
        """With so many times fewer tokens and parameters."""
        fewer = {"tokens": self.tokens // by, "elements": self.elements // by}
        return replace(self, **fewer)


FULL = Size()
# of a derivative at an input that is recovered from a rounded output
RECOVERED = {"float32": 1e-4, "float16": 0.0075, "bfloat16": 0.016}


@dataclass(frozen=True)
class Case:
    """An op at a size that training has.

    Attributes:
      kernel: its name in `pallas_kernels.dispatch`.
      fn: `fn(implementation)` is the op of `args`.
      args: shapes and dtypes.
      wanted: positions that are differentiated; none for an update of its arguments.
      moved: bytes that forward and backward pass must read and write.
      others: the nearest ops of other libraries, of the same arguments, by name.
      below: what whole numbers among the arguments are less than.
      stated: by dtype, how far the op says that its derivative is off.
      possible: from arguments at random to such as a training step has.
    """

    kernel: str
    fn: Callable[[str], Callable]
    args: tuple[Any, ...]
    wanted: tuple[int, ...]
    moved: int
    others: dict[str, Callable] | None = None
    below: int = 1000
    stated: Mapping[str, float] = field(default_factory=dict)
    possible: Callable[..., tuple] | None = None

    def forward(self, op: Callable) -> Callable:
        """Values, and the function from cotangents to gradients."""

        def run(*args):
            def some(*chosen):
                whole = dict(enumerate(args)) | dict(
                    zip(self.wanted, chosen, strict=True)
                )
                return op(*whole.values())

            return jax.vjp(some, *(args[i] for i in self.wanted))

        return run

    def run(self, op: Callable) -> Callable:
        """Values and gradients, as one function of cotangents and arguments."""
        if not self.wanted:
            return op

        def both(cotangents, *args):
            out, pull = self.forward(op)(*args)
            # A step's gradients come after its values. Without this XLA would compute
            # both in one pass, or the values last, and keep less than in a step.
            out, cotangents = jax.lax.optimization_barrier((out, cotangents))
            return out, pull(cotangents)

        return both

    def arguments(self) -> tuple[Any, ...]:
        """Of what `run` gives."""
        if not self.wanted:
            return self.args
        return jax.eval_shape(self.fn("xla"), *self.args), *self.args


def nbytes(*shapes) -> int:
    return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def by_implementation(op: Callable, **options) -> Callable[[str], Callable]:
    return lambda implementation: partial(op, implementation=implementation, **options)


def attention_case(rate: float, causal: bool, size=FULL, dtype=BF16) -> Case:
    x = SDS((1, size.tokens, size.heads, size.head), dtype)

    def fn(implementation):
        return lambda q, k, v, key: ops.dot_product_attention(
            *(q, k, v),
            is_causal=causal,
            dropout_rate=rate,
            dropout_rng=key if rate else None,
            implementation=implementation,
        )

    library = lambda q, k, v, key: jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation="cudnn"
    )
    others = {"cuDNN without dropout" if rate else "cuDNN": library}
    if not rate:
        others["tokamax"] = fn("tokamax")
    return Case("attention", fn, (x, x, x, KEY), (0, 1, 2), 12 * nbytes(x), others)


def bias_case(sequences: int, size=FULL, dtype=BF16) -> Case:
    """With a trained bias by head, as relative positions are."""
    length = size.tokens // sequences
    x = SDS((sequences, length, size.heads, size.head), dtype)
    bias = SDS((1, size.heads, length, length), F32)
    fn = by_implementation(ops.dot_product_attention)
    moved = 12 * nbytes(x) + 4 * nbytes(bias)
    return Case("attention", fn, (x, x, x, bias), (0, 1, 2, 3), moved)


def elementwise_case(op, arrays: int, kept: float, options, size=FULL, dtype=BF16):
    """`kept` bytes an element pass from the forward to the backward pass."""
    x = SDS((size.tokens, size.width), dtype)
    through = (2 + 3 * (arrays - 1)) * nbytes(x) + 2 * nbytes(x)  # both passes
    moved = through + round(2 * kept * x.size)
    fn, wanted = by_implementation(op, **options), tuple(range(arrays))
    recovered = RECOVERED if options.get("save") == "output" else {}
    return Case(op.__name__, fn, (x,) * arrays, wanted, moved, stated=recovered)


def norm_case(op, vectors: int, options, size=FULL, dtype=BF16) -> Case:
    x, v = SDS((size.tokens, size.width), dtype), SDS((size.width,), F32)
    args, fn = (x, *(v,) * vectors), by_implementation(op, **options)
    wanted, moved = tuple(range(len(args))), 5 * nbytes(x)
    return Case(op.__name__, fn, args, wanted, moved, possible=with_scales)


def with_scales(g, x, scale, *bias):
    """A norm's arguments with scales about one: a layer divides by few that are 0."""
    return g, x, 1 + scale / 4, *bias


def residual_case(size=FULL, dtype=BF16) -> Case:
    x, v = SDS((size.tokens, size.width), dtype), SDS((size.width,), F32)

    def fn(implementation):
        return lambda x, r, scale, bias, key: ops.dropout_add_layer_norm(
            *(x, r, scale, bias), rate=0.1, rng=key, implementation=implementation
        )

    args, moved = (x, x, v, v, KEY), 9 * nbytes(x)
    return Case("dropout_add_layer_norm", fn, args, (0, 1, 2, 3), moved)


def cross_entropy_case(size=FULL, dtype=BF16) -> Case:
    x, w = SDS((size.tokens, size.width), dtype), SDS((size.width, size.words), dtype)
    args = x, w, SDS((size.tokens,), jnp.int32)
    fn = by_implementation(ops.linear_cross_entropy)
    moved, below = 2 * nbytes(x, w), min(1000, size.words)
    return Case("linear_cross_entropy", fn, args, (0, 1), moved, below=below)


def adam_case(size=FULL, dtype=F32) -> Case:
    """At random in bfloat16: the rounding of parameters that is right on average."""
    p, m = SDS((size.elements,), dtype), SDS((size.elements,), F32)
    state = jax.eval_shape(jaxmem.optim.FusedAdam(1e-3).init, p)

    def fn(implementation):
        adam = jaxmem.optim.FusedAdam(1e-3, implementation=implementation)
        return lambda p, state, g, key: adam.step(g, state, p, rng=key)

    moved = nbytes(p, m, m) * 2 + nbytes(p)
    args = p, state, p, KEY
    return Case("adam", fn, args, (), moved, possible=between_two_steps)


def between_two_steps(p, state, g, key):
    """Adam's arguments with counters of a state, and squares that are positive."""
    whole = lambda n: jnp.asarray(n, jnp.int32)
    squares = jax.tree.map(jnp.abs, state.nu)
    state = state._replace(count=whole(9), micro_step=whole(0), nu=squares)
    return p, state._replace(micro_batches=whole(1)), g, key


CASES: dict[str, Callable[..., Case]] = {
    "attention, S 8192, dropout": partial(attention_case, 0.1, False),
    "attention, S 8192, causal": partial(attention_case, 0.0, True),
    "layer_norm": partial(norm_case, ops.layer_norm, 2, {}),
    "layer_norm, output": partial(norm_case, ops.layer_norm, 2, {"save": "output"}),
    "rms_norm": partial(norm_case, ops.rms_norm, 1, {}),
    "dropout_add_layer_norm": residual_case,
    "gelu, output and a bit": partial(
        elementwise_case, ops.gelu, 1, 2 + 1 / 8, {"save": "output"}
    ),
    "gelu, 2 bits": partial(elementwise_case, ops.gelu, 1, 2 / 8, {"save": 2}),
    "silu, 4 bits": partial(elementwise_case, ops.silu, 1, 4 / 8, {"save": 4}),
    "gelu, 6 bits": partial(elementwise_case, ops.gelu, 1, 6 / 8, {"save": 6}),
    "linear_cross_entropy": cross_entropy_case,
    "adam, float32": partial(adam_case, dtype=F32),
    "adam, bfloat16 at random": partial(adam_case, dtype=BF16),
}

# Forms of one kernel whose machine code differs.
OF_128 = Size(head=128)
MORE_CODE: dict[str, Callable[..., Case]] = {
    "attention, 8 of 1024, bias": partial(bias_case, 8),
    "attention, S 8192": partial(attention_case, 0.0, False),
    "attention, S 8192, causal, dropout": partial(attention_case, 0.1, True),
    "attention, S 8192, heads of 128": partial(attention_case, 0.0, False, OF_128),
    "attention, S 8192, heads of 128, causal": partial(
        attention_case, 0.0, True, OF_128
    ),
    "attention, S 8192, heads of 128, dropout": partial(
        attention_case, 0.1, False, OF_128
    ),
}


def filled(shapes: Any, below: int = 1000, seed: int = 0) -> Any:
    """Arrays of these shapes, each of its own seed.

    They are of normal numbers; whole ones are uniform, signed ones `below` this.
    """
    leaves, tree = jax.tree.flatten(shapes)
    # of a generator that compiles in a moment, for each of many shapes
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))
    made = [_filled(x, key, below) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, made)


@partial(jax.jit, static_argnums=(0, 2))
def _filled(shape, key, below: int):
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return jax.random.normal(key, shape.shape, F32).astype(shape.dtype)
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), shape.shape)
    if shape.dtype == jnp.uint32:
        return jax.random.bits(key, shape.shape)
    return jax.random.randint(key, shape.shape, 0, below, shape.dtype)


def arguments_of(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """Arrays for `case.run`."""
    args = filled(case.arguments(), case.below, seed)
    return case.possible(*args) if case.possible else args
