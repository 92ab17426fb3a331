"""JAX's attention by cuDNN, traced and lowered where no GPU is."""

import functools
from contextvars import ContextVar

from jaxmem._contexts import set_within

# Compute capability of the GPU that a step is traced for, where none is here.
_ABSENT_GPU: ContextVar[tuple[int, int] | None] = ContextVar("absent", default=None)
# Whether it is lowered by rules that need no devices.
_NO_DEVICES: ContextVar[bool] = ContextVar("no devices", default=False)
_ABSENT_CUDNN = 91800  # newer than all that JAX's rules ask for


def absent_gpu(capability: tuple[int, int] | None):
    """A context in which JAX's attention by cuDNN can be traced without a GPU.

    JAX asks the process for its GPU and its cuDNN while it traces. None changes
    nothing.
    """
    if capability is not None:
        _answer_for_absent_gpus()
    return set_within(_ABSENT_GPU, capability or _ABSENT_GPU.get())


def no_absent_gpu():
    """A context outside of `absent_gpu`, for what is lowered while a step is traced."""
    return set_within(_ABSENT_GPU, None)


def without_devices():
    """A context in which what `counted_partitions` lowers asks for no devices."""
    return set_within(_NO_DEVICES, True)


@functools.cache
def _answer_for_absent_gpus() -> None:
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def asked(name, answer):
        plain = getattr(fused, name)

        @functools.wraps(plain)
        def run(*args):
            have = _ABSENT_GPU.get()
            return plain(*args) if have is None else answer(have, *args)

        setattr(fused, name, run)

    version = lambda text: tuple(int(x) for x in text.split("."))
    asked("check_cudnn_version", lambda have: _ABSENT_CUDNN)
    asked("check_compute_capability", lambda have, least: have >= version(least))
    asked("is_cuda_compute_capability_equal", lambda have, of: have == version(of))
    # JAX asks for the devices that these are spread over, as it need not where each
    # device has its own, in a `shard_map`.
    kinds = "fwd_p", "fwd_p_wrapper", "bwd_p", "bwd_p_wrapper"
    spread = {getattr(fused, f"_dot_product_attention_{kind}") for kind in kinds}

    class Asking(set):
        def __contains__(self, primitive) -> bool:
            absent = _ABSENT_GPU.get() is not None or _NO_DEVICES.get()
            absent = absent and primitive in spread
            return super().__contains__(primitive) and not absent

    asking = Asking(dispatch.prim_requires_devices_during_lowering)
    dispatch.prim_requires_devices_during_lowering = asking
