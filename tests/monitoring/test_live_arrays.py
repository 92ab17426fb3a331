"""What is alive, by name or by type; each buffer once; what a step leaves."""

import gc
import json
import weakref

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jaxmem

WIDTH = 24


def of_name(found, name: str) -> dict[str, jaxmem.monitoring.LiveArray]:
    return {row.path: row for row in found.rows if row.name == name}


def over_devices(x, *axes):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(x, NamedSharding(mesh, P(*axes)))


# -- by name


def test_a_pytree_is_told_by_its_paths():
    params = {"up": jnp.ones((8, WIDTH)), "layers": [jnp.ones(3), jnp.ones(3)]}
    rows = of_name(jaxmem.live_arrays(params=params), "params")
    assert {path: row.bytes for path, row in rows.items()} == {
        "up": 4 * 8 * WIDTH,
        "layers/0": 12,
        "layers/1": 12,
    }
    assert rows["up"].array == f"f32[8,{WIDTH}]" and rows["up"].count == 1


def test_an_array_is_a_tree():
    (row,) = of_name(jaxmem.live_arrays(x=jnp.ones((5, 7))), "x").values()
    assert (row.path, row.bytes, row.memory, row.placement) == ("", 140, "device", "")


def test_nnx_objects():
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    found = jaxmem.live_arrays(
        model=model,
        optimizer=optimizer,
        both=[{"a": model.layers[0].kernel}],
        state=nnx.state(model, nnx.Param),
    )
    rows = of_name(found, "model")
    assert rows["layers/0/kernel"].bytes == 48
    assert of_name(found, "optimizer")["opt_state/0/mu/layers/0/kernel"].bytes == 48
    assert of_name(found, "both")["0/a"].shares == "model/layers/0/kernel"
    assert {row.bytes for row in of_name(found, "state").values()} == {0}


def test_random_keys_count_as_their_words():
    """JAX lists the words of a key, and not the key."""
    keys = jax.random.split(jax.random.key(0), 5)
    before = jaxmem.live_arrays()
    found = jaxmem.live_arrays(keys=keys)
    assert of_name(found, "keys")[""].bytes == 40
    assert found.total_bytes == before.total_bytes and found.count == before.count
    rngs = jaxmem.live_arrays(rngs=nnx.Rngs(0))
    assert {"default/count", "default/key"} <= {*of_name(rngs, "rngs")}


def test_equinox_modules():
    model = equinox.nn.MLP(2, 3, 5, 1, key=jax.random.key(0))
    rows = of_name(jaxmem.live_arrays(model=model), "model")
    assert rows["layers/0/weight"].bytes == 40 and len(rows) == 4


def test_linen_variables_and_a_train_state():
    model = linen.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1.0))
    rows = of_name(jaxmem.live_arrays(state=state), "state")
    assert {"params/kernel", "opt_state/0/mu/kernel"} <= {*rows}


def test_a_state_without_arrays_has_no_rows():
    state = optax.sgd(1.0).init({"w": jnp.ones(2)})
    assert of_name(jaxmem.live_arrays(opt_state=state), "opt_state") == {}


@pytest.mark.parametrize("tree", [{"w": np.ones(2)}, "text", linen.Dense(3)])
def test_a_tree_without_arrays_of_jax_is_refused(tree):
    with pytest.raises(TypeError, match="^params=.*with arrays of JAX in it"):
        jaxmem.live_arrays(params=tree)


def test_inside_of_a_jitted_function():
    with pytest.raises(ValueError, match="^x=.*outside of jitted functions"):
        jax.jit(lambda x: jaxmem.live_arrays(x=x))(1.0)


# -- by type


def test_the_rest_is_told_by_type():
    before = jaxmem.live_arrays()
    kept = [jnp.full((7, 11), i, jnp.int16) for i in range(3)]
    found = jaxmem.live_arrays()
    (row,) = [row for row in found.rows if row.array == "i16[7,11]"]
    assert (row.name, row.count, row.bytes) == ("", 3, 3 * 2 * 77)
    assert found.total_bytes - before.total_bytes == row.bytes
    del kept


def test_no_array_is_kept_alive():
    x = jnp.ones((13, 5))
    reference = weakref.ref(x)
    found = jaxmem.live_arrays(x=x, sharded=over_devices(np.ones((8, 2)), "x"))
    del x
    gc.collect()
    assert reference() is None
    after = jaxmem.live_arrays()
    assert not [row for row in after.rows if row.array in ("f32[13,5]", "f32[8,2]")]
    assert of_name(found, "x")[""].bytes == 260


# -- buffers


