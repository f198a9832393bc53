"""RingDilatedAttention for flax.linen: projections, ring dilated attention, projection."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jaxtyping import Array, Float

from ringjax._decoding.cache import Cache
from ringjax._heads import Settings, normalize_inner, output_sharding
from ringjax._module_arguments import (
    CHECKED,
    PositionEmbedding,
    Positions,
    check_decoding,
    check_flax_arguments,
    check_module,
    read_inputs,
    read_positions,
    read_steps,
)
from ringjax._options import ModuleOptions
from ringjax._pattern.counts import is_integer, read_flag
from ringjax._pattern.option import documented, options_of, types_of
from ringjax._pattern.other_names import OF_LINEN, naming_what_serves

__all__ = ["RingDilatedAttention"]


def _fields(namespace: dict[str, Any]) -> None:
    defaults = {name: option.default for name, option in options_of(ModuleOptions).items()}
    namespace |= {"__annotations__": types_of(ModuleOptions), "__module__": __name__, **defaults}


# Modules are dataclasses: this base class has the options as its fields.
_Options: Any = types.new_class("_Options", (linen.Module,), {"kw_only": True}, _fields)


@documented(ModuleOptions)
class RingDilatedAttention(_Options):
    """Multi-head attention in a dilated pattern, over a sequence that is sharded along a mesh axis.

    Its parameters have the names and shapes of `linen.MultiHeadDotProductAttention` where `num_kv_heads` is None: with
    one branch (T, 1) the two compute the same. Dropout draws from the stream of random numbers named "dropout".

    With `decode`, `init` makes the cache of a sequence as long as its inputs, in the collection "cache" and the dtype
    of keys: `apply` with ``mutable=["cache"]`` then takes the next tokens, any number at a time.

    Args:
      num_heads: the number of query heads N.
      qkv_features: the width of all query heads together; by default N * `head_dim` if that is given, else the width of
        the inputs.
      out_features: the width of the outputs; that of the inputs by default.
      num_kv_heads: the number of key/value heads K, a divisor of N; N by default.
      head_dim: the width H of a head, instead of `qkv_features`.
      rope_theta: the base of a rotary embedding of queries and keys, such as 10000; none by default.
      rope: instead of `rope_theta`, the frequencies and the factor of the embedding, as
        :func:`ringjax.rope_frequencies` returns them.
      position_embedding: instead, any function that embeds positions in queries and keys:
        ``f(heads, positions, is_key)`` takes heads [..., T, N, H] and the positions of their tokens, [T] or as passed
        to the call, and returns heads. It has no parameters, because they would not be trained.
      qk_norm: makes the norms of queries and of keys over the width of a head, before their rotary embedding, such as
        ``functools.partial(linen.RMSNorm, epsilon=1e-6)``; none by default.
      normalize_qk: whether these norms are LayerNorms without bias, as in Flax's own module (arXiv 2302.05442).
      inner_norm: makes a norm of all heads together, between attention and the output's projection (SubLN, arXiv
        2210.06423), such as ``linen.LayerNorm`` or ``functools.partial(linen.LayerNorm, epsilon=1e-5)``; none by
        default.
      sinks: whether each query head has a sink, a parameter [N]; see :func:`ring_dilated_attention`.
      deterministic: whether calls skip dropout. With a dropout rate it must be set here or in each call.
      decode: whether calls continue the sequence in the cache.
      sow_max_logit: whether calls sow the greatest logit of each head [N] as ``max_logit`` in "intermediates", see
        `return_max_logit` of :func:`ring_dilated_attention`; calls that decode do not.
      per_sequence: whether each sequence in the cache has a length of its own.
      rewind: how many tokens can always be taken back from the cache.
      force_fp32_for_softmax: an argument of Flax's module without effect: the softmax is always in float32 at least.
      dtype: the dtype of the computation; by default that of inputs and parameters.
      param_dtype: the dtype of the parameters.
      use_bias: whether the projections have biases.
      use_out_bias: whether the output's projection has a bias; as `use_bias` by default.
      kernel_init: initializes the kernels of queries, keys and values [D, N, H].
      out_kernel_init: initializes the kernel [N, H, E] of the outputs; `kernel_init` by default.
      bias_init: initializes the biases [N, H] of queries, keys and values.
      out_bias_init: initializes the bias [E] of the outputs; `bias_init` by default.
      sinks_init: initializes the sinks [N].
      **options: as :func:`ring_dilated_attention` takes them.

    Raises:
      ValueError: for a wrong pattern, heads that do not divide, an odd head width with `rope_theta`, a dropout rate
        outside [0, 1), or decoding that is not causal.
      TypeError: for arguments of another type, such as an array of `sinks`, which the call takes.

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
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    rope: Any = None
    position_embedding: PositionEmbedding | None = None
    qk_norm: Any = None
    normalize_qk: bool = False
    inner_norm: Any = None
    sinks: bool = False
    deterministic: bool | None = None
    decode: bool = False
    sow_max_logit: bool = False
    per_sequence: bool = False
    rewind: int = 0
    force_fp32_for_softmax: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    use_out_bias: bool | None = None
    kernel_init: Any = linen.initializers.lecun_normal()
    out_kernel_init: Any = None
    bias_init: Any = linen.initializers.zeros_init()
    out_bias_init: Any = None
    sinks_init: Any = linen.initializers.zeros_init()

    def __post_init__(self) -> None:
        # Modules must be hashable to be static arguments of jax.jit, and lists are not.
        for name in options_of(ModuleOptions):
            if isinstance(getattr(self, name), list):
                setattr(self, name, tuple(getattr(self, name)))
        if isinstance(self.rope, tuple) and isinstance(self.rope[0], np.ndarray):
            self.rope = (tuple(self.rope[0].tolist()), *self.rope[1:])
        super().__post_init__()
        check_module({name: getattr(self, name) for name in CHECKED})
        # Errors are raised when the module is made, before the width of its inputs is known.
        width = 2 * max(1, np.size(self.rope[0])) if isinstance(self.rope, tuple) and self.rope else 2
        settings = _settings_of(self, in_features=width * self.num_heads if is_integer(self.num_heads) else 2)
        if self.decode:
            settings.check_causal()

    @linen.compact
    @naming_what_serves(OF_LINEN)
    def __call__(
        self,
        inputs_q: Float[Array, "*B T D"],
        inputs_k: Float[Array, "*B S D"] | None = None,
        inputs_v: Float[Array, "*B S D"] | None = None,
        *,
        inputs_kv: Float[Array, "*B S D"] | None = None,
        mask: None = None,
        document_ids: Any = None,
        query_offset: Any = 0,
        positions: Any = None,
        key_positions: Any = None,
        sinks: Float[Array, "..."] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Any = None,
        sow_weights: bool = False,
        prefill: bool = False,
        lengths: Any = None,
    ) -> Float[Array, "*B T E"]:
        """Computes attention, with the arguments of :class:`ringjax.RingDilatedAttention` except `decode` and `rngs`.

        Two more come from Flax's module: `inputs_kv`, for both keys and values, and `dropout_rng`, the key that dropout
        is drawn from instead of the stream "dropout".
        """
        check_flax_arguments(mask, sow_weights)
        prefill, _ = read_steps(prefill, self.decode, lengths)
        if inputs_kv is not None:
            if inputs_k is not None or inputs_v is not None:
                raise ValueError("inputs_kv is given beside inputs_k or inputs_v: give either")
            inputs_k = inputs_v = inputs_kv
        is_self_attention = inputs_k is None and inputs_v is None
        inputs_q, inputs_k, inputs_v = read_inputs(inputs_q, inputs_k, inputs_v)
        embedded = read_positions(positions, key_positions, (inputs_q, inputs_k), query_offset)
        settings = _settings_of(self, inputs_q.shape[-1])
        dense = functools.partial(
            linen.DenseGeneral,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        inits = {"kernel_init": self.kernel_init, "bias_init": self.bias_init}
        of_heads = functools.partial(dense, use_bias=self.use_bias, **inits)
        key_shape = settings.num_kv_heads, settings.head_dim
        heads = (
            of_heads((self.num_heads, settings.head_dim), name="query")(inputs_q),
            of_heads(key_shape, name="key")(inputs_k),
            of_heads(key_shape, name="value")(inputs_v),
        )  # [..., T, N, H], [..., S, K, H]
        qk_norm = functools.partial(linen.LayerNorm, use_bias=False) if self.normalize_qk else self.qk_norm
        if qk_norm is not None:
            norm = functools.partial(qk_norm, dtype=self.dtype, param_dtype=self.param_dtype)
            heads = norm(name="query_ln")(heads[0]), norm(name="key_ln")(heads[1]), heads[2]
        own = self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype) if self.sinks else None
        sinks = own if sinks is None else sinks
        seed = self._dropout_seed(deterministic, dropout_rng)
        if self.decode:
            check_decoding(document_ids, query_offset, is_self_attention, seed is not None)
            attended = self._decode(settings, *heads, sinks, prefill=prefill, positions=embedded, lengths=lengths)
        else:
            sow = functools.partial(self.sow, "intermediates", "max_logit") if self.sow_max_logit else None
            attended = settings.attend(*heads, document_ids, query_offset, seed, sinks, embedded, sow)
        if self.inner_norm is not None:
            norm = self.inner_norm(dtype=self.dtype, param_dtype=self.param_dtype, name="inner_norm")
            attended = normalize_inner(attended, norm)
        dot_general = functools.partial(jax.lax.dot_general, out_sharding=output_sharding(inputs_q))
        out = dense(
            inputs_q.shape[-1] if self.out_features is None else self.out_features,
            axis=(-2, -1),
            use_bias=self.use_bias if self.use_out_bias is None else self.use_out_bias,
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=dot_general,
            name="out",
        )
        return settings.clear_padding(out(attended), lengths)  # [..., T, E]

    def _dropout_seed(self, deterministic: bool | None, dropout_rng: Any) -> Any:
        given = self.deterministic, deterministic
        own, deterministic = (read_flag("deterministic", flag) for flag in given)
        if not self.dropout_rate:
            return None
        deterministic = linen.merge_param("deterministic", own, deterministic)
        if deterministic:
            return None
        return self.make_rng("dropout") if dropout_rng is None else dropout_rng

    def _decode(
        self,
        settings: Settings,
        query: Array,
        key: Array,
        value: Array,
        sinks: Array | None,
        prefill: bool,
        positions: Positions,
        lengths: Any,
    ) -> Array:
        if not self.has_variable("cache", Cache.VARIABLES[0]):
            *batch, length, _, _ = key.shape
            sizes = {"per_sequence": self.per_sequence, "rewind": self.rewind}
            cache = settings.make_cache(tuple(batch), length, key.dtype, **sizes)
            for name, rows in zip(Cache.VARIABLES, cache, strict=True):
                self.put_variable("cache", name, rows)
            return settings.attend(query, key, value, sinks=sinks, positions=positions)
        run = functools.partial(settings.prefill, lengths=lengths) if prefill else settings.step
        cache = Cache(*(self.get_variable("cache", name) for name in Cache.VARIABLES))
        out, cache = run(query, key, value, cache, sinks, positions, self.rewind)
        for name, rows in zip(Cache.VARIABLES, cache, strict=True):
            self.put_variable("cache", name, rows)
        return out


# Not a method: Flax tabulates the results of methods as if they were arrays.
def _settings_of(module: RingDilatedAttention, in_features: int) -> Settings:
    return Settings.of(
        {name: getattr(module, name) for name in options_of(ModuleOptions)},
        num_heads=module.num_heads,
        num_kv_heads=module.num_kv_heads,
        in_features=in_features,
        qkv_features=module.qkv_features,
        head_dim=module.head_dim,
        rope_theta=module.rope_theta,
        rope=module.rope,
        position_embedding=module.position_embedding,
    )
