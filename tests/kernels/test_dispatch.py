"""Which implementation runs is decided by the platform that is lowered for."""

import functools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
)

import jaxmem
from pallas_kernels import _compat, partials, simulated
from pallas_kernels import dispatch as module
from pallas_kernels.dispatch import dispatch
from pallas_kernels.lowering import KernelCandidate, kernel_or_xla
from tests.kernels.meshes import chip_mesh

X = jnp.arange(4.0)


def plain(x):
    return x + 1


def on_tpu(x):
    return jnp.sin(x)


def on_gpu(x):
    return jnp.cos(x)


def not_me(x):
    raise NotImplementedError("even lengths alone")


def call(x, implementation="pallas", tpu=on_tpu, gpu=on_gpu):
    return dispatch("op", implementation, x, xla=plain, tpu=tpu, gpu=gpu)


def lowered(platform, **how):
    return export.export(jax.jit(lambda x: call(x, **how)), platforms=[platform])(X)


@pytest.mark.parametrize("platform, op", [("tpu", "sine"), ("cuda", "cosine")])
def test_platform_decides(platform, op):
    assert f"stablehlo.{op}" in lowered(platform).mlir_module()


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_plain_where_nothing_was_measured(implementation):
    assert (call(X, implementation) == X + 1).all()
    for platform in ("tpu", "cuda", "cpu"):
        text = lowered(platform, implementation=implementation).mlir_module()
        assert "stablehlo.add" in text and "stablehlo.cosine" not in text


# -- what None takes, where something was measured


def takes_kernel(fn, *args, kind="NVIDIA H100 80GB HBM3", platform="cuda", size=1):
    """Whether the kernel is in what is lowered for that many of a chip."""
    with jax.sharding.use_abstract_mesh(chip_mesh(kind, size)):
        run = jax.jit(lambda *args: fn(*args))  # no trace from before an entry
        text = export.export(run, platforms=[platform])(*args).mlir_module()
    return ("stablehlo.cosine" in text) or ("stablehlo.sine" in text)


@pytest.fixture
def measured(monkeypatch):
    """The forward pass of float32 arrays of four elements or more, on an H100."""
    entry = module.Measured("op", "h100", "float32", 4, backward=False)
    monkeypatch.setattr(module, "MEASURED", (entry,))


def chosen(x, **how):
    return dispatch("op", None, x, xla=plain, tpu=on_tpu, gpu=on_gpu, **how)


def test_a_measured_kernel_is_taken_on_its_chip(measured):
    assert takes_kernel(chosen, X)
    assert not takes_kernel(chosen, X, kind="NVIDIA H200")
    assert not takes_kernel(chosen, X, kind="NVIDIA A100-SXM4-40GB")
    assert not takes_kernel(chosen, X, kind="TPU v5 lite", platform="tpu")
    assert not takes_kernel(chosen, X, platform="cpu")
    assert "cosine" not in lowered("cuda", implementation=None).mlir_module()
    for run in (chosen, jax.jit(chosen)):  # here, on a CPU
        assert (run(X) == X + 1).all()


def test_a_measured_kernel_is_taken_for_its_dtype_size_and_pass(measured):
    assert not takes_kernel(chosen, X.astype("bfloat16"))
    assert not takes_kernel(chosen, X[:3])
    assert not takes_kernel(lambda x: chosen(x, backward=True), X)
    assert takes_kernel(lambda x: chosen(x, sized_by=jnp.zeros(9)), X[:3])


COUNTED = []


def counted(factor, x):
    COUNTED.append(factor)
    return factor * jnp.cos(x)


def test_equal_calls_are_lowered_once(measured):
    """Layers of one kind share the lowering of a kernel."""
    COUNTED.clear()

    def layer(x, factor):
        xla, gpu = (partials.partial(f, factor) for f in (jnp.multiply, counted))
        return dispatch("op", None, x, xla=xla, gpu=gpu)

    with jax.sharding.use_abstract_mesh(chip_mesh("NVIDIA H100 80GB HBM3", 1)):
        factors = [2.0, 2.0, 2.0, 2.0, 3.0, 3.0]
        layers = jax.jit(lambda x: functools.reduce(layer, factors, x))
        text = export.export(layers, platforms=["cuda"])(X).mlir_module()
    assert text.count("stablehlo.cosine") == len(factors)
    # traced and lowered; the first array alone has a type without the mesh
    assert COUNTED == 2 * [2.0, 2.0, 3.0]


