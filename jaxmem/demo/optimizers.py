"""The optimizers that the demonstration knows, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.tree_util import keystr

from jaxmem import optim

_B2, _DECAY = 0.95, 1e-4
_RANK = 32  # a quarter of the demonstration's width
# Kernels of attention have heads of their own: many small matrices.
_MATRICES = ("*/up/kernel", "*/down/kernel", "head/kernel")


@dataclass(frozen=True)
class DemoOptimizer:
    """An optimizer as the demonstration uses it.

    Attributes:
      make: the transformation, of a learning rate and further arguments.
      rate: its learning rate in terms of AdamW's: rules differ in how long their steps
        are. Each is the best of 1, 3, 10 and so on, by `benchmarks.optimizer_training`.
      in_state: whether it accumulates the gradients of micro-batches in its own state.
      averages: whether its rate stays as it is after the warm-up, and the model is the
        average of the weights.
    """

    make: Callable[..., optax.GradientTransformation]
    rate: float = 1.0
    in_state: bool = False
    averages: bool = False


def _decayed(make: Callable, **how: Any) -> Callable:
    """With AdamW's arguments."""
    return lambda rate, **more: make(rate, b2=_B2, weight_decay=_DECAY, **(how | more))


def _lion(bits: int) -> Callable:
    return lambda rate: optim.lion(rate, weight_decay=10 * _DECAY, bits=bits)


def _schedule_free(**how: Any) -> DemoOptimizer:
    make = _decayed(optim.schedule_free_adamw, **how)
    return DemoOptimizer(make, averages=True)


def _low_rank(make: Callable, **how: Any) -> Callable:
    return lambda rate: make(rate, projected=_MATRICES, **how)


def _axes_of(path: Any, _: Any) -> Any:
    """Which axes of a kernel are rows and columns; heads of attention are merged."""
    name = keystr(path)
    if "kernel" not in name and "embedding" not in name:
        return None
    axes = -2, -1
    if any(f"'{part}'" in name for part in ("query", "key", "value")):
        axes = -3, (-2, -1)
    elif "'out'" in name:
        axes = (-3, -2), -1
    return optax.contrib.MuonDimensionNumbers(*axes)


def _preconditioned(make: Callable, rate: float, **how: Any) -> DemoOptimizer:
    numbers = lambda params: jax.tree_util.tree_map_with_path(_axes_of, params)
    how |= {"b2": _B2, "weight_decay": _DECAY, "weight_dimension_numbers": numbers}
    return DemoOptimizer(lambda lr: make(lr, **how), rate=rate)


_EIGHT = {"bits": 8, "preconditioner_dtype": "int8"}

OPTIMIZERS = {
    "adamw": DemoOptimizer(_decayed(optax.adamw)),
    "adama": DemoOptimizer(_decayed(optim.adama), in_state=True),
    "adamw-8bit": DemoOptimizer(_decayed(optim.adamw, bits=8)),
    "adamw-float8": DemoOptimizer(
        _decayed(optim.adamw, bits=optim.LowBit(8, code="float8"))
    ),
    **{
        f"adamw-{code}": DemoOptimizer(
            _decayed(optim.adamw, bits=optim.LowBit(bits, code=code))
        )
        for bits, code in ((8, "mxfp8"), (4, "mxfp4"), (4, "nvfp4"))
    },
    "adamw-4bit": DemoOptimizer(_decayed(optim.adamw, bits=4)),
    "adama-8bit": DemoOptimizer(_decayed(optim.adama, bits=8), in_state=True),
    "adamw-host": DemoOptimizer(
        lambda rate: optim.on_host(_decayed(optim.adamw, bits=32)(rate))
    ),
    "lion": DemoOptimizer(_lion(32)),
    "lion-8bit": DemoOptimizer(_lion(8)),
    "lion-4bit": DemoOptimizer(_lion(4)),
    "schedule-free": _schedule_free(),
    "schedule-free-8bit": _schedule_free(bits=8),
    "schedule-free-4bit": _schedule_free(bits=4),
    "galore": DemoOptimizer(_low_rank(optim.galore, rank=_RANK), rate=3.0),
    "galore-8bit": DemoOptimizer(
        _low_rank(optim.galore, rank=_RANK, inner=optim.scale_by_adam(b2=_B2, bits=8)),
        rate=3.0,
    ),
    "apollo": DemoOptimizer(_low_rank(optim.apollo, rank=_RANK)),
    "apollo-mini": DemoOptimizer(_low_rank(optim.apollo_mini)),
    "fira": DemoOptimizer(_low_rank(optim.fira, rank=_RANK)),
    "came": DemoOptimizer(optim.came, rate=0.1),
    "adafactor": DemoOptimizer(optim.adafactor, rate=10.0),
    "adalomo": DemoOptimizer(optim.adalomo, rate=10.0),
    "lomo": DemoOptimizer(optim.lomo, rate=100.0),
    "sm3": DemoOptimizer(optim.sm3, rate=10.0),
    "adam-mini": DemoOptimizer(optim.adam_mini),
    "soap": _preconditioned(optim.soap, rate=3.0),
    "soap-8bit": _preconditioned(optim.soap, rate=3.0, **_EIGHT),
    "soap-one-sided-8bit": _preconditioned(
        optim.soap, rate=3.0, one_sided=True, **_EIGHT
    ),
    "shampoo": _preconditioned(optim.shampoo, rate=1.0),
    "shampoo-8bit": _preconditioned(optim.shampoo, rate=1.0, **_EIGHT),
}
