"""Exact ring and dilated attention for JAX and Flax."""

from ringjax import linen
from ringjax._attention import ring_dilated_attention
from ringjax._pattern import DilatedPattern
from ringjax._reference import dilated_attention_reference
from ringjax.nn import RingDilatedAttention

__all__ = [
    "DilatedPattern",
    "RingDilatedAttention",
    "dilated_attention_reference",
    "linen",
    "ring_dilated_attention",
]
