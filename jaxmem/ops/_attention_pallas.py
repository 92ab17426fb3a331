"""Which implementation computes attention, forward and backward: kernel or XLA.

The kernels hold logits, probabilities and dropout's mask on the chip; the XLA path in
`_attention_xla.py` is their twin. What a kernel does not do it says, and the choice of
`pallas_kernels.dispatch` goes on from there. The forward and the backward pass choose
each for itself: between them are the same arrays.
"""

from typing import Any, NamedTuple

from jaxmem.ops import _attention_xla
from jaxmem.ops._attention_block import Extras
from jaxmem.ops._attention_xla import Plan
from jaxmem.ops._quantize import Quantization
from pallas_kernels.attention import Inputs
from pallas_kernels.dispatch import Implementation, dispatch, kernel_module

_DIFFERENTIATED = ("q", "k", "v", "bias")


class How(NamedTuple):
    """The whole static part: what to compute, by what, and what to keep as codes."""

    plan: Plan
    implementation: Implementation | None = None
    block_q: int | None = None
    save: Quantization | None = None


def forward(how: How, q, k, v, bias, extras: Extras):
    """(o, row maximum [b, n, t], logarithm of the row sum [b, n, t])."""

    def on(platform):
        def run(q, k, v, bias, extras):
            run = kernel_module("attention", platform).forward
            inputs, blocks = Inputs(q, k, v, bias, extras), (how.block_q, None)
            return run(inputs, how.plan.rules, blocks=blocks)

        return run

    return dispatch(
        *("attention", how.implementation, q, k, v, bias, extras),
        xla=lambda *inputs: _attention_xla.forward(how.plan, *inputs),
        tpu=on("tpu"),
        gpu=on("gpu"),
    )


def backward(how: How, wanted: frozenset[str], saved: dict, g) -> dict[str, Any]:
    """A dict of the gradients named in `wanted`."""

    def on(platform):
        def run(saved, g):
            extras = Extras(*(saved[name] for name in Extras._fields))
            arrays = (saved.get(name) for name in _DIFFERENTIATED)
            results = tuple(saved.get(name) for name in ("o", "top", "log_total"))
            run = kernel_module("attention", platform).backward
            inputs, blocks = Inputs(*arrays, extras=extras), (how.block_q, None)
            args = inputs, results, g, how.plan.rules
            grads = run(*args, wanted=wanted, blocks=blocks)
            named = zip(_DIFFERENTIATED, grads, strict=True)
            return {name: x for name, x in named if name in wanted}

        return run

    return dispatch(
        *("attention", how.implementation, saved, g),
        xla=lambda saved, g: _attention_xla.backward(how.plan, wanted, saved, g),
        tpu=on("tpu"),
        gpu=on("gpu"),
        sized_by=saved["q"],
        backward=True,
    )
