"""Each private name of JAX that jaxmem leans on, called once: fails when JAX moves."""

import dataclasses
import inspect
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
import pallas_kernels
from jaxmem import _compat
from jaxmem.ir import jaxprs


def test_saved_residuals_lists_avals_and_sources():
    kept = _compat.saved_residuals(lambda x: jnp.sum(jnp.sin(x)), jnp.ones(3))
    assert [aval.shape for aval, _ in kept] == [(3,)]
    assert all(isinstance(source, str) for _, source in kept)


def test_jaxpr_types():
    closed = jax.make_jaxpr(lambda x: x + 1.0)(1.0)
    assert isinstance(closed, _compat.ClosedJaxpr)
    assert isinstance(closed.jaxpr, _compat.Jaxpr)
    (eqn,) = closed.jaxpr.eqns
    assert isinstance(eqn.primitive, _compat.Primitive)
    assert isinstance(eqn.invars[0], _compat.Var)
    assert isinstance(eqn.invars[1], _compat.Literal)


def test_compile_module():
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8)))
    built = _compat.compile_module(lowered.as_text(), jax.devices()[:1], {})
    assert built.get_compiled_memory_stats().argument_size_in_bytes == 4 * 8 * 8


@pytest.mark.usefixtures("hidden_heap")
def test_no_leak_check():
    escaped = []

    def leaks(x):
        escaped.append(x)
        return x

    with jax.checking_leaks():
        with pytest.raises(Exception, match="Leaked"):
            jax.make_jaxpr(leaks)(1.0)
        with _compat.no_leak_check():
            jax.make_jaxpr(leaks)(1.0)


def _traced(fn, *args):
    return jax.make_jaxpr(fn)(*args)


def _scan(x):
    return jax.lax.scan(lambda c, a: (c * a + 1.0, c), x[0], x, reverse=True)


def test_varying_axes():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def body(x):
        seen.append(_compat.varying_axes(x))
        seen.append(_compat.varying_axes(_compat.typed_as(jnp.ones(1), jax.typeof(x))))
        return x

    spec = jax.sharding.PartitionSpec("x")
    jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones(8))
    assert seen == [frozenset({"x"})] * 2


def test_without_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    closed = jax.make_jaxpr(jnp.sin)(jax.device_put(jnp.ones(8), sharding))
    (v,) = closed.jaxpr.invars
    bare = _compat.without_mesh(v)
    assert bare is not v and bare.aval == jax.typeof(jnp.ones(8)) != v.aval


def test_equations_run_again_where_they_were():
    def scoped(x):
        with jax.named_scope("here"):
            return jnp.sin(x)

    (eqn,) = _traced(scoped, 1.0).eqns
    assert _compat.name_stack(eqn) == "here"
    assert "scoped" in _compat.source_line(eqn)
    bound = _traced(lambda x: _compat.bind(eqn, [x])[0], 1.0)
    assert _compat.name_stack(bound.eqns[0]) == "here"
    moved = _traced(lambda x: _compat.in_context_of(eqn, jnp.cos, x), 1.0)
    assert _compat.name_stack(moved.eqns[0]) == "here"


def test_caller_line():
    (eqn,) = _traced(lambda x: x + 1.0, 1.0).eqns
    assert "test_compat" in _compat.caller_line(eqn)
    assert "test_compat" not in _compat.caller_line(eqn, "tests")


