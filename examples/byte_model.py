"""A causal language model over bytes: pre-norm blocks, ring dilated attention, tied embeddings."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import ringjax

NUM_BYTES = 256


class Block(nnx.Module):
    """Attention and a feed-forward layer, each on normalised inputs and added to them."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = ringjax.RingDilatedAttention(
            num_heads,
            width,
            segment_lengths=segment_lengths,
            dilation_rates=dilation_rates,
            is_causal=True,
            rope_theta=10_000.0,
            use_bias=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, hidden: jax.Array, **options: Any) -> jax.Array:
        """Maps hidden states [B, T, D] to hidden states [B, T, D]; the options are the attention's."""
        hidden = hidden + self.attention(self.attention_norm(hidden), **options)
        return hidden + self.down(nnx.gelu(self.up(self.norm(hidden))))


class ByteModel(nnx.Module):
    """Predicts each next byte from the bytes before it."""

    def __init__(
        self,
        *,
        width: int,
        num_layers: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        initializer = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(NUM_BYTES, width, embedding_init=initializer, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            Block(width, num_heads, segment_lengths, dilation_rates, dtype, rngs) for _ in range(num_layers)
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Maps bytes [B, T] to the logits [B, T, 256] of the byte after each, in float32.

        The options are the attention's, such as `document_ids`, or `decode` and `prefill` after `init_cache`.
        """
        hidden = self.embedding(tokens)  # [B, T, D]
        for block in self.blocks:
            hidden = block(hidden, **options)
        return self.embedding.attend(self.norm(hidden)).astype(jnp.float32)  # [B, T, 256]

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Makes the caches of sequences that are to be continued."""
        for block in self.blocks:
            block.attention.init_cache((batch_size, max_length, block.attention.in_features))
