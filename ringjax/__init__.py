"""Exact ring and dilated attention for JAX and Flax."""

from ringjax import linen
from ringjax._attention import ring_dilated_attention
from ringjax._attention_fn import attention_fn
from ringjax._device_order import make_mesh
from ringjax._pattern import DilatedPattern
from ringjax._reference import dilated_attention_reference
from ringjax.nn import RingDilatedAttention

__all__ = [
    "DilatedPattern",
    "RingDilatedAttention",
    "attention_fn",
    "dilated_attention_reference",
    "linen",
    "make_mesh",
    "ring_dilated_attention",
]
