"""Which implementation computes attention: a kernel, or XLA in `blockwise.py`.

With `implementation=None` it is cuDNN's or, on a TPU, JAX's splash kernels' where these
take the case, else a kernel of ours where it was measured, else XLA.

The forward and the backward pass choose each for itself: between them are the same
arrays.
"""

from typing import Any, NamedTuple

from jaxmem.ops.attention import blockwise, cudnn, splash
from jaxmem.ops.attention.block import Extras, Rules
from jaxmem.ops.attention.blockwise import AttentionBlocks
from jaxmem.ops.codes.quantization import Quantization
from pallas_kernels.attention import Inputs
from pallas_kernels.dispatch import Implementation, considered, dispatch, kernel_module
from pallas_kernels.lowering import KernelCandidate
from pallas_kernels.partials import partial

_DIFFERENTIATED = ("q", "k", "v", "bias")


class AttentionCall(NamedTuple):
    """The whole static part: what to compute, by what, and what to keep as codes."""

    blocks: AttentionBlocks
    implementation: Implementation | None = None
    block_q: int | None = None
    save: Quantization | None = None


def forward(call: AttentionCall, q, k, v, bias, extras: Extras):
    """(o, row maximum [b, n, t], logarithm of the row sum [b, n, t])."""

    rules, inputs = call.blocks.rules, (q, k, bias, extras)
    return dispatch(
        *("attention", call.implementation, q, k, v, bias, extras),
        xla=partial(blockwise.forward, call.blocks),
        tpu=partial(_forward, call, "tpu"),
        gpu=partial(_forward, call, "gpu"),
        others=_of_others("forward", rules, inputs),
    )


def _forward(call: AttentionCall, platform: str, *inputs):
    run = kernel_module("attention", platform).forward
    return run(Inputs(*inputs), call.blocks.rules, blocks=(call.block_q, None))


def _takers(rules: Rules, inputs: tuple) -> list[Any]:
    """The modules of other makers' kernels that take (q, k, bias, extras)."""
    return [maker for maker in (cudnn, splash) if not maker.refusal(rules, *inputs)]


def _of_others(name: str, rules: Rules, inputs: tuple, *more) -> list[KernelCandidate]:
    """Their kernels for a pass, "forward" or "backward"; `more`: what is static."""
    found = []
    for maker in _takers(rules, inputs):
        run = partial(getattr(maker, name), rules, *more)
        candidate = KernelCandidate(
            platform=maker.PLATFORM,
            wins=maker.wins(rules, *inputs),
            run=run,
            reason="",
            name=f"{maker.NAME}, {name}",
            vmaps=True,
            sharded=partial(run, sharded=True) if maker.PARTITIONED else None,
        )
        found.append(candidate)
    return found


def reads_value_as_it_is(call: AttentionCall, q, k, bias, extras: Extras) -> bool:
    """Whether a kernel may read the value in the backward pass, unchanged."""
    if considered("attention", call.implementation, q):
        return True
    own = call.implementation is None and call.save is None
    return own and bool(_takers(call.blocks.rules, (q, k, bias, extras)))


def backward(
    call: AttentionCall, wanted: frozenset[str], saved: dict, g
) -> dict[str, Any]:
    """A dict of the gradients named in `wanted`."""

    extras = Extras(*(saved[name] for name in Extras._fields))
    inputs = saved["q"], saved["k"], saved.get("bias"), extras
    rules, others = call.blocks.rules, ()
    if "v" in saved and "bias" not in wanted:
        others = _of_others("backward", rules, inputs, wanted)
    return dispatch(
        *("attention", call.implementation, saved, g),
        xla=partial(blockwise.backward, call.blocks, wanted),
        tpu=partial(_backward, call, wanted, "tpu"),
        gpu=partial(_backward, call, wanted, "gpu"),
        sized_by=saved["q"],
        backward=True,
        others=others,
    )


def _backward(call: AttentionCall, wanted: frozenset[str], platform: str, saved, g):
    extras = Extras(*(saved[name] for name in Extras._fields))
    arrays = (saved.get(name) for name in _DIFFERENTIATED)
    results = tuple(saved.get(name) for name in ("o", "top", "log_total"))
    run = kernel_module("attention", platform).backward
    inputs, blocks = Inputs(*arrays, extras=extras), (call.block_q, None)
    args = inputs, results, g, call.blocks.rules
    grads = run(*args, wanted=wanted, blocks=blocks)
    named = zip(_DIFFERENTIATED, grads, strict=True)
    return {name: x for name, x in named if name in wanted}
