"""Sphinx: prose in MyST, the API pages from the docstrings, warnings are errors."""

import importlib.metadata
import pathlib
import re
import sys

from docutils import nodes

sys.path.insert(0, str(pathlib.Path(__file__).parent))

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
nb_execution_mode = "off"  # the tests run the notebook
myst_enable_extensions = ["deflist"]
default_role = "py:obj"  # `jaxmem.schedule` in a docstring is a link
autosummary_generate = False  # the entries stand on the same page as the table
autodoc_typehints = "description"  # jaxtyping's shapes make signatures of many lines
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
napoleon_custom_sections = ["Saves", "Source"]
napoleon_use_ivar = True  # a NamedTuple's fields are listed once
exclude_patterns = ["_build"]


def setup(app):
    app.connect("autodoc-process-docstring", _readable)
    app.connect("missing-reference", _elsewhere)
    app.connect("builder-inited", _all_documented)


def _readable(app, what, name, obj, options, lines):
    """Two forms of our docstrings that RST would read as something else.

    A letter right after a closing backtick, as in `array`s, ends no RST markup; a star
    in the shape of an attribute's type begins one.
    """
    lines[:] = [re.sub(r"(?<=\w`)(?=s\b)", r"\\ ", line) for line in lines]
    lines[:] = [re.sub(r"^(:vartype \w+:) (.*\*.*)$", r"\1 ``\2``", x) for x in lines]


def _elsewhere(app, env, node, content):
    """A name of jax, Flax or optax is a link to their own documentation."""
    url = links.address(node.get("reftarget", ""))
    if url is None:
        return None
    return nodes.reference("", "", content, refuri=url, internal=False)


def _all_documented(app):
    """The build fails where users can call what nothing describes."""
    if missing := exported.undocumented():
        raise RuntimeError(f"no docstring: {', '.join(missing)}")
    if missing := exported.undescribed():
        raise RuntimeError(f"on no API page: {', '.join(missing)}")
