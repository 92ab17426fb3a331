"""The arguments of a loss as `jaxmem.microbatch` takes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.advising.forms import name_of, parameters
from jaxmem.frameworks import framework_of


@dataclass(frozen=True)
class LossBatch:
    """The arguments of a loss after its model, as `jaxmem.microbatch` takes them.

    Attributes:
      examples: how many it has.
      loss: `(model, batch, rng) -> scalar`.
      args: (batch, rng).
      written: the loss, in a line.
      call: the arguments of the step, in a comment.
    """

    examples: int
    loss: Callable
    args: tuple[Any, Any]
    written: str
    call: str


def batch_of(loss_fn: Callable, lean: Callable, args: Sequence[Any]) -> LossBatch:
    """The batch of a loss's arguments; `lean`: what is called in the loss's place.

    Raises:
      ValueError: there are no examples along the first axis of all arguments.
    """
    model, *names = parameters(loss_fn, len(args))
    rest, (key,) = list(args[1:]), (None,)
    if rest and _is_key(rest[-1]):
        key = rest.pop()
        names.pop()
    sizes = {x.shape[:1] for x in jax.tree.leaves(rest)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            "allow='adama': the arguments after the model must have one first axis in "
            f"common, of examples; got {sorted(sizes)}"
        )
    ((examples,),) = sizes
    keys = () if key is None else ("rng",)
    single = len(rest) == 1
    inside = ", ".join([model, "batch" if single else "*batch", *keys])
    name = name_of(loss_fn, "loss_fn")
    written = f"lambda {model}, batch, rng: {name}({inside})"
    if single and keys:
        written = name

    def loss(model, batch, rng):
        return lean(model, *((batch,) if single else batch), *((rng,) if keys else ()))

    batch = rest[0] if single else tuple(rest)
    state = framework_of(args[0]).state_name
    listed = names[0] if single else f"({', '.join(names)})"
    call = f"step({model}, {state}, {listed}, rng)"
    return LossBatch(examples, loss, (batch, key), written, call)


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    is_raw = x.shape == (2,) and dtype == jnp.uint32
    return bool(is_raw or jnp.issubdtype(dtype, jax.dtypes.prng_key))