def test_equal_calls_are_compiled_once_without_a_jit(measured, caplog):
    twice = partials.partial(jnp.multiply, 2.0)
    call = lambda: dispatch("op", None, X, xla=twice, gpu=on_gpu)
    with jax.log_compiles():
        assert (call() == 2 * X).all() and "Compiling" in caplog.text
        caplog.clear()
        call()
    assert "Compiling" not in caplog.text


def test_arrays_are_compared_by_no_value():
    same = partials.partial(plain, 1, dtype=jnp.float32)
    assert same == partials.partial(plain, 1, dtype=jnp.float32)
    assert same != partials.partial(plain, 2, dtype=jnp.float32)
    x = X + 1
    for one in (x, lambda: x, partial(plain, x)):
        assert isinstance(partials.partial(plain, one), partial)  # kept by no cache


def test_names_of_chips_are_those_of_devices(monkeypatch):
    entry = module.Measured("op", "v5e", "float32", 0, backward=False)
    monkeypatch.setattr(module, "MEASURED", (entry,))
    assert takes_kernel(chosen, X, kind="TPU v5 lite", platform="tpu")
    assert not takes_kernel(chosen, X, kind="TPU v5", platform="tpu")


def test_a_sharded_jit_takes_xla_and_its_shard_map_the_kernel(measured):
    mesh, part = chip_mesh("NVIDIA H100 80GB HBM3", 2), PartitionSpec("x")
    x = jax.ShapeDtypeStruct((8,), X.dtype, sharding=NamedSharding(mesh, part))
    assert not takes_kernel(chosen, x, size=2)
    for check in (True, False):
        each = jax.shard_map(
            chosen, mesh=mesh, in_specs=part, out_specs=part, check_vma=check
        )
        assert takes_kernel(each, x, size=2)


def test_a_shard_map_over_some_axes_takes_xla(measured):
    device = AbstractDevice("NVIDIA H100 80GB HBM3", 1, "cuda")
    types = (AxisType.Auto,) * 2
    mesh = AbstractMesh((2, 2), ("x", "y"), types, abstract_device=device)
    part = PartitionSpec("x")
    place = NamedSharding(mesh, part)
    x = jax.ShapeDtypeStruct((8,), X.dtype, sharding=place)
    how = {"mesh": mesh, "in_specs": part, "out_specs": part}
    for axes, taken in (({"x"}, False), ({"x", "y"}, True)):
        each = jax.jit(jax.shard_map(chosen, axis_names=axes, check_vma=False, **how))
        text = export.export(each, platforms=["cuda"])(x).mlir_module()
        assert ("stablehlo.cosine" in text) == taken


def test_transformations_of_what_was_measured(measured):
    """Nothing was measured under `vmap`, and a kernel has no derivative."""
    assert not takes_kernel(jax.vmap(chosen), jnp.ones((2, 4)))
    for derive in (jax.jacfwd, jax.jacrev):
        assert not takes_kernel(derive(chosen), X)
        np.testing.assert_array_equal(derive(chosen)(X), np.eye(4))
    assert takes_kernel(jax.checkpoint(chosen), X)
    scanned = lambda x: jax.lax.scan(lambda c, _: (chosen(c), None), x, length=3)[0]
    assert takes_kernel(scanned, X)


