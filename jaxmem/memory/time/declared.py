"""What a custom call declares of its cost: the fields of a `pl.CostEstimate`.

Pallas writes them into the call's configuration: on TPUs, and on GPUs from jax 0.12 on.
With any jax they stand among the call's attributes if it is made under
`jax.experimental.xla_metadata.set_xla_metadata(flops=..., transcendentals=...)`.
Kernels of JAX's own that declare nothing are known by their names.
"""

import re

from jaxmem.cost.kernel import Declared
from jaxmem.memory.buffers.hlo import Hlo, Instruction
from jaxmem.memory.buffers.shapes import arrays_of
from jaxmem.memory.time.reading import inside
from jaxmem.memory.time.splash import splash_cost

# `flops="1"`, `"flops":"1"`, and in a string of a configuration `\22flops\22: 1`
_FIELDS = {
    name: re.compile(rf'(?:\\22|\b){name}(?:\\22|\\?"|[=:\s])+(\d+)')
    for name in ("flops", "transcendentals", "bytes_accessed")
}


def declared_of(hlo: Hlo, made: Instruction) -> Declared | None:
    """What an instruction declares, or a call in its fusion; None without any."""
    if made.opcode == "fusion":  # XLA puts a call and the slices that it reads into one
        of_calls = (declared_of(hlo, one) for one in inside(hlo, made))
        return next((one for one in of_calls if one), None)
    if made.opcode != "custom-call":
        return None
    found = {name: one.search(made.attributes) for name, one in _FIELDS.items()}
    flops, special, size = (int(one.group(1)) if one else 0 for one in found.values())
    if not any(found.values()):
        known = splash_cost(hlo, made)
        if known is None:
            return None
        flops, special = known
    operands = [a for name in made.operands for a in arrays_of(hlo.shape_of(name))]
    largest = max(operands, key=lambda array: array.bytes, default=None)
    return Declared(flops, special, size, largest.bits if largest else 16)