def test_policy_names():
    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["b"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    assert _compat.policy_names(offload) == ({"a"}, {"b"})
    two = policies.save_only_these_names("c", "d"), policies.dots_saveable
    both = policies.save_from_both_policies(*two)
    assert _compat.policy_names(both) == ({"c", "d"}, set())
    for policy in (None, policies.nothing_saveable, policies.dots_saveable, max):
        assert _compat.policy_names(policy) == (set(), set())


def test_forgets_its_names():
    policies = jax.checkpoint_policies
    forgets = _compat.forgets_its_names(policies.save_anything_except_these_names("a"))
    # jax's own answer: whether it saves the very name it is not to save
    (eqn,) = _traced(lambda x: checkpoint_name(x, "a"), 1.0).eqns
    saves = policies.save_anything_except_these_names("a")(eqn.primitive, name="a")
    assert forgets == bool(saves)
    for policy in (None, policies.everything_saveable, lambda *_, **__: True):
        assert not _compat.forgets_its_names(policy)


def test_constants_first():
    table = jnp.arange(3.0)
    closed = _traced(lambda x: x + table, jnp.ones(3))
    opened = _compat.constants_first(closed)
    assert len(opened.invars) == len(closed.consts) + 1


def test_shard_map_again():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    (eqn,) = _traced(mapped, jnp.ones(8)).eqns
    body = lambda shards: [jnp.cos(shards[0])]
    (out,) = jax.jit(lambda x: _compat.shard_map_again(eqn, body, [x]))(jnp.ones(8))
    assert jnp.allclose(out, jnp.cos(1.0))


def test_function_source():
    closed = _traced(lambda x: x + 1.0, 1.0)
    assert "test_compat" in _compat.function_source(closed.jaxpr)


def test_scan_counts():
    (eqn,) = (e for e in _traced(_scan, jnp.ones(4)).eqns if e.primitive.name == "scan")
    consts, carries = _compat.scan_counts(eqn)
    assert carries == 1 and consts + carries + 1 == len(eqn.invars)


def test_without_dead_code():
    def wasteful(x):
        jnp.sin(x)
        return jnp.cos(x), x

    closed = _compat.without_dead_code(_traced(wasteful, 1.0))
    assert [e.primitive.name for e in closed.eqns] == ["cos"]
    assert len(closed.in_avals) == 1 and len(closed.out_avals) == 2


def test_mesh_of_specs_is_the_first_that_is_named():
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    kinds = (None, NamedSharding(mesh, PartitionSpec("x")))
    specs = [jax.ShapeDtypeStruct((4,), jnp.float32, sharding=kind) for kind in kinds]
    assert _compat.mesh_of_specs(specs) == mesh
    assert _compat.mesh_of_specs(specs[:1]) is None


def test_is_unspecified():
    (eqn,) = _traced(jax.jit(jnp.sin), 1.0).eqns
    assert all(map(_compat.is_unspecified, eqn.params["in_shardings"]))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    (eqn,) = _traced(jax.jit(jnp.sin, in_shardings=spread), jnp.ones(8)).eqns
    assert not any(map(_compat.is_unspecified, eqn.params["in_shardings"]))


def test_has_side_effects():
    (quiet,) = jax.make_jaxpr(lambda x: jax.lax.psum(x, "i"), axis_env=[("i", 2)])(
        1.0
    ).eqns
    loud = _traced(lambda x: jax.debug.print("{}", x), 1.0).eqns[-1]
    assert not _compat.has_side_effects(quiet)
    assert _compat.has_side_effects(loud)


def test_trace_state_tells_traces_apart():
    outer = _compat.trace_state()
    inner = []

    def body(x):
        inner.extend([_compat.trace_state(), _compat.trace_state()])
        return x

    jax.make_jaxpr(body)(1.0)
    assert _compat.trace_state() == outer
    assert inner[0] == inner[1] != outer


def test_is_own_line():
    (eqn,) = _traced(lambda x: x + 1.0, 1.0).eqns
    assert not _compat.is_own_line(eqn)
    (eqn,) = _traced(lambda x: _compat.typed_as(x, jax.typeof(x)) + 1.0, 1.0).eqns
    assert not _compat.is_own_line(eqn)
    closed = jax.make_jaxpr(lambda x: jaxmem.ops.glu(x))(jnp.ones(4))
    assert any(_compat.is_own_line(eqn) for eqn in closed.eqns)


def test_jit_info():
    fn = jax.jit(lambda x, n: x, static_argnames="n", donate_argnums=0)
    info = _compat.jit_info(fn)
    assert info.static_argnums == (1,) and info.static_argnames == ("n",)
    assert info.donate_argnums == (0,) and info.donate_argnames == ("x",)
    assert info.compiler_options_kvs == ()
    assert _compat.jit_info(lambda x: x) is None


def test_what_a_primitive_is_lowered_for():
    """`tests/ir/test_one_gpu.py` asks for the rest: a mesh, and the shards of one."""
    from jax.interpreters import mlir

    said = []
    asked = _compat.Primitive("asked")
    asked.def_abstract_eval(lambda x: x)

    def lowered(ctx, x):
        said.append((_compat.is_on_one_device(ctx), _compat.is_for_export(ctx)))
        return [x]

    mlir.register_lowering(asked, lowered)
    jax.jit(lambda x: asked.bind(x)).lower(1.0)
    jax.export.export(jax.jit(lambda x: asked.bind(x)))(1.0)
    assert said == [(True, False), (True, True)]


def test_threefry_of_a_counter():
    key = jax.random.key(7)
    rbg = jax.random.key(7, impl="rbg")
    assert _compat.is_threefry(jax.typeof(key))
    assert not _compat.is_threefry(jax.typeof(rbg))
    draw = lambda key: jax.random.bits(key, (5,))
    for flag in (True, False):
        with jax.threefry_partitionable(flag):
            (eqn,) = jax.make_jaxpr(draw)(key).eqns
            assert _compat.is_partitionable(eqn) is flag
    with jax.threefry_partitionable(True):
        whole = draw(key)
    counters = jnp.zeros(5, jnp.uint32), jnp.arange(5, dtype=jnp.uint32)
    first, second = _compat.threefry2x32(*jax.random.key_data(key), *counters)
    assert (first ^ second == whole).all()


# made once, as a module does
_halves = lambda a, x, y: (x >> np.uint32(1)) ^ (y * a)
HALVES = _compat.word_operation("halves", _halves, 3)
FOLD = _compat.word_operation("fold", lambda x: x ^ (x >> np.uint32(16)), 1)


@pytest.mark.parametrize("how", ["called", "jit", "vmap", "differentiated"])
def test_an_operation_of_words_is_one_equation(how):
    a, x, y = (
        jnp.uint32(7),
        jnp.arange(6, dtype=jnp.uint32)[:, None],
        jnp.uint32([3, 5]),
    )
    expected = FOLD(_halves(a, x, y[None]))
    fn = lambda a, y: FOLD(HALVES(a, x, y[None]))
    made = jax.make_jaxpr(fn)(a, y).eqns
    assert [eqn.primitive.name for eqn in made[-2:]] == ["halves", "fold"]
    (opened,) = _compat.expanded(made[-2], (a, x, y[None]))
    assert (opened == _halves(a, x, y[None])).all()
    assert _compat.expanded(made[0], (y,)) is None
    if how == "called":
        found = fn(a, y)
    elif how == "jit":
        found = jax.jit(fn)(a, y)
    elif how == "vmap":  # the batch is an axis of some of the operands
        found = jax.vmap(fn, in_axes=(0, None))(jnp.stack([a, a + 1]), y)
        assert (found[1] == fn(a + 1, y)).all()
        found = found[0]
    else:
        weighed = lambda w: (w * fn(a, y).astype(jnp.float32)).sum()
        grad = jax.grad(weighed)(1.0)
        assert grad == expected.astype(jnp.float32).sum()
        found = fn(a, y)
    assert (found == expected).all()


def test_an_operation_of_words_on_shards():
    y = jnp.arange(8, dtype=jnp.uint32)
    mesh = jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Explicit,))
    fn = lambda y: HALVES(jnp.uint32(7), jnp.uint32([[1], [2]]), y[None])
    spec = PartitionSpec("d")
    with jax.set_mesh(mesh):
        found = jax.jit(fn)(jax.device_put(y, spec))
        assert jax.typeof(found).sharding.spec == PartitionSpec(None, "d")
    assert (found == fn(y)).all()


