"""How many bits moments have, and where: the options of the low-bit optimizers."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxmem._checks import check_bool, check_int, shown, wrong_value
from jaxmem.optim.low_bit.codes import FORMATS, Codes, Format, shapes


@dataclass(frozen=True)
class LowBit:
    """How Adam's moments are stored; `bits=8` is short for `bits=LowBit(8)`.

    Bytes a parameter of both moments: 2.13 with 8 bits and companding, 2.03 with the
    dynamic map, 1.06 with 4 bits, 8 with 32.

    Attributes:
      bits: 8, 4, or 32 for moments in float32.
      code: "companding" (8 bits, the default there): arithmetic, groups of 32, bfloat16
        scales. "dynamic": bitsandbytes' map with blocks of 256 (8 bits), torchao's maps
        with blocks of 128 (4 bits, the default there); float32 scales.
      block: values that share a scale, along the last axis; by default as above. A leaf
        whose last axis it does not divide keeps moments in float32.
      least_size: leaves with fewer elements keep moments in float32.
      stochastic: round stochastically, without bias, instead of to the nearest. By
        default only AdamA does, which rounds once a micro-batch.
      seed: of the stochastic rounding. What is drawn depends on it, the step, the leaf
        and the element alone.
      by_rows: update large leaves of two axes, such as embeddings, in a loop over
        chunks of rows, so that no temporary array has the leaf's size (TPU moves the
        whole leaf to group it). Leave it out for tables whose rows are spread over so
        many devices that a chunk would be gathered; `init` warns where it knows.

    Raises:
      TypeError, ValueError: an argument that is not one of these.
    """

    bits: int = 8
    code: str | None = None
    block: int | None = None
    least_size: int = 4096
    stochastic: bool | None = None
    seed: int = 0
    by_rows: bool = True

    def __post_init__(self) -> None:
        bits = check_int("bits", self.bits)
        if bits not in (4, 8, 32):
            raise wrong_value("bits", bits, "4, 8 or 32")
        codes = [code for b, code in FORMATS if b == bits]
        if self.code is not None and self.code not in codes:
            allowed = " or ".join(map(repr, codes)) or "None"
            raise wrong_value("code", self.code, f"with bits={bits} {allowed}")
        if self.block is not None:
            block = check_int("block", self.block, 2)
            if bits == 4 and block % 2:
                raise wrong_value("block", block, "even with bits=4")
        check_int("least_size", self.least_size, 0)
        check_int("seed", self.seed, 0, 2**32 - 1)
        check_bool("by_rows", self.by_rows)
        if self.stochastic is not None:
            check_bool("stochastic", self.stochastic)

    @property
    def formats(self) -> tuple[Format, Format, int] | None:
        """Of the first and the second moment, and the block; None for float32."""
        if self.bits == 32:
            return None
        code = self.code or ("companding" if self.bits == 8 else "dynamic")
        first, second, block = FORMATS[self.bits, code]
        return first, second, self.block or block

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a leaf of this shape has its moments in codes."""
        if self.formats is None or not shape:
            return False
        return shape[-1] % self.formats[2] == 0 and math.prod(shape) >= max(
            self.least_size, 1
        )


def as_low_bit(bits: Any) -> LowBit:
    """The options that `bits` says, a number or the options."""
    if isinstance(bits, LowBit):
        return bits
    if isinstance(bits, jax.Array):
        raise TypeError(
            f"bits={shown(bits)}: 4, 8, 32 or a LowBit, not an array; under "
            'optax.inject_hyperparams pass a LowBit, or static_args=("bits",)'
        )
    return LowBit(bits)


def zeros(how: LowBit, params: PyTree) -> tuple[PyTree, PyTree]:
    """Both moments of new parameters, placed as these are.

    Raises:
      TypeError: a leaf that is no real floating array.
      ValueError: a block that does not divide a leaf's shard, where that is known.
    """
    made = [
        jax.tree_util.tree_map_with_path(lambda path, p: _zeros(how, i, path, p), params)
        for i in (0, 1)
    ]
    return made[0], made[1]


def _zeros(how: LowBit, which: int, path, p) -> Any:
    dtype = getattr(p, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"params{jax.tree_util.keystr(path)} is {shown(p)}: Adam takes real "
            "floating parameters; leave others out with optax.masked or partition"
        )
    formats = how.formats
    if formats is None or not how.fits(p.shape):
        return jnp.zeros_like(p, dtype=jnp.float32)
    sharding = _known_sharding(p)
    block = formats[2]
    if sharding is not None:
        shard = sharding.shard_shape(p.shape)[-1]
        if shard % block:
            raise ValueError(
                f"block={block} does not divide the shard of "
                f"params{jax.tree_util.keystr(path)}, {shard} of {p.shape[-1]} along "
                f"its last axis ({sharding.spec}): a block that does, in "
                "LowBit(block=...), or another sharding"
            )
    like = shapes(formats[which], block, p.shape)
    codes = jnp.zeros_like(p, dtype=like.codes.dtype, shape=like.codes.shape)
    scale = jnp.zeros(like.scale.shape, like.scale.dtype, device=sharding)
    if codes.shape != p.shape and sharding is not None:
        codes = jnp.zeros(codes.shape, codes.dtype, device=sharding)
    return Codes(codes, scale)


def _known_sharding(p) -> NamedSharding | None:
    """Where an array lies over a mesh; a traced one does not say."""
    if isinstance(p, jax.core.Tracer):
        return None
    sharding = getattr(p, "sharding", None)
    known = isinstance(sharding, NamedSharding) and not sharding.mesh.empty
    return sharding if known else None
