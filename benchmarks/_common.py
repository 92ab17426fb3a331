"""What the benchmarks share: a table printed, and its rows as CSV in results/.

The last column of a file says at which commit a row was measured: commands that measure
some rows anew keep the others, which then come from other commits.
"""

import csv
import functools
import importlib.metadata
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import rich
from rich.table import Table

import jaxmem
from jaxmem.chips import compiler_versions
from jaxmem.memory import CompileError, DoesNotFit, MemoryReport

RESULTS = pathlib.Path(__file__).parent / "results"
MIB = 2**20
TARGETS = ("h100", "tpu-v5e")
TOO_LARGE = "does not fit"
COMMIT = "commit"
MS = "predicted ms"


def versions() -> str:
    names = ("jax", "jaxlib", "flax")
    found = [(name, importlib.metadata.version(name)) for name in names]
    found += compiler_versions()  # in the environment or in jaxmem's folder
    return ", ".join(f"{name} {version}" for name, version in found)


def publish(name: str, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
    """Prints the table, and writes `results/<name>-jax<version>.csv`."""
    table = Table(*columns, title=f"{name}, jax {jax.__version__}")
    for row in rows:
        table.add_row(*(f"{c:,.1f}" if isinstance(c, float) else str(c) for c in row))
    rich.print(table)
    path = write(name, columns, rows)
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")


class Row(list):
    """The cells of a row, and the commit at which they were measured, if not now."""

    def __init__(self, cells: Iterable, commit: str):
        super().__init__(cells)
        self.commit = commit


@functools.cache
def commit() -> str:
    """The commit of the working tree, with a plus if the tree differs from it."""
    git = functools.partial(subprocess.run, cwd=RESULTS.parent, text=True, check=True)
    said = lambda *words: git(["git", *words], capture_output=True).stdout.strip()
    # results, and the pages made of them, change while benchmarks run
    made = (":!/benchmarks/results", ":!/docs", ":!/README.md")
    changed = said("status", "--porcelain", "--", ":/", *made)
    return said("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")


@functools.cache
def same_library(other: str) -> bool:
    """Whether a commit has the `jaxmem/` of the working tree."""
    git = ["git", "diff", "--quiet", other.removesuffix("+"), "--", ":/jaxmem"]
    return subprocess.run(git, cwd=RESULTS.parent, check=False).returncode == 0


def write(name: str, columns: Sequence[str], rows: Sequence[Sequence]) -> pathlib.Path:
    """Writes the rows alone; a `Row` keeps its commit, others are of this one."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-jax{jax.__version__}.csv"
    module = pathlib.Path(sys.argv[0]).stem
    command = " ".join(["python -m", f"benchmarks.{module}", *sys.argv[1:]])
    with path.open("w", newline="") as file:
        file.write(f"# {command}")
        file.write(f"\n# {versions()}\n")
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*columns, COMMIT])
        for row in rows:
            cells = [round(c, 2) if isinstance(c, float) else c for c in row]
            out.writerow([*cells, getattr(row, "commit", None) or commit()])
    return path


def as_a_whole() -> None:
    """Rows that the command line does not name are kept: the file is that of them all.

    So the command that is written above the rows has its options, but no names.
    """
    sys.argv[1:] = [word for word in sys.argv[1:] if word.startswith("-")]


def published(name: str) -> list[Row]:
    """The rows of `results/<name>-jax<version>.csv`, as text; none if there is none."""
    path = RESULTS / f"{name}-jax{jax.__version__}.csv"
    if not path.exists():
        return []
    lines = (x for x in path.read_text().splitlines() if not x.startswith("#"))
    return [Row(cells, commit) for *cells, commit in list(csv.reader(lines))[1:]]


def unless_known(name: str, key: Sequence[str], measure: Callable[[], list]) -> list:
    """The cells behind a row's first ones: those that this library has measured before.

    `measure` makes them anew.
    """
    first = len(key)
    known = {
        tuple(row[:first]): Row(row[first:], row.commit) for row in published(name)
    }
    found = known.get(tuple(key))
    return measure() if found is None or not same_library(found.commit) else found


def publish_some(
    name: str,
    columns: Sequence[str],
    cases: Mapping[tuple[str, ...], Callable[[], Sequence]],
    words: Sequence[str],
) -> None:
    """Measures the rows whose first cells have all of the words, and keeps the others.

    `cases`: the first cells of each row -> the rest of it, measured when it is called.
    """
    as_a_whole()
    first = len(next(iter(cases)))
    rows: dict[tuple, Sequence] = {tuple(r[:first]): r for r in published(name)}
    for key, measure in cases.items():
        if all(any(word in cell for cell in key) for word in words):
            found = measure()
            rows[key] = Row((*key, *found), getattr(found, "commit", ""))
            print(*rows[key], flush=True)
            write(name, columns, [rows[key] for key in cases if key in rows])
    publish(name, columns, [rows[key] for key in cases if key in rows])


def milliseconds(report: MemoryReport) -> float:
    """Of a step, as predicted."""
    return 1e3 * report.seconds


def size_and_ms(report: MemoryReport, what: str = "temp_bytes") -> tuple[float, float]:
    """MiB of `what`, and the predicted milliseconds of a step."""
    return getattr(report, what) / MIB, milliseconds(report)


def peak_with(report: MemoryReport, temp: float) -> int:
    """Bytes of the peak if temporaries took so many MiB, to half a MiB."""
    return report.peak_bytes - report.temp_bytes + round((temp + 0.5) * MIB)


def compiled_with_ms(
    step: Callable, *args, what: str, **how
) -> tuple[float | str, float | str]:
    """MiB of `what` ("peak_bytes") and predicted milliseconds.

    Or why there are no bytes, and no time: XLA refuses some steps.
    """
    try:
        return size_and_ms(jaxmem.estimate(step, *args, **how), what)
    except DoesNotFit:
        return TOO_LARGE, ""
    except CompileError as error:
        print(str(error)[:200])
        return "does not compile", ""


def compiled(step: Callable, *args, what: str, **how) -> float | str:
    """MiB of `what`, or why there are none."""
    return compiled_with_ms(step, *args, what=what, **how)[0]


def result_of(value: float, threshold: float | None) -> str:
    """ "yes" or "no", or nothing without a threshold, which is a whole number."""
    return "" if threshold is None else "yes" if round(value) <= threshold else "no"