def test_a_kernel_says_what_it_costs():
    """On TPUs in its parameters; ours for GPUs in the metadata of its context."""
    x = jnp.ones((8, 128))
    body = lambda x, y: y.__setitem__(..., x[...])
    cost = pl.CostEstimate(flops=3, transcendentals=4, bytes_accessed=5)
    for how in {"cost_estimate": cost}, {}:
        run = pl.pallas_call(body, out_shape=jax.typeof(x), **how)
        with set_xla_metadata(**({} if how else dataclasses.asdict(cost))):
            jaxpr = jax.make_jaxpr(run)(x)
        told = [_compat.declared_cost(eqn) for eqn in jaxprs.walk(jaxpr)]
        (found,) = filter(None, told)
        assert found["flops"] == 3 and found["bytes_accessed"] == 5
    (eqn,) = jax.make_jaxpr(jnp.sin)(x).eqns
    assert _compat.declared_cost(eqn) is None


def test_shardings_are_propagated():
    mesh = jax.make_mesh((4, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
    where = jax.NamedSharding(mesh, jax.P("a", "b"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=where)
    assert _compat.uses_shardy()
    found = _compat.propagated(lambda x: [x.T, x.sum(1), jnp.ones(3)], [x])
    assert found[:2] == [(("b",), ("a",)), (("a",),)]
    assert not any(found[2])


JOB = """
import socket
import subprocess
import sys

import jax
from jaxmem import _compat

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
jax.distributed.initialize(f"localhost:{port}", 1, 0)
store = _compat.JobStore()
assert store.wait("a/b", 0.05) is None
store.set("a/b", b"one")
store.set("a/b", b"two")
assert store.wait("a/b", 1.0) == b"two"
assert store.under("a/") == {"a/b": b"two"}, store.under("a/")
assert store.under("c/") == {}
jax.distributed.shutdown()
"""


def test_job_store():
    """In a process of its own: this one's backend exists already."""
    run = [sys.executable, "-c", JOB]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_empty_like():
    """Of the host's memory too, without an array on the device."""
    host = jax.memory.Space.Host
    aval = jax.core.ShapedArray((3, 4), jnp.bfloat16, memory_space=host)
    made = jax.make_jaxpr(lambda: _compat.empty_like(aval))()
    assert made.out_avals[0].memory_space == host
    assert made.out_avals[0].str_short() == aval.str_short()
    assert "device_put" not in str(made)
    assert jax.jit(lambda: _compat.empty_like(aval))().shape == (3, 4)


# -- cuDNN's attention


@pytest.mark.parametrize("padded", [False, True])
def test_cudnn_attention_is_lowered_to_its_calls(padded):
    form = SimpleNamespace(causal=not padded, window=None, padded=padded)
    x = jnp.zeros((2, 128, 4, 64), jnp.bfloat16)

    def both(x):
        arrays = dict.fromkeys("qkvg", x)
        arrays["kv_len"] = jnp.asarray([5, 128], jnp.int32) if padded else None
        o, total = _compat.cudnn_attention(form, 0.5, arrays)
        assert o.shape == x.shape and total.shape == (2, 4, 128)
        arrays |= {"o": o, "total": total}
        return _compat.cudnn_attention_grads(form, 0.5, arrays)

    grads = jax.eval_shape(both, x)
    assert {name: g.shape for name, g in grads.items()} == dict.fromkeys("qkv", x.shape)
    calls = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    how = [export.DisabledSafetyCheck.custom_call(name) for name in calls]
    made = export.export(jax.jit(both), platforms=["cuda"], disabled_checks=how)(x)
    text = made.mlir_module()
    assert all(f"@{name}(" in text for name in calls)
    assert ("PADDING" in text) == padded and ("CAUSAL" in text) == (not padded)
    sizes = lambda call, results: 4096 if call.endswith("Backward") else None
    changed = _compat.with_results_of_calls(made, sizes)
    assert "tensor<4096xui8>" in changed.mlir_module()
    assert "tensor<4096xui8>" not in text


def test_calls_of_custom_partitioning_become_shard_maps():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)

    @custom_partitioning
    def double(x):
        return x + x

    partition = lambda mesh, given, made: (
        *(mesh, lambda x: x + x, given[0].sharding),
        (given[0].sharding,),
    )
    double.def_partition(partition, sharding_rule="i j -> i j")
    step = jax.jit(lambda x: double(jnp.sin(x)))
    checks = [export.DisabledSafetyCheck.custom_call("CustomSPMDPartitioning")]
    made = lambda rules: _compat.export(step, "cpu", checks, rules, [x])
    counted = made(_compat.counted_partitions())
    assert "CustomSPMDPartitioning" in counted.mlir_module()
    found = _compat.partitions_in(counted)
    assert found == [([(("d",), ())], [(("d",), ())])]
    text = made(_compat.partitioned_by(found)).mlir_module()
    assert "CustomSPMDPartitioning" not in text and "manual_computation" in text
    # for one device there is nothing to partition
    alone = jax.ShapeDtypeStruct(x.shape, x.dtype)
    one = _compat.export(step, "cpu", [], _compat.counted_partitions(), [alone])
    assert _compat.partitions_in(one) == []
    assert _compat.propagated(lambda x: [double(x)], [x]) == [(("d",), ())]


def test_jax_asks_for_devices_but_for_an_absent_gpu():
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as fused

    spread = fused._dot_product_attention_fwd_p_wrapper
    with _compat.absent_gpu((9, 0)):
        assert spread not in dispatch.prim_requires_devices_during_lowering
    assert spread in dispatch.prim_requires_devices_during_lowering


def test_jax_asks_the_absent_gpu_and_else_the_process():
    from jax._src.cudnn import fused_attention_stablehlo as fused

    with _compat.absent_gpu((9, 0)), _compat.absent_gpu(None):
        assert fused.check_cudnn_version() >= 91300
        assert fused.check_compute_capability("9.0")
        assert not fused.check_compute_capability("10.0")
        assert fused.is_cuda_compute_capability_equal("9.0")
    assert not fused.check_compute_capability("8.0")  # there is none here


def test_a_jitted_function_is_called_in_another_without_its_options():
    options = {"xla_cpu_enable_fast_math": True}
    step = jax.jit(lambda x, n: x * n, static_argnums=1, compiler_options=options)
    inner = _compat.without_compiler_options(step)
    assert inner is _compat.without_compiler_options(step) is not step
    assert jax.jit(lambda x: inner(x, 3))(2.0) == inner(2.0, n=3) == 6.0
    other = jax.jit(jnp.sin)
    assert _compat.without_compiler_options(other) is other
    assert _compat.without_compiler_options(jnp.sin) is jnp.sin


def test_whether_a_function_is_traced():
    seen = []
    jax.eval_shape(lambda: seen.append(_compat.is_tracing()))
    assert seen == [True] and not _compat.is_tracing()


def test_traces_for_a_tpu_are_cached_apart():
    seen = jax.jit(lambda x: x + int(_compat.is_for_tpu()))
    assert not _compat.is_for_tpu() and seen(1) == 1
    with _compat.traced_for_tpu(True):
        assert _compat.is_for_tpu() and seen(1) == 2
        with _compat.traced_for_tpu(False):
            assert seen(1) == 1
    assert seen(1) == 1


def test_devices_of_this_process_run_here():
    assert _compat.runs_here(jax.devices()[0])
    assert not _compat.runs_here(SimpleNamespace(platform="gpu"))
    version = _compat.cudnn_version()
    assert version is None or version > 80000


def test_what_a_checkpoint_recomputes_has_its_name_scope():
    step = jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))))
    text = jax.jit(step).lower(jnp.float32(1)).as_text(debug_info=True)
    assert f"/{_compat.RECOMPUTED}/sin" in text


