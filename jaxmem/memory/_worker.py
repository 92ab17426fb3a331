"""The process that compiles for chips that are not there; run as a file, on its own.

It has jax imported and nothing started: it has one thread beside the one that listens,
and no backend. Each compile is a fork of it: it pays for no import, has an environment
of its own, and leaves nothing behind in a process that others compile in (Mosaic GPU
keeps its kernels by their code, not by the chip). Where there is no safe fork, each
compile is a new process.

Commands come as lines of JSON on stdin, all else is files in a folder for each compile:

- `request`, which the caller writes, and `answer`, which the compile writes;
- `dump`, what XLA dumps, and `log`, what the compile prints;
- `ended`, how the compile ended, which comes last.

A compile that is watched is ended as soon as XLA has written its buffer assignment: the
code that it would generate then is nothing that a report shows.
"""

import ctypes
import gc
import glob
import importlib
import json
import os
import queue
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

IDLE_SECONDS = 300.0
_POLL = 0.01  # seconds from one look at the running compiles to the next
_FORKS = sys.platform == "linux"  # elsewhere system libraries have threads by now
_HERE = os.path.dirname(os.path.abspath(__file__))
# A file that XLA writes after the assignment and the module's text, by platform.
FENCES = {
    "cpu": "*.debug_options",
    "cuda": "*.debug_options",
    "tpu": "*after_optimizations_after_buffer_assignment.txt",
}


def newest(folder: str, pattern: str) -> str | None:
    """The path of the newest file of this kind, None where there is none."""
    paths = glob.glob(os.path.join(glob.escape(folder), pattern))
    return max(paths, key=os.path.getmtime, default=None)


def assigned(dump_dir: str, fence: str) -> bool:
    """Whether the buffer assignment and the module's text are on disk as a whole.

    XLA closes a file before it opens the next one, so that those that are older than
    another one are complete.
    """
    last = newest(dump_dir, fence)
    report = newest(dump_dir, "*memory-usage-report.txt")
    hlo = newest(dump_dir, "*after_optimizations.txt")
    if not (last and report and hlo):
        return False
    written = max(os.stat(path).st_mtime_ns for path in (report, hlo))
    if os.stat(last).st_mtime_ns < written:  # of an earlier stage
        return False
    with open(hlo, "rb") as file:
        file.seek(-min(8, os.path.getsize(hlo)), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


class _Fork:
    """A fork of this process that compiles; to be used like a `Popen`."""

    def __init__(self, folder: str, compile_into: Any):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _stand_alone(folder)
                compile_into(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Ends it, with the assembler it may be waiting for."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(_POLL / 10)


def _stand_alone(folder: str) -> None:
    """In the fork: its own group and output; it ends with the worker."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    null, log = os.open(os.devnull, os.O_RDONLY), _log(folder)
    for source, own in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, own)


def _log(folder: str) -> int:
    return os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _process(folder: str) -> Any:
    """A new process that compiles, where there is no safe fork."""
    log = _log(folder)
    command = [sys.executable, "-s", __file__, "once", folder]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    finally:
        os.close(log)


@dataclass
class _Running:
    """A compile under way, and until when."""

    process: Any
    folder: str
    fence: str | None
    deadline: float

    def over(self) -> str | None:
        """How it ended; it is ended here where it need not go on."""
        if (code := self.process.poll()) is not None:
            return f"exit {code}"
        if self.fence and assigned(os.path.join(self.folder, "dump"), self.fence):
            self.end()
            return "assigned"
        if time.monotonic() > self.deadline:
            self.end()
            return "timeout"
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Server:
    """Compiles what it is asked for, so many at a time, first come first served."""

    def __init__(self, most: int, start: Any):
        self.most, self.start = most, start
        self.waiting: list[dict[str, Any]] = []
        self.running: list[_Running] = []

    def obey(self, command: dict[str, Any]) -> None:
        """Notes what to compile, or ends a compile that nobody waits for any more."""
        if command["do"] == "compile":
            self.waiting.append(command)
            return
        folder = command["folder"]
        self.waiting = [c for c in self.waiting if c["folder"] != folder]
        for job in [j for j in self.running if j.folder == folder]:
            job.end()
            self.running.remove(job)
        shutil.rmtree(folder, ignore_errors=True)

    def advance(self) -> None:
        """Ends what has ended, starts what there is room for."""
        for job in list(self.running):
            if (how := job.over()) is not None:
                self.running.remove(job)
                _tell(job.folder, how)
        while self.waiting and len(self.running) < self.most:
            command = self.waiting.pop(0)
            folder, deadline = command["folder"], time.monotonic() + command["timeout"]
            started = self.start(folder)
            job = _Running(started, folder, command["fence"], deadline)
            self.running.append(job)

    def close(self) -> None:
        """Ends all."""
        for job in self.running:
            job.end()


def _tell(folder: str, how: str) -> None:
    part = os.path.join(folder, "ended.part")
    try:
        with open(part, "w") as file:
            file.write(how)
        os.replace(part, os.path.join(folder, "ended"))
    except FileNotFoundError:
        pass  # the caller has gone, and its folder with it


def main(most: int) -> None:
    """Serves until stdin closes, or nothing was asked for in a long time."""
    compile_into = _compile_into()
    commands: queue.Queue = queue.Queue()

    def listen():
        for line in sys.stdin:
            commands.put(json.loads(line))
        commands.put(None)  # the caller has gone

    if _FORKS:
        _import_all()
    threading.Thread(target=listen, daemon=True).start()
    start = (lambda folder: _Fork(folder, compile_into)) if _FORKS else _process
    server = Server(most, start)
    while True:
        busy = server.running or server.waiting
        try:
            command = commands.get(timeout=_POLL if busy else IDLE_SECONDS)
        except queue.Empty:
            command = {}
        if command is None or not (command or busy):
            break
        if command:
            server.obey(command)
        server.advance()
    server.close()
    os._exit(0)


def _compile_into() -> Any:
    return runpy.run_path(os.path.join(_HERE, "_worker_compile.py"))["compile_into"]


def _import_all() -> None:
    """What every compile needs; none of it may start a thread, see `os.fork`."""
    for name in (
        *("jax", "jax.export", "jax.numpy", "jax.experimental.topologies"),
        *("jaxlib.mlir.dialects.mhlo", "scipy.linalg.cython_blas"),
    ):
        importlib.import_module(name)
    # jax warns of its own threads; here it has not begun any
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    gc.collect()
    gc.freeze()  # else each fork would look through, and copy, all that is imported


if __name__ == "__main__":
    if sys.argv[1] == "once":
        _compile_into()(sys.argv[2])
    else:
        main(int(sys.argv[1]))
