"""How many bits moments have, and where: the options of the low-bit optimizers."""

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmem._checks import check_bool, check_int, shown, wrong_value
from jaxmem.ir.host_memory import check_host_memory
from jaxmem.ir.row_chunks import chunks_of
from jaxmem.optim._memory_space import to_host
from jaxmem.optim.low_bit.chosen import FLOAT32, ChosenCodes, by_path, code_of
from jaxmem.optim.low_bit.codes import FORMATS, Format, shapes

_LEAST_BLOCK = 16


@dataclass(frozen=True)
class LowBit:
    """How Adam's moments are stored; `bits=8` is short for `bits=LowBit(8)`.

    Bytes a parameter of both moments: 2.13 with 8 bits and companding, 2.03 with the
    dynamic map, 2.06 with float8 and mxfp8, 1.06 with 4 bits and mxfp4, 1.13 with
    nvfp4, 8 with 32.

    Attributes:
      bits: 8, 4, or 32 for moments in float32.
      code: "companding" (8 bits, the default there): arithmetic, groups of 32, bfloat16
        scales. "float8" (8 bits): numbers in `float8_e4m3fn`, of the second moment its
        root, with blocks of 128 and float32 scales; the relative error is the same over
        five decades. "dynamic": bitsandbytes' map with blocks of 256 (8 bits),
        torchao's maps with blocks of 128 (4 bits, the default there); float32 scales.
        The OCP's MX formats, blocks of 32 with a power of two as their scale, one byte:
        "mxfp8" (8 bits), `float8_e4m3fn` for first moments and `float8_e5m2` for second
        ones; "mxfp4" (4 bits), e2m1. "nvfp4" (4 bits): e2m1 in blocks of 16, scales of
        `float8_e4m3fn` and a float32 scale for each matrix (the last two axes), whose
        largest value is found first: leaves are updated as a whole, without a loop
        over rows, and stacked vectors share one scale. What the codes lose:
        `docs/optimizers/low_bit.md`. A mapping from the path of each leaf to its code,
        or "float32": a `ChosenCodes` of `choose_codes`, which measures them, or a dict.
      block: values that share a scale, along the last axis. A leaf whose last axis it
        does not divide keeps moments in float32. By default as above, or that halved
        down to 16 until it divides the leaf's last axis.
      least_size: leaves with fewer elements keep moments in float32.
      stochastic: round stochastically, without bias, instead of to the nearest. By
        default AdamA does, which rounds once a micro-batch, and second moments of
        "mxfp8" and both of "mxfp4" are, which to the nearest would stop growing or
        falling.
      seed: of the stochastic rounding. What is drawn depends on it, the step, the leaf
        and the element alone.
      by_rows: update large leaves of two axes, such as embeddings, in a loop over
        chunks of rows, so that no temporary array has the leaf's size (TPU moves the
        whole leaf to group it). Leave it out for tables whose rows are spread over so
        many devices that a chunk would be gathered; `init` warns where it knows.
      on_host: keep the moments in the host's memory, `pinned_host`, as
        `jaxmem.optim.on_host` does, which says what to donate; of large leaves of two
        axes a chunk of rows is on
        the device at a time.

    Raises:
      TypeError, ValueError: an argument that is not one of these.
    """

    bits: int = 8
    code: str | Mapping[str, str] | None = None
    block: int | None = None
    least_size: int = 4096
    stochastic: bool | None = None
    seed: int = 0
    by_rows: bool = True
    on_host: bool = False

    def __post_init__(self) -> None:
        bits = check_int("bits", self.bits)
        if bits not in (4, 8, 32):
            raise wrong_value("bits", bits, "4, 8 or 32")
        codes = [code for b, code in FORMATS if b == bits]
        self._check_code(bits, codes)
        if self.block is not None:
            block = check_int("block", self.block, 2)
            if bits == 4 and block % 2:
                raise wrong_value("block", block, "even with bits=4")
        check_int("least_size", self.least_size, 0)
        check_int("seed", self.seed, 0, 2**32 - 1)
        check_bool("by_rows", self.by_rows)
        check_bool("on_host", self.on_host)
        if self.stochastic is not None:
            check_bool("stochastic", self.stochastic)

    def _check_code(self, bits: int, codes: list[str]) -> None:
        if self.code == "auto":
            raise wrong_value(
                *("code", self.code),
                "is measured on gradients, and none are here: give it what "
                "jaxmem.optim.choose_codes(gradients) returns",
            )
        if bits != 32 and isinstance(self.code, Mapping):
            # what is hashable, as the other options
            object.__setattr__(self, "code", by_path(self.code, bits, codes))
        elif self.code is not None and self.code not in codes:
            allowed = " or ".join(map(repr, codes)) or "None"
            raise wrong_value("code", self.code, f"with bits={bits} {allowed}")

    def at(self, path: Any) -> "LowBit":
        """The options of one leaf; ValueError for a leaf without a code."""
        if not isinstance(self.code, Mapping):
            return self
        code = code_of(self.code, path)
        if code == FLOAT32:
            return replace(self, bits=32, code=None)
        return replace(self, code=code)

    @property
    def formats(self) -> tuple[Format, Format] | None:
        """Of the first and the second moment; None for float32."""
        if self.bits == 32:
            return None
        return FORMATS[self.bits, self._code][:2]

    @property
    def _code(self) -> str:
        assert not isinstance(self.code, Mapping)  # `at` has said which
        return self.code or ("companding" if self.bits == 8 else "dynamic")

    @property
    def row_by_row(self) -> bool:
        """Whether large leaves are updated in a loop over chunks of rows."""
        return self.by_rows and not any(fmt.tensor for fmt in self.formats or ())

    def draws(self, which: int) -> bool:
        """Whether first (0) or second (1) moments are rounded stochastically."""
        if self.stochastic is None:
            return self.formats is not None and self.formats[which].stochastic
        return self.stochastic

    def block_of(self, shape: tuple[int, ...]) -> int | None:
        """The block of a leaf of this shape; None if its moments stay in float32."""
        few = math.prod(shape) < max(self.least_size, 1)
        if self.bits == 32 or not shape or few:
            return None
        block = self.block or FORMATS[self.bits, self._code][2]
        least = self.block or _LEAST_BLOCK
        while shape[-1] % block and block > least:
            block //= 2
        return None if shape[-1] % block else block