def test_a_donated_array_is_told():
    params = {"w": jnp.ones((16, 3)), "b": jnp.ones(3)}
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    new = step(params["w"])
    found = jaxmem.live_arrays(params=params)
    row = of_name(found, "params")["w"]
    assert (row.deleted, row.count, row.bytes) == (1, 0, 0)
    assert "params: 1 of 2 was donated or deleted, w" in str(found)
    assert of_name(jaxmem.live_arrays(new=new), "new")[""].bytes == 192


def test_a_shared_buffer_counts_once():
    x = jnp.ones((9, 9))
    same = jax.device_put(x, x.sharding, may_alias=True)
    other = jax.device_put(x, jax.devices()[0])
    tree = {"a": x, "b": same, "c": other, "tied": x}
    found = jaxmem.live_arrays(tree=tree)
    rows = of_name(found, "tree")
    assert [rows[k].bytes for k in tree] == [324, 0, 0, 0]
    assert rows["tied"].shares == "tree/a"
    assert "tree/tied has the buffer of tree/a" in str(found)
    assert not [row for row in found.rows if not row.name and row.array == "f32[9,9]"]


def test_sharded_and_replicated_arrays():
    alone = jaxmem.live_arrays()
    x = over_devices(np.ones((16, 4), np.float32), "x")
    y = over_devices(np.ones((16, 4), np.float32))
    for _ in range(2):  # single shards, of which the first call makes arrays
        found = jaxmem.live_arrays(x=x)
        row = of_name(found, "x")[""]
        assert (row.bytes, row.device_bytes) == (256, 32)
        assert row.placement == "sharded over 8"
        (other,) = [r for r in found.rows if r.placement == "replicated over 8"]
        assert (other.bytes, other.device_bytes) == (8 * 256, 256)
        assert found.total_bytes == alone.total_bytes + 9 * 256
        assert found.count == alone.count + 2
    assert len(found.devices) == 8
    assert "on the fullest of 8 devices" in str(found)
    del y


def test_memory_of_the_host_is_apart():
    x = jnp.ones((10, 10))
    before = jaxmem.live_arrays()
    y = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    found = jaxmem.live_arrays(y=y)
    assert of_name(found, "y")[""].memory == "pinned_host"
    assert found.other_bytes == {"pinned_host": 400}
    assert found.total_bytes == before.total_bytes
    assert "400 B in pinned_host" in str(found)


# -- the difference


def test_a_step_that_keeps_something_is_seen():
    losses, w = [], jnp.ones((6, 6))
    step = jax.jit(lambda w: (w * 0.5, jnp.sum(w, axis=0)), donate_argnums=0)
    w, loss = step(w)
    before = jaxmem.live_arrays(w=w)
    for _ in range(5):
        w, kept = step(w)
        losses.append(kept)
    change = jaxmem.live_arrays(w=w) - before
    (row,) = change.rows
    assert (row.array, row.count, row.bytes) == ("f32[6]", 5, 5 * 24)
    assert change.total_bytes == 120 and change.count == 5
    assert str(change).splitlines()[0] == "live arrays: 120 B more, +5 arrays"
    del losses, kept, loss
    gone = jaxmem.live_arrays(w=w).since(before)
    assert gone.total_bytes == -24 and "24 B less, -1 array" in str(gone)


def test_a_step_that_keeps_nothing():
    before = jaxmem.live_arrays()
    assert str(jaxmem.live_arrays() - before) == "live arrays: no change"
    with pytest.raises(TypeError, match="before=3"):
        before.since(3)


# -- printing


def found_of_layers():
    layers = {f"layer_{i}": {"kernel": jnp.ones((32, 32))} for i in range(12)}
    long = {"a_long_name_of_a_module" * 3: {"kernel": jnp.ones((64, 64))}}
    others = {f"x{'abcdefghijkl'[i]}": jnp.ones(i + 1) for i in range(12)}
    return jaxmem.live_arrays(params={**layers, **long, **others})


@pytest.mark.parametrize("columns", [80, 60])
def test_lines_are_no_longer_than_asked_for(columns):
    text = found_of_layers().text(columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "12 x f32[32,32]" in text and "layer_*/kernel" in text
    assert "in 6 more" in text and "…" in text
    with pytest.raises(ValueError, match="columns=3"):
        found_of_layers().text(3)


def test_as_a_table_a_page_and_data(tmp_path):
    found = found_of_layers()
    console = Console(width=80, record=True)
    console.print(found)
    assert "layer_*/kernel" in console.export_text()
    plain = json.loads(found.to_json())
    assert sum(row["bytes"] for row in plain["rows"]) == found.total_bytes
    assert plain["devices"] == found.devices
    for suffix in ("html", "txt", "json"):
        found.save(tmp_path / f"live.{suffix}")
    assert "layer_3/kernel" in (tmp_path / "live.html").read_text()
    assert "live arrays" in (found - found)._repr_html_()
