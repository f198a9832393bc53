"""RingDilatedAttention for flax.nnx: projections, ring dilated attention, projection."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from jaxtyping import Array, Float

from ringjax._attention import Strategy
from ringjax._heads import attend, head_dim, output_sharding
from ringjax._implementation import Implementation
from ringjax._pattern import DilatedPattern, Offsets


class RingDilatedAttention(nnx.Module):
    """Multi-head self-attention in a dilated pattern, over a sequence that is sharded along a mesh axis.

    Its parameters have the names and shapes of `nnx.MultiHeadAttention`: with one branch (T, 1) both compute the same.

    Args:
      num_heads: the number of query heads N.
      in_features: the width of the inputs.
      qkv_features: the width of all query heads together; `in_features` by default.
      out_features: the width of the outputs; `in_features` by default.
      segment_lengths: the segment length of each branch, in tokens.
      dilation_rates: the dilation rate of each branch.
      is_causal: whether token t sees only tokens s <= t.
      offsets: ``"interleaved"`` or ``"blocked"``, see :class:`ringjax.DilatedPattern`.
      num_kv_heads: the number of key/value heads K, a divisor of N; N by default.
      rope_theta: the base of a rotary embedding of queries and keys, such as 10000; none by default.
      strategy: ``"ring"`` or ``"all_gather"``, see :func:`ring_dilated_attention`.
      implementation: ``"xla"`` or ``"cudnn"``; by default the fastest that serves, see :func:`ring_dilated_attention`.
      dtype: the dtype of the computation; by default that of inputs and parameters.
      param_dtype: the dtype of the parameters.
      use_bias: whether the projections have biases.
      kernel_init: initialises the kernels.
      bias_init: initialises the biases.
      mesh: the mesh to run on; by default as :func:`ringjax.ring_dilated_attention` finds it.
      axis_name: the mesh axis that the sequence is sharded along.
      spec: how the heads [..., T, N, H] lie on the mesh, see :func:`ring_dilated_attention`.
      rngs: the random streams that the parameters are drawn from.

    Raises:
      ValueError: for a wrong pattern, heads that do not divide, or an odd head width with `rope_theta`.

    Example:
      >>> from flax import nnx
      >>> attention = RingDilatedAttention(
      ...     4, 32, segment_lengths=(4, 16), dilation_rates=(1, 4), is_causal=True, rngs=nnx.Rngs(0)
      ... )
      >>> attention(jnp.ones((2, 16, 32))).shape
      (2, 16, 32)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        *,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        is_causal: bool = False,
        offsets: Offsets = "interleaved",
        num_kv_heads: int | None = None,
        rope_theta: float | None = None,
        strategy: Strategy = "ring",
        implementation: Implementation | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        kernel_init: nnx.Initializer = initializers.lecun_normal(),
        bias_init: nnx.Initializer = initializers.zeros_init(),
        mesh: Any = None,
        axis_name: str = "seq",
        spec: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.pattern = DilatedPattern(tuple(segment_lengths), tuple(dilation_rates), offsets)
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.in_features = in_features
        self.qkv_features = in_features if qkv_features is None else qkv_features
        self.out_features = in_features if out_features is None else out_features
        self.head_dim = head_dim(self.num_heads, self.num_kv_heads, self.qkv_features, rope_theta)
        self.is_causal = is_causal
        self.rope_theta = rope_theta
        self.strategy: Strategy = strategy
        self.implementation: Implementation | None = implementation
        self.mesh = mesh
        self.axis_name = axis_name
        self.spec = spec
        linear = functools.partial(
            nnx.LinearGeneral,
            dtype=dtype,
            param_dtype=param_dtype,
            use_bias=use_bias,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.query = linear(in_features, (self.num_heads, self.head_dim))
        self.key = linear(in_features, (self.num_kv_heads, self.head_dim))
        self.value = linear(in_features, (self.num_kv_heads, self.head_dim))
        self.out = linear((self.num_heads, self.head_dim), self.out_features, axis=(-2, -1))

    def __call__(self, inputs: Float[Array, "*B T D"]) -> Float[Array, "*B T E"]:
        """Attends: inputs [..., T, in_features] to outputs [..., T, out_features], sharded like the inputs."""
        heads = attend(
            self.query(inputs),
            self.key(inputs),
            self.value(inputs),
            segment_lengths=self.pattern.segment_lengths,
            dilation_rates=self.pattern.dilation_rates,
            offsets=self.pattern.offsets,
            is_causal=self.is_causal,
            rope_theta=self.rope_theta,
            strategy=self.strategy,
            implementation=self.implementation,
            mesh=self.mesh,
            axis_name=self.axis_name,
            spec=self.spec,
        )  # [..., T, N, H]
        return self.out(heads, out_sharding=output_sharding(inputs))  # [..., T, E]