def test_operations_by_their_names():
    closed = jax.make_jaxpr(jnp.searchsorted)(jnp.arange(9.0), jnp.ones(1))
    body = closed.eqns[0].params["jaxpr"]
    names = {_compat.operation(eqn)[0] for eqn in body.eqns}
    # older versions trace what it is made of
    assert (names == {"SearchSorted"}) == (jax.__version_info__ >= (0, 12))
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    assert _compat.operation(eqn) == ("sin", eqn.params)


def test_an_operation_made_of_others_is_expanded():
    closed = jax.make_jaxpr(jnp.searchsorted)(jnp.arange(9.0), jnp.ones(1))
    (eqn,) = closed.eqns[0].params["jaxpr"].eqns[:1]
    expand = lambda *args: _compat.expanded(eqn, args)
    if jax.__version_info__ < (0, 12):  # it is made of others from the start
        assert expand(jnp.arange(9.0), jnp.ones(1)) is None
    else:
        (found,) = expand(jnp.arange(9.0), jnp.full(1, 3.5))
        assert found == 4
    assert _compat.PRIMITIVES.sin_p.name == "sin"


def test_within_a_step_no_gpu_is_absent():
    from jax._src.cudnn import fused_attention_stablehlo as fused

    with _compat.absent_gpu((9, 0)), _compat.no_absent_gpu():
        assert not fused.check_compute_capability("8.0")  # of this process


