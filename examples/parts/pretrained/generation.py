"""Continues prompts with a pretrained model."""

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
    """Yields the next token of each prompt, [B], so many times; one program serves all lengths.

    It is the likeliest at temperature 0, and else drawn from the softmax of the logits over the temperature.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    size = 1 << (int(lengths.max()) - 1).bit_length()
    tokens = np.stack([np.pad(prompt, (0, size - len(prompt))) for prompt in prompts]).astype(np.int32)
    model.init_cache(len(prompts), size + count)

    @nnx.jit(static_argnames="prefill")
    def next_token(model: LanguageModel, tokens: jax.Array, last: Any, number: int, **options: Any) -> jax.Array:
        states = model.states(tokens, decode=True, **options)  # [B, T, D]
        logits = model.logits(jnp.take_along_axis(states, last[:, None, None], axis=1))  # [B, 1, vocabulary]
        key = jax.random.fold_in(jax.random.key(seed), number)
        drawn = jax.random.categorical(key, logits / temperature) if temperature else logits.argmax(axis=-1)
        return drawn.astype(jnp.int32)  # [B, 1]

    token = next_token(model, jnp.asarray(tokens), lengths - 1, 0, prefill=True, lengths=lengths)
    for number in range(1, count + 1):
        yield np.asarray(token[:, 0])
        if number < count:
            token = next_token(model, token, np.zeros_like(lengths), number)
