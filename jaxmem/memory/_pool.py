"""A few worker processes that compile side by side, started on demand.

A worker has its own environment: the caller's stays as it is, as does its default
backend. What the worker prints lands in a file, of which an error shows the last lines.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any, BinaryIO, cast

from jaxmem.memory import _worker

MAX_WORKERS = max(1, min(4, os.cpu_count() or 1))
_LAST_LINES = 15
_QUIET = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    # a cached executable would be loaded without the dump that the report is made of
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    # the caller may itself hold libtpu's lock, or compile in another worker
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class CompileError(RuntimeError):
    """A compile that failed: the compiler's own words, or how the worker died."""


class DoesNotFit(CompileError):
    """The compiler refused the step: it needs more memory than the target has."""


class Worker:
    """One process, one request at a time."""

    def __init__(self, host_devices: int):
        self.host_devices = host_devices
        self._dir = tempfile.mkdtemp(prefix="jaxmem-")
        self._log = open(os.path.join(self._dir, "stderr"), "w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-s", _worker.__file__, self._dump_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environment(),
        )

    @property
    def _dump_dir(self) -> str:
        return os.path.join(self._dir, "dump")

    @property
    def _pipes(self) -> tuple[BinaryIO, BinaryIO]:
        """To the worker, and from it."""
        return cast(
            tuple[BinaryIO, BinaryIO], (self._process.stdin, self._process.stdout)
        )

    def _environment(self) -> dict[str, str]:
        """The caller's own flags go along: they change what XLA makes of the step."""
        flags = [
            flag
            for flag in os.environ.get("XLA_FLAGS", "").split()
            if not flag.startswith(("--xla_dump", "--xla_force_host_platform"))
        ]
        flags += [
            f"--xla_dump_to={self._dump_dir}",
            "--xla_dump_hlo_as_text",
            f"--xla_force_host_platform_device_count={self.host_devices}",
        ]
        return {**os.environ, **_QUIET, "XLA_FLAGS": " ".join(flags)}

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The worker's answer; kills the worker when it does not come in time."""
        answer: list[Any] = []

        def talk():
            try:
                _worker.write_frame(self._pipes[0], request)
                answer.append(_worker.read_frame(self._pipes[1]))
            except (EOFError, OSError):
                pass  # it died: its last words are in the log

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        try:
            thread.join(timeout)
        except BaseException:  # interrupted: its answer must not go to the next request
            self.close()
            raise
        if thread.is_alive():
            self.close()
            raise TimeoutError(
                f"compiling {request['name']!r} for {request['target']['name']} took "
                f"more than {timeout:g} s: pass a larger timeout= to jaxmem"
            )
        if not answer:
            code = self._process.wait()
            words = self.last_lines()
            self.close()
            raise CompileError(
                f"the compiler for {request['target']['name']} died (exit code {code}) "
                f"on {request['name']!r}; its last lines were:\n{words}"
            )
        return _result_of(answer[0], request)

    def last_lines(self) -> str:
        """The end of what the worker printed."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:])

    def close(self) -> None:
        """Ends the process and removes its files."""
        if self.alive:
            self._process.kill()
            self._process.wait()
        for stream in (*self._pipes, self._log):
            try:
                stream.close()
            except OSError:
                pass  # unsent bytes of a worker that is gone
        shutil.rmtree(self._dir, ignore_errors=True)


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
    """Hands out idle workers, and starts new ones up to `MAX_WORKERS`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[Worker] = []
        self._running = 0

    def run(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Compiles in some worker; waiting for a free one does not count as time."""
        worker = self._take(request["target"]["devices"])
        try:
            return worker.run(request, timeout)
        finally:
            self._give(worker)

    def _take(self, devices: int) -> Worker:
        with self._changed:
            while self._running >= MAX_WORKERS:
                self._changed.wait()
            self._running += 1
            stale = [w for w in self._idle if w.host_devices < devices or not w.alive]
            self._idle = [w for w in self._idle if w not in stale]
            worker = self._idle.pop() if self._idle else None
        for old in stale:
            old.close()
        return worker or Worker(devices)

    def _give(self, worker: Worker) -> None:
        with self._changed:
            self._running -= 1
            if worker.alive:
                self._idle.append(worker)
            self._changed.notify()

    def close(self) -> None:
        """Ends the idle workers."""
        with self._changed:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()


_POOLS: dict[int, Pool] = {}


def pool() -> Pool:
    """This process's pool: after a fork the parent's workers are not ours."""
    if os.getpid() not in _POOLS:
        _POOLS[os.getpid()] = Pool()
        atexit.register(_POOLS[os.getpid()].close)
    return _POOLS[os.getpid()]
