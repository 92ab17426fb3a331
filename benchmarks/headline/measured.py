"""How a row of ours is measured: by compiling, for a chip that need not be there.

Whole train steps give peaks with their state donated, gradients alone the bytes of
their temporaries. MiB of one device, unless said otherwise.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import size_and_ms
from benchmarks.headline.claim import Side
from benchmarks.models import zoo

SDS = jax.ShapeDtypeStruct
ADAMW = optax.adamw(1e-4)
TIMEOUT = 1200.0  # seconds of a compile


def estimated(step: Callable, *args, target: str, donate=(0,), scheduled=False):
    """The report of a step; scheduled: of what `jaxmem.schedule` makes of it."""
    how = {"target": target, "donate_argnums": donate}
    if scheduled:
        report = jaxmem.schedule(step, **how).plan(*args).scheduled
        assert report is not None
        return report
    return jaxmem.estimate(step, *args, **how, timeout=TIMEOUT)


def peak(model: nn.Module, inputs, target: str, scheduled: bool = False) -> Side:
    """Of an AdamW step on the mean cross entropy of classes."""
    state, logits = zoo.abstract(model, inputs, ADAMW)
    labels = SDS(logits.shape[:-1], jnp.int32)
    step = zoo.train_step(model, ADAMW)
    args = state, inputs, labels, zoo.KEY
    report = estimated(step, *args, target=target, scheduled=scheduled)
    return size_and_ms(report, "peak_bytes")
