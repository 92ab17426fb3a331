"""Whether a check fits on the device, and a smaller batch where it does not."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.checking._carry import carry_of
from jaxmem.checking._runs import Arguments, Ran, Runner, copied
from jaxmem.frameworks import has_models, pure_call
from jaxmem.ir import jaxprs


def room() -> int:
    """Bytes of one device's memory, of the machine's where the device is the host."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def needed_bytes(runner: Runner, arguments: Arguments) -> float:
    """What a check of a step takes on a device, by the compiler of this process.

    The caller's arguments are there besides. Noise may take as much again as what the
    step computes, of which fewer operations are fused.
    """
    try:
        of = runner.memory(*copied(arguments))
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            return float("inf")
        raise
    made = of.output_size_in_bytes + of.temp_size_in_bytes
    return 2 * of.argument_size_in_bytes + 2 * made


def is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def slices(
    reference: Callable, arguments: Arguments, static: Sequence[int | str]
) -> Iterator[tuple[int, int, Arguments]]:
    """(examples, of how many, arguments) with half of the batch, a quarter, ..."""
    places = set(_batch_places(reference, arguments, static))
    leaves, tree = jax.tree.flatten(arguments)
    sizes = Counter(leaves[i].shape[0] for i in places)
    if not sizes:
        return
    whole = sizes.most_common(1)[0][0]
    places = {i for i in places if leaves[i].shape[0] == whole}
    size = whole // 2
    while size and whole % size == 0:
        cut = [_cut(x, size) if i in places else x for i, x in enumerate(leaves)]
        yield size, whole, jax.tree.unflatten(tree, cut)
        size //= 2


def _cut(x: Any, size: int) -> Any:
    sharding = getattr(x, "sharding", None)
    if sharding is None or sharding.num_devices == 1:
        return x[:size]
    return jax.device_put(x[:size], sharding)  # an error where it cannot be spread


def _batch_places(
    reference: Callable, arguments: Arguments, static: Sequence[int | str]
) -> Iterator[int]:
    """Numbers of the leaves that are examples: arrays that are no state."""
    args, kwargs = copied(arguments)
    with pure_call(reference, args, kwargs, (), static) as call:
        out = jax.eval_shape(call.form.pure(reference), *call.args, **call.kwargs)
        ran = Ran(call.args, call.kwargs, getattr(out, "out", out))
        carried = {place for place, _ in carry_of(call.args, ran, None).pairs}
    count = 0
    args, kwargs = arguments
    for place, value in [*enumerate(args), *sorted(kwargs.items())]:
        leaves = jax.tree.leaves(value)
        if place not in carried and not has_models(value):
            yield from (count + i for i, x in enumerate(leaves) if _is_batch(x))
        count += len(leaves)


def _is_batch(x: Any) -> bool:
    if not jaxprs.is_array(x) or not x.shape or x.shape[0] < 2:
        return False
    is_raw_key = x.shape == (2,) and x.dtype == jnp.uint32
    return not is_raw_key and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
