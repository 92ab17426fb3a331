"""Compiles in processes of their own, side by side, by a worker started on demand.

The caller's process stays as it is, as does its default backend. What a compile prints
lands in a file, of which an error shows the last lines.
"""

import atexit
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from jaxmem.memory import _worker
from jaxmem.memory._dump import assigned_bytes

MAX_COMPILES = max(1, min(4, os.cpu_count() or 1))
_POLL = 0.005
_LAST_LINES = 15
_QUIET = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    # a cached executable would be loaded without the dump that the report is made of
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    # the caller may itself hold libtpu's lock, or compile in another process
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # a worker that forks has no threads
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_DUMPS = {
    "buffer_assignment": "*buffer-assignment.txt",
    "live_range": "*live-range.txt",
    "memory_usage_report": "*memory-usage-report.txt",
    "hlo": "*after_optimizations.txt",
}


class CompileError(RuntimeError):
    """A compile that failed: the compiler's own words, or how it died."""


class DoesNotFit(CompileError):
    """The compiler refused the step: it needs more memory than the target has."""


class _Gone(Exception):
    """The worker has died, or gone since nothing was asked for in a long time."""


def own_flags(environment: Mapping[str, str] = os.environ) -> str:
    """The caller's own flags of XLA: they change what it makes of the step."""
    flags = environment.get("XLA_FLAGS", "").split()
    ours = ("--xla_dump", "--xla_force_host_platform")
    return " ".join(flag for flag in flags if not flag.startswith(ours))


