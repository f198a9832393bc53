"""Exact ring and dilated attention for JAX and Flax."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ringjax._attention import ring_dilated_attention
from ringjax._attention_fn import attention_fn
from ringjax._decode_attention import decode_attention
from ringjax._mesh.device_order import make_mesh
from ringjax._mesh.padding import pad_to_mesh, unpad
from ringjax._mesh.unused import MeshWarning
from ringjax._pattern.branch import Segments, Window
from ringjax._pattern.pattern import DilatedPattern
from ringjax._pattern.reach_warning import ReachWarning
from ringjax._pattern.reference import dilated_attention_reference
from ringjax._pattern.rope import rope_frequencies
from ringjax._pattern.rotary import rotary_embedding
from ringjax._tools.explain import explain
from ringjax._tools.pictures import plot_pattern as _plot_pattern
from ringjax._tools.plan import plan
from ringjax._version import find_version as _find_version
from ringjax._weights import attention_weights

if _TYPE_CHECKING:
    from ringjax import linen, nn
    from ringjax.nn import RingDilatedAttention

__all__ = [
    "DilatedPattern",
    "MeshWarning",
    "ReachWarning",
    "RingDilatedAttention",
    "Segments",
    "Window",
    "attention_fn",
    "attention_weights",
    "decode_attention",
    "dilated_attention_reference",
    "explain",
    "linen",
    "make_mesh",
    "nn",
    "pad_to_mesh",
    "plan",
    "ring_dilated_attention",
    "rope_frequencies",
    "rotary_embedding",
    "unpad",
]
__version__ = _find_version()
DilatedPattern.plot = _plot_pattern
# Tracebacks, reprs and pickles show public names by the path that users know.
for _name in {*__all__} & {*globals()}:
    if callable(globals()[_name]):
        globals()[_name].__module__ = __name__


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


# Only the modules need Flax: they are imported on first access.
def __getattr__(name: str) -> _Any:
    if name not in ("RingDilatedAttention", "linen", "nn"):
        raise AttributeError(f"module 'ringjax' has no attribute {name!r}")
    try:
        module = _importlib.import_module("ringjax.linen" if name == "linen" else "ringjax.nn")
    except ModuleNotFoundError as error:
        if error.name != "flax":
            raise
        raise ModuleNotFoundError(f"ringjax.{name} needs Flax: pip install flax", name="flax") from error
    return module.RingDilatedAttention if name == "RingDilatedAttention" else module
