"""Max pooling that keeps where each maximum lay, in as few bits as the window takes.

Plain JAX keeps the whole input, to search for the maxima a second time. Source: the
kept mask of Bhatia and Dangel, arXiv 2404.12406, section 3; the packing is ours.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxmem._checks import check_array, check_numbers, wrong_type, wrong_value
from jaxmem.ops.codes.packing import pack_codes, unpack_codes

MOST_PLACES = 256  # a code is a byte at most


@dataclass(frozen=True)
class _Window:
    """Sizes along every axis of the input, those not pooled of size 1."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def bits(self) -> int:
        return max(1, (math.prod(self.sizes) - 1).bit_length())

    def offsets(self):
        """The places in a window, in row-major order."""
        return enumerate(itertools.product(*map(range, self.sizes)))

    def parts(self, x: Array, value: float) -> dict[tuple[int, ...], Array]:
        """The padded input, of each axis every stride-th element: by where it starts.

        Windows take their elements of these with steps of one. Slices with larger steps
        would be padded between elements in the backward pass, an array of the whole
        input for each place of the window, which TPUs write one by one.
        """
        sizes = zip(x.shape, self.strides, self.padding, strict=True)
        config = [(low, high + -(low + n + high) % s, 0) for n, s, (low, high) in sizes]
        found = {(): jax.lax.pad(x, jnp.asarray(value, x.dtype), config)}
        for axis, s in enumerate(self.strides):
            found = {
                (*start, i): part
                for start, whole in found.items()
                for i, part in enumerate(_every(whole, axis, s))
            }
        return found

    def taken(self, parts: dict, offset, out: Sequence[int]) -> Array:
        """Of each window the element at `offset`."""
        first, start = zip(*map(divmod, offset, self.strides), strict=True)
        ends = [o + n for o, n in zip(first, out, strict=True)]
        return jax.lax.slice(parts[start], first, ends)


def _every(x: Array, axis: int, stride: int) -> list[Array]:
    """The elements 0, stride, ... of an axis, the elements 1, stride + 1, ..., ..."""
    if stride == 1:
        return [x]
    split = (*x.shape[:axis], -1, stride, *x.shape[axis + 1 :])
    parts = jax.lax.split(x.reshape(split), [1] * stride, axis + 1)
    return [part.squeeze(axis + 1) for part in parts]


def max_pool(
    inputs: Float[Array, "..."],
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
) -> Float[Array, "..."]:
    """The largest element of each window, as `flax.linen.max_pool`.

    Args:
        inputs: any number of batch axes, one axis for each of `window_shape`, and
            channels last.
        window_shape: sizes of the window, of at most 256 elements together.
        strides: between windows, one for each size; None: ones.
        padding: "SAME", "VALID", or a pair (low, high) for each size; padded elements
            never win.

    Returns:
        Batch axes, windows, channels, in the dtype of `inputs`. A window that is all
        padding gives -inf.

    Raises:
        ValueError: a window with no or too many elements, strides or padding for
            another number of axes, too few axes, another word for padding.
        TypeError: inputs are not of a real floating dtype.

    Saves:
        For each element of the output ceil(log2(elements of the window)) bits. Of equal
        elements the first takes the whole gradient, as in JAX.

    Limits:
        On a TPU the plain op is faster, which searches for the maxima a second time:
        `jaxmem.substitute` leaves it there.

    Source:
        Bhatia and Dangel, arXiv 2404.12406, section 3.
    """
    check_array("max_pool: inputs", inputs, "floating")
    window = _window(inputs.shape, window_shape, strides, padding)
    with jax.named_scope("jaxmem.max_pool"):
        return _pool(window, inputs)


def _window(shape, sizes, strides, padding) -> _Window:
    sizes = _sizes("window_shape", sizes)
    strides = (1,) * len(sizes) if strides is None else _sizes("strides", strides)
    if len(shape) < len(sizes) + 1:
        raise ValueError(
            f"max_pool: inputs {shape} have fewer axes than window_shape={sizes} and "
            "channels"
        )
    if min(sizes, default=0) < 1 or math.prod(sizes) > MOST_PLACES:
        raise ValueError(
            f"max_pool: window_shape={sizes}: 1 to {MOST_PLACES} elements are allowed"
        )
    if len(strides) != len(sizes) or min(strides) < 1:
        raise ValueError(f"max_pool: strides={strides} for window_shape={sizes}")
    batch = (1,) * (len(shape) - len(sizes) - 1)
    full, steps = (*batch, *sizes, 1), (*batch, *strides, 1)
    return _Window(full, steps, _pads(shape, full, steps, padding, len(sizes)))


def _sizes(name: str, given: Any) -> tuple[int, ...]:
    allowed = "a sequence of ints, one for each axis that is pooled"
    if not isinstance(given, list | tuple):
        raise wrong_type(f"max_pool: {name}", given, allowed)
    return check_numbers(f"max_pool: {name}", given, allowed)


def _pads(shape, sizes, strides, padding: Any, count: int):
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise ValueError(f'max_pool: padding={padding!r}, "SAME" or "VALID"')
        return tuple(jax.lax.padtype_to_pads(shape, sizes, strides, padding))
    allowed = f'"SAME", "VALID" or {count} pairs (low, high) of ints, at least 0'
    if not isinstance(padding, list | tuple):
        raise wrong_type("max_pool: padding", padding, allowed)
    pairs = tuple(check_numbers("max_pool: padding", p, allowed) for p in padding)
    if len(pairs) != count or any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise wrong_value("max_pool: padding", padding, allowed)
    sides = tuple((low, high) for low, high in pairs)
    return ((0, 0),) * (len(shape) - count - 1) + sides + ((0, 0),)


def _largest(window: _Window, x: Array) -> Array:
    low = jnp.asarray(-jnp.inf, x.dtype)
    return jax.lax.reduce_window(
        x, low, jax.lax.max, window.sizes, window.strides, window.padding
    )


def _places(window: _Window, x: Array, y: Array) -> Array:
    """For each output the first place in its window that holds it, packed."""
    # A step a window element, on slices, fuses in XLA; the graph grows with it.
    parts = window.parts(x, -math.inf)
    place = jnp.zeros(y.shape, jnp.uint8)
    # From the last to the first: of equal elements the first one stays.
    for code, offset in reversed([*window.offsets()]):
        here = window.taken(parts, offset, y.shape) == y
        place = jnp.where(here, jnp.uint8(code), place)
    return pack_codes(place, window.bits)


def _tangent(window: _Window, packed: Array, x_dot: Array) -> Array:
    """Of each window the tangent at its place."""
    parts = window.parts(x_dot, 0.0)
    out = jax.eval_shape(functools.partial(_largest, window), x_dot).shape
    place = unpack_codes(packed, window.bits, out)
    found = jnp.zeros(out, x_dot.dtype)
    for code, offset in window.offsets():
        here = window.taken(parts, offset, out)
        found = jnp.where(place == code, here, found)
    return found


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pool(window: _Window, x: Array) -> Array:
    return _largest(window, x)


@_pool.defjvp
def _pool_jvp(window, primals, tangents):
    (x,), (x_dot,) = primals, tangents
    y = _largest(window, x)
    places = checkpoint_name(_places(window, x, y), "jaxmem_max_pool_places")
    linear = jax.checkpoint(functools.partial(_tangent, window), prevent_cse=False)
    return y, linear(places, x_dot)