def test_a_measured_kernel_that_does_not_do_it_warns_once(measured):
    run = lambda x: dispatch("op", None, x, xla=plain, tpu=on_tpu, gpu=not_me)
    assert (run(X) == X + 1).all()
    with pytest.warns(UserWarning, match="op on GPU: even lengths alone; XLA does it"):
        assert not takes_kernel(run, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not takes_kernel(run, X)


def test_an_op_takes_what_was_measured_of_each_pass(monkeypatch):
    """The forward pass by the kernel and the backward pass by XLA, and so on."""
    x = jnp.ones((8, 1024), "bfloat16")

    def step(x, g):
        out, pull = jax.vjp(lambda x: jaxmem.ops.silu(x, save="output"), x)
        return out, pull(g)

    for passes in ((), (False,), (True,), (False, True)):
        entries = (
            module.Measured("silu", "h100", "bfloat16", x.size, backward)
            for backward in passes
        )
        monkeypatch.setattr(module, "MEASURED", tuple(entries))
        with jax.sharding.use_abstract_mesh(chip_mesh("NVIDIA H100 80GB HBM3")):
            how = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
            run = jax.jit(lambda *args: step(*args))
            exported = export.export(run, platforms=["cuda"], disabled_checks=how)
            text = exported(x, x).mlir_module()
        assert text.count("@mosaic_gpu_v2(") == len(passes)


def test_attention_keeps_values_as_a_measured_kernel_reads_them(monkeypatch):
    """Transposed for XLA alone; a kernel would transpose them all again."""
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), "bfloat16")
    mask = jnp.ones((8, 8), bool)  # which cuDNN does not take
    monkeypatch.setattr(module, "MEASURED", ())

    def transposed():
        attend = partial(jaxmem.ops.dot_product_attention, mask=mask)
        pull = jax.eval_shape(lambda x: jax.vjp(attend, x, x, x)[1], x)
        return (1, 2, 8 * 16) in [leaf.shape for leaf in jax.tree.leaves(pull)]

    assert transposed()
    for kernel, length in (("attention", 0), ("silu", 0), ("attention", 2**20)):
        entry = module.Measured(kernel, "h100", "bfloat16", length, backward=True)
        monkeypatch.setattr(module, "MEASURED", (entry,))
        assert transposed() == ((kernel, length) != ("attention", 0))


# -- "pallas" where there is no kernel


def test_no_kernel_for_the_platform_is_said_when_it_is_lowered():
    for run in (call, jax.jit(call), jax.vmap(call)):
        with pytest.raises(ValueError, match="no kernel for the platform"):
            run(X)
    with pytest.raises(ValueError, match="TPU: even lengths alone"):
        lowered("tpu", tpu=not_me)
    assert "stablehlo.cosine" in lowered("cuda", tpu=not_me).mlir_module()


def test_no_kernel_at_all_is_said_at_the_call():
    with pytest.raises(ValueError, match="no kernel for this op. TPU: even .* GPU: th"):
        call(X, tpu=not_me, gpu=None)


@pytest.mark.parametrize("platform, op", [("tpu", jnp.sin), ("cuda", jnp.cos)])
def test_a_simulated_platform_decides(platform, op):
    with simulated(platform):
        assert (call(X) == op(X)).all()
        assert (call(X, None) == X + 1).all()
        with pytest.raises(ValueError, match="no kernel for the platform"):
            call(X, **{"tpu": {"tpu": None}, "cuda": {"gpu": None}}[platform])


def test_another_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation='cudnn': allowed are None"):
        call(X, "cudnn")


@pytest.mark.parametrize("shape, whole", [((8,), False), ((6,), True)])
def test_what_says_how_it_is_partitioned_runs_under_a_sharded_jit(
    monkeypatch, shape, whole
):
    """The devices of the CPU stand in for GPUs."""
    monkeypatch.setitem(_compat._PLATFORMS, "cpu", ("cpu",))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec() if whole else PartitionSpec("x"))

    @custom_partitioning
    def parts(x):
        return (jnp.sin(x),)

    def partition(mesh, given, made):
        own = (given[0].sharding,)
        return mesh, lambda x: (jnp.sin(x),), own, own

    parts.def_partition(partition, sharding_rule="i -> i")
    alone = lambda x: (jnp.cos(x),)
    candidate = KernelCandidate(
        "cpu", lambda device: True, alone, "", "a kernel", sharded=parts
    )
    run = jax.jit(lambda x: kernel_or_xla(lambda x: (plain(x),), [candidate], x)[0])
    x = jax.device_put(np.arange(*shape, dtype=np.float32), sharding)
    np.testing.assert_allclose(run(x), np.sin(np.arange(*shape)), rtol=1e-6)
    assert run(x).sharding.spec == sharding.spec
    # a program of one device's takes the other one, and the derivative is XLA's
    np.testing.assert_allclose(run(np.ones(3, np.float32)), np.cos(np.ones(3)), 1e-6)
    assert (jax.jvp(run, (x,), (x,))[1] == x).all()
    needs_map = candidate._replace(sharded=None)
    run = jax.jit(lambda x: kernel_or_xla(lambda x: (plain(x),), [needs_map], x)[0])
    assert (run(x) == x + 1).all()