EIGHT = LowBit()
Bits = int | LowBit | ChosenCodes  # as users say it


def as_low_bit(bits: Any, stochastic: bool | None = None) -> LowBit:
    """The options that `bits` says, a number or the options.

    Args:
      bits: as users give it.
      stochastic: of a rule, where the options say nothing.
    """
    if isinstance(bits, LowBit):
        unsaid = bits.stochastic is None and stochastic is not None
        return replace(bits, stochastic=stochastic) if unsaid else bits
    if isinstance(bits, ChosenCodes):
        return LowBit(bits.bits, bits, stochastic=stochastic)
    if isinstance(bits, jax.Array):
        raise TypeError(
            f"bits={shown(bits)}: 4, 8, 32 or a LowBit, not an array; under "
            'optax.inject_hyperparams pass a LowBit, or static_args=("bits",)'
        )
    return LowBit(bits, stochastic=stochastic)


def one_code(bits: Any) -> LowBit:
    """`as_low_bit`, or ValueError for a code a leaf."""
    how = as_low_bit(bits)
    if isinstance(how.code, Mapping):
        raise wrong_value(
            *("bits", how),
            "one code for all leaves; adam, adamw, adama, lion and schedule_free take "
            "one for each",
        )
    return how


def nearest_code(bits: Any) -> LowBit:
    """`one_code`, or ValueError for one on the host or one that is drawn."""
    how = one_code(bits)
    if how.on_host or how.draws(0):
        allowed = (
            "neither on_host (see jaxmem.optim.on_host) nor stochastic, as "
            'code="mxfp4" is by default'
        )
        raise wrong_value("bits", how, allowed)
    return how


def zeros(
    how: LowBit, params: PyTree, which: tuple[int, ...] = (0, 1)
) -> tuple[PyTree, ...]:
    """The moments of new parameters, placed as these are: first (0) and second (1).

    Raises:
      TypeError: a leaf that is no real floating array.
      ValueError: a block that does not divide a leaf's shard, where that is known.
    """
    if how.on_host:
        check_host_memory("on_host=True")
    made = tuple(
        jax.tree_util.tree_map_with_path(functools.partial(zeros_of, how, i), params)
        for i in which
    )
    return jax.tree.map(to_host, made) if how.on_host else made


def zeros_of(how: LowBit, which: int, path: Any, p: Any) -> Any:
    """The first (0) or second (1) moment of a new parameter; see `zeros`."""
    dtype = getattr(p, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"params{jax.tree_util.keystr(path)} is {shown(p)}: moments are of real "
            "floating parameters; leave others out with optax.masked or partition"
        )
    how = how.at(path)
    formats, block = how.formats, how.block_of(p.shape)
    if formats is None or block is None:
        return jnp.zeros_like(p, dtype=jnp.float32)
    sharding = _known_sharding(p)
    if sharding is not None:
        _check_shard(sharding, block, path, p)
        _warn_of_gathers(how, sharding, path, p)
    new = lambda x: (
        # `zeros_like` keeps a sharding that is in the array's type, too
        jnp.zeros_like(p, dtype=x.dtype)
        if x.shape == p.shape
        else jnp.zeros(x.shape, x.dtype, device=_first_axes(sharding, x.ndim))
    )
    return jax.tree.map(new, shapes(formats[which], block, p.shape))


def _first_axes(sharding: NamedSharding | None, count: int) -> NamedSharding | None:
    """The sharding of an array that has the first axes alone."""
    if sharding is None or len(sharding.spec) <= count:
        return sharding
    spec = PartitionSpec(*sharding.spec[:count])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _check_shard(sharding: NamedSharding, block: int, path, p) -> None:
    shard = sharding.shard_shape(p.shape)[-1]
    if shard % block:
        raise ValueError(
            f"block={block} does not divide the shard of "
            f"params{jax.tree_util.keystr(path)}, {shard} of {p.shape[-1]} along its "
            f"last axis ({sharding.spec}): give one that does, LowBit(block=...), or "
            "another sharding"
        )


def _warn_of_gathers(how: LowBit, sharding: NamedSharding, path, p) -> None:
    chunks = chunks_of(p.shape) if how.row_by_row else None
    if chunks is None:
        return
    shards = p.shape[0] // sharding.shard_shape(p.shape)[0]
    if chunks.outer % shards:
        warnings.warn(
            f"the rows of params{jax.tree_util.keystr(path)} {p.shape} are spread over "
            f"{shards} devices, and its update by chunks of rows (on TPU, or with "
            "tables of codes) would gather them: LowBit(by_rows=False) updates it as "
            "a whole",
            stacklevel=2,
        )


def _known_sharding(p) -> NamedSharding | None:
    """Where an array lies over a mesh; a traced one does not say."""
    sharding = None if isinstance(p, Tracer) else getattr(p, "sharding", None)
    known = isinstance(sharding, NamedSharding) and not sharding.mesh.empty
    return sharding if known else None
