"""Tables for the activations of `jaxmem.ops`: up to 4 bits from a file, else solved.

`python -m benchmarks.fewbit_tables` writes the file; the interval is -10 .. 10.
"""

import functools
import json
from collections.abc import Callable
from importlib import resources

import jax
import jax.numpy as jnp

from jaxmem.ops.few_bit.derivative import as_table, fewbit_table

SHIPPED_BITS = range(1, 5)


# None for ReLU and leaky ReLU: 1 bit has their two slopes exactly.
FUNCTIONS: dict[str, Callable] = {
    "elu": jax.nn.elu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "mish": jax.nn.mish,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
}


def path():
    """Of the file; found when it is needed, as the import takes time."""
    return resources.files("jaxmem.ops.few_bit") / "tables.json"


@functools.cache
def _file() -> dict[str, dict[str, dict]]:
    return json.loads(path().read_text())


@functools.cache
def shipped(name: str, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(borders, levels) for one of `FUNCTIONS`."""
    if bits in SHIPPED_BITS:
        table = _file()[name][str(bits)]
        return as_table((table["borders"], table["levels"]))
    return as_table(fewbit_table(FUNCTIONS[name], bits))
