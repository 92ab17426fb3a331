"""The table of chips, and meshes of them."""

import pathlib
import pickle
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jaxmem
from jaxmem import chips
from jaxmem.chips import (
    CHIPS,
    Target,
    _compilers,
    _table,
    _target,
    local_target,
    target_mesh,
    targets,
)
from pallas_kernels import chips as kernel_chips

CONTRIBUTING = pathlib.Path(jaxmem.__file__).parents[1] / "CONTRIBUTING.md"
NAMES = "cpu t4 l4 a100 h100 h200 b200 tpu-v4 tpu-v5e tpu-v5p tpu-v6e".split()


def test_all_chips_have_a_row_that_says_whether_they_compile():
    rows = targets()
    assert [row.name for row in rows] == NAMES
    assert rows[0].available and rows[0].memory_bytes is None
    for row in rows:
        assert row.available == (row.why_not == "")
        assert row.name in str(rows)
    assert all(row.memory_bytes > 14 * 2**30 for row in rows[1:])


def test_kernels_know_every_chip_by_the_same_figures():
    """The kernels stand on jax alone and have a table of their own."""
    for name, chip in _table.CHIPS.items():
        if isinstance(chip.compiler, _table.Gpu):
            assert kernel_chips.GPUS[name] == chip.compiler.capability, name
        elif isinstance(chip.compiler, _table.Tpu):
            assert name.removeprefix("tpu-") in kernel_chips.TPUS, name


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Puts versions in the place of what is installed here."""
    versions = {}
    monkeypatch.setenv("JAXMEM_TARGETS_DIR", str(tmp_path))
    monkeypatch.setattr(_compilers, "version_of", versions.get)
    _compilers.forget_compilers()
    yield versions
    _compilers.forget_compilers()


CUDA = {
    **{"jax-cuda13-plugin": jaxlib.__version__, "jax-cuda13-pjrt": jaxlib.__version__},
    "nvidia-cuda-nvcc": "13.5",
}


def test_what_is_missing_is_said_with_the_line_that_installs_it(installed):
    rows = targets()
    assert [row.available for row in rows] == [row.name == "cpu" for row in rows]
    for name, words in (("h100", "cuda13-plugin is"), ("tpu-v6e", "libtpu is")):
        kind = "tpu" if "tpu" in name else "gpu"
        line = rf"{words} missing: .*jaxmem targets --install {kind}"
        with pytest.raises(RuntimeError, match=line):
            chips.get_target(name)
    # each line once, below the table
    assert str(rows).count("targets --install") == 2


def test_a_plugin_of_another_version_is_refused(installed):
    installed |= CUDA | {"jax-cuda13-pjrt": "0.0.1"}
    with pytest.raises(
        RuntimeError, match=f"pjrt is 0.0.1, that of jax .* is {jaxlib.__version__}"
    ):
        chips.get_target("h100")


def test_a_libtpu_of_another_version_is_taken_and_said(installed):
    installed["libtpu"] = "0.0.1"
    row = chips.get_target("tpu-v5e")
    assert row.available and row.compiler == "libtpu 0.0.1 of the environment"
    assert re.search(
        r"^tpu: libtpu is 0.0.1, that of jax \S+ is 0", str(targets()), re.M
    )


def test_wheels_of_the_environment_come_first(installed):
    installed |= CUDA
    assert _compilers.requirements("cuda") == ()
    row = chips.get_target("h100")
    assert row.compiler.endswith("of the environment")
    assert chips.compiler_folders() == ()


def test_cuda_12_of_the_environment_is_completed_and_not_joined(installed):
    """jax would find two plugins for one platform."""
    version = jaxlib.__version__
    installed |= {"jax-cuda12-plugin": version, "jax-cuda12-pjrt": version}
    assert _compilers.requirements("cuda") == ("nvidia-cuda-nvcc-cu12",)
    installed["nvidia-cuda-nvcc-cu12"] = "12.9"
    assert _compilers.requirements("cuda") == ()
    _compilers.forget_compilers()
    assert "jax-cuda12-plugin" in chips.get_target("h100").compiler


@pytest.mark.parametrize("own", ["13.0.88", "12.9.1", ""])
def test_the_assembler_of_a_cuda_toolkit_does_for_the_wheel(
    installed, monkeypatch, own
):
    monkeypatch.setattr(_compilers, "_ptxas_version", lambda path: own)
    installed |= {k: v for k, v in CUDA.items() if k != "nvidia-cuda-nvcc"}
    _compilers.forget_compilers()
    if own.startswith("13"):
        assert chips.get_target("h100").available
        assert ("nvidia-cuda-nvcc", own) in chips.compiler_versions()
    else:
        with pytest.raises(RuntimeError, match="nvidia-cuda-nvcc is missing"):
            chips.get_target("h100")
    assert _compilers.requirements("cuda") == ("nvidia-cuda-nvcc",)  # as --install has


@pytest.mark.parametrize(
    ("version", "wanted", "matches"),
    [
        ("0.0.42", "==0.0.42.*", True),
        ("0.0.42.1", "==0.0.42.*", True),
        ("0.0.421", "==0.0.42.*", False),
        ("0.10.2", "==0.10.2", True),
        ("0.10.2.post1", "==0.10.2", True),
        ("0.10.20", "==0.10.2", False),
        ("13.5", "", True),
    ],
)
def test_versions(version, wanted, matches):
    assert _compilers._matches(version, wanted) == matches


def test_jax_names_the_version_of_libtpu():
    assert re.fullmatch(r"==[\d.]+\*?", _compilers._libtpu_of_jax())


def test_rich_shows_the_whole_line_below_the_table():
    line = "pip install 'a[b]' " + "x" * 100
    console = Console(width=200)
    with console.capture() as capture:
        console.print(chips.Targets([Target("x", "cuda", 2**34, "X", False, line)]))
    assert f"cuda: {line}" in capture.get()


def test_config_text_holds_the_facts():
    text = chips.config_text("a100")
    assert "core_count: 108" in text and "device_memory_size: 42331013120" in text
    assert "cuda_compute_capability { major: 8 }" in text
    assert "{ major: 8 minor: 9 }" in chips.config_text("l4")


@pytest.mark.parametrize(
    ("name", "devices", "topology"),
    [
        ("h100", 1, "1x1x1"),
        ("h100", 8, "1x1x8"),
        ("h100", 16, "1x2x8"),
        ("tpu-v5e", 1, "v5e:1x1"),
        ("tpu-v5e", 3, "v5e:2x2"),
        ("tpu-v6e", 256, "v6e:16x16"),
        ("tpu-v4", 4, "v4:2x2x1"),
    ],
)
def test_topologies(name, devices, topology):
    assert chips.topology(name, devices)["topology"] == topology


def test_a_mesh_builds_shardings_without_any_plugin():
    mesh = target_mesh("h100", (2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, P("data", "model"))
    spec = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    assert spec.sharding.shard_shape((8, 8)) == (4, 2)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert pickle.loads(pickle.dumps(mesh)) == mesh


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("h1000", (8,), ("d",)), "unknown target 'h1000'"),
        (("h100", (8,), ("d", "m")), "at least one device along each axis"),
        (("h100", (12,), ("d",)), "multiple of 8"),
        (("tpu-v5e", (512,), ("d",)), "no v5e slice"),
    ],
)
def test_meshes_that_cannot_be(args, words):
    with pytest.raises(ValueError, match=words):
        target_mesh(*args)


def test_a_chip_is_one_row_of_the_table(monkeypatch):
    """The example of CONTRIBUTING.md."""
    blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "CHIPS[" in block]
    table = dict(_table.CHIPS)
    monkeypatch.setattr(_target, "CHIPS", table)
    monkeypatch.setattr(chips._devices, "CHIPS", table)
    exec(example, {**vars(_table), "CHIPS": table})
    assert str(targets()).count("NVIDIA A10 ") == 1
    assert chips.get_target("a10", check=False).memory_bytes == int(22.5 * 2**30)
    assert "core_count: 72" in chips.config_text("a10")
    assert target_mesh("a10", (2,), ("data",)).abstract_device.num_cores == 72


# -- the target of this process


class OfDevice(NamedTuple):
    """What is asked of a device."""

    platform: str
    device_kind: str
    bytes_limit: int | None = None

    def memory_stats(self):
        return self.bytes_limit and {"bytes_limit": self.bytes_limit}


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H200", "h200"),  # as one has named itself
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA H100 NVL", "h100"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA L4", "l4"),
        ("gpu", "Tesla T4", "t4"),
        ("tpu", "TPU v5 lite", "tpu-v5e"),
        ("tpu", "TPU v5p", "tpu-v5p"),
        ("tpu", "TPU v6 lite", "tpu-v6e"),
    ],
)
def test_a_device_is_known_by_a_word_of_its_name(monkeypatch, platform, kind, name):
    monkeypatch.setattr(jax, "devices", lambda: [OfDevice(platform, kind, 2**36)])
    found = local_target()
    assert (found.name, found.memory_bytes) == (name, 2**36)
    monkeypatch.setattr(jax, "devices", lambda: [OfDevice(platform, kind)])
    assert local_target().memory_bytes == CHIPS[name].memory_bytes


def test_every_target_knows_itself(monkeypatch):
    for target in jaxmem.targets():
        platform = {"cuda": "gpu"}.get(target.platform, target.platform)
        device = OfDevice(platform, target.device)
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        assert local_target().name == target.name


def test_a_device_that_is_no_target_says_what_there_is(monkeypatch):
    other = OfDevice("gpu", "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(jax, "devices", lambda: [other])
    with pytest.raises(ValueError, match=r"RTX 4090.*h100.*name the one that is meant"):
        local_target()
