"""Sphinx: prose in MyST, the API pages from the docstrings, warnings are errors."""

import importlib.metadata

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
nb_execution_mode = "off"  # the tests run the notebook
autodoc_typehints = "none"  # jaxtyping's shapes stand in the docstrings
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Saves", "Source"]
exclude_patterns = ["_build"]
