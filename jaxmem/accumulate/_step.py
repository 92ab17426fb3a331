"""The step as one callable, traced, compiled and planned as a jitted function is."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr

from jaxmem._checks import wrong_type
from jaxmem.accumulate._face import Face
from jaxmem.accumulate._faces import kind_of, make_face
from jaxmem.accumulate._mini_batch import check_mini_batch, counters
from jaxmem.accumulate._options import Options
from jaxmem.accumulate._overwritten import check_nnx
from jaxmem.accumulate._trees import tree_bytes
from jaxmem.accumulate._ways import say
from jaxmem.frameworks import Jitted
from jaxmem.memory import format_bytes


class MicrobatchStep:
    """What `microbatch` returns: a train step, called and lowered as `jax.jit`'s.

    All arguments are positional. The first decides what is passed and returned::

      params, opt_state, metrics = step(params, opt_state, batch, rng)
      params, opt_state, model_state, metrics = step(
          params, opt_state, model_state, batch, rng)       # has_model_state=True
      state, metrics = step(train_state, batch, rng)        # a Flax TrainState
      metrics = step(model, optimizer, batch, rng)          # Flax nnx, in place
    """

    def __init__(self, loss_fn: Callable, tx: Any, options: Options):
        self.options = options
        self.__name__ = "microbatch_step"
        self._made_of = (loss_fn, tx, options)
        self._scheduled: dict[str, tuple[Face, Any]] = {}
        self._told = False
        self._given: list[Any] = []  # counters of the state that the last call gave

    def __call__(self, *args):
        face, scheduled = self._prepare(args)
        check_mini_batch(face.state_in(args), self.options.n, self._given)
        with _naming_arguments(face.run, args):
            out = scheduled(*args)
        self._given = counters(face.state_out(args, out))
        return out

    def trace(self, *args):
        """`jax.stages.Traced`, with what is donated."""
        return self._prepare(args)[1].trace(*args)

    def lower(self, *args):
        """`jax.stages.Lowered`, for arrays or `jax.ShapeDtypeStruct`s."""
        return self._prepare(args)[1].lower(*args)

    def eval_shape(self, *args):
        """Shapes and dtypes of what the step returns."""
        return self._prepare(args)[1].eval_shape(*args)

    def plan(self, *args, target=None):
        """What was moved into the backward pass, and the bytes: see `schedule`."""
        return self._prepare(args)[1].plan(*args, target=target)

    def jit_options(self, *args) -> Jitted:
        """Which arguments are donated, for who calls this step in another."""
        return self._prepare(args)[1].jit_options(*args)

    def _prepare(self, args) -> tuple[Face, Any]:
        if not args:
            raise TypeError("a step takes params, a TrainState or an nnx.Module first")
        kind = kind_of(args[0])
        if kind not in self._scheduled:
            if kind == "nnx":
                check_nnx(args[0])
            self._scheduled[kind] = self._schedule(make_face(kind, *self._made_of))
        face, scheduled = self._scheduled[kind]
        _check_count(face.run, args)
        face.check(args)
        if not (self.options.donate or self._told):
            _tell_of_copies([args[i] for i in face.donate])
            self._told = True
        return face, scheduled

    def _schedule(self, face: Face) -> tuple[Face, Any]:
        from jaxmem.scheduling import schedule

        donate = face.donate if self.options.donate else ()
        clip = self.options.clip
        return face, schedule(face.run, donate_argnums=donate, clip=clip)


def _check_count(run: Callable, args) -> None:
    """Positions are those of `run`, whose names the message can give."""
    signature = inspect.signature(run)
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(f"{run.__name__}{signature}: {error}") from None


@contextlib.contextmanager
def _naming_arguments(run: Callable, args):
    """A TypeError for what is no array: with the argument's name."""
    try:
        yield
    except TypeError as error:
        for name, arg in zip(inspect.signature(run).parameters, args, strict=False):
            for path, x in jax.tree.leaves_with_path(arg):
                if not (hasattr(x, "dtype") or isinstance(x, int | float | complex)):
                    raise wrong_type(f"{name}{keystr(path)}", x, "an array") from error
        raise


def _tell_of_copies(kept: list[Any]) -> None:
    say(
        "microbatch: donate=False, so parameters and state are there twice while a "
        f"step runs, {format_bytes(tree_bytes(kept))} more than with donate=True"
    )
