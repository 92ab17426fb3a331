"""Compiles in other processes, several at a time, by a worker started on demand.

The caller's process and its default backend are left as they are.
"""

import atexit
import contextlib
import errno
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

from jaxmem.chips import NO_HARDWARE, Target, compiler_folders
from jaxmem.memory.compile import worker
from jaxmem.memory.compile.answer import compiler_died, read_answer
from jaxmem.memory.compile.lower import TracedCall, lower

MAX_COMPILES = max(1, min(4, os.cpu_count() or 1))
_POLL = 0.005  # seconds from one look for an ended compile to the next
_ROOM = 2**16  # bytes that are left where nothing of a compile was cut
_QUIET = {
    **NO_HARDWARE,
    "JAX_PLATFORMS": "cpu",
    # a cached executable would be loaded without the dump that the report is made of
    "JAX_ENABLE_COMPILATION_CACHE": "0",
    # the caller may itself hold libtpu's lock, or compile in another process
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # a worker that forks has no threads
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


class _Gone(Exception):
    """The worker has died, or has exited because nothing was asked of it for long."""


@contextlib.contextmanager
def _writing(folder: str) -> Iterator[None]:
    """Has an error of the file system name the folder, and say what to do."""
    try:
        yield
    except OSError as error:
        why = f"{folder}, where jaxmem compiles: {error.strerror or error}: set TMPDIR"
        text = f"{why} to a folder that can be written and has room"
        raise OSError(error.errno, text) from error


def _check_room(folder: str) -> None:
    """OSError where nothing more can be written: XLA says nothing of what is cut."""
    probe = os.path.join(folder, "probe")
    try:
        with _writing(folder), open(probe, "wb") as file:
            file.write(bytes(_ROOM))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


def caller_flags(environment: Mapping[str, str] = os.environ) -> str:
    """The caller's own flags of XLA: the compile depends on them."""
    flags = environment.get("XLA_FLAGS", "").split()
    # flags of where and how, with which the program would be the same
    ignored = ("--xla_dump", "--xla_force_host_platform")
    return " ".join(flag for flag in flags if not flag.startswith(ignored))


def _path_of(folders: tuple[str, ...]) -> dict[str, str]:
    """The variable that puts folders of compilers on a worker's path, first."""
    own = os.environ.get("PYTHONPATH")
    paths = [*folders, *([own] if own else [])]
    return {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}


class Worker:
    """The process that starts compiles; see `worker.py`."""

    def __init__(self, log: str, folders: tuple[str, ...] = ()) -> None:
        self.log, self.folders = log, folders
        with _writing(os.path.dirname(log)):
            file = open(log, "wb")
        with file:
            self.process = subprocess.Popen(
                # -P: a script's own folder is else searched for modules first, and
                # this one has a `cache.py` and the like
                [sys.executable, "-sP", worker.__file__, str(MAX_COMPILES)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, **_QUIET, **_path_of(folders)},
                # an interrupt at the terminal is for the caller alone
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
        """Ends the process, which ends its compiles."""
        try:
            cast(IO[bytes], self.process.stdin).close()
        except OSError:
            pass  # bytes that were not sent to a process that is gone
        try:
            self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Compile:
    """A compile that has been asked for."""

    def __init__(self, pool: "Pool", request: dict[str, Any], options: dict[str, Any]):
        self._pool, self._request, self._options = pool, request, options
        self._attempts = 2  # how many workers may die over it
        self._start()

    def _start(self) -> None:
        """Sends the request to a worker; to another one, once, if it is dead."""
        while True:
            self._worker = self._pool.worker()
            self.folder = self._pool.new_folder()
            request = pickle.dumps(self._request, protocol=5)
            with (
                _writing(self.folder),
                open(os.path.join(self.folder, "request"), "wb") as file,
            ):
                file.write(request)
            command = {"do": "compile", "folder": self.folder, **self._options}
            try:
                return self._pool.tell(self._worker, **command)
            except _Gone:
                self._lose_worker()

    def _lose_worker(self) -> None:
        """Counts a dead worker; raises at the second one."""
        _check_room(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._attempts -= 1
        if not self._attempts:
            raise compiler_died(self._request, "with the worker", self._worker.log)

    def result(self) -> dict[str, Any]:
        """Waits for `memory`, `cost`, `dump` (texts of XLA's) and `aliases`."""
        try:
            while True:
                try:
                    how = self._wait()
                except _Gone:  # the worker may have died before it was asked
                    self._lose_worker()
                else:
                    _check_room(self.folder)
                    result = read_answer(self.folder, how, self._request)
                    if result is not None:
                        return result
                    # The texts were not complete: compile to the end.
                    self._options["fence"] = None
                self._start()
        except BaseException:  # also an interrupt: nobody will ask for the result
            self.cancel()
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def cancel(self) -> None:
        """Ends the compile and removes its files."""
        if not os.path.exists(os.path.join(self.folder, "ended")):
            try:
                # the worker removes the files once no process writes them any more
                return self._pool.tell(self._worker, do="cancel", folder=self.folder)
            except _Gone:
                pass
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> str:
        """How the compile ended, once it has."""
        ended = os.path.join(self.folder, "ended")
        while not os.path.exists(ended):
            if not self._worker.alive and not os.path.exists(ended):
                raise _Gone
            time.sleep(_POLL)
        with open(ended) as file:
            how = file.read()
        if how == "timeout":
            raise TimeoutError(
                f"compiling {self._request['name']!r} for "
                f"{self._request['target']['name']} took more than "
                f"{self._options['timeout']:g} s: pass a larger timeout= to jaxmem"
            )
        return how


def _untuned(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Compiler options with which XLA tries no kernels, if the caller has said nothing.

    Without a GPU it finds out how far each elementwise kernel could be unrolled, and
    then takes what it would have taken anyway: a third of the time of a module that has
    layers written out. Products are tiled as otherwise.
    """
    if "autotun" in caller_flags() or any("autotun" in name for name in options or ()):
        return options
    return {"xla_gpu_autotune_level": 0} | (options or {})


class Pool:
    """Compiles up to `MAX_COMPILES` at a time."""

    def __init__(self) -> None:
        with _writing(os.environ.get("TMPDIR", "the folder of temporary files")):
            self._folder = tempfile.mkdtemp(prefix="jaxmem-")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def submit(
        self,
        request: dict[str, Any],  # of a `LoweredStep`
        timeout: float,  # seconds, without those in which it waits for other compiles
        *,
        code: bool = True,  # whether to go on after the buffers are assigned
    ) -> Compile:
        """Begins a compile."""
        target = request["target"]
        devices = f"--xla_force_host_platform_device_count={target['devices']}"
        environment = {"XLA_FLAGS": f"{caller_flags()} {devices}"}
        fence = None if code else worker.FENCES[target["platform"]]
        options = {"fence": fence, "timeout": timeout}
        request = request | {"environment": environment}
        if fence is not None and target["platform"] == "cuda":
            request["compiler_options"] = _untuned(request["compiler_options"])
        return Compile(self, request, options)

    def worker(self) -> Worker:
        """The worker; a new one where there is none, or it is dead or outdated."""
        # A new one takes a second to start: call this ahead of a compile.
        folders = compiler_folders()
        with self._lock:
            worker = self._worker
            # jax looks for plugins when it is imported: compilers that were installed
            # since then need a new worker
            if worker is None or worker.folders != folders or not worker.alive:
                if worker is not None:
                    worker.close()
                with _writing(self._folder):
                    os.makedirs(self._folder, exist_ok=True)
                worker = Worker(os.path.join(self._folder, "log"), folders)
            self._worker = worker
            return worker

    def new_folder(self) -> str:
        """An empty folder for a compile."""
        folder = os.path.join(self._folder, f"compile-{next(self._numbers)}")
        with _writing(folder):
            os.makedirs(folder)  # also where somebody has tidied up the one around it
        return folder

    def tell(self, worker: Worker, **command: Any) -> None:
        """Sends a command; the lock keeps the lines of several threads apart."""
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
    """The pool of this process: a forked child must not use its parent's worker."""
    if os.getpid() not in _POOLS:
        _POOLS[os.getpid()] = Pool()
        atexit.register(_POOLS[os.getpid()].close)
    return _POOLS[os.getpid()]


def start_worker() -> None:
    """Starts the worker ahead of the first compile; it takes a second to start."""
    pool().worker()


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler makes of a step for a target."""

    target: str  # its name
    hlo: str  # the text of the optimized program
    temp_bytes: int  # bytes of its temporaries on one device
    aliased: frozenset[int]  # the leaves of the call whose buffers outputs reuse
    assignment: str = ""  # the text of its buffer assignment; "" where XLA dumps none
    live_range: str = ""  # the text of its live ranges; "" where XLA dumps none
    used: tuple[int, ...] = ()  # the leaves of the call that are parameters, in order


def compile_program(
    step: TracedCall,
    target: Target,
    timeout: float,
    options: dict[str, Any] | None = None,
) -> CompiledProgram:
    """Compiles a traced step to the end; `options`: of the compiler."""
    lowered = lower(step.jitted, step.traced, step.call, target, options)
    result = pool().submit(lowered.request, timeout).result()
    aliased = frozenset(leaf for _, leaf in result["aliases"])
    temp_bytes = result["memory"]["temp"]
    dump = result["dump"]
    texts = dump["buffer_assignment"], dump["live_range"]
    used = tuple(lowered.request["used"])
    return CompiledProgram(target.name, dump["hlo"], temp_bytes, aliased, *texts, used)
