"""Everything a device is needed for, in pieces under ten minutes each.

    python -m benchmarks.device                 # all that is not done, the best first
    python -m benchmarks.device --minutes 25    # no longer than that
    python -m benchmarks.device --only fast     # jobs with such a name
    python -m benchmarks.device --list          # what there is, and what is done
    python -m benchmarks.device --small         # tiny sizes, on a CPU too
    python -m benchmarks.device --table         # the kernels that `None` takes

A job is a process of its own; its line is added to results/device-*.jsonl when it ends.
What is done is not done a second time without --again; what has failed is tried last.
"""

import argparse
import importlib
import json
import pathlib
import signal
import sys
from collections.abc import Sequence

from benchmarks._common import RESULTS
from benchmarks.device.job import Job, NotHere
from benchmarks.device.runner import NOT_HERE

SMALL = RESULTS.parent.parent / "build" / "device"  # which git ignores


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--only", nargs="*", default=[], help="words of which a job's name has one")
    add("--minutes", type=float, help="end before that many have passed")
    add("--small", action="store_true", help="tiny sizes, on a CPU too")
    add("--again", action="store_true", help="what is done as well")
    add("--list", action="store_true", help="what there is, and what is done")
    add("--table", action="store_true", help="write what None takes, of all results")
    add("--folder", type=pathlib.Path, help="of the lines, benchmarks/results else")
    add("--source", default="benchmarks.device.jobs", help=argparse.SUPPRESS)
    add("--machine", action="store_true", help=argparse.SUPPRESS)
    add("--job", help=argparse.SUPPRESS)
    add("--answers", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def answer(job: Job, small: bool, path: pathlib.Path) -> None:
    """The process of one job: its rows, each written as soon as it is there."""
    with path.open("a") as file:
        try:
            for row in job.rows(small):
                print(json.dumps(row), file=file, flush=True)
        except NotHere as reason:
            print(json.dumps({NOT_HERE: str(reason)}), file=file, flush=True)


def main() -> None:
    options = parse()
    if options.machine:
        from benchmarks.device import machine

        return print(json.dumps(machine.describe()))
    if options.table:
        from benchmarks.device import table

        return table.write()
    jobs = importlib.import_module(options.source).jobs()
    if options.job:
        return answer(jobs[options.job], options.small, options.answers)
    chosen = [j for j in jobs.values() if _named(j.name, options.only)]
    sys.exit(command(options, chosen))


def _named(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


def command(options: argparse.Namespace, jobs: Sequence[Job]) -> int:
    """Runs or lists the jobs; the exit status."""
    from benchmarks.device import machine, results
    from benchmarks.device.runner import Runner

    here = machine.asked()
    if here["platform"] == "cpu" and not options.small:
        print("no GPU or TPU is found; --small runs the jobs in small on a CPU")
        return 2
    folder = options.folder or (SMALL if options.small else RESULTS)
    path = results.path_for(here, folder)
    runner = Runner(here, path, options.small, options.source)
    if options.list:
        return listed(jobs, results.read(path))
    signal.signal(signal.SIGTERM, _interrupt)
    seconds = options.minutes and 60 * options.minutes
    try:
        whole = runner.run(jobs, seconds, again=options.again)
    except KeyboardInterrupt:
        print(f"stopped; {path} has what was found, the same command goes on")
        return 130
    print(f"{path}: {'all that was asked for' if whole else 'more is left to do'}")
    return 0


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def listed(jobs: Sequence[Job], seen: dict) -> int:
    for job in sorted(jobs, key=lambda job: -job.worth):
        status = seen.get(job.name, {}).get("status", "to do")
        print(f"{status:>10}  {job.seconds:4} s  {job.name}")
    return 0


if __name__ == "__main__":
    main()
