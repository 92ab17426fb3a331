"""The step as one callable, traced, compiled and planned as a jitted function is."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr

from jaxmem._checks import wrong_type
from jaxmem.accumulate._accumulators import log_once, tree_bytes
from jaxmem.accumulate._loss import loss_of
from jaxmem.accumulate._mapped import check_parameters
from jaxmem.accumulate._mini_batch import MiniBatchResult, run_mini_batch
from jaxmem.accumulate._opt_state import check_opt_state
from jaxmem.accumulate._options import StepOptions
from jaxmem.frameworks import Framework, Held, Jitted, StepForm, framework_of
from jaxmem.optim.accumulation import check_position, counters


class MicrobatchStep:
    """The train step that `microbatch` returns, with the methods of a jitted function.

    All arguments are positional. The first one decides the form of the call::

      params, opt_state, metrics = step(params, opt_state, batch, rng)
      params, opt_state, model_state, metrics = step(
          params, opt_state, model_state, batch, rng)       # has_model_state=True
      state, metrics = step(train_state, batch, rng)        # a Flax TrainState
      metrics = step(model, optimizer, batch, rng)          # Flax nnx, in place
    """

    def __init__(self, loss_fn: Callable, tx: Any, options: StepOptions):
        self.options = options
        self.__name__ = "microbatch_step"
        self._definition = (loss_fn, tx, options)
        self._scheduled: dict[str, tuple[StepForm, Any]] = {}
        self._logged_copies = False
        self._known: list[Any] = []  # counters of the state that the last call returned

    def __call__(self, *args):
        form, scheduled = self._prepare(args)
        check_position(form.state_in(args), self.options.n, self._known)
        with _naming_arguments(form.run, args):
            out = scheduled(*args)
        self._known = counters(form.state_out(args, out))
        return out

    def trace(self, *args):
        """`jax.stages.Traced`, with the donated arguments."""
        return self._prepare(args)[1].trace(*args)

    def lower(self, *args):
        """`jax.stages.Lowered`, for arrays or `jax.ShapeDtypeStruct`s."""
        return self._prepare(args)[1].lower(*args)

    def eval_shape(self, *args):
        """Shapes and dtypes of what the step returns."""
        return self._prepare(args)[1].eval_shape(*args)

    def plan(self, *args, target=None):
        """The plan of `schedule`: the moves into the backward pass, and the bytes."""
        return self._prepare(args)[1].plan(*args, target=target)

    def jit_options(self, *args) -> Jitted:
        """Which arguments are donated, for a caller that jits this step."""
        return self._prepare(args)[1].jit_options(*args)

    def _prepare(self, args) -> tuple[StepForm, Any]:
        if not args:
            raise TypeError("a step takes params, a TrainState or an nnx.Module first")
        framework = framework_of(args[0])
        if framework.name not in self._scheduled:
            self._scheduled[framework.name] = self._schedule(framework)
        form, scheduled = self._scheduled[framework.name]
        _check_count(form.run, args)
        form.check(args)
        if self.options.mesh is not None:
            check_parameters(args[0], self.options)
        if not (self.options.donate or self._logged_copies):
            _log_copies([args[i] for i in form.donate])
            self._logged_copies = True
        return form, scheduled

    def _schedule(self, framework: Framework) -> tuple[StepForm, Any]:
        from jaxmem.scheduling import schedule

        loss_fn, tx, options = self._definition
        update = update_of(loss_fn, tx, options)
        form = framework.step_form(update, tx, options.has_model_state)
        donate = form.donate if self.options.donate else ()
        clip = self.options.clip
        return form, schedule(form.run, donate_argnums=donate, clip=clip)


def _check_count(run: Callable, args) -> None:
    """TypeError for a wrong number of arguments, with the names of those of `run`."""
    signature = inspect.signature(run)
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(f"{run.__name__}{signature}: {error}") from None


@contextlib.contextmanager
def _naming_arguments(run: Callable, args):
    """Adds the argument's name to a TypeError for a leaf that is no array."""
    try:
        yield
    except TypeError as error:
        for name, arg in zip(inspect.signature(run).parameters, args, strict=False):
            for path, x in jax.tree.leaves_with_path(arg):
                if not (hasattr(x, "dtype") or isinstance(x, int | float | complex)):
                    raise wrong_type(f"{name}{keystr(path)}", x, "an array") from error
        raise


def _log_copies(arguments: list[Any]) -> None:
    log_once(
        "microbatch: donate=False, so parameters and state are in memory twice while "
        f"a step runs, {tree_bytes(arguments)} more than with donate=True"
    )


def update_of(loss_fn: Callable, tx: Any, options: StepOptions) -> Callable:
    """As `Framework.step_form` takes it."""

    def update(
        held: Held, opt_state: Any, model_state: Any, batch: Any, rng: Any
    ) -> MiniBatchResult:
        check_opt_state(tx, held.params, opt_state)
        loss, inner = loss_of(held, loss_fn, options)
        state = model_state if held.state_of is None else held.state
        return run_mini_batch(
            loss, tx, inner, held.params, opt_state, state, batch, rng
        )

    return update
