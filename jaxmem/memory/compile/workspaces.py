"""Workspaces that XLA asks cuDNN for, which is not there when a chip is absent.

JAX hands over attention with a workspace of no bytes, and XLA puts in what the library
says on a GPU. For an absent one the bytes follow from the shapes: float32 sums for the
gradient of the queries, one number for each row, and what the library rounds up to.
Source: the modules that an H200 has compiled (jax 0.11.2, heads of 64 and 128).
"""

from typing import Any

from jaxmem import _compat

_CALLS = "__cudnn$fmha"
_BACKWARD = "Backward"
_LEAST = 256


def with_workspaces(exported: Any) -> Any:
    """An exported step, its calls of cuDNN's attention with their workspaces."""
    if _CALLS.encode() not in bytes(exported.mlir_module_serialized):
        return exported
    return _compat.with_results_of_calls(exported, workspace)


def workspace(call: str, results: list[tuple[int, ...]]) -> int | None:
    """Bytes that a call needs besides its results; None for other calls.

    Args:
      call: its name in XLA.
      results: their shapes; the first is [batch, heads, queries, size].
    """
    if not call.startswith(_CALLS):
        return None
    if not call.endswith(_BACKWARD):
        return _LEAST
    batch, heads, queries, size = results[0]
    return 4 * batch * heads * queries * (size + 1) + _LEAST
