"""Sphinx configuration; `./dev docs` builds with every warning as an error."""

import configparser
import logging
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "docs" / "_ext")]
setup_cfg = configparser.ConfigParser()
setup_cfg.read(REPOSITORY / "setup.cfg")

project = "celery_claim"
author = "celery_claim contributors"
copyright = "celery_claim contributors"
version = release = setup_cfg["metadata"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "claim_reference"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_static", "_ext"]

html_theme = "furo"
html_title = "celery_claim"
html_static_path = ["_static"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Signatures in our docstrings come from the code; names of other projects need no link to be read.
nitpicky = False

# A kind of page that has no page yet is no fault. (suppress_warnings cannot name this warning: it has no type.)
logging.getLogger("sphinx.sphinx.directives.other").addFilter(
    lambda record: getattr(record, "subtype", None) != "empty_glob"
)
