"""`estimate`: the numbers, the worker, the cache, and what goes wrong."""

import functools
import os
import subprocess
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.chips import compiler_folders
from jaxmem.memory import (
    DoesNotFit,
    _estimate,
    _pending,
    estimate,
    target_mesh,
    targets,
)
from jaxmem.memory.compile import pool as pooling
from jaxmem.memory.report import donation
from jaxmem.ops import rms_norm

SDS = jax.ShapeDtypeStruct
KIB = 1024
AVAILABLE = {t.name for t in targets() if t.available}
needs_h100 = pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")
needs_tpu = pytest.mark.skipif("tpu-v5e" not in AVAILABLE, reason="targets extra")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    _estimate._SEEN.clear()


@pytest.fixture
def fresh_pool(monkeypatch):
    monkeypatch.setattr(pooling, "_POOLS", {})
    yield pooling.pool()
    pooling.pool().close()


def mlp_loss(ws, x):
    def body(x, w):
        return jax.nn.gelu(x @ w[0]) @ w[1], None

    x, _ = jax.lax.scan(body, x, ws)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def mlp_args(layers=2, tokens=256, width=128, hidden=512, dtype=jnp.bfloat16):
    ws = SDS((layers, width, hidden), dtype), SDS((layers, hidden, width), dtype)
    return ws, SDS((tokens, width), dtype)


def sgd(w, x):
    grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad


W, X = SDS((64, 64), jnp.float32), SDS((32, 64), jnp.float32)
W_BYTES = 64 * 64 * 4

# The recipe by hand: no export, no worker, an H100's own description.
BY_HAND = """
import sys; sys.path.insert(0, sys.argv[1])
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tests.memory.test_estimate import mlp_args, mlp_loss
config = '''gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32
shared_memory_per_block: 49152 shared_memory_per_core: 233472
threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
registers_per_block_limit: 65536 }
runtime_version { major: 13 } platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"'''
topology = topologies.get_topology_desc(
    "h100", "cuda", target_config=config, topology="1x1x1")
here = SingleDeviceSharding(topology.devices[0])
args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), mlp_args())
step = jax.jit(jax.grad(mlp_loss), donate_argnums=0)
m = step.lower(*args).compile().memory_analysis()
print(m.argument_size_in_bytes, m.output_size_in_bytes,
      m.temp_size_in_bytes, m.alias_size_in_bytes)
"""


@needs_h100
def test_h100_is_the_recipe_by_hand_to_the_byte():
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    path = [*compiler_folders(), os.environ.get("PYTHONPATH", "")]
    out = subprocess.run(
        [sys.executable, "-c", BY_HAND, root],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        },
    ).stdout.split()
    r = estimate(jax.grad(mlp_loss), *mlp_args(), target="h100", donate_argnums=0)
    ours = r.argument_bytes, r.output_bytes, r.temp_bytes, r.alias_bytes
    assert ours == tuple(map(int, out[-4:]))


def test_cpu_is_the_process_own_compile_to_the_byte():
    r = estimate(sgd, W, X, donate_argnums=0)
    compiled = jax.jit(sgd, donate_argnums=0).lower(W, X).compile()
    m = compiled.memory_analysis()
    assert r.argument_bytes == m.argument_size_in_bytes
    assert r.output_bytes == m.output_size_in_bytes
    assert r.temp_bytes == m.temp_size_in_bytes
    assert r.alias_bytes == m.alias_size_in_bytes == W_BYTES
    live = r.argument_bytes + r.output_bytes + r.temp_bytes - r.alias_bytes
    assert r.peak_bytes == live


@needs_tpu
def test_tpu_counts_flops():
    r = estimate(jax.grad(mlp_loss), *mlp_args(), target="tpu-v5e")
    assert r.cost["flops"] > 0 and r.cost["bytes accessed"] > 0
    assert r.argument_bytes == (2 * 2 * 128 * 512 + 256 * 128) * 2


@needs_tpu
def test_a_step_too_large_for_a_tpu_says_so():
    huge = SDS((1 << 17, 1 << 16), jnp.float32)
    with pytest.raises(DoesNotFit, match="does not fit on tpu-v5e"):
        estimate(lambda x: x @ x.T, huge, target="tpu-v5e")


