"""Exact ring and dilated attention for JAX and Flax."""

from ringjax._attention import ring_dilated_attention
from ringjax._pattern import DilatedPattern
from ringjax._reference import dilated_attention_reference

__all__ = ["DilatedPattern", "dilated_attention_reference", "ring_dilated_attention"]
