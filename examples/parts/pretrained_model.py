"""The language model of a pretrained checkpoint: its blocks around ring dilated attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import ringjax
from parts.byte_model import sharded
from parts.pretrained_config import LayerConfig, ModelConfig, Rope

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


class FeedForward(nnx.Module):
    """A gated feed-forward layer."""

    def __init__(self, config: ModelConfig, **types: Any) -> None:
        linear = functools.partial(nnx.Linear, use_bias=config.has_mlp_bias, **types)
        self.gate = linear(config.width, config.hidden_width, kernel_init=sharded("fsdp", "tensor"))
        self.up = linear(config.width, config.hidden_width, kernel_init=sharded("fsdp", "tensor"))
        self.down = linear(config.hidden_width, config.width, kernel_init=sharded("tensor", "fsdp"))
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, states: jax.Array) -> jax.Array:
        """Returns what it adds to the states [B, T, D]."""
        return self.down(self.activation(self.gate(states)) * self.up(states))


class Block(nnx.Module):
    """Attention and a feed-forward layer, each on normalised states and added to them."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        pattern: Any,
        rope: Rope | None,
        spec: P | None,
        **types: Any,
    ) -> None:
        norm = functools.partial(nnx.RMSNorm, epsilon=config.epsilon)
        of_width = functools.partial(norm, config.width, **types)
        is_full = layer.window is None
        branches = pattern if is_full and pattern is not None else [_branch(config, layer)]
        self.input_norm = of_width()
        self.attention = ringjax.RingDilatedAttention(
            config.num_heads,
            config.width,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            pattern=ringjax.DilatedPattern(branches, merge="union"),
            is_causal=True,
            scale=config.scale,
            logits_soft_cap=config.attention_cap,
            rope=rope if is_full and rope is not None else layer.rope,
            qk_norm=norm if config.has_qk_norm else None,
            use_bias=config.has_qkv_bias,
            use_out_bias=config.has_out_bias,
            kernel_init=sharded("fsdp", "tensor", None),
            out_kernel_init=sharded("tensor", None, "fsdp"),
            spec=spec,
            **types,
        )
        self.attended_norm = of_width() if config.is_gemma else nnx.data(None)
        self.hidden_norm = of_width()
        self.feed_forward = FeedForward(config, **types)
        self.output_norm = of_width() if config.is_gemma else nnx.data(None)

    def __call__(self, states: jax.Array, **options: Any) -> jax.Array:
        """Returns the states [B, T, D] after the block."""
        attended = self.attention(self.input_norm(states), **options)
        states = states + (attended if self.attended_norm is None else self.attended_norm(attended))
        added = self.feed_forward(self.hidden_norm(states))
        return states + (added if self.output_norm is None else self.output_norm(added))


def _branch(config: ModelConfig, layer: LayerConfig) -> Any:
    return ringjax.Segments(2**30) if layer.window is None else ringjax.Window(layer.window)


class LanguageModel(nnx.Module):
    """A decoder with the parameters of a checkpoint.

    Args:
      config: the model.
      pattern: the branches of layers that attend to all tokens, merged as a union; all tokens by default.
      rope: their rotary embedding, instead of the checkpoint's.
      spec: how heads [B, T, N, H] lie on the mesh, which fused kernels need where its axes are Auto.
      dtype: the dtype of the computation.
      param_dtype: the dtype of the parameters.
      rngs: the random streams of parameters that are not loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pattern: Any = None,
        rope: Rope | None = None,
        spec: P | None = None,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.width, embedding_init=sharded("tensor", "fsdp"), **types)
        self.blocks = nnx.List([Block(config, layer, pattern, rope, spec, **types) for layer in config.layers])
        self.norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, **types)
        head = functools.partial(nnx.Linear, use_bias=False, kernel_init=sharded("fsdp", "tensor"), **types)
        self.head = nnx.data(None) if config.is_tied else head(config.width, config.vocab_size)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: Any = None,
        document_ids: Any = None,
        decode: bool = False,
        prefill: bool = False,
        lengths: Any = None,
    ) -> jax.Array:
        """Returns the logits [B, T, vocabulary] of the tokens that follow each of the tokens [B, T].

        The options are those of :class:`ringjax.RingDilatedAttention`; `decode` needs :meth:`init_cache` before.
        """
        states = self.embed(tokens)
        if self.config.is_gemma:
            states = states * jnp.asarray(self.config.width**0.5, states.dtype)
        options = {"positions": positions, "decode": decode, "prefill": prefill, "lengths": lengths}
        for block in self.blocks:
            states = block(states, document_ids=document_ids, **options)
        states = self.norm(states)
        logits = self.embed.attend(states) if self.head is None else self.head(states)
        cap = self.config.logits_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = jnp.float32) -> None:
        """Makes the caches of sequences of up to `max_length` tokens, each of its own length."""
        for block in self.blocks:
            block.attention.init_cache((batch_size, max_length, self.config.width), dtype, per_sequence=True)
