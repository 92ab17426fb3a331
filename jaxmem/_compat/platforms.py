"""Whether a function is traced for a TPU; JAX's caches of traces know it."""

import contextlib

import jax

# None: for the device of the process
_TPU = jax.make_user_context(None)


def traced_for_tpu(whether: bool) -> contextlib.AbstractContextManager:
    """A context in which what is traced is for a TPU, or is not.

    It changes nothing where that is so already: what was traced outside stays cached.
    """
    return contextlib.nullcontext() if whether == is_for_tpu() else _TPU(whether)


def is_for_tpu() -> bool:
    """Whether what is traced now is for a TPU; where nobody said so, by the process."""
    return jax.default_backend() == "tpu" if _TPU.value is None else _TPU.value
