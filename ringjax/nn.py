"""RingDilatedAttention for flax.nnx: projections, ring dilated attention, projection."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from jaxtyping import Array, Float

from ringjax._decoding.cache import Cache, read_shape
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
from ringjax._pattern.counts import check_count, check_flags, check_optional_count, read_flag
from ringjax._pattern.option import documented, taking
from ringjax._pattern.other_names import OF_NNX, naming_what_serves

__all__ = ["RingDilatedAttention"]


@documented(ModuleOptions)
class RingDilatedAttention(nnx.Module):
    """Multi-head attention in a dilated pattern, over a sequence that is sharded along a mesh axis.

    Its parameters have the names and shapes of `nnx.MultiHeadAttention`: with one branch (T, 1) both compute the same.

    Args:
      num_heads: the number of query heads N.
      in_features: the width of the inputs.
      qkv_features: the width of all query heads together; by default N * `head_dim` if that is given, else
        `in_features`.
      out_features: the width of the outputs; `in_features` by default.
      in_kv_features: the width of the inputs of keys and values; `in_features` by default.
      num_kv_heads: the number of key/value heads K, a divisor of N; N by default.
      head_dim: the width H of a head, instead of `qkv_features`.
      rope_theta: the base of a rotary embedding of queries and keys, such as 10000; none by default.
      rope: instead of `rope_theta`, the frequencies and the factor of the embedding, as
        :func:`ringjax.rope_frequencies` returns them.
      position_embedding: instead, any function that embeds positions in queries and keys:
        ``f(heads, positions, is_key)`` takes heads [..., T, N, H] and the positions of their tokens, [T] or as passed
        to the call, and returns heads. It has no parameters, because they would not be trained.
      qk_norm: makes the norms of queries and of keys over the width of a head, before their rotary embedding, such as
        ``functools.partial(nnx.RMSNorm, epsilon=1e-6)``; none by default.
      normalize_qk: whether these norms are LayerNorms without bias, as in Flax's own module (arXiv 2302.05442).
      inner_norm: makes a norm of all heads together, between attention and the output's projection (SubLN, arXiv
        2210.06423), such as ``nnx.LayerNorm`` or ``functools.partial(nnx.LayerNorm, epsilon=1e-5)``; none by default.
      sinks: whether each query head has a sink, a parameter [N]; see :func:`ring_dilated_attention`.
      deterministic: whether calls skip dropout. With a dropout rate it must be set here or in each call.
      decode: whether calls continue the sequence in the cache, see :meth:`init_cache`.
      sow_max_logit: whether calls sow the greatest logit of each head [N] as ``max_logit``, which
        ``nnx.capture(model, nnx.Intermediate)`` collects, see `return_max_logit` of :func:`ring_dilated_attention`;
        calls that decode do not. Outside it, as with all that is sown, each call adds one more to the module.
      dtype: the dtype of the computation; by default that of inputs and parameters.
      param_dtype: the dtype of the parameters.
      use_bias: whether the projections have biases.
      use_out_bias: whether the output's projection has a bias; as `use_bias` by default.
      kernel_init: initializes the kernels of queries, keys and values [D, N, H]; as in Flax, an initializer made by
        `nnx.with_partitioning` gives them sharding metadata.
      out_kernel_init: initializes the kernel [N, H, E] of the outputs; `kernel_init` by default.
      bias_init: initializes the biases [N, H] of queries, keys and values.
      out_bias_init: initializes the bias [E] of the outputs; `bias_init` by default.
      sinks_init: initializes the sinks [N].
      rngs: the random streams that parameters are drawn from; dropout is drawn from the stream "dropout".
      keep_rngs: whether the module keeps a stream for dropout; else calls must be given one.
      **options: as :func:`ring_dilated_attention` takes them.

    Raises:
      ValueError: for a wrong pattern, heads that do not divide, an odd head width with `rope_theta`, a dropout rate
        outside [0, 1), or decoding that is not causal.
      TypeError: for arguments of another type, such as an array of `sinks`, which the call takes.

    Example:
      >>> from flax import nnx
      >>> attention = RingDilatedAttention(
      ...     4, 32, segment_lengths=(4, 16), dilation_rates=(1, 4), is_causal=True, rngs=nnx.Rngs(0)
      ... )
      >>> attention(jnp.ones((2, 16, 32))).shape
      (2, 16, 32)
    """

    @taking(ModuleOptions)
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        in_kv_features: int | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = None,
        rope: tuple[Any, float] | None = None,
        position_embedding: PositionEmbedding | None = None,
        qk_norm: Callable[..., nnx.Module] | None = None,
        normalize_qk: bool = False,
        inner_norm: Callable[..., nnx.Module] | None = None,
        sinks: bool = False,
        deterministic: bool | None = None,
        decode: bool = False,
        sow_max_logit: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_out_bias: bool | None = None,
        kernel_init: nnx.Initializer = initializers.lecun_normal(),
        out_kernel_init: nnx.Initializer | None = None,
        bias_init: nnx.Initializer = initializers.zeros_init(),
        out_bias_init: nnx.Initializer | None = None,
        sinks_init: nnx.Initializer = initializers.zeros_init(),
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Unpack[ModuleOptions],
    ) -> None:
        if isinstance(position_embedding, nnx.Module):
            raise TypeError("position_embedding is a module, whose parameters would not be trained: give a function")
        arguments = locals()
        check_module({name: arguments[name] for name in CHECKED})
        check_flags(keep_rngs=keep_rngs)
        check_count("in_features", in_features)
        check_optional_count("in_kv_features", in_kv_features)
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"rngs={rngs!r} must be random streams, such as nnx.Rngs(0)")
        for name, one in (("inner_norm", inner_norm), ("qk_norm", qk_norm)):
            if isinstance(one, nnx.Module):
                raise TypeError(f"{name} is a module: give what makes it, such as nnx.LayerNorm or a partial of it")
        use_out_bias = use_bias if use_out_bias is None else use_out_bias
        self.in_features = in_features
        self.out_features = in_features if out_features is None else out_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.dtype, self.param_dtype, self.use_bias, self.normalize_qk = dtype, param_dtype, use_bias, normalize_qk
        self.settings = settings = Settings.of(
            options,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            in_features=in_features,
            qkv_features=qkv_features,
            head_dim=head_dim,
            rope_theta=rope_theta,
            rope=rope,
            position_embedding=position_embedding,
        )
        precision = settings.options["precision"]
        self.deterministic = read_flag("deterministic", deterministic)
        self.decode, self.sow_max_logit = decode, sow_max_logit
        self.cached_key: nnx.Cache[Any] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Any] | None = nnx.data(None)
        self.cached_token: nnx.Cache[Any] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Any] | None = nnx.data(None)
        self.cache_length: nnx.Cache[Any] | None = nnx.data(None)
        self.rewind = 0
        if decode:
            settings.check_causal()
        linear = functools.partial(
            nnx.LinearGeneral,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        of_heads = functools.partial(linear, use_bias=use_bias, kernel_init=kernel_init, bias_init=bias_init)
        self.query = of_heads(in_features, (num_heads, settings.head_dim))
        self.key = of_heads(self.in_kv_features, (settings.num_kv_heads, settings.head_dim))
        self.value = of_heads(self.in_kv_features, (settings.num_kv_heads, settings.head_dim))
        self.out = linear(
            (num_heads, settings.head_dim),
            self.out_features,
            axis=(-2, -1),
            use_bias=use_out_bias,
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )
        # Made last, so that their random numbers change no other parameter.
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        qk_norm = functools.partial(nnx.LayerNorm, use_bias=False) if normalize_qk else qk_norm
        self.query_ln: Any = nnx.data(None) if qk_norm is None else qk_norm(settings.head_dim, **types)
        self.key_ln: Any = nnx.data(None) if qk_norm is None else qk_norm(settings.head_dim, **types)
        make_sinks = lambda: nnx.Param(sinks_init(rngs.params(), (num_heads,), param_dtype))
        self.sinks: nnx.Param[Any] | None = make_sinks() if sinks else nnx.data(None)
        self.inner_norm: Any = nnx.data(None) if inner_norm is None else inner_norm(settings.qkv_features, **types)
        self.rngs = rngs.dropout.fork() if self.dropout_rate > 0 and keep_rngs else nnx.data(None)

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.settings.num_heads

    @property
    def num_kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.settings.num_kv_heads

    @property
    def qkv_features(self) -> int:
        """The width of all query heads together."""
        return self.settings.qkv_features

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.settings.head_dim

    @property
    def dropout_rate(self) -> float:
        """The share of attention weights that are dropped."""
        return self.settings.options["dropout_rate"]

    @property
    def is_causal(self) -> bool:
        """Whether queries see no later keys."""
        return self.settings.options["is_causal"]

    @naming_what_serves(OF_NNX)
    def __call__(
        self,
        inputs_q: Float[Array, "*B T D"],
        inputs_k: Float[Array, "*B S D"] | None = None,
        inputs_v: Float[Array, "*B S D"] | None = None,
        *,
        mask: None = None,
        document_ids: Any = None,
        query_offset: Any = 0,
        positions: Any = None,
        key_positions: Any = None,
        sinks: Float[Array, "..."] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        prefill: bool = False,
        lengths: Any = None,
    ) -> Float[Array, "*B T E"]:
        """Computes attention.

        Args:
          inputs_q: [..., T, in_features], of the queries.
          inputs_k: [..., S, in_kv_features], of the keys; `inputs_q` by default.
          inputs_v: [..., S, in_kv_features], of the values; `inputs_k` by default.
          mask: an argument of Flax's module that is refused: use is_causal, document_ids or query_offset instead.
          document_ids: the documents of tokens, see :func:`ring_dilated_attention`.
          query_offset: the position of the first query, see :func:`ring_dilated_attention`.
          positions: integers [T], or [..., T] with batch dimensions, that are embedded in place of the positions of
            tokens. They change nothing else: the pattern, causality and documents go by the order of tokens.
          key_positions: the same for keys, [S] or [..., S]; by default `positions` if keys are also computed from
            `inputs_q`.
          sinks: logits of sinks, [N] or what broadcasts to [..., T, N], instead of the module's, see
            :func:`ring_dilated_attention`.
          deterministic: whether to skip dropout, instead of the module's setting.
          rngs: streams whose "dropout" the seed is drawn from, instead of the module's.
          sow_weights: an argument of Flax's module that is refused if true.
          decode: whether to continue the sequence in the cache, instead of the module's setting.
          prefill: in decoding, whether the inputs are a sequence from its beginning, sharded along the mesh axis: it is
            computed as in training, and the cache is filled. Other calls take tokens that are not sharded.
          lengths: in `prefill`, integers [...], the tokens of each prompt, behind which there is padding: it is not
            cached, and its outputs are zeros. The cache must be one of ``init_cache(..., per_sequence=True)``.

        Returns:
          [..., T, out_features], sharded like `inputs_q`. In decoding, NaN beyond the length of the cache.

        Raises:
          ValueError: if `deterministic` is needed but not set, if there is no cache to decode with or it is known to be
            full, for arguments that mean nothing in decoding, or for `prefill` without decoding.
        """
        check_flax_arguments(mask, sow_weights)
        prefill, decode = read_steps(prefill, self.decode if decode is None else decode, lengths)
        is_self_attention = inputs_k is None and inputs_v is None
        widths = self.in_features, self.in_kv_features, self.in_kv_features
        inputs_q, inputs_k, inputs_v = read_inputs(inputs_q, inputs_k, inputs_v, widths)
        embedded = read_positions(positions, key_positions, (inputs_q, inputs_k), query_offset)
        heads = self._project(inputs_q, inputs_k, inputs_v)  # [..., T, N, H], [..., S, K, H]
        if sinks is None and self.sinks is not None:
            sinks = self.sinks.get_value()
        seed = self._dropout_seed(deterministic, rngs)
        if decode:
            check_decoding(document_ids, query_offset, is_self_attention, seed is not None)
            attended = self._decode(*heads, sinks=sinks, prefill=prefill, positions=embedded, lengths=lengths)
        else:
            sow = functools.partial(self.sow, nnx.Intermediate, "max_logit") if self.sow_max_logit else None
            attended = self.settings.attend(*heads, document_ids, query_offset, seed, sinks, embedded, sow)
        attended = normalize_inner(attended, self.inner_norm)
        out = self.out(attended, out_sharding=output_sharding(inputs_q))  # [..., T, E]
        return self.settings.clear_padding(out, lengths)

    def _project(self, inputs_q: Array, inputs_k: Array, inputs_v: Array) -> tuple[Array, Array, Array]:
        query, key, value = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        if self.query_ln is None or self.key_ln is None:
            return query, key, value
        return self.query_ln(query), self.key_ln(key), value

    def _dropout_seed(self, deterministic: bool | None, rngs: Any) -> Any:
        deterministic = read_flag("deterministic", self.deterministic if deterministic is None else deterministic)
        if not self.dropout_rate:
            return None
        if deterministic is None:
            raise ValueError(
                f"dropout_rate={self.dropout_rate}, but deterministic=None: say to the module or to the call "
                "whether to drop nothing, with True or False"
            )
        if deterministic:
            return None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("dropout needs random numbers, and keep_rngs=False keeps no stream: pass rngs to the call")
        if isinstance(rngs, nnx.RngStream):
            return rngs()
        if not isinstance(rngs, nnx.Rngs) or not ("dropout" in rngs or "default" in rngs):
            raise TypeError(f"rngs={rngs!r} must be random streams with dropout, such as nnx.Rngs(dropout=0)")
        return rngs.dropout()

    def init_cache(
        self,
        input_shape: Sequence[int],
        dtype: Any = jnp.float32,
        *,
        spec: Any = None,
        per_sequence: bool = False,
        rewind: int = 0,
    ) -> None:
        """Makes the cache of sequences that are to be continued: with `decode`, calls then take their next tokens.

        For each branch and head it holds the kept rows of one segment, or the last rows of a window, however long the
        sequence is. On a mesh with the sequence axis these rows are sharded along it. To take tokens back, subtract
        their number from `cache_index`. If later tokens have taken rows that are needed then, the output is NaN.

        Args:
          input_shape: the shape [..., T, in_features] of inputs, where T is the most tokens that the sequence may have.
          dtype: the dtype of cached keys and values, a floating one.
          spec: how the heads [..., T, N, H] lie on the mesh, such as ``P("data", "seq")`` for batches that are sharded
            along "data"; by default the module's `spec`. A loop that carries the cache may need it, because the type of
            a carry must not change.
          per_sequence: whether each sequence has a length of its own, `cache_index` [...]; else all have the same.
          rewind: how many tokens can always be taken back, as speculative decoding does: the cache keeps so many more
            rows of a window, and the kept ones of so many tokens more of segments.

        Raises:
          ValueError: if the attention is not causal, `input_shape` is another shape, or heads cannot lie as `spec`
            says.
          TypeError: if the dtype is not a floating one, or `spec` is not a PartitionSpec.
        """
        shape = read_shape(input_shape, self.in_features)
        cache = self.settings.make_cache(*shape, dtype, spec, per_sequence=per_sequence, rewind=rewind)
        self.rewind = int(rewind)
        for name, value in zip(Cache.VARIABLES, cache, strict=True):
            setattr(self, name, nnx.Cache(value))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets what :func:`flax.nnx.view` changes; `decode` makes a cache of these sizes if there is none."""
        if deterministic is not None:
            self.deterministic = read_flag("deterministic", deterministic)
        if decode is None:
            return
        check_flags(decode=decode)
        self.decode = decode
        if decode and self.cached_key is None:
            if batch_size is None or max_length is None:
                raise TypeError(f"decode=True makes a cache: {batch_size=} and {max_length=} must be given")
            check_count("max_length", max_length)
            batch = batch_size if isinstance(batch_size, tuple) else (batch_size,)
            for size in batch:
                check_count("batch_size", size)
            self.init_cache((*batch, max_length, self.in_features))

    def _decode(
        self,
        query: Array,
        key: Array,
        value: Array,
        sinks: Array | None,
        prefill: bool,
        positions: Positions,
        lengths: Any,
    ) -> Array:
        variables = [getattr(self, name) for name in Cache.VARIABLES]
        if None in variables:
            raise ValueError("decode=True, but there is no cache: call init_cache first")
        cache = Cache(*(variable.get_value() for variable in variables))
        settings = self.settings
        run = functools.partial(settings.prefill, lengths=lengths) if prefill else settings.step
        out, cache = run(query, key, value, cache, sinks, positions, self.rewind)
        for variable, rows in zip(variables, cache, strict=True):
            variable.set_value(rows)
        return out
