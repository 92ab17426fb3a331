"""Sphinx: prose in MyST, the API pages from the docstrings, warnings are errors."""

import importlib.metadata
import re

project = "jaxmem"
author = "The jaxmem authors"
release = importlib.metadata.version("jaxmem")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests run the notebook
autodoc_typehints = "none"  # jaxtyping's shapes stand in the docstrings
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Saves", "Source"]
napoleon_use_ivar = True  # a NamedTuple's fields are listed once
exclude_patterns = ["_build"]


def setup(app):
    app.connect("autodoc-process-docstring", _plurals)


def _plurals(app, what, name, obj, options, lines):
    """A letter right after a closing backtick, as in `array`s, ends no RST markup."""
    lines[:] = [re.sub(r"(?<=\w`)(?=s\b)", r"\\ ", line) for line in lines]
