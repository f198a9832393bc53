"""Ring attention in your own model: for training, and for decoding from a cache that the model keeps."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import ringjax


class Attention(nnx.Module):
    """Causal attention with grouped heads, and a cache that its caller keeps."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, pattern: Any, spec: Any, rngs: nnx.Rngs) -> None:
        head_dim = width // num_heads
        linear = lambda heads: nnx.LinearGeneral(width, (heads, head_dim), use_bias=False, rngs=rngs)
        self.query, self.key, self.value = linear(num_heads), linear(num_kv_heads), linear(num_kv_heads)
        self.out = nnx.LinearGeneral((num_heads, head_dim), width, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.options, self.spec = {"pattern": pattern, "axis_name": "seq"}, spec

    def __call__(self, states: jax.Array, positions: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
        """Returns the outputs [B, T, D], and the cache with the keys and values of these tokens."""
        rotate = lambda heads: ringjax.rotary_embedding(heads, positions, theta=10_000.0)
        query, key, value = rotate(self.query(states)), rotate(self.key(states)), self.value(states)
        if cache is None:
            out = ringjax.ring_dilated_attention(query, key, value, is_causal=True, spec=self.spec, **self.options)
            return self.out(out), None
        # Each sequence has a length of its own, which its new tokens follow.
        rows = cache["lengths"][:, None] + jnp.arange(states.shape[1])  # [B, T]
        write = lambda old, new: old.at[jnp.arange(len(old))[:, None], rows].set(new)
        lengths = cache["lengths"] + states.shape[1]
        cache = {"keys": write(cache["keys"], key), "values": write(cache["values"], value), "lengths": lengths}
        out = ringjax.decode_attention(query, cache["keys"], cache["values"], lengths=lengths, **self.options)
        return self.out(out), cache
