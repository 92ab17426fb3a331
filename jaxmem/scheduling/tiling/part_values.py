"""The values of one of the blocks that an axis of examples is cut in."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax import lax

from jaxmem.ir.placements.lower import Form, PartValues


def of_block(
    n: int,
    block: Any,
    whole: Callable[[Any], Any],
    zeros: Collection[Any] = (),
    env: Mapping[Form, Any] | None = None,
) -> PartValues:
    """The values of block number `block` of `n`; the number may be traced."""

    def cut(v, axis: int, whole: Callable[[Any], Any]) -> Any:
        x = whole(v)
        size = x.shape[axis] // n
        return lax.dynamic_slice_in_dim(x, block * size, size, axis)

    return PartValues(
        whole,
        cut,
        length=lambda size: size // n,
        start=lambda size: block * (size // n),
        env={**(env or {})},
        is_first=block == 0,
        zeros=zeros,
        of_shard=True,
    )