# --- arguments of all kinds ---------------------------------------------------------


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.1, deterministic=not train)(nn.gelu(nn.Dense(64)(x)))
        return nn.Dense(64)(x)


def train_state():
    model = Mlp()
    x = SDS((32, 64), jnp.float32)
    init = lambda x: model.init(jax.random.key(0), x, False)["params"]
    params = jax.eval_shape(init, x)
    create = functools.partial(
        TrainState.create, apply_fn=model.apply, tx=optax.adam(1e-3)
    )
    return jax.eval_shape(lambda p: create(params=p), params)


def train_step(state, x, key, train):
    def loss(p):
        y = state.apply_fn({"params": p}, x, train, rngs={"dropout": key})
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


STATE_BYTES = 3 * 2 * (64 * 64 + 64) * 4 + 2 * 4


@pytest.fixture
def standard_promotion():
    """optax and flax mix ints and floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
def test_donated_train_state_with_typed_key_and_static_flag():
    key = jax.random.key(0)
    r = estimate(
        train_step, train_state(), X, key, True, donate_argnums=0, static_argnums=3
    )
    assert r.argument_bytes == STATE_BYTES + 32 * 64 * 4 + 8
    assert r.alias_bytes == STATE_BYTES
    assert not any("not reused" in note for note in r.notes)


@pytest.mark.usefixtures("standard_promotion")
def test_a_jitted_step_brings_its_donation_and_static_arguments():
    key = SDS((), jax.random.key(0).dtype)
    by_number = jax.jit(train_step, donate_argnums=0, static_argnums=3)
    by_name = jax.jit(train_step, donate_argnames="state", static_argnames="train")
    first = estimate(by_number, train_state(), X, key, True)
    second = estimate(by_name, train_state(), X, key, train=True)
    assert first.alias_bytes == second.alias_bytes == STATE_BYTES
    assert first.temp_bytes == second.temp_bytes


def test_an_argument_the_step_does_not_read_takes_no_bytes():
    used = estimate(lambda x: x * 2, X)
    both = estimate(lambda x, key: x * 2, X, jax.random.key(3))
    assert both.argument_bytes == used.argument_bytes == 32 * 64 * 4


@pytest.mark.usefixtures("standard_promotion")
def test_nnx_modules_keep_their_updates():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)

    r = estimate(nnx.jit(step, donate_argnums=(0, 1)), model, optimizer, X)
    assert r.alias_bytes >= 3 * (64 * 64 + 64) * 4
    graph, state = nnx.split((model, optimizer))

    def pure(state, x):
        model, optimizer = nnx.merge(graph, state)
        step(model, optimizer, x)
        return nnx.state((model, optimizer))

    assert estimate(pure, state, X, donate_argnums=0).alias_bytes == r.alias_bytes


def test_x64_follows_the_caller():
    with jax.enable_x64(True):
        r = estimate(lambda x: x * 2.0, SDS((100,), jnp.float64))
    assert (r.argument_bytes, r.output_bytes) == (800, 800)
    assert estimate(lambda x: x * 2.0, SDS((100,), jnp.float32)).output_bytes == 400


@pytest.mark.parametrize("target", ["cpu", pytest.param("h100", marks=needs_h100)])
def test_sharded_arguments_are_counted_on_one_device(target):
    mesh = target_mesh(target, (8,), ("data",))
    rows = NamedSharding(mesh, P("data"))
    w, x = (SDS((1024, 1024), jnp.float32, sharding=rows) for _ in range(2))
    r = estimate(sgd, w, x, target=target, donate_argnums=0)
    assert r.argument_bytes == 2 * 4 * 2**20 // 8
    assert r.alias_bytes == 4 * 2**20 // 8
    assert r.temp_bytes >= 4 * 2**20  # the gathered weight


def test_a_mesh_named_only_inside_the_step():
    mesh = target_mesh("cpu", (4, 2), ("a", "b"))
    step = jax.shard_map(
        lambda x: jax.lax.psum(x @ x.T, "b"),
        mesh=mesh,
        in_specs=P("a", "b"),
        out_specs=P("a", None),
    )
    r = estimate(step, SDS((64, 64), jnp.float32))
    assert r.argument_bytes == 64 * 64 * 4
    assert r.output_bytes == 64 * 16 * 4 // 4


@needs_h100
def test_a_kernel_inside_shard_map():
    mesh = target_mesh("h100", (8,), ("data",))
    rows = SDS((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    scale = SDS((512,), jnp.float32, sharding=NamedSharding(mesh, P()))
    norm = functools.partial(rms_norm, implementation="pallas")
    step = jax.shard_map(
        norm, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    r = estimate(step, rows, scale, target="h100")
    assert r.output_bytes == 1024 * 512 * 2 // 8
    assert r.temp_bytes < 1024


# --- notes --------------------------------------------------------------------------


def test_donation_that_did_not_happen_is_named_with_its_reason():
    r = estimate(lambda x, y, z: x + z, X, X, X, donate_argnums=(0, 1, 2))
    assert r.alias_bytes == 32 * 64 * 4
    unused = [note for note in r.notes if note.startswith("donated but not reused")]
    assert any("(8" in n and "already has another buffer" in n for n in unused)
    assert any("y (8" in n and "does not read it" in n for n in unused)
    none = estimate(lambda x: x @ x.T, X, donate_argnums=0)
    assert any("no output has its shape" in note for note in none.notes)


def test_a_state_kept_twice_is_named():
    kept = estimate(sgd, W, X)
    assert any(n.startswith("in memory twice: w (16") for n in kept.notes)
    donated = estimate(sgd, W, X, donate_argnums=0)
    assert not any("returns its updated value" in n for n in donated.notes)


def test_a_gradient_is_no_updated_argument():
    w, x = (jnp.zeros(s.shape, s.dtype) for s in (W, X))
    loss = lambda w: jnp.sum((x @ w) ** 2)
    assert donation.updated_arguments(jax.make_jaxpr(jax.grad(loss))(w)) == {}
    adam = lambda p, m, g: (p - 0.1 * (0.9 * m + g), 0.9 * m + g)
    closed = jax.make_jaxpr(jax.jit(adam))(w, w, loss(w))
    assert donation.updated_arguments(closed) == {0: 0, 1: 1}


def test_parameters_copied_by_the_program_are_found():
    hlo = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = bf16[4,4]{1,0} parameter(1)
  %copy.1 = bf16[4,4]{1,0} copy(%b), metadata={op_name="x"}
  %copy.2 = bf16[4,4]{1,0} copy(%copy.1)
  ROOT %n = f32[8]{0} negate(f32[8]{0} %a)
}
"""
    assert donation.copied_parameters(hlo) == [1]
    assert donation.copied_parameters("") == []


