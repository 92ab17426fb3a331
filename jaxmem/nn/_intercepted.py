"""Whether another library has put its own function in the place of JAX's products.

qwix quantises a model, or gives it LoRA, by intercepting `jax.lax.dot_general` while
the model runs; it tells from the arguments and from the module which weight a product
is of. A lean layer's product would not be recognised, and the adapters would be lost.
"""

import jax

# Either the name stands for another function, or the function has another body.
_PRODUCTS = {
    name: (getattr(jax.lax, name), getattr(jax.lax, name).__code__)
    for name in ("dot_general", "conv_general_dilated")
}
INTERCEPTED = "another library intercepts its product"


def products_are_intercepted() -> bool:
    """Whether the products of JAX are another library's at this moment."""
    return any(
        getattr(jax.lax, name) is not fn or fn.__code__ is not code
        for name, (fn, code) in _PRODUCTS.items()
    )
