"""Whether the files in results/ are what the code gives: some rows measured anew.

    python -m benchmarks.recheck                 # the cheap rows, a tenth of all
    python -m benchmarks.recheck layers storage  # those of some files
    python -m benchmarks.recheck --all           # every row that it knows to measure

Compiles a row's step as the benchmark does, and compares with the file to the digits
that the file has. Exits 1, naming each row that is otherwise: it is stale, and its
benchmark is to be rerun. Files of times and of losses are not among them.
"""

import sys
from collections.abc import Iterator, Sequence

import jax

from benchmarks._common import COMMIT, RESULTS, versions
from benchmarks._rechecks import CHECKS, Check
from benchmarks.figures.rows import VERSION, Row, rows

HALF = 0.005 + 1e-9  # of the last digit that `_common.write` keeps
COMPILED = ("batch", "budget", "depth", "frozen_h100", "latency_hiding", "offload")
COMPILED += ("release_residuals", "scheduling_h100")  # not measured here


def chosen(files: Sequence[str], every: bool) -> Iterator[tuple[Check, Row]]:
    for check in CHECKS:
        if not files or check.file in files:
            found = rows(check.file, VERSION)
            yield from ((check, r) for r in found if every or check.cheap(r))


def compiled_rows() -> int:
    """How many rows of all files hold bytes that were compiled for a chip."""
    names = (*(c.file for c in CHECKS), *COMPILED)
    return sum(len(rows(name, VERSION)) for name in names)


def name_of(check: Check, row: Row) -> str:
    return f"{check.file}: {', '.join(row[key] for key in check.keys)}"


def differences(check: Check, row: Row, measured: Sequence[float | str]) -> list[str]:
    """A sentence for each figure that is not the file's."""
    found = []
    for column, now in zip(check.columns, measured, strict=True):
        same = row[column] == now
        if isinstance(now, float) and row[column]:
            same = abs(float(row[column]) - now) <= HALF
        if not same:
            shown = round(now, 2) if isinstance(now, float) else now
            then = f"the file has {row[column] or 'nothing'}, of {row[COMMIT]}"
            found.append(f"{name_of(check, row)}: {column} is {shown}; {then}")
    return found


def recheck(check: Check, row: Row) -> list[str]:
    """Measures a row; a sentence for each figure that is otherwise."""
    return differences(check, row, check.measure(row))


def versions_of(file: str) -> str:
    """What the file was made with."""
    path = RESULTS / f"{file}-{VERSION}.csv"
    return path.read_text().splitlines()[1].removeprefix("# ")


def main() -> None:
    files = [word for word in sys.argv[1:] if word != "--all"]
    if unknown := set(files) - {check.file for check in CHECKS}:
        known = ", ".join(check.file for check in CHECKS)
        sys.exit(f"unknown: {', '.join(unknown)}; known: {known}")
    if VERSION != f"jax{jax.__version__}":
        sys.exit(f"the files are of {VERSION}, this is jax {jax.__version__}")
    stale, count = [], 0
    for check, row in chosen(files, "--all" in sys.argv):
        wrong, count = recheck(check, row), count + 1
        print(*(wrong or [f"{name_of(check, row)}: the same"]), sep="\n", flush=True)
        stale += [(check.file, sentence) for sentence in wrong]
    print(f"{count} of {compiled_rows()} rows measured, {len(stale)} figures differ")
    for file in dict.fromkeys(file for file, _ in stale):
        if versions_of(file) != versions():
            print(f"{file} is of {versions_of(file)}; these are {versions()}")
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