def test_whether_a_jitted_function_names_shardings():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    named = jax.jit(lambda x: x, out_shardings=one)
    assert _compat.names_shardings(_compat.jit_info(named))
    assert not _compat.names_shardings(_compat.jit_info(jax.jit(lambda x: x)))


def test_equations_of_no_mesh_are_in_that_of_the_context():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    outer = jax.make_jaxpr(jax.jit(lambda x: x + 1.0))(1.0).jaxpr
    with jax.set_mesh(mesh):
        moved = _compat.in_mesh_in_context(outer)
    (before,), (call,) = outer.eqns, moved.eqns
    (inside,) = call.params["jaxpr"].jaxpr.eqns
    assert before.ctx.cur_abstract_mesh.empty
    assert call.ctx.cur_abstract_mesh == mesh.abstract_mesh
    assert inside.ctx.cur_abstract_mesh == mesh.abstract_mesh


def test_in_mesh():
    mesh = jaxmem.target_mesh("cpu", (8,), ("x",))
    (eqn,) = _traced(jnp.sin, 1.0).eqns
    assert eqn.ctx.cur_abstract_mesh.empty
    assert _compat.in_mesh(eqn, mesh).ctx.cur_abstract_mesh == mesh


def test_an_export_of_explicit_and_auto_axes_is_serialized():
    types = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    where = NamedSharding(mesh, PartitionSpec("x"))
    spec = jax.ShapeDtypeStruct((8, 8), "float32", sharding=where)
    exported = _compat.export(jax.jit(jnp.sin), "cpu", [], [], [spec])
    assert export.deserialize(exported.serialize()).nr_devices == 8


