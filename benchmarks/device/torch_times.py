"""torch and Liger on the same sizes, where they are installed, for `fast`.

They run in processes of their own, since two frameworks would share the device's
memory. The two commands differ in what surrounds a kernel: torch launches each by
itself, so that the small sizes show its launches.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.device.job import NotHere, Rows
from benchmarks.device.timing import spread
from benchmarks.steps.kernels import FULL, Size

SMALL = Size(tokens=64, width=64, heads=1, words=128)
ROUNDS = 15


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise NotHere("torch is not installed") from error
    return torch


def _times(torch, fn: Callable, args: tuple, rounds: int) -> Rows:
    """Rows of the forward and of the backward pass."""
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    g = torch.randn_like(fn(*args))
    for n in range(rounds + 3):
        begin = _mark(torch)
        out = fn(*args)
        middle = _mark(torch)
        torch.autograd.grad(out, args, g)
        end = _mark(torch)
        if n >= 3:
            found["forward"].append(_apart(torch, begin, middle))
            found["backward"].append(_apart(torch, middle, end))
    for which, times in found.items():
        yield {"pass": which, **spread(times)}


def _mark(torch):
    """An event of the device, or a time of the host."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _apart(torch, begin, end) -> float:
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def _array(torch, *shape: int):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    how = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    return torch.randn(shape, **how)


def attention(torch, size: Size, **how):
    fn = partial(torch.nn.functional.scaled_dot_product_attention, **how)
    shape = 1, size.heads, size.tokens, 64
    return fn, tuple(_array(torch, *shape) for _ in range(3))


def layer_norm(torch, size: Size):
    fn = lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)
    vectors = (_array(torch, size.width) for _ in range(2))
    return fn, (_array(torch, size.tokens, size.width), *vectors)


def gelu(torch, size: Size):
    return torch.nn.functional.gelu, (_array(torch, size.tokens, size.width),)


def _liger() -> Any:
    try:
        import liger_kernel.ops as ops
    except ImportError as error:
        raise NotHere("liger-kernel is not installed") from error
    return ops


def liger_rms_norm(torch, size: Size):
    fn = _liger().rms_norm.LigerRMSNormFunction.apply
    args = _array(torch, size.tokens, size.width), _array(torch, size.width)
    return lambda x, w: fn(x, w, 1e-6, 0.0, "llama", False), args


def liger_cross_entropy(torch, size: Size):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    x = _array(torch, size.tokens, size.width)
    weight = _array(torch, size.words, size.width)
    labels = torch.randint(0, size.words, (size.tokens,), device=x.device)
    return lambda x, w: LigerFusedLinearCrossEntropyLoss()(w, x, labels), (x, weight)


def _rows(make: Callable, needs_liger: bool, small: bool) -> Rows:
    torch = _torch()
    if needs_liger:
        _liger()
    for by in (1,) if small else (1, 4, 16):
        size = SMALL if small else FULL.divided(by)
        for row in _times(torch, *make(torch, size), 2 if small else ROUNDS):
            yield {"tokens": size.tokens, "dtype": "bfloat16", **row}


KINDS: dict[str, Callable[[bool], Rows]] = {
    "torch, attention, dropout": partial(
        _rows, partial(attention, dropout_p=0.1), False
    ),
    "torch, attention, causal": partial(
        _rows, partial(attention, is_causal=True), False
    ),
    "torch, layer_norm": partial(_rows, layer_norm, False),
    "torch, gelu": partial(_rows, gelu, False),
    "Liger, rms_norm": partial(_rows, liger_rms_norm, True),
    "Liger, linear_cross_entropy": partial(_rows, liger_cross_entropy, True),
}
