"""The records of the ops are whole, and what is written from them is up to date."""

import inspect
import pathlib

import flax.linen
import flax.nnx
import pytest

from jaxmem import ops
from jaxmem.nn import nnx as lean_nnx
from jaxmem.ops.records import RECORDS, table

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# They make, merge or measure something for an op, and keep nothing of their own.
HELPERS = {"fewbit_table", "merge_scale", "stored", "unmerge_scale"}
HELPERS |= {"velora_projection"}


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
