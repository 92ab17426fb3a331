"""An optimizer's state in the host's memory, moved for the update alone."""

from typing import Any

import jax
import optax
from jaxtyping import PyTree

from jaxmem.ir.host_memory import check_host_memory
from jaxmem.optim._memory_space import to_device, to_host
from jaxmem.optim.accumulation.steps import as_transformation


def on_host(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps an optimizer's state in the host's memory (`pinned_host`).

    `init` makes the state there, `update` fetches it, runs `tx`, and sends the new
    state back. By itself a step then has the whole state on the device while it is
    updated. `jaxmem.schedule` moves the update of scanned layers into the backward
    scan: then one layer's state is on the device at a time, and the copies of one layer
    run while another is computed. Leaves outside of a scan are fetched whole: an
    embedding's moments go in chunks of rows with `jaxmem.optim.adamw(on_host=True)`,
    which needs no wrapper.

    Donate the parameters and the state together, or the host holds the state twice, and
    return them in the order in which the step takes them: on one device `jax.jit`
    matches donated arguments with results by shape, whatever their memories, and XLA's
    CPU backend aborts the process where they differ. `jaxmem.schedule` and
    `jaxmem.microbatch` raise an error instead.

    The result is that of `tx`. Scalars, such as step counts, stay on the device.

    Args:
      tx: an optax transformation, such as `optax.adamw(1e-3)`, whose state is made of
        arrays.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `tx`. Of the state's
      sharding only the memory changes.

    Raises:
      TypeError: `tx` is no transformation.
      ValueError: from `init`, the backend has no `pinned_host` memory.

    Source:
      The same idea as ZeRO-Offload (Ren et al. 2021), arXiv 2101.06840, without its
      update on the host's processor.

    Example::

      tx = jaxmem.optim.on_host(optax.adamw(3e-4))
      step = jaxmem.schedule(step, donate_argnums=0)
    """
    tx = as_transformation("tx", tx)

    def init(params: PyTree) -> Any:
        check_host_memory("on_host")
        return jax.tree.map(to_host, tx.init(params))

    def update(updates, state, params=None, **extra):
        there = jax.tree.map(to_device, state)
        updates, new = tx.update(updates, there, params, **extra)
        return updates, jax.tree.map(to_host, new)

    return optax.GradientTransformationExtraArgs(init, update)
