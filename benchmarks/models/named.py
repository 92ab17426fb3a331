"""Checkpoint policies by name, as MaxText has them, on the models of `blocks`.

MaxText marks products with `jax.ad_checkpoint.checkpoint_name` and keeps, recomputes or
sends to the host's memory what a policy lists ("remat_policy" of its decoders). Here an
interceptor of Flax marks them by the names of the modules: no model is written anew.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

# module -> what its output is called; the input of "out" is attention's "context"
OUTPUTS = {
    "query": "query_proj",
    "key": "key_proj",
    "value": "value_proj",
    "out": "out_proj",
    "gate": "mlpwi",
    "up": "mlpwi",
    "down": "mlpwo",
}
QKV = "query_proj", "key_proj", "value_proj"
OFFLOADED = "minimal_offloaded", "qkv_proj_offloaded"

_kept = jax.checkpoint_policies.save_only_these_names
_TO_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}
POLICIES: dict[str, Callable] = {
    "minimal_flash": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _kept("context")
    ),
    "save_dot_with_context_except_mlp": _kept(*QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": _kept(*QKV, "out_proj", "mlpwo"),
    "save_dot_except_mlp": _kept(*QKV, "out_proj"),
    "save_qkv_proj": _kept(*QKV),
    "save_out_proj": _kept("out_proj"),
    "minimal_offloaded": jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        **_TO_HOST
    ),
    "qkv_proj_offloaded": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(QKV),
        **_TO_HOST,
    ),
}


def named(call, args: tuple, kwargs: dict[str, Any], context) -> Any:
    """Marks what a module gives, for `nn.intercept_methods`."""
    if context.method_name == "expert":  # of a mixture, which has no modules
        return checkpoint_name(call(*args, **kwargs), "mlpwo")
    name = OUTPUTS.get(context.module.name or "")
    if name is None or context.method_name != "__call__":
        return call(*args, **kwargs)
    if name == "out_proj":
        args = checkpoint_name(args[0], "context"), *args[1:]
    return checkpoint_name(call(*args, **kwargs), name)


def with_names(step: Callable) -> Callable:
    """The step of a Flax model whose products are marked."""

    @functools.wraps(step)
    def marked(*args):
        with nn.intercept_methods(named):
            return step(*args)

    return marked


def every_second(layer: type[nn.Module]) -> type[nn.Module]:
    """Two layers in one, of which the first keeps nothing but its input."""
    nothing = jax.checkpoint_policies.nothing_saveable
    first = nn.remat(layer, policy=nothing, prevent_cse=False)

    class Pair(nn.Module):
        config: Any
        deterministic: bool = False

        @nn.compact
        def __call__(self, x, _):
            own = {"config": self.config, "deterministic": self.deterministic}
            own = {k: v for k, v in own.items() if k in layer.__dataclass_fields__}
            x, _ = first(**own, name="first")(x, None)
            return layer(**own, name="second")(x, None)

    return Pair
