"""Addresses of the public documentation of jax, Flax and optax.

Inventories for `sphinx.ext.intersphinx` would be downloaded at every build. The names
that docstrings use are imported instead, and the address follows from the module that
defines them, so that a name that does not exist gets no link.
"""

import importlib
from typing import Any

JAX = "https://docs.jax.dev/en/latest"
LINEN = "https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen"
NNX = "https://flax.readthedocs.io/en/latest/api_reference/flax.nnx"
OPTAX = "https://optax.readthedocs.io/en/latest/api"
SHORT = {"jnp": "jax.numpy", "nnx": "flax.nnx", "linen": "flax.linen"}

# the module that defines a name -> the page that describes it
OPTAX_PAGES = {
    "alias": "optimizers",
    "base": "utilities",
    "update": "apply_updates",
    "combining": "combining_optimizers",
    "wrappers": "optimizer_wrappers",
    "accumulation": "optimizer_wrappers",
    "conditionality": "optimizer_wrappers",
    "losses": "losses",
    "contrib": "contrib",
    "schedules": "optimizer_schedules",
}
LINEN_PAGES = {
    "linear": "layers",
    "normalization": "layers",
    "attention": "layers",
    "stochastic": "layers",
    "pooling": "layers",
    "activation": "activation_functions",
    "module": "module",
    "transforms": "transformations",
}
NNX_PAGES = {
    "linear": "nn/linear",
    "normalization": "nn/normalization",
    "attention": "nn/attention",
    "stochastic": "nn/stochastic",
    "lora": "nn/lora",
    "activations": "nn/activations",
    "optimizer": "training/optimizer",
    "compilation": "transforms",
    "transforms": "transforms",
    "iteration": "transforms",
    "autodiff": "transforms",
    "rnglib": "rnglib",
    "module": "module",
    "graph": "graph",
    "graphlib": "graph",
    "variablelib": "variables",
    "statelib": "state",
}


def address(name: str) -> str | None:
    """Where `jax.checkpoint`, `optax.adamw`, `nnx.Linear` and the like are described.

    Args:
        name: a dotted name, its first part a library or the usual short form of one.

    Returns:
        The address, or None where the name does not exist or has no page of its own.
    """
    first, _, rest = name.partition(".")
    name = f"{SHORT.get(first, first)}.{rest}"
    value = _find(name) if rest else None
    if value is None:
        return None
    places = getattr(value, "__module__", None) or ""
    if name.startswith(("jax.stages.", "jax.sharding.")):
        return f"{JAX}/{name.rpartition('.')[0]}.html#{name}"
    if name.startswith("jax.") and "checkpoint_" not in name:  # these have no page
        return f"{JAX}/_autosummary/{name}.html"
    if name.startswith("optax."):
        page = _page(OPTAX_PAGES, places) or "transformations"
        return f"{OPTAX}/{page}.html#{name}"
    if name.startswith("flax.linen."):
        page = _page(LINEN_PAGES, places)
        return page and f"{LINEN}/{page}.html#{name}"
    if name.startswith("flax.nnx."):
        page = _page(NNX_PAGES, places)
        return page and f"{NNX}/{page}.html#{name}"
    return None


def _page(pages: dict[str, str], module: str) -> str | None:
    parts = [part.lstrip("_") for part in reversed(module.split("."))]
    return next((pages[part] for part in parts if part in pages), None)


def _find(name: str) -> Any:
    """What a dotted name stands for, modules aside: they have no common address."""
    module, *attributes = name.split(".")
    value = importlib.import_module(module) if module in ("jax", "flax", "optax") else 0
    for i, attribute in enumerate(attributes):
        if not hasattr(value, attribute):
            try:
                importlib.import_module(".".join([module, *attributes[: i + 1]]))
            except ImportError:
                return None
        value = getattr(value, attribute, None)
    return None if type(value).__name__ == "module" else value
