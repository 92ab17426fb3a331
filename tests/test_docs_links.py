"""Links of the documentation: to names of other libraries, and between its pages."""

import re

import pytest

from docs import links
from tests.docs_code import DOCS, ROOT

NAMED = re.compile(
    r"`((?:jax|jnp|optax|flax|nnx|linen)\.[A-Za-z]\w*(?:\.[A-Za-z]\w*)*)`"
)
SOURCES = [*(ROOT / "jaxmem").rglob("*.py"), *DOCS.rglob("*.md")]
# Modules and namespaces, and files.
NO_PAGE = {
    *("jax.ad_checkpoint.checkpoint_name", "jax.checkpoint_policies", "jax.export"),
    *("jax.extend", "jax.extend.core", "jax.lax", "jax.nn", "jax.numpy"),
    *("flax.linen", "flax.linen.fp8_ops", "flax.nnx"),
    *("linen.py", "nnx.py"),
}


def test_names_of_other_libraries_exist_and_have_an_address():
    named = {n for path in SOURCES for n in NAMED.findall(path.read_text())}
    assert len(named) > 50  # guards the pattern
    without = {name for name in named if links.address(name) is None}
    assert without <= NO_PAGE


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("jax.checkpoint", f"{links.JAX}/_autosummary/jax.checkpoint.html"),
        ("jnp.where", f"{links.JAX}/_autosummary/jax.numpy.where.html"),
        ("optax.adamw", f"{links.OPTAX}/optimizers.html#optax.adamw"),
        ("optax.chain", f"{links.OPTAX}/combining_optimizers.html#optax.chain"),
        ("flax.linen.Dense", f"{links.LINEN}/layers.html#flax.linen.Dense"),
        ("nnx.Linear", f"{links.NNX}/nn/linear.html#flax.nnx.Linear"),
        ("jax.banana", None),
        ("jaxmem.estimate", None),
        ("step", None),
    ],
)
def test_the_address_follows_from_the_name(name, address):
    assert links.address(name) == address


# a block of code, with the fences of directives left where they are
CODE = re.compile(r"^```\w+\n.*?^```$", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    text = CODE.sub("", page.read_text())
    files = re.findall(r"\]\((?!\w+:|#)([^)#]+)(?:#[^)]*)?\)", text)
    pages = [f"{name}.md" for name in re.findall(r"{doc}`([^`<]+)`", text)]
    for trees in re.findall(r"^```{toctree}\n(.*?)^```", text, re.DOTALL | re.M):
        lines = (line for line in trees.splitlines() if not line.startswith(":"))
        names = (re.sub(r".*<(.*)>", r"\1", line) for line in lines if line)
        pages += [f"{name}.md" for name in names]
    # the build copies notebooks/ into docs/
    folders = (page.parent, ROOT) if page.parent == DOCS else (page.parent,)
    missing = [
        to for to in (*files, *pages) if not any((f / to).exists() for f in folders)
    ]
    assert missing == []
