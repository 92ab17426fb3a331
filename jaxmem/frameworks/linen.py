"""Flax linen: modules without arrays, whose parameters a `TrainState` holds."""

import sys
from typing import Any, ClassVar

from jaxmem.frameworks.pytrees import Pytrees
from jaxmem.frameworks.training import Held, ModelUpdate, StepForm, next_step

_FIELDS = ("apply_gradients", "params", "opt_state", "tx", "step")


class Linen(Pytrees):
    """A step is called with a `TrainState`; `(state, batch, rng) -> state, metrics`."""

    name: ClassVar[str] = "linen"
    module: ClassVar[str | None] = None  # users write a TrainState without `flax.linen`
    lean_layers: ClassVar[bool] = True

    def is_model(self, x: Any) -> bool:
        linen = sys.modules.get("flax.linen")
        return linen is not None and isinstance(x, linen.Module)

    def trains(self, x: Any) -> bool:
        return all(hasattr(x, name) for name in _FIELDS)

    def step_form(
        self, update: ModelUpdate, tx: Any, has_model_state: bool
    ) -> StepForm:
        """The model state, if there is one, is the field `batch_stats`."""

        def microbatch_step(state, batch, rng=None):
            _check_state(state, tx, has_model_state)
            held = Held(state.params, lambda params: params)
            model_state = state.batch_stats if has_model_state else None
            out = update(held, state.opt_state, model_state, batch, rng)
            new = {"params": out.params, "opt_state": out.opt_state}
            if has_model_state:
                new["batch_stats"] = out.model_state
            step = next_step(state.step, out.updated)
            return state.replace(step=step, **new), out.metrics

        return StepForm(
            microbatch_step,
            donate=(0,),
            state_in=lambda args: args[0].opt_state,
            state_out=lambda args, out: out[0].opt_state,
        )

    def model_in(self, x: Any) -> Any | None:
        """The module whose `apply` a TrainState has."""
        fn = getattr(x, "apply_fn", None) if hasattr(x, "replace") else None
        model = getattr(fn, "__self__", None)
        return model if self.is_model(model) else None

    def with_model(self, x: Any, model: Any) -> Any:
        return x.replace(apply_fn=model.apply)

    def substitute_line(self, name: str, options: str) -> str:
        lean = f"jaxmem.substitute({name}.apply_fn.__self__{options}).apply"
        return f"{name} = {name}.replace(apply_fn={lean})"


def _check_state(state: Any, tx: Any, has_model_state: bool) -> None:
    if state.tx != tx:
        raise ValueError(
            "tx is not the TrainState's own transformation: pass microbatch(loss_fn, "
            "state.tx, n)"
        )
    if has_model_state and not hasattr(state, "batch_stats"):
        raise ValueError(
            "has_model_state=True needs a TrainState with a field batch_stats, "
            f"{type(state).__name__} has none"
        )
