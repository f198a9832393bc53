"""Continues prompts with a pretrained model."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parts.pretrained.model import LanguageModel


def generate(
    model: LanguageModel, prompts: list[list[int]], count: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[np.ndarray]:
    """Yields the next tokens [B] of prompts, `count` times; one program serves all lengths.

    At temperature 0 these are the most likely tokens; otherwise they are sampled.

    Raises:
      ValueError: for an empty prompt, or tokens that are not in the vocabulary.
    """
    size = model.config.vocab_size
    if any(not prompt or min(prompt) < 0 or max(prompt) >= size for prompt in prompts):
        raise ValueError(f"a prompt is empty, or has tokens that are not in the vocabulary of {size}: give others")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    size = 1 << (int(lengths.max()) - 1).bit_length()
    tokens = np.stack([np.pad(prompt, (0, size - len(prompt))) for prompt in prompts]).astype(np.int32)
    model.init_cache(len(prompts), size + count, model.embed.dtype)
    options = {"temperature": temperature, "seed": seed}
    token = _next_token(model, jnp.asarray(tokens), lengths - 1, 0, prefill=True, lengths=lengths, **options)
    for number in range(1, count + 1):
        yield np.asarray(token[:, 0])
        if number < count:
            token = _next_token(model, token, np.zeros_like(lengths), number, **options)


@functools.partial(nnx.jit, static_argnames=("temperature", "prefill"))
def _next_token(
    model: LanguageModel,
    tokens: jax.Array,
    last: Any,
    number: Any,
    *,
    temperature: float,
    seed: Any,
    prefill: bool = False,
    lengths: Any = None,
) -> jax.Array:
    """Returns the token [B, 1] that follows the last of the tokens [B, T]."""
    states = model.states(tokens, decode=True, prefill=prefill, lengths=lengths)  # [B, T, D]
    logits = model.logits(jnp.take_along_axis(states, last[:, None, None], axis=1))  # [B, 1, vocabulary]
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    key = jax.random.fold_in(jax.random.key(seed), number)
    drawn = jax.random.categorical(key, logits / temperature) if temperature else logits.argmax(axis=-1)
    return drawn.astype(jnp.int32)
