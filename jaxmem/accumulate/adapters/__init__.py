"""Adapters of the step to what users call it with.

There is a file for plain pytrees and Equinox modules, one for a Flax TrainState, and
one for Flax nnx objects.
"""

from collections.abc import Callable
from typing import Any

from jaxmem.accumulate._options import StepOptions
from jaxmem.accumulate.adapters.adapter import Adapter as Adapter
from jaxmem.accumulate.adapters.plain import equinox_adapter, plain_adapter
from jaxmem.accumulate.adapters.train_state import train_state_adapter
from jaxmem.frameworks import is_equinox_module, is_nnx_object


def kind_of(first: Any) -> str:
    """The kind of a step's first argument; no framework is imported to find out."""
    if is_nnx_object(first):
        return "nnx"
    if is_equinox_module(first):
        return "equinox"
    fields = ("apply_gradients", "params", "opt_state", "tx", "step")
    if all(hasattr(first, name) for name in fields):
        return "train_state"
    return "plain"


def make_adapter(kind: str, loss_fn: Callable, tx, options: StepOptions) -> Adapter:
    """The adapter for this kind of first argument."""
    if kind == "nnx":
        from jaxmem.accumulate.adapters.nnx import nnx_adapter

        return nnx_adapter(loss_fn, tx, options)
    makers = {
        "plain": plain_adapter,
        "equinox": equinox_adapter,
        "train_state": train_state_adapter,
    }
    return makers[kind](loss_fn, tx, options)