# --- the worker and the cache -------------------------------------------------------


def test_a_worker_that_dies_becomes_an_error_with_its_last_words(
    fresh_pool, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", "--xla_there_is_no_such_flag=1")
    with pytest.raises(RuntimeError, match="xla_there_is_no_such_flag"):
        estimate(sgd, W, X, cache=False)
    monkeypatch.delenv("XLA_FLAGS")
    assert estimate(sgd, W, X, cache=False).peak_bytes > 0


def test_a_compile_that_takes_too_long(fresh_pool):
    with pytest.raises(TimeoutError, match="more than 0.05 s"):
        estimate(sgd, W, X, timeout=0.05, cache=False)
    assert estimate(sgd, W, X, cache=False).peak_bytes > 0


def test_a_second_call_is_not_compiled(monkeypatch):
    first = estimate(sgd, W, X)
    monkeypatch.setattr(_pending, "pool", None)  # any compile would fail
    started = time.perf_counter()
    assert estimate(sgd, W, X) is first  # the same function: nothing lowered either
    assert time.perf_counter() - started < 1
    _estimate._SEEN.clear()  # as in another process: found on disk
    assert estimate(sgd, W, X) == first


def test_the_key_does_not_depend_on_who_calls():
    calls = [lambda: estimate(sgd, W, X, cache=False)]
    calls += [lambda: jax.tree.map(lambda _: estimate(sgd, W, X, cache=False), 0)]
    keys = set()
    for call in calls:
        _estimate._SEEN.clear()
        with mock.patch.object(_pending.cache, "store") as store:
            call()
        keys.add(store.call_args.args[0])
    assert len(keys) == 1


def test_another_context_is_another_compile():
    plain = estimate(sgd, W, X)
    with jax.default_matmul_precision("bfloat16"):
        assert estimate(sgd, W, X) is not plain


def test_a_cache_that_cannot_be_written_is_told_of_once(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(blocked))
    with pytest.warns(UserWarning, match="JAXMEM_CACHE_DIR"):
        estimate(sgd, W, X, cache=False)
    assert estimate(sgd, W, X, cache=False).peak_bytes > 0


QUIET = """
import jaxmem, jax, jax.numpy as jnp
x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
for target in {targets!r}:
    report = jaxmem.estimate(lambda x: jnp.sin(x) @ x, x, target=target)
    print(target, report.argument_bytes)
print(jax.default_backend(), len(jax.devices()))
"""


@pytest.mark.skipif(
    any(os.path.exists(f) for f in ("/dev/nvidia0", "/dev/accel0")), reason="has a chip"
)
def test_a_caller_without_environment_stays_quiet_and_on_its_backend():
    names = [n for n in ("cpu", "h100", "tpu-v5e") if n in AVAILABLE]
    keep = ("PATH", "HOME", "PYTHONPATH", "JAXMEM_CACHE_DIR", "TMPDIR")
    keep += ("JAXMEM_TARGETS_DIR",)
    ran = subprocess.run(
        [sys.executable, "-c", QUIET.format(targets=names)],
        capture_output=True,
        text=True,
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        env={k: v for k, v in os.environ.items() if k in keep},
    )
    assert ran.stderr == ""
    assert ran.stdout.split("\n")[:-1] == [f"{n} 65536" for n in names] + ["cpu 1"]


# --- bad input ----------------------------------------------------------------------


def test_a_step_that_needs_values_cannot_be_traced():
    def step(x, flag):
        return x if flag else -x

    with pytest.raises(TypeError, match="static_argnums"):
        estimate(step, X, True)
    assert estimate(step, X, True, static_argnums=1).output_bytes == 32 * 64 * 4


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(TypeError, match=r"sgd does not take.*\n(.*\n)*.*x: float32\[3"):
        estimate(sgd, W, SDS((3, 5), jnp.float32))
    with pytest.raises(TypeError, match="sgd does not take"):
        estimate(jax.jit(sgd), W, SDS((3, 5), jnp.float32))


def test_callbacks_are_refused_by_name():
    def step(x):
        return jax.pure_callback(lambda x: x * 2, x, x)

    with pytest.raises(ValueError, match="from Python while it runs .*pure_callback"):
        estimate(step, X)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "unknown target 'h9'", lambda: estimate(sgd, W, X, target="h9")),
        (TypeError, "argument s is 'hi'", lambda: estimate(lambda x, s: x, X, "hi")),
        (ValueError, "donate_argnums=7", lambda: estimate(sgd, W, X, donate_argnums=7)),
        (ValueError, "timeout=0", lambda: estimate(sgd, W, X, timeout=0)),
        (
            ValueError,
            "donated and static",
            lambda: estimate(sgd, W, X, donate_argnums=0, static_argnums=0),
        ),
    ],
)  # fmt: skip
def test_bad_arguments(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_numpy_arrays_and_scalars_are_arguments():
    r = estimate(lambda x, s: x * s, np.zeros((8, 8), np.float32), 2.0)
    assert r.argument_bytes == 8 * 8 * 4 + 4


def test_a_jitted_step_brings_its_compiler_options():
    slow = jax.jit(
        lambda x: jnp.sin(x) @ x, compiler_options={"xla_cpu_use_onednn": False}
    )
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert estimate(slow, x).temp_bytes >= 0
    broken = jax.jit(lambda x: x + 1, compiler_options={"xla_no_such_option": True})
    with pytest.raises(Exception, match="xla_no_such_option"):
        estimate(broken, x)
