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
from ringjax._cache import Cache
from ringjax._heads import Settings, check_decoding, output_sharding
from ringjax._implementation import Implementation
from ringjax._pattern import DilatedPattern, Heads, Merge, Offsets


class RingDilatedAttention(linen.Module):
    """Multi-head attention in a dilated pattern, over a sequence that is sharded along a mesh axis.

    Its parameters have the names and shapes of `linen.MultiHeadDotProductAttention` where `num_kv_heads` is None: with
    one branch (T, 1) the two compute the same. The attributes are the arguments of
    :class:`ringjax.RingDilatedAttention`, less the width of the inputs, which is theirs, and the random streams, of
    which dropout takes the one named "dropout".

    With `decode`, `init` makes the cache of a sequence as long as its inputs, in the collection "cache" (in the dtype
    of its keys): `apply` with ``mutable=["cache"]`` then takes the next tokens, however many at a time.

    Raises:
      ValueError: for a wrong pattern, heads that do not divide, an odd head width with `rope_theta`, a dropout rate
        outside [0, 1), or decoding that is not causal.

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
    merge: Merge = "lse"
    heads: Heads = "all"
    num_kv_heads: int | None = None
    rope_theta: float | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    deterministic: bool | None = None
    decode: bool = False
    strategy: Strategy = "ring"
    implementation: Implementation | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    kernel_init: Any = linen.initializers.lecun_normal()
    out_kernel_init: Any = None
    bias_init: Any = linen.initializers.zeros_init()
    out_bias_init: Any = None
    mesh: Any = None
    axis_name: str = "seq"
    spec: Any = None

    @linen.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*B T D"],
        inputs_k: Float[Array, "*B S D"] | None = None,
        inputs_v: Float[Array, "*B S D"] | None = None,
        *,
        document_ids: Any = None,
        query_offset: int = 0,
        deterministic: bool | None = None,
        prefill: bool = False,
    ) -> Float[Array, "*B T E"]:
        """Attends; the arguments are those of :class:`ringjax.RingDilatedAttention`."""
        is_self_attention = inputs_k is None and inputs_v is None
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        settings = self._settings(inputs_q.shape[-1])
        dense = functools.partial(
            linen.DenseGeneral, dtype=self.dtype, param_dtype=self.param_dtype, use_bias=self.use_bias
        )
        of_heads = functools.partial(dense, kernel_init=self.kernel_init, bias_init=self.bias_init)
        key_shape = settings.num_kv_heads, settings.head_dim
        heads = (
            of_heads((self.num_heads, settings.head_dim), name="query")(inputs_q),
            of_heads(key_shape, name="key")(inputs_k),
            of_heads(key_shape, name="value")(inputs_v),
        )  # [..., T, N, H], [..., S, K, H]
        seed = self._dropout_seed(deterministic)
        if self.decode:
            check_decoding(document_ids, query_offset, is_self_attention, seed is not None)
            attended = self._decode(settings, *heads, prefill=prefill)
        else:
            attended = settings.attend(*heads, document_ids, query_offset, seed)
        dot_general = functools.partial(jax.lax.dot_general, out_sharding=output_sharding(inputs_q))
        out = dense(
            self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=dot_general,
            name="out",
        )
        return out(attended)  # [..., T, E]

    def _settings(self, in_features: int) -> Settings:
        return Settings(
            pattern=DilatedPattern(self.segment_lengths, self.dilation_rates, self.offsets, self.merge, self.heads),
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            qkv_features=self.qkv_features or in_features,
            **{name: getattr(self, name) for name in _SAME_SETTINGS},
        )

    def _dropout_seed(self, deterministic: bool | None) -> Any:
        if not self.dropout_rate:
            return None
        deterministic = linen.merge_param("deterministic", self.deterministic, deterministic)
        return None if deterministic else self.make_rng("dropout")

    def _decode(self, settings: Settings, query: Array, key: Array, value: Array, prefill: bool) -> Array:
        if not self.has_variable("cache", _CACHE[0]):
            *batch, length, _, _ = key.shape
            for name, rows in zip(_CACHE, settings.make_cache(tuple(batch), length, key.dtype), strict=True):
                self.put_variable("cache", name, rows)
            return settings.attend(query, key, value)
        run = settings.prefill if prefill else settings.step
        out, cache = run(query, key, value, Cache(*(self.get_variable("cache", name) for name in _CACHE)))
        for name, rows in zip(_CACHE, cache, strict=True):
            self.put_variable("cache", name, rows)
        return out


_CACHE = "cached_key", "cached_value", "cache_index", "cache_length"
_SAME_SETTINGS = (
    "is_causal",
    "rope_theta",
    "logits_soft_cap",
    "dropout_rate",
    "broadcast_dropout",
    "strategy",
    "implementation",
    "mesh",
    "axis_name",
    "spec",
)
