"""How the site is built: `sphinx-build -W docs FOLDER`. Every cell runs, on eight simulated devices."""

import inspect
import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from sphinx.util.inspect import stringify_signature

ROOT = Path(__file__).parent.parent
# Of the kernels that run the cells: devices, the pictures of this folder and the examples, and no advice of libraries.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "TF_CPP_MIN_LOG_LEVEL": "3"}
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "docs"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
)
sys.path.insert(0, str(ROOT))

project = "ringjax"
author = "The ringjax authors"
copyright = author
release = version_of("ringjax")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_templates", "*.py"]
templates_path = ["_templates"]
suppress_warnings = ["config.cache"]

html_theme = "furo"
html_title = "ringjax"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
html_theme_options = {
    "source_repository": "https://github.com/ringjax/ringjax/",
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_output_stderr = "remove"
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say what each argument is
autosummary_generate = True
default_role = "code"
napoleon_use_rtype = False


def show_arguments(app: Any, what: str, name: str, value: Any, options: Any, signature: Any, returns: Any) -> Any:
    """Shows the arguments of classes that hide them behind those of their metaclass, as Flax's modules do."""
    del app, name, options, returns
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    own = inspect.signature(value.__init__)
    own = own.replace(parameters=list(own.parameters.values())[1:])  # without self
    return stringify_signature(own, show_annotation=False, show_return_annotation=False), None


def setup(app: Any) -> None:
    """Connects what Sphinx calls."""
    app.connect("autodoc-process-signature", show_arguments)
