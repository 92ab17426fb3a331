"""The examples in the docstrings of public names run, after the names that they use.

These names are defined by a block of docs/api/index.md, which readers see as well.
"""

import inspect

import pytest

from docs import exported
from tests.docs_code import DOCS, blocks, examples, run

(NAMES,) = blocks(DOCS / "api" / "index.md")
# These compile for an absent chip, or steps that take seconds to compile.
SLOW = {
    *("advise", "estimate", "remat_policy", "schedule"),
    *("MultiSteps", "dot_product_attention", "linear_cross_entropy", "max_batch"),
    "best_batch",
    *("adama", "microbatch", "rowwise", "save_quantized", "start_step", "substitute"),
}


def _cases():
    seen = set()
    for name, value in exported.exported():
        if inspect.ismodule(value) or id(value) in seen:
            continue
        seen.add(id(value))
        for inner in (value, *filter(inspect.isfunction, _attributes(value))):
            if code := examples(inner):
                marks = [pytest.mark.slow] if inner.__name__ in SLOW else []
                where = name if inner is value else f"{name}.{inner.__name__}"
                yield pytest.param("\n\n".join(code), id=where, marks=marks)


def _attributes(value):
    """Methods of a class; of a function others that go by its name, as `f.paper`."""
    if inspect.isclass(value):
        return [*vars(value).values()]
    own = vars(value) if inspect.isfunction(value) else {}
    return [x for name, x in own.items() if not name.startswith("__")]


CASES = list(_cases())


def test_there_are_examples():
    """Guards the pattern that finds them."""
    assert len(CASES) > 50


@pytest.mark.parametrize("code", CASES)
def test_an_example_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where a plot would be written
    names = {"__name__": "example"}
    run(NAMES, names, "docs/api/index.md")
    before = names["tx"]
    run(code, names, "the example")
    if names["tx"] is not before:  # a transformation is one of these parameters
        run("tx.init(params)", names, "the parameters of docs/api/index.md")
