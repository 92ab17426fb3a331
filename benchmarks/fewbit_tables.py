"""Writes the tables that `jaxmem.ops` ships for its activations.

    python -m benchmarks.fewbit_tables

Numbers are rounded to six decimals, to which the solver finds them; the error is that
of the unrounded table.
"""

import json
import pathlib

from jaxmem.ops import fewbit_table
from jaxmem.ops.few_bit.tables import FUNCTIONS, SHIPPED_BITS, path

DECIMALS = 6


def rounded(numbers) -> list[float]:
    return [round(float(n), DECIMALS) + 0.0 for n in numbers]


def tables(name: str) -> dict[str, dict]:
    found = {b: fewbit_table(FUNCTIONS[name], b) for b in SHIPPED_BITS}
    return {
        str(bits): {
            "borders": rounded(table.borders),
            "levels": rounded(table.levels),
            "error": float(f"{table.error:.6g}"),
        }
        for bits, table in found.items()
    }


if __name__ == "__main__":
    file = pathlib.Path(str(path()))
    file.write_text(json.dumps({n: tables(n) for n in FUNCTIONS}, indent=1) + "\n")
    print(f"wrote {file.name}")
