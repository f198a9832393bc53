"""A causal language model over bytes: pre-norm blocks, ring dilated attention, tied embeddings."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import PartitionSpec as P

import ringjax

NUM_BYTES = 256
# A token is its byte, and numbers of the last 2, 3, 4 and 6 bytes, so that the model need not learn to look them up (as
# in arXiv 2412.09871). Many of these share a number.
NGRAMS = 2, 3, 4, 6
NGRAM_BITS = 14
NUM_OF_NGRAM = 2**NGRAM_BITS
_WIDTH_OF_NGRAM = 32
NUM_FEATURES = 1 + len(NGRAMS)


def features(text: np.ndarray) -> np.ndarray:
    """Returns the tokens [T, 5] of a text [T + 5] of bytes, of which the first five come before the first token."""
    length, text = len(text) - max(NGRAMS) + 1, text.astype(np.uint64)
    last = [text[len(text) - length - back : len(text) - back] for back in range(max(NGRAMS))]  # the byte so far back
    numbers = [last[0]]
    for count, size in enumerate(NGRAMS):
        number = np.zeros(length, np.uint64)
        for byte in reversed(last[:size]):
            number = number * np.uint64(NUM_BYTES) + byte
        # Multiplicative hashing: the upper bits of the product depend on all bytes.
        number = number * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - NGRAM_BITS)
        numbers.append(number + np.uint64(count * NUM_OF_NGRAM))
    return np.stack(numbers, axis=-1).astype(np.int32)


def sharded(
    *axes: str | tuple[str, ...] | None, initializer: nnx.Initializer = nnx.initializers.lecun_normal()
) -> nnx.Initializer:
    """Returns an initialiser of parameters that carry the mesh axes which their dimensions are sharded over."""
    return nnx.with_partitioning(initializer, axes, eager_sharding=False)


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
        spec: P | None = None,
    ):
        self.spec = spec
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = ringjax.RingDilatedAttention(
            num_heads,
            width,
            segment_lengths=segment_lengths,
            dilation_rates=dilation_rates,
            is_causal=True,
            documents_are_sorted=True,
            rope_theta=10_000.0,
            use_bias=False,
            dtype=dtype,
            kernel_init=sharded("fsdp", "tensor", None),
            out_kernel_init=sharded("tensor", None, "fsdp"),
            spec=None if spec is None else P(*spec, "tensor"),
            rngs=rngs,
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = linear(width, 4 * width, kernel_init=sharded("fsdp", "tensor"))
        self.down = linear(4 * width, width, kernel_init=sharded("tensor", "fsdp"))

    def __call__(self, hidden: jax.Array, **options: Any) -> jax.Array:
        """Maps hidden states [B, T, D] to hidden states [B, T, D]; the options are the attention's."""
        hidden = lay(hidden + self.attention(self.attention_norm(hidden), **options), self.spec)
        return lay(hidden + self.down(nnx.gelu(self.up(self.norm(hidden)))), self.spec)


def lay(hidden: jax.Array, spec: P | None) -> jax.Array:
    """Lays hidden states [B, T, D] on the mesh as their tokens are, so that the parameters come to them."""
    return hidden if spec is None else jax.lax.with_sharding_constraint(hidden, spec)


def promote_and_gather(arrays: tuple[jax.Array, ...], **options: Any) -> tuple[jax.Array, ...]:
    """Gathers the table of embeddings to be read: the compiler would move its rows to the tokens that read them."""
    *others, table = promote_dtype(arrays, **options)
    return *others, lay(table, P())


class ByteModel(nnx.Module):
    """Predicts each next byte from the bytes before it.

    Its parameters carry the mesh axes "fsdp" and "tensor" that they are sharded over; `spec` says over which axes
    tokens [B, T] are. Of the numbers of the last bytes it tells `2**ngram_bits` apart, at most `2**NGRAM_BITS`.
    """

    def __init__(
        self,
        *,
        width: int,
        num_layers: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dtype: Any,
        ngram_bits: int = NGRAM_BITS,
        spec: P | None = None,
        rngs: nnx.Rngs,
    ):
        self.spec = spec
        self.bits_left_out = NGRAM_BITS - ngram_bits
        initializer = sharded(("fsdp", "tensor"), None, initializer=nnx.initializers.normal(0.02))
        table = functools.partial(
            nnx.Embed,
            embedding_init=initializer,
            promote_dtype=promote_dtype if spec is None else promote_and_gather,
            dtype=dtype,
            rngs=rngs,
        )
        self.embedding = table(NUM_BYTES, width)
        self.ngrams = table(len(NGRAMS) * 2**ngram_bits, _WIDTH_OF_NGRAM)
        self.join = nnx.Linear(
            len(NGRAMS) * _WIDTH_OF_NGRAM,
            width,
            use_bias=False,
            kernel_init=sharded("fsdp", "tensor"),
            dtype=dtype,
            rngs=rngs,
        )
        self.blocks = nnx.List(
            Block(width, num_heads, segment_lengths, dilation_rates, dtype, rngs, spec) for _ in range(num_layers)
        )
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Maps tokens [B, T, 5], see `features`, to the logits [B, T, 256] of the byte after each, in float32.

        The options are the attention's, such as `document_ids`, or `decode` and `prefill` after `init_cache`.
        """
        ngrams = lay(self.ngrams(tokens[..., 1:] >> self.bits_left_out), self.spec)  # [B, T, n, W]
        hidden = self.embedding(tokens[..., 0]) + self.join(ngrams.reshape(*ngrams.shape[:2], -1))  # [B, T, D]
        hidden = lay(hidden, self.spec)
        for block in self.blocks:
            hidden = block(hidden, **options)
        return self.embedding.attend(self.norm(hidden)).astype(jnp.float32)  # [B, T, 256]

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Makes the caches of sequences that are to be continued."""
        for block in self.blocks:
            block.attention.init_cache((batch_size, max_length, block.attention.in_features))
