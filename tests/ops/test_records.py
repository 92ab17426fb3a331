"""The records of the ops are whole, and what is written from them is up to date."""

import inspect
import pathlib
import re

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

from jaxmem import ops, rewriting
from jaxmem.nn import nnx as lean_nnx
from jaxmem.ops.records import RECORDS, table
from tests.references import kept_bytes

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
# They make, merge or measure something for an op, and keep nothing of their own.
HELPERS = {"fewbit_table", "merge_scale", "stored", "unmerge_scale"}
HELPERS |= {"stored_in_ranges", "velora_projection"}


def test_every_public_op_has_one_record():
    public = {f.__name__ for f in vars(ops).values() if inspect.isfunction(f)}
    names = [record.name for record in RECORDS]
    assert sorted(names) == sorted(public - HELPERS)


def test_the_table_in_the_docs_is_that_of_the_records():
    text = (DOCS / "saves.md").read_text()
    assert table() in text, "python -m jaxmem.ops.records prints the table anew"


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name)
def test_a_record_says_what_is_there(record):
    assert record.saves
    layers = record.layers
    assert all(hasattr(flax.linen, name) for name in layers.linen)
    for name in layers.nnx:
        assert issubclass(getattr(lean_nnx, name), getattr(flax.nnx, name))


def test_the_new_op_of_the_contributing_guide():
    """Its record is all that the rewriter needs."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (code,) = (block for block in blocks if "SOFTSIGN" in block)
    names = {"jax": jax, "jnp": jnp}
    exec(code, names)
    record, x = names["SOFTSIGN"], jnp.linspace(-3, 3, 7)
    patterns = rewriting.library(records=(record,))
    assert rewriting.find(jax.nn.soft_sign, x, patterns=patterns).counts == {
        "softsign": 1
    }
    lean = rewriting.rewrite(jax.nn.soft_sign, patterns)
    assert jnp.allclose(lean(x), record.reference(x))
    kept = record.residuals["input"].nbytes(x)
    assert kept_bytes(lean, (x,), {0}) == kept < kept_bytes(record.reference, (x,), {0})
