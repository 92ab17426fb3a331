"""The process that compiles for chips that are not there; it is run as a script.

Each compile is a fork: it need not import anything, has its own environment, and shares
no state with others (Mosaic GPU caches its kernels by their code, whatever the chip).
Commands arrive on stdin, one line of JSON each. Everything else is in a folder a
compile: `request` by the caller, `answer`, `dump` and `log` by the compile, `ended`.
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

IDLE_SECONDS = 300.0  # after which a worker without commands exits
_POLL = 0.01  # seconds from one look at the running compiles to the next
_FORKS = sys.platform == "linux"  # elsewhere system libraries start threads
_HERE = os.path.dirname(os.path.abspath(__file__))
# Fences: a file that XLA writes after the buffer assignment and the module's text. The
# compile is killed there: the code that it would generate next appears in no report.
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
    """Whether the buffer assignment and the module's text are completely on disk."""
    # XLA closes each file before it opens the next one, so that a file is complete once
    # there is a newer one.
    last = newest(dump_dir, fence)
    report = newest(dump_dir, "*memory-usage-report.txt")
    hlo = newest(dump_dir, "*after_optimizations.txt")
    if not (last and report and hlo):
        return False
    written = max(os.stat(path).st_mtime_ns for path in (report, hlo))
    if os.stat(last).st_mtime_ns < written:  # the fence of an earlier module
        return False
    with open(hlo, "rb") as file:
        file.seek(-min(8, os.path.getsize(hlo)), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


class _Fork:
    """A fork of this process that compiles; used like a `Popen`."""

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
        """Kills it, and the assembler that it may be waiting for."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # the fork has not yet reached `setpgid`
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(_POLL / 10)


def _stand_alone(folder: str) -> None:
    """In the fork: a process group and a log of its own; it dies with the worker."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    null, log = os.open(os.devnull, os.O_RDONLY), _log(folder)
    for source, own in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, own)


def _log(folder: str) -> int:
    return os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _process(folder: str) -> Any:
    """A new process that compiles, where forks are not safe."""
    log = _log(folder)
    command = [sys.executable, "-sP", __file__, "once", folder]
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    finally:
        os.close(log)


@dataclass
class _Running:
    """A compile that is running."""

    process: Any  # a `_Fork` or a `Popen`
    folder: str  # the files of the compile
    fence: str | None  # the file after which it is killed; None to let it finish
    deadline: float  # of `time.monotonic`

    def over(self) -> str | None:
        """How it ended; None while it runs. Kills it where it need not go on."""
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
    """Runs at most `limit` compiles at a time, in the order of the commands."""

    def __init__(self, limit: int, start: Any):
        self.limit, self.start = limit, start
        self.waiting: list[dict[str, Any]] = []
        self.running: list[_Running] = []

    def obey(self, command: dict[str, Any]) -> None:
        """Queues a compile, or cancels one."""
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
        """Reports the compiles that have ended, and starts queued ones."""
        for job in list(self.running):
            if (how := job.over()) is not None:
                self.running.remove(job)
                _write_ended(job.folder, how)
        while self.waiting and len(self.running) < self.limit:
            command = self.waiting.pop(0)
            folder, deadline = command["folder"], time.monotonic() + command["timeout"]
            started = self.start(folder)
            job = _Running(started, folder, command["fence"], deadline)
            self.running.append(job)

    def close(self) -> None:
        """Kills all compiles."""
        for job in self.running:
            job.end()


def _write_ended(folder: str, how: str) -> None:
    unfinished = os.path.join(folder, "ended.part")  # `ended` is complete once there
    try:
        with open(unfinished, "w") as file:
            file.write(how)
        os.replace(unfinished, os.path.join(folder, "ended"))
    except FileNotFoundError:
        pass  # the caller has gone, and its folder with it


def main(limit: int) -> None:
    """Serves until stdin closes or no command has come for `IDLE_SECONDS`."""
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
    server = Server(limit, start)
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
    return runpy.run_path(os.path.join(_HERE, "worker_compile.py"))["compile_into"]


def _import_all() -> None:
    """Imports what every compile needs; none of it may start a thread before a fork."""
    for name in (
        *("jax", "jax.export", "jax.numpy", "jax.experimental.topologies"),
        *("jaxlib.mlir.dialects.mhlo", "scipy.linalg.cython_blas"),
    ):
        importlib.import_module(name)
    # jax warns of forks because of its own threads, and has started none here
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    gc.collect()
    gc.freeze()  # else the collector of each fork would copy the pages of all modules


if __name__ == "__main__":
    if sys.argv[1] == "once":
        _compile_into()(sys.argv[2])
    else:
        main(int(sys.argv[1]))
