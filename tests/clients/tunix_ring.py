"""Ring attention in Tunix' models: their `Attention.block`."""

from typing import Any

import jax
import jax.numpy as jnp
from tunix.models.qwen3.model import apply_rope

import ringjax


def ring_block(pattern: Any = None, axis_name: str = "sp") -> Any:
    """Returns a `block` for the attention of Tunix' Qwen 3, over a sequence that is sharded along an axis.

    Args:
      pattern: the branches; all tokens by default.
      axis_name: the axis of tokens, "sp" in Tunix' own configuration of shardings.
    """

    def block(
        self: Any, x: jax.Array, segment_pos: jax.Array, cache: Any, attn_mask: Any, segment_ids: Any = None
    ) -> tuple[Any, jax.Array]:
        query = apply_rope(self.q_norm(self.q_proj(x)), segment_pos, head_dim=self.head_dim)
        key = apply_rope(self.k_norm(self.k_proj(x)), segment_pos, head_dim=self.head_dim)
        value = self.v_proj(x)
        length = query.shape[1] if cache is None else cache["k"].shape[1]
        branches = [ringjax.Segments(length)] if pattern is None else pattern
        options = {"pattern": branches, "axis_name": axis_name, "scale": self.scale}
        if cache is None:  # the mask is not read: documents are segment_ids
            spec = jax.P(*self.shd_config.act_btnh)
            ids = {} if segment_ids is None else {"document_ids": segment_ids}
            out = ringjax.ring_dilated_attention(query, key, value, is_causal=True, spec=spec, **ids, **options)
            return None, self.o_proj(out)
        end = cache["end_index"]
        write = lambda rows, new: jax.lax.dynamic_update_slice_in_dim(rows, new, end[0], axis=1)
        cache = {"k": write(cache["k"], key), "v": write(cache["v"], value), "end_index": end + x.shape[1]}
        # Prompts are padded on the left: the last token sees the first that is none.
        starts = jnp.argmax(attn_mask[:, -1], axis=-1)
        out = ringjax.decode_attention(
            query, cache["k"], cache["v"], lengths=cache["end_index"], starts=starts, **options
        )
        return cache, self.o_proj(out)

    return block