def test_backward_pass_of_splash_attention():
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    length, size = 128, 128
    mask = masks.MultiHeadMask([masks.FullMask((length, length))])
    blocks = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), length),
        **dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), length),
        use_fused_bwd_kernel=True,
    )
    kernel = splash.make_splash_mha(
        mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=True
    )
    q = k = v = jnp.ones((1, length, size), jnp.float32)
    total = jnp.full((1, length), size + jnp.log(float(length)))
    grads = _compat.splash_attention_grads(kernel, q, k, v, v, total, v)
    assert [x.shape for x in grads] == [q.shape] * 3
    # all rows are alike: each value is of all rows' outputs alike, and the logits of no
    # account
    assert jnp.allclose(grads[2], 1.0, rtol=1e-5)
    assert jnp.allclose(grads[0], 0.0, atol=1e-4)


def test_files_of_this_package():
    assert _compat.is_own_file(_compat.__file__)
    assert not _compat.is_own_file(jaxmem.demo.__file__)
    assert _compat.is_own_file(pallas_kernels.__file__)
    assert any(part in jax.__file__ for part in _compat.INSTALLED)
    assert all(folder.endswith(os.sep) for folder in _compat.OWN)


def test_every_name_has_a_test():
    text = pathlib.Path(__file__).read_text()
    names = [name for name in vars(_compat) if not name.startswith("_")]
    functions = [name for name in names if not inspect.ismodule(vars(_compat)[name])]
    assert len(functions) > 50
    assert [name for name in functions if f"_compat.{name}" not in text] == []


def test_what_equations_share_they_share_in_another_mesh():
    """JAX lowers a body once for all equations that have the same object."""
    inner = jax.jit(jnp.sin)
    closed = jax.make_jaxpr(lambda x: inner(inner(x)))(1.0)
    first, second = _compat.in_mesh_in_context(closed.jaxpr).eqns
    assert first.params["jaxpr"] is second.params["jaxpr"]


def test_copied_equations():
    """What is not worked out anew is what JAX would have worked out."""

    def fn(x, key):
        with jax.named_scope("scope"):
            y = jax.nn.gelu(x @ x.T) + jnp.arange(4.0)[None]
        with set_xla_metadata(name="value"):
            y = y * 2
        return jnp.sort(y)[::-1].astype("bfloat16"), jax.random.normal(key, (3,))

    closed = jax.make_jaxpr(fn)(jnp.ones((4, 8)), jax.random.key(0))

    def scoped(*args):
        with jax.named_scope("outer"):
            return jaxprs.evaluate(closed, args)

    copied = jax.make_jaxpr(scoped)(jnp.ones((4, 8)), jax.random.key(0))
    assert str(copied) == str(closed)
    before, after = (list(jaxprs.walk(one)) for one in (closed, copied))
    for old, new in zip(before, after, strict=True):
        assert new.ctx is old.ctx
        assert [v.aval for v in new.outvars] == [v.aval for v in old.outvars]
    names = [str(e.source_info.name_stack) for e in jaxprs.split(copied)[0].eqns]
    assert any(name.startswith("outer/scope") for name in names)
    assert all(name.startswith("outer") for name in names)


def test_an_equation_on_operands_of_other_types_is_traced_anew():
    closed = jax.make_jaxpr(lambda x: x * 2.0 + 1.0)(jnp.ones(3))
    other = jax.make_jaxpr(lambda x: jaxprs.evaluate(closed, [x]))(jnp.ones((2, 3)))
    assert [v.aval.shape for v in other.jaxpr.eqns[-1].outvars] == [(2, 3)]
    assert jaxprs.evaluate(closed, [jnp.ones(3)])[0].tolist() == [3.0] * 3
