"""`jaxmem.nn.linen.Reversible`: a stack of reversible blocks of two modules."""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta

from jaxmem._checks import check_dtype, check_int, wrong_type
from jaxmem.nn._reversible import Pair, reversible


class Reversible(nn.Module):
    """A stack of reversible blocks, `jaxmem.nn.reversible` of two modules.

    Parameters are those of f and g under "f" and "g" (for modules that are made inside
    of another one's call, under their own names there), with the layers along axis 0,
    as `nn.scan` makes them. Each layer has its own parameters and its own random keys
    of all collections, which the backward pass uses once more.

    Args:
        f: a module from a stream to an array of its shape.
        g: likewise.
        length: layers.
        stream_dtype: as for `jaxmem.nn.reversible`; keyword-only, as all that follow.
        metadata_params: as for `nn.scan`, for parameters with partitioning.

    Raises:
        TypeError: f or g is no module, x no pair of floating arrays.
        ValueError: `length` below 1, or an output of another shape than its stream.

    Saves:
        The output, two arrays in `stream_dtype`, for all layers together.

    Limits:
        Modules run twice, so their variables are read and not updated: Flax refuses a
        batch norm that updates its averages, and `sow` stores nothing.
    """

    f: nn.Module
    g: nn.Module
    length: int
    stream_dtype: Any = field(default=None, kw_only=True)
    metadata_params: Mapping[Any, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("f", "g"):
            if not isinstance(module := getattr(self, name), nn.Module):
                raise wrong_type(f"Reversible: {name}", module, "a linen module")
        check_int("Reversible: length", self.length, 1)
        if self.stream_dtype is not None:
            check_dtype("Reversible: stream_dtype", self.stream_dtype)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Pair, *args: Any, **kwargs: Any) -> Pair:
        """Both streams through all layers; f and g get a stream and the arguments."""
        if self.is_initializing():
            return self._initialized(x, args, kwargs)
        runs, layers = zip(
            *(self._branch(m, args, kwargs) for m in (self.f, self.g)), strict=True
        )
        return reversible(*runs, stream_dtype=self.stream_dtype)(x, layers)

    def _initialized(self, x: Pair, args: Any, kwargs: Any) -> Pair:
        """The stack as a scan, which makes the variables."""

        def layer(module, x, _):
            y1 = x[0] + module.f(x[1], *args, **kwargs).astype(x[0].dtype)
            y2 = x[1] + module.g(y1, *args, **kwargs).astype(x[1].dtype)
            return (y1, y2), None

        scanned = nn.scan(
            layer,
            variable_axes={True: 0},
            split_rngs={True: True},
            length=self.length,
            metadata_params=dict(self.metadata_params),
        )
        return scanned(self, tuple(x), None)[0]

    def _branch(self, bound: nn.Module, args, kwargs) -> tuple[Callable, Any]:
        """A module as a function of a stream and a layer, and what layers have."""
        module, variables = bound.unbind()
        assert self.scope is not None  # inside of a call
        names = [name for name in self.scope.rngs if name != "params"]
        keys = {n: jax.random.split(self.make_rng(n), self.length) for n in names}

        def run(x, layer):
            variables, keys = layer
            return module.apply(variables, x, *args, rngs=keys, **kwargs)

        return run, (meta.unbox(variables), keys)
