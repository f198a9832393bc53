"""RingDilatedAttention for flax.linen: projections, ring dilated attention, projection."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from ringjax._attention import Strategy
from ringjax._heads import attend, head_dim, output_sharding
from ringjax._implementation import Implementation
from ringjax._pattern import DilatedPattern, Offsets


class RingDilatedAttention(linen.Module):
    """Multi-head self-attention in a dilated pattern, over a sequence that is sharded along a mesh axis.

    Its parameters have the names and shapes of `linen.MultiHeadDotProductAttention` where `num_kv_heads` is None: with
    one branch (T, 1) the two compute the same. The attributes are the arguments of
    :class:`ringjax.RingDilatedAttention`, less the width of the inputs, which is theirs, and the random streams.

    Raises:
      ValueError: for a wrong pattern, heads that do not divide, or an odd head width with `rope_theta`.

    Example:
      >>> attention = RingDilatedAttention(4, segment_lengths=(4, 16), dilation_rates=(1, 4), is_causal=True)
      >>> inputs = jnp.ones((2, 16, 32))
      >>> attention.apply(attention.init(jax.random.key(0), inputs), inputs).shape
      (2, 16, 32)
    """

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    is_causal: bool = False
    offsets: Offsets = "interleaved"
    num_kv_heads: int | None = None
    rope_theta: float | None = None
    strategy: Strategy = "ring"
    implementation: Implementation | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    kernel_init: Any = linen.initializers.lecun_normal()
    bias_init: Any = linen.initializers.zeros_init()
    mesh: Any = None
    axis_name: str = "seq"
    spec: Any = None

    @linen.compact
    def __call__(self, inputs: Float[Array, "*B T D"]) -> Float[Array, "*B T E"]:
        """Attends: inputs [..., T, D] to outputs [..., T, out_features], sharded like the inputs."""
        pattern = DilatedPattern(tuple(self.segment_lengths), tuple(self.dilation_rates), self.offsets)
        qkv_features = self.qkv_features or inputs.shape[-1]
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        width = head_dim(self.num_heads, num_kv_heads, qkv_features, self.rope_theta)
        dense = functools.partial(
            linen.DenseGeneral,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        heads = attend(
            dense((self.num_heads, width), name="query")(inputs),
            dense((num_kv_heads, width), name="key")(inputs),
            dense((num_kv_heads, width), name="value")(inputs),
            segment_lengths=pattern.segment_lengths,
            dilation_rates=pattern.dilation_rates,
            offsets=pattern.offsets,
            is_causal=self.is_causal,
            rope_theta=self.rope_theta,
            strategy=self.strategy,
            implementation=self.implementation,
            mesh=self.mesh,
            axis_name=self.axis_name,
            spec=self.spec,
        )  # [..., T, N, H]
        dot_general = functools.partial(jax.lax.dot_general, out_sharding=output_sharding(inputs))
        out = dense(self.out_features or inputs.shape[-1], axis=(-2, -1), dot_general=dot_general, name="out")
        return out(heads)  # [..., T, E]
