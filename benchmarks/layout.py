"""Layouts in one arena: best fit in XLA's two orders, and `planning.layout`.

    python -m benchmarks.layout [--time-limit S] [FILE ...]

Each FILE is a CSV of buffers (id, lower, upper, size). A number between dots in its
name is taken for a capacity, as in minimalloc's `A.1048576.csv`: the search then stops
at the first layout within, and then with none at the lowest. Without files the
instances are made here: rectangles cut into pieces, whose least height is known.
"""

import argparse
import pathlib
import sys
import time

import numpy as np

from benchmarks._common import publish
from jaxmem import planning
from jaxmem.planning import Buffer

COLUMNS = (
    "instance",
    "buffers",
    "capacity",
    "bound",
    "by size / bound",
    "by lifetime / bound",
    "within capacity",
    "CPU seconds within",
    "lowest",
    "lowest / bound",
    "proven",
    "CPU seconds for lowest",
)


def guillotine(count, time, height, seed):
    """Buffers that fill an arena without a gap: a rectangle cut, and cut further."""
    random = np.random.default_rng(seed)
    pieces = [(0, time, 0, height)]
    while len(pieces) < count:
        # The largest that can be cut, so that no piece stays much larger than others.
        area = [(b - a) * (d - c) for a, b, c, d in pieces]
        a, b, c, d = pieces.pop(int(np.argmax(area)))
        if d - c < 2 or (b - a >= 2 and random.random() < 0.5):
            cut = int(random.integers(a + 1, b))
            pieces += [(a, cut, c, d), (cut, b, c, d)]
        else:
            cut = int(random.integers(c + 1, d))
            pieces += [(a, b, c, cut), (a, b, cut, d)]
    order = random.permutation(len(pieces))
    return [
        Buffer(n, *pieces[i][:2], pieces[i][3] - pieces[i][2])
        for n, i in enumerate(order)
    ]


def instances(files):
    """(name, buffers, capacity)."""
    for path in files:
        numbers = [int(p) for p in path.name.split(".") if p.isdecimal()]
        yield path.name, planning.read_buffers(path), numbers[0] if numbers else None
    if not files:
        for count in (100, 150, 200, 300):
            yield f"cut-{count}", guillotine(count, count, 10_000, count), 10_000


def timed(buffers, capacity, time_limit):
    """(layout, CPU seconds): this machine may be busy with other things."""
    begin = time.process_time()
    try:
        found = planning.layout(buffers, capacity=capacity, time_limit=time_limit)
    except planning.NoLayoutError as error:
        found = error.best
    seconds = time.process_time() - begin
    found.check()
    return found, seconds


def row(name, buffers, capacity, time_limit):
    simple = [planning.best_fit(buffers, by) for by in ("size", "lifetime")]
    within = ("", "")
    if capacity is not None:
        found, seconds = timed(buffers, capacity, time_limit)
        within = ("yes" if found.height <= capacity else "no", seconds)
    lowest, seconds = timed(buffers, None, time_limit)
    ratio = lambda height: f"{height / lowest.load:.4f}"
    return (
        name,
        len(buffers),
        "" if capacity is None else capacity,
        lowest.load,
        *(ratio(s.height) for s in simple),
        *within,
        lowest.height,
        ratio(lowest.height),
        "yes" if lowest.optimal else "no",
        seconds,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--time-limit", type=float, default=10.0)
    options = parser.parse_args()
    rows = [row(*i, options.time_limit) for i in instances(options.files)]
    # The command that is written above the results names files, not their folders.
    sys.argv[1:] = [f"--time-limit={options.time_limit:g}"]
    sys.argv += [path.name for path in options.files]
    publish("layout", COLUMNS, rows)


if __name__ == "__main__":
    main()
