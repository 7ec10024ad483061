"""Sphinx configuration. Build: ``sphinx-build -W -b html docs out/docs`` (extra ``docs``)."""

from importlib.metadata import version as installed

project = "gradientmail-torch"
copyright = "the gradientmail-torch authors"
version = release = installed("gradientmail-torch")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["parsl", "colmena", "redis"]
napoleon_numpy_docstring = False
exclude_patterns = ["_build"]
# The types of others' libraries are named in signatures and documented elsewhere.
suppress_warnings = ["ref.python", "myst.xref_missing"]

html_theme = "furo"
html_title = "gradientmail-torch"
