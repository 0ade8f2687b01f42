"""Settings of the site: ``make docs``."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
os.environ["TQDM_DISABLE"] = "1"  # pages hold no bars, which depend on the speed of the machine

import fedstat

project = "fedstat"
author = "the fedstat developers"
version = release = fedstat.__version__
language = "en"

extensions = [
    "sphinx.ext.autodoc", "numpydoc", "myst_nb", "sphinx_design", "sphinx_copybutton", "fedstat_site", "mathml",
]  # fmt: skip
exclude_patterns = ["_build", "_ext", "notebooks/*.py", "**/.ipynb_checkpoints"]
nitpicky = True  # a reference that leads nowhere is an error

autodoc_typehints = "none"  # docstrings say types and shapes
autodoc_member_order = "bysource"
add_module_names = False
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / ".notebooks")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_excludepatterns = []
nb_merge_streams = True

html_theme = "pydata_sphinx_theme"
html_title = f"fedstat {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_context = {"default_mode": "auto"}  # the theme of the reader's system; without it, the console shows an error
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_nav_level": 1,
    "collapse_navigation": True,
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": [], "start": [], "tutorial": [], "findings": []}
copyright = "the fedstat developers, MIT license"  # noqa: A001
