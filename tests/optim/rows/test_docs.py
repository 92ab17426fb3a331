"""The example of the documentation trains, in memory of the ids."""

import pathlib
import re

import jax

import jaxmem

PAGE = pathlib.Path(jaxmem.__file__).parents[1] / "docs" / "tables.md"


def test_the_complete_example():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "train_step" in block)
    found: dict = {}
    with jax.numpy_dtype_promotion("standard"):  # for optax
        exec(code, found)
        args = (found[k] for k in ("params", "opt_state", "ids", "labels"))
        program = found["train_step"].lower(*args).compile()
    losses = found["losses"]
    assert losses[-1] < 0.5 * losses[0]
    table = found["params"]["table"]
    assert program.memory_analysis().temp_size_in_bytes < table.nbytes / 2
