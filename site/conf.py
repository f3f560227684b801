"""Sphinx's settings; `builder.stage` lays out the pages that it reads, and calls it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

project = "minillm"
extensions = ["myst_nb", "builder.sphinx_parts"]
html_theme = "furo"
html_title = "minillm"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["katex/katex.min.css", "site.css"]
html_js_files = ["live.js"]
html_math_renderer = "katex"
html_copy_source = False  # the notebooks hold solutions
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": [], "navigation_with_keys": True}

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # tables in outputs are tables
nb_ipywidgets_js = {}  # their scripts would come from another host
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
suppress_warnings = [
    "myst.header",  # a lesson may skip a level of headings
    "misc.highlighting_failure",  # cells with … for what is left out
    "ref.python",  # a type that two modules have is linked to neither
]
