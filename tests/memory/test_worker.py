"""The process that compiles: what is done when it dies, and what it leaves behind."""

import os
import signal
import time

import jax
import jax.numpy as jnp
import pytest

from jaxmem.memory import CompileError, begin, estimate
from jaxmem.memory.compile import answer
from jaxmem.memory.compile import pool as pooling
from jaxmem.memory.compile import worker as working
from tests.memory.test_estimate import W, X, needs_h100, sgd
from tests.memory.test_estimate import fresh_pool as fresh_pool
from tests.memory.test_estimate import own_cache as own_cache

FORKS = pytest.mark.skipif(not working._FORKS, reason="no safe fork here")


def kill(worker):
    os.kill(worker.process.pid, signal.SIGKILL)


def test_a_worker_that_died_while_idle_is_replaced(fresh_pool):
    first = fresh_pool.worker()
    kill(first)
    first.process.wait()
    assert estimate(sgd, W, X, cache=False).peak_bytes > 0
    assert fresh_pool.worker() is not first


def test_a_worker_that_dies_over_a_compile_is_replaced_once(fresh_pool):
    """Killed after it was asked: what it was asked for is asked of another one."""
    pending = begin(sgd, (W, X), {}, cache=False)
    first = fresh_pool.worker()
    kill(first)
    assert pending.result().peak_bytes > 0
    assert fresh_pool.worker() is not first


def test_a_worker_that_never_lives_is_an_error(fresh_pool, monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit('no such library')")
    monkeypatch.setattr(working, "__file__", str(script))
    with pytest.raises(CompileError, match=r"(?s)died with the worker.*no such libr"):
        estimate(sgd, W, X, cache=False)


@needs_h100
def test_compiles_leave_no_files_and_no_processes(fresh_pool):
    one = begin(sgd, (W, X), {}, target="h100", cache=False)
    one.result()  # ended in the middle
    other = begin(sgd, (W, X), {}, target="cpu", cache=False)
    other.cancel()
    assert _left(fresh_pool) == []


def test_the_largest_dump_of_a_kind_is_read(tmp_path):
    """In a folder whose name reads like a pattern itself."""
    dump = tmp_path / "a[b]*" / "dump"
    assert answer._largest(str(dump.parent), "*-hlo.txt") == ""
    dump.mkdir(parents=True)
    files = {"m1-hlo.txt": "a", "m2-hlo.txt": "largest", "m3-hlo.txt.bak": "x" * 99}
    for name, text in files.items():
        (dump / name).write_text(text)
    assert answer._largest(str(dump.parent), "*-hlo.txt") == "largest"


def test_the_pool_ends_its_worker(fresh_pool):
    worker = fresh_pool.worker()
    begin(sgd, (W, X), {}, cache=False)
    fresh_pool.close()
    assert not worker.alive
    assert not os.path.exists(fresh_pool._folder)


@FORKS
def test_an_interrupted_compile_is_ended(fresh_pool, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pooling.Compile, "_wait", interrupt)
        pending = begin(sgd, (W, X), {}, cache=False)
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    assert estimate(sgd, W, X, cache=False).peak_bytes > 0
    assert _left(fresh_pool) == []


def _left(pool, seconds=30):
    """Folders and processes of compiles, after a while in which they may go."""
    deadline = time.monotonic() + seconds
    while True:
        left = [f for f in os.listdir(pool._folder) if f != "log"]
        left += _children(pool.worker().process.pid)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def _children(pid):
    path = f"/proc/{pid}/task/{pid}/children"
    if not os.path.exists(path):
        pytest.skip("this system does not tell a process's children")
    with open(path) as file:
        return file.read().split()


@needs_h100
@pytest.mark.parametrize("own", [None, {"xla_gpu_autotune_level": 4}])
def test_kernels_are_not_tried_where_the_caller_does_not_say_how(monkeypatch, own):
    asked, result = [], pooling.Compile.result
    told = lambda self: asked.append(self._request["compiler_options"]) or result(self)
    monkeypatch.setattr(pooling.Compile, "result", told)
    estimate(sgd, W, X, target="h100", cache=False, compiler_options=own)
    assert asked == [own or {"xla_gpu_autotune_level": 0}]


@needs_h100
def test_without_kernels_tried_the_module_is_as_large_and_as_fast():
    def step(x, w):
        return jnp.sum(jax.nn.softmax(jnp.tanh(x @ w) @ w, axis=-1) ** 2)

    args = jnp.ones((512, 256)), jnp.ones((256, 256))
    about = {"target": "h100", "cache": False}
    how = {"compiler_options": {"xla_gpu_autotune_level": 4}}
    tried, untried = (estimate(jax.grad(step), *args, **about, **h) for h in (how, {}))
    assert tried.temp_bytes == untried.temp_bytes
    assert tried.seconds == untried.seconds
