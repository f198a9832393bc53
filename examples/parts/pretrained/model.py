"""The language model of a pretrained checkpoint: its blocks around ring dilated attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import PartitionSpec as P

import ringjax
from parts.byte_model import lay, promote_and_gather, sharded
from parts.pretrained.config import LayerConfig, ModelConfig
from parts.pretrained.experts import Experts

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


class GemmaNorm(nnx.Module):
    """RMSNorm with the scale 1 + parameter, added in float32: bfloat16 would round small parameters away."""

    def __init__(self, num_features: int, *, epsilon: float, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        del rngs  # of which it draws nothing
        self.epsilon, self.dtype = epsilon, dtype
        self.scale = nnx.Param(jnp.zeros(num_features, param_dtype))

    def __call__(self, states: jax.Array) -> jax.Array:
        """Returns the states [..., D] as they are normalised."""
        wide = states.astype(jnp.promote_types(states.dtype, jnp.float32))
        wide *= jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + self.epsilon)
        return (wide * (1 + self.scale.get_value().astype(wide.dtype))).astype(self.dtype)


class FeedForward(nnx.Module):
    """A gated feed-forward layer."""

    def __init__(self, config: ModelConfig, **types: Any) -> None:
        linear = functools.partial(nnx.Linear, use_bias=config.has_mlp_bias, **types)
        self.gate = linear(config.width, config.hidden_width, kernel_init=sharded("fsdp", "tensor"))
        self.up = linear(config.width, config.hidden_width, kernel_init=sharded("fsdp", "tensor"))
        self.down = linear(config.hidden_width, config.width, kernel_init=sharded("tensor", "fsdp"))
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, states: jax.Array) -> jax.Array:
        """Returns the update that is added to the states [B, T, D]."""
        return self.down(self.activation(self.gate(states)) * self.up(states))


def make_norm(config: ModelConfig) -> functools.partial[Any]:
    """Returns what makes the norms of a model."""
    return functools.partial(GemmaNorm if config.is_gemma else nnx.RMSNorm, epsilon=config.epsilon)


class Block(nnx.Module):
    """Attention and a feed-forward layer, each on normalised states and added to them."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, spec: P | None, **types: Any) -> None:
        norm = make_norm(config)
        of_width = functools.partial(norm, config.width, **types)
        self.input_norm = of_width()
        self.attention = ringjax.RingDilatedAttention(
            config.num_heads,
            config.width,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            pattern=layer.pattern,
            is_causal=True,
            documents_are_sorted=True,
            scale=config.scale,
            logits_soft_cap=config.attention_cap,
            rope=layer.rope,
            qk_norm=norm if config.has_qk_norm else None,
            sinks=config.has_sinks,
            use_bias=config.has_qkv_bias,
            use_out_bias=config.has_out_bias,
            kernel_init=sharded("fsdp", "tensor", None),
            out_kernel_init=sharded("tensor", None, "fsdp"),
            spec=spec,
            **types,
        )
        self.attended_norm = of_width() if config.is_gemma else nnx.data(None)
        self.hidden_norm = of_width()
        self.feed_forward = FeedForward(config, **types) if config.experts is None else Experts(config, **types)
        self.output_norm = of_width() if config.is_gemma else nnx.data(None)

    def __call__(self, states: jax.Array, **options: Any) -> jax.Array:
        """Returns the states [B, T, D] after the block."""
        attended = self.attention(self.input_norm(states), **options)
        states = states + (attended if self.attended_norm is None else self.attended_norm(attended))
        added = self.feed_forward(self.hidden_norm(states))
        return states + (added if self.output_norm is None else self.output_norm(added))


class LanguageModel(nnx.Module):
    """A decoder with the parameters of a checkpoint.

    Layers repeat with a period. Whole periods are stacked and run in a scan; the remaining layers follow.

    Args:
      config: the model.
      spec: how heads [B, T, N, H] lie on the mesh, which fused kernels need where its axes are Auto; states [B, T, D]
        are laid so too.
      remat: whether gradients compute each block again instead of keeping what is inside.
      dtype: the dtype of the computation.
      param_dtype: the dtype of the parameters.
      rngs: the random streams of parameters that are not loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        spec: P | None = None,
        remat: bool = False,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        types = {"dtype": dtype, "param_dtype": param_dtype}
        self.config, self.remat = config, remat
        self.spec = None if spec is None else P(*spec[:2])
        count = len(config.layers) // config.period
        make = lambda rngs, layers: nnx.List(Block(config, layer, spec, **types, rngs=rngs) for layer in layers)
        period = functools.partial(make, layers=config.layers[: config.period])
        stack = nnx.vmap(period, axis_size=count, transform_metadata={nnx.PARTITION_NAME: None})
        self.embed = nnx.Embed(
            config.vocab_size,
            config.width,
            embedding_init=sharded("tensor", "fsdp"),
            promote_dtype=promote_dtype if spec is None else promote_and_gather,
            **types,
            rngs=rngs,
        )
        self.stacked = nnx.split_rngs(splits=count)(stack)(rngs)
        self.rest = make(rngs, config.layers[count * config.period :])
        self.norm = make_norm(config)(config.width, **types, rngs=rngs)
        head = functools.partial(nnx.Linear, use_bias=False, kernel_init=sharded("fsdp", "tensor"), **types, rngs=rngs)
        self.head = nnx.data(None) if config.is_tied else head(config.width, config.vocab_size)

    def __call__(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Returns the logits [B, T, vocabulary] of the tokens that follow each of the tokens [B, T].

        The options are those of :class:`ringjax.RingDilatedAttention`: `positions`, `document_ids`, and after
        :meth:`init_cache` `decode`, `prefill` and `lengths`. Documents are in order.
        """
        return self.logits(self.states(tokens, **options))

    def states(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Returns the last states [B, T, D], of which :meth:`logits` are made; the options are those of a call."""
        states = lay(self.embed(tokens), self.spec)
        if self.config.is_gemma:
            states = states * jnp.asarray(self.config.width**0.5, states.dtype)
        run_block = lambda block, states: lay(block(states, **options), self.spec)
        run_block = nnx.remat(run_block) if self.remat else run_block

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run_period(states: jax.Array, blocks: nnx.List[Block]) -> jax.Array:
            return functools.reduce(lambda states, block: run_block(block, states), blocks, states)

        states = run_period(states, self.stacked)
        for block in self.rest:
            states = run_block(block, states)
        return self.norm(states)

    def logits(self, states: jax.Array) -> jax.Array:
        """Returns the logits [..., vocabulary] of states [..., D]."""
        return self.cap(states @ self.head_kernel().astype(states.dtype))

    def head_kernel(self) -> jax.Array:
        """Returns the kernel [D, vocabulary] of the logits."""
        return self.embed.embedding.get_value().T if self.head is None else self.head.kernel.get_value()

    def cap(self, logits: jax.Array) -> jax.Array:
        """Returns logits as the model bounds them."""
        cap = self.config.logits_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = jnp.float32) -> None:
        """Makes the caches of sequences of up to `max_length` tokens, each of its own length."""

        def make(blocks: nnx.List[Block]) -> None:
            for block in blocks:
                block.attention.init_cache((batch_size, max_length, self.config.width), dtype, per_sequence=True)

        nnx.vmap(make)(self.stacked)
        make(self.rest)
