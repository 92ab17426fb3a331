"""Every file of results/ as a table, with what made it: docs/benchmarks."""

import csv
import functools
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.figures.rows import RESULTS, figures, table

H100, CPU = "H100", "the CPU of the machine that ran it"
NOTHING = "none: nothing is compiled"
# What a file's figures are of, where it has no column that says so.
CHIPS = {
    "advice": H100,
    "batch": H100,
    "bert_losses": CPU,
    "blocks": H100,
    "budget": H100,
    "collectives": "8 H100",
    "cpu": CPU,
    "cpu_seconds": CPU,
    "cost": "TPU v5e",
    "cross_entropy_time": CPU,
    "curve": f"{H100}, by its rates",
    "depth": H100,
    "frontier_tpu": "TPU v5e",
    "fewbit-output": NOTHING,
    "fewbit-tables": NOTHING,
    "fills": H100,
    "five_bytes": f"losses, {CPU}",
    "foreign": H100,
    "frontier": H100,
    "headlines": "what each row says",
    "frozen": NOTHING,
    "frozen_h100": H100,
    "kernels_sass": H100,
    "latency_hiding": H100,
    "long_context": "1 or 8 H100",
    "memformer": H100,
    "moment_codes": CPU,
    "many_devices": "1 to 64 H100",
    "layout": NOTHING,
    "ledger": NOTHING,
    "muon": "one H100; updates, 8 H100",
    "offload": H100,
    "placement": H100,
    "programs": H100,
    "published_rows": "1 or 8 H100, 64 or 128 TPU v5p, 256 TPU v5e",
    "optimizer_training": CPU,
    "optimizer_update": H100,
    "overhead": f"{CPU}, compiling for an {H100}",
    "quantized_base": H100,
    "remat-checkmate": NOTHING,
    "remat-exact": NOTHING,
    "remat-transformer": NOTHING,
    "reversible": f"{H100}; drift, {CPU}",
    "scheduling_eager": NOTHING,
    "scheduling_h100": H100,
    "scheduling_layout": H100,
    "scheduling_order": NOTHING,
    "storage": H100,
    "tiles_budget": H100,
    "tiles_collectives": "8 H100",
    "training": CPU,
    "throughput": H100,
    "velora": CPU,
}
NAMES = {"h100": H100, "a100": "A100", "h200": "H200", "b200": "B200", "t4": "T4"}
NAMES |= {"l4": "L4", "cpu": CPU}
NAMES |= {f"tpu-{v}": f"TPU {v}" for v in ("v4", "v5e", "v5p", "v6e")}
OF_CHIPS = ("target", "chip")
OURS = re.compile(r"\bours\b")  # what the files call the library's own column


class Results(NamedTuple):
    """A results file.

    Attributes:
      name: without the version and the suffix.
      path: where it lies.
      command: what made it.
      versions: of jax and what it was compiled with.
      columns: the last one is the commit.
      rows: as text.
    """

    name: str
    path: pathlib.Path
    command: str
    versions: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def jax(self) -> str:
        return self.path.stem.rsplit("-jax", 1)[1]

    @property
    def commits(self) -> list[str]:
        return sorted({row[-1] for row in self.rows})

    @property
    def chips(self) -> str:
        """The chips that the rows were compiled for, or what else they are of."""
        columns = [i for i, c in enumerate(self.columns) if c in OF_CHIPS]
        named = dict.fromkeys(row[i] for i in columns for row in self.rows)
        named |= dict.fromkeys(c for c in self.columns if c in NAMES)
        return ", ".join(NAMES[chip] for chip in named) or CHIPS[self.name]


@functools.cache
def results() -> list[Results]:
    return [_read(path) for path in sorted(RESULTS.glob("*.csv"))]


def _read(path: pathlib.Path) -> Results:
    command, versions, *lines = path.read_text().splitlines()
    head, *rows = csv.reader(lines)
    name = path.stem.rsplit("-jax", 1)[0]
    said = (line.removeprefix("# ") for line in (command, versions))
    return Results(name, path, *said, head, rows)


def shown(of: Results) -> str:
    """Where the rows come from, then the rows."""
    made = [
        ("command", f"`{of.command}`"),
        ("versions", of.versions),
        ("chip", of.chips),
        ("commits", ", ".join(f"`{commit}`" for commit in of.commits)),
        ("file", f"[{of.path.name}](../../benchmarks/results/{of.path.name})"),
    ]
    used = [i for i, _ in enumerate(of.columns) if any(row[i] for row in of.rows)]
    chosen = lambda cells: [cells[i].strip() for i in used]
    head = [OURS.sub("jaxmem", column) for column in chosen(of.columns)]
    rows = table(head, map(chosen, of.rows))
    return f"{table(('', ''), made)}\n\n{rows}"


def _index() -> Iterator[Sequence[str]]:
    for of in results():
        file = f"[{of.path.stem}](../../benchmarks/results/{of.path.name})"
        yield file, f"`{of.command}`", of.chips, str(len(of.rows)), of.jax


@figures("results")
def index() -> str:
    head = ("file", "command", "chip", "rows", "jax")
    return table(head, _index())


for _of in results():
    figures(f"results, {_of.path.stem}")(functools.partial(shown, _of))
