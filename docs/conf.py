"""Sphinx: prose in MyST, the API pages from the docstrings, warnings are errors."""

import importlib.metadata
import pathlib
import shutil
import sys

from docutils import nodes

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import docstrings  # noqa: E402
import exported  # noqa: E402
import links  # noqa: E402

project = "jaxmem"
author = "The jaxmem authors"
release = importlib.metadata.version("jaxmem")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_js_files = ["filter.js"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests run the notebook
myst_enable_extensions = ["deflist"]
default_role = "py:obj"  # `jaxmem.schedule` in a docstring is a link
autosummary_generate = False  # the entries stand on the same page as the table
autodoc_typehints = "description"  # jaxtyping's shapes make signatures of many lines
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_custom_sections = ["Saves", "Costs", "Source"]
napoleon_use_ivar = True  # a NamedTuple's fields are listed once
exclude_patterns = ["_build"]


HERE = pathlib.Path(__file__).parent
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
sources = shutil.ignore_patterns("*.md", "*.py", "__pycache__")
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", ignore=sources)


def setup(app):
    app.connect("autodoc-process-docstring", docstrings.readable)
    app.connect("autodoc-process-signature", docstrings.signature)
    # before autodoc merges them into the descriptions
    app.connect("object-description-transform", docstrings.short_types, priority=400)
    app.connect("doctree-read", docstrings.link_code)
    app.connect("missing-reference", _elsewhere)
    app.connect("builder-inited", _all_documented)


def _elsewhere(app, env, node, content):
    """A short name of the library; or one of jax, Flax or optax, in their own pages."""
    name = node.get("reftarget", "")
    if full := exported.full_name(name):
        target = app.builder, "obj", full, node, content
        return env.domains.python_domain.resolve_xref(env, node["refdoc"], *target)
    url = links.address(name)
    if url is None:
        return None
    return nodes.reference("", "", content, refuri=url, internal=False)


def _all_documented(app):
    """The build fails where users can call what nothing describes."""
    if missing := exported.undocumented():
        raise RuntimeError(f"no docstring: {', '.join(missing)}")
    if missing := exported.undescribed():
        raise RuntimeError(f"on no API page: {', '.join(missing)}")
