"""Whether another library has put its own function in the place of JAX's products.

qwix quantises a model, or gives it LoRA, by intercepting `jax.lax.dot_general` while
the model runs; it tells from the arguments and from the module which weight a product
is of. A lean layer's product would not be recognised, and the adapters would be lost.
"""

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax

from jaxmem._contexts import set_within
from jaxmem.ir import primitives
from jaxmem.nn._fallback import fall_back

# Either the name stands for another function, or the function has another body.
_PRODUCTS = {
    name: (getattr(jax.lax, name), getattr(jax.lax, name).__code__)
    for name in primitives.names(lambda known: known.kind is primitives.Kind.PRODUCT)
}
INTERCEPTED = "another library intercepts its product"
LEFT_TO_IT = (
    "another library intercepts products: layers leave theirs to it, and what these "
    "keep is decided by the formulas found in the trace"
)
_listener: contextvars.ContextVar[Callable[[str], None] | None] = (
    contextvars.ContextVar("jaxmem_interception_listener", default=None)
)


def products_are_intercepted() -> bool:
    """Whether the products of JAX are another library's at this moment."""
    return any(
        getattr(jax.lax, name) is not fn or fn.__code__ is not code
        for name, (fn, code) in _PRODUCTS.items()
    )


def leave(layer: str, reason: str) -> None:
    """Says why Flax's own code runs; of interception in a substituted model its report.

    There the rewriter still finds the product, so that nothing is lost.
    """
    listener = _listener.get()
    if reason == INTERCEPTED and listener is not None:
        listener(LEFT_TO_IT)
        return
    fall_back(layer, reason)


def interception_heard_by(
    listener: Callable[[str], None],
) -> AbstractContextManager[None]:
    """Of interceptions inside `listener` is told, in place of a warning."""
    return set_within(_listener, listener)