class Worker:
    """The process that starts compiles; see `_worker.py`."""

    def __init__(self, log: str) -> None:
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-s", _worker.__file__, str(MAX_COMPILES)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, **_QUIET},
                # an interrupt at the terminal is the caller's to deal with
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tell(self, **command: Any) -> None:
        """Sends a command; raises `_Gone` where nobody listens."""
        try:
            stdin = cast(IO[bytes], self.process.stdin)
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise _Gone from error

    def close(self) -> None:
        """Ends the process and its compiles."""
        try:
            cast(IO[bytes], self.process.stdin).close()
        except OSError:
            pass  # unsent bytes of a process that is gone
        try:
            self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Compile:
    """A compile under way."""

    def __init__(self, pool: "Pool", request: dict[str, Any], how: dict[str, Any]):
        self._pool, self._request, self._how = pool, request, how
        self._lives = 2
        self._start()

    def _start(self) -> None:
        """Asks a worker; another one, once, where it is found dead."""
        while True:
            self._worker = self._pool.worker()
            self.folder = self._pool.new_folder()
            with open(os.path.join(self.folder, "request"), "wb") as file:
                pickle.dump(self._request, file, protocol=5)
            command = {"do": "compile", "folder": self.folder, **self._how}
            try:
                return self._pool.tell(self._worker, **command)
            except _Gone:
                self._die()

    def _die(self) -> None:
        """The worker is gone; raises where it is the second that this was asked of."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lives -= 1
        if not self._lives:
            raise self._died("with the worker", _last_lines(self._worker.log))

    def result(self) -> dict[str, Any]:
        """What the compiler said, once it has.

        Returns:
          `memory`: bytes on one device; `cost`; `dump`: the texts that XLA dumped;
          `aliases`: (output index, leaf) of each input buffer that an output reuses.

        Raises:
          CompileError, TimeoutError.
        """
        try:
            while True:
                try:
                    found = self._read(self._wait())
                except _Gone:  # it may have been dead before it was asked
                    self._die()
                else:
                    if found is not None:
                        return found
                    self._how["fence"] = None  # not read as a whole: to the end, then
                self._start()
        except BaseException:  # interrupted, too: nobody waits for it any more
            self.cancel()
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def cancel(self) -> None:
        """Ends the compile, of which nobody wants to know; its files go with it."""
        if not os.path.exists(os.path.join(self.folder, "ended")):
            try:
                # the worker removes the files, once nobody writes them any more
                return self._pool.tell(self._worker, do="cancel", folder=self.folder)
            except _Gone:
                pass
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> str:
        """How the compile ended."""
        ended = os.path.join(self.folder, "ended")
        while not os.path.exists(ended):
            if not self._worker.alive and not os.path.exists(ended):
                raise _Gone
            time.sleep(_POLL)
        with open(ended) as file:
            return file.read()

    def _read(self, how: str) -> dict[str, Any] | None:
        """The result; None where what was dumped does not add up."""
        request, target = self._request, self._request["target"]["name"]
        if how == "timeout":
            raise TimeoutError(
                f"compiling {request['name']!r} for {target} took more than "
                f"{self._how['timeout']:g} s: pass a larger timeout= to jaxmem"
            )
        dump = {kind: _largest(self.folder, form) for kind, form in _DUMPS.items()}
        if how == "assigned":
            texts = dump["buffer_assignment"], dump["memory_usage_report"]
            memory = assigned_bytes(*texts)
            return memory and self._made(memory, {}, dump)
        answer = os.path.join(self.folder, "answer")
        if not os.path.exists(answer):
            words = _last_lines(os.path.join(self.folder, "log"))
            raise self._died(f"({how})", words)
        with open(answer, "rb") as file:
            result = _result_of(pickle.load(file), request)
        dump["hlo"] = dump["hlo"] or result["hlo"]
        return self._made(result["memory"], result["cost"], dump)

    def _made(self, memory, cost, dump: dict[str, str]) -> dict[str, Any]:
        aliases = aliases_of(dump["hlo"], self._request["kept"])
        return {"memory": memory, "cost": cost, "dump": dump, "aliases": aliases}

    def _died(self, how: str, words: str) -> CompileError:
        return CompileError(
            f"the compiler for {self._request['target']['name']} died {how} on "
            f"{self._request['name']!r}; its last lines were:\n{words}"
        )


def aliases_of(hlo: str, kept: Sequence[int]) -> list[tuple[str, int]]:
    """(output index, leaf) of each input buffer that an output reuses."""
    start = hlo.find("input_output_alias={")
    if start < 0:
        return []
    line = hlo[start : hlo.find("\n", start)]
    pairs = re.findall(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}", line)
    return [(out, kept[int(number)]) for out, number in pairs]


def _largest(folder: str, pattern: str) -> str:
    """The text of the largest file of a kind: helpers may be compiled beside."""
    paths = list(Path(folder, "dump").glob(pattern))
    if not paths:
        return ""
    return max(paths, key=os.path.getsize).read_text(errors="replace")


def _last_lines(log: str) -> str:
    """The end of what was printed."""
    try:
        with open(log, errors="replace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        lines = []
    return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:])


def _result_of(answer: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    if "result" in answer:
        return answer["result"]
    text, target = answer["error"], request["target"]["name"]
    if "RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text:
        raise DoesNotFit(f"{request['name']!r} does not fit on {target}: {text}")
    raise CompileError(
        f"compiling {request['name']!r} for {target} failed: {answer['type']}: {text}"
    )


class Pool:
    """Compiles up to `MAX_COMPILES` at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="jaxmem-")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def submit(
        self, request: dict[str, Any], timeout: float, *, code: bool = True
    ) -> Compile:
        """Begins a compile; waiting for others does not count as time.

        Args:
          request: as `_compile.lower` makes it.
          timeout: seconds.
          code: whether code is generated; else the compile ends as soon as the buffers
            are assigned, and `memory` is what the assignment adds up to.
        """
        target = request["target"]
        devices = f"--xla_force_host_platform_device_count={target['devices']}"
        environment = {"XLA_FLAGS": f"{own_flags()} {devices}"}
        fence = None if code else _worker.FENCES[target["platform"]]
        how = {"fence": fence, "timeout": timeout}
        return Compile(self, request | {"environment": environment}, how)

    def run(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Compiles, to the end."""
        return self.submit(request, timeout).result()

    def worker(self) -> Worker:
        """The worker; a new one where there is none, or it has gone.

        To be called ahead where a compile is going to follow: it takes a second to
        start.
        """
        with self._lock:
            if self._worker is None or not self._worker.alive:
                if self._worker is not None:
                    self._worker.close()
                os.makedirs(self._folder, exist_ok=True)
                self._worker = Worker(os.path.join(self._folder, "log"))
            return self._worker

    def new_folder(self) -> str:
        """An empty folder for a compile."""
        folder = os.path.join(self._folder, f"compile-{next(self._numbers)}")
        os.mkdir(folder)
        return folder

    def tell(self, worker: Worker, **command: Any) -> None:
        """Sends a command, a whole line at a time."""
        with self._lock:
            worker.tell(**command)

    def close(self) -> None:
        """Ends the worker, and removes all files."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
            self._worker = None
            shutil.rmtree(self._folder, ignore_errors=True)


_POOLS: dict[int, Pool] = {}


def pool() -> Pool:
    """This process's pool: after a fork the parent's worker is not ours."""
    if os.getpid() not in _POOLS:
        _POOLS[os.getpid()] = Pool()
        atexit.register(_POOLS[os.getpid()].close)
    return _POOLS[os.getpid()]


def start_worker() -> None:
    """Starts what compiles, ahead of the first compile: that takes it a second."""
    pool().worker()
