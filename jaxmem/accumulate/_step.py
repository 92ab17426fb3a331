"""The step as one callable, traced, compiled and planned as a jitted function is."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxmem.accumulate._face import Face
from jaxmem.accumulate._faces import kind_of, make_face
from jaxmem.accumulate._mini_batch import check_mini_batch, counters
from jaxmem.accumulate._options import Options
from jaxmem.accumulate._trees import tree_bytes
from jaxmem.accumulate._ways import say
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
        face, scheduled, inner = self._prepare(args)
        check_mini_batch(face.state_in(inner), self.options.n, self._given)
        out = scheduled(*inner)
        self._given = counters(face.state_out(out))
        return face.hand_back(args, out)

    def trace(self, *args):
        """`jax.stages.Traced`, with what is donated."""
        _, scheduled, inner = self._prepare(args)
        return scheduled.trace(*inner)

    def lower(self, *args):
        """`jax.stages.Lowered`, for arrays or `jax.ShapeDtypeStruct`s."""
        _, scheduled, inner = self._prepare(args)
        return scheduled.lower(*inner)

    def eval_shape(self, *args):
        """Shapes and dtypes of what the step returns (nnx: and of both objects)."""
        face, _, inner = self._prepare(args)
        return jax.eval_shape(face.run, *inner)

    def plan(self, *args, target=None):
        """What was moved into the backward pass, and the bytes: see `schedule`."""
        _, scheduled, inner = self._prepare(args)
        return scheduled.plan(*inner, target=target)

    def _prepare(self, args) -> tuple[Face, Any, tuple[Any, ...]]:
        if not args:
            raise TypeError("a step takes params, a TrainState or an nnx.Module first")
        kind = kind_of(args[0])
        if kind not in self._scheduled:
            self._scheduled[kind] = self._schedule(make_face(kind, *self._made_of))
        face, scheduled = self._scheduled[kind]
        _check_count(face.run, args)
        inner = face.take_apart(*args)
        if not (self.options.donate or self._told):
            _tell_of_copies([inner[i] for i in face.donate])
            self._told = True
        return face, scheduled, inner

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


def _tell_of_copies(kept: list[Any]) -> None:
    say(
        "microbatch: donate=False, so parameters and state are there twice while a "
        f"step runs, {format_bytes(tree_bytes(kept))} more than with donate=True"
    )
