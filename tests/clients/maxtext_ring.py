"""Ring attention in MaxText's models: their `AttentionOp.apply_attention`."""

from typing import Any

import jax
from maxtext.common.common_types import MODEL_MODE_TRAIN, AttentionType
from maxtext.layers.attention_op import AttentionOp

import ringjax

OWN = AttentionOp.apply_attention


def ring_attention(pattern: Any = None, axis_name: str = "context", spec: Any = None) -> Any:
    """Returns an `apply_attention` for MaxText, over a sequence that is sharded along an axis.

    Args:
      pattern: the branches of layers that attend to all tokens; all tokens by default.
      axis_name: the axis of tokens.
      spec: how heads [B, T, N, H] lie on the mesh; by default as MaxText lays them over data, fsdp, context and tensor.
    """
    spec = jax.P(("data", "fsdp"), axis_name, "tensor") if spec is None else spec

    def apply_attention(
        self: Any,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        decoder_segment_ids: Any,
        segment_positions: Any,
        lengths: Any,
        model_mode: str,
        use_ragged_attention: bool = False,
        previous_chunk: Any = None,
        bidirectional_mask: Any = None,
        sinks: Any = None,
        **options: Any,
    ) -> tuple[jax.Array, Any, Any]:
        if model_mode != MODEL_MODE_TRAIN:  # a cache is MaxText's own
            more = (use_ragged_attention, previous_chunk, bidirectional_mask, sinks)
            ids = decoder_segment_ids, segment_positions, lengths
            return OWN(self, query, key, value, *ids, model_mode, *more, **options)
        masks = {"bidirectional_mask": bidirectional_mask, "indexer_mask": options.get("indexer_mask")}
        for name, mask in masks.items():
            if mask is not None:
                raise ValueError(f"{name} is an array of pairs, which a ring does not take: leave it out")
        if self.attention_type not in (AttentionType.GLOBAL, AttentionType.LOCAL_SLIDING):
            raise ValueError(f"attention_type={self.attention_type} has no pattern here: use GLOBAL or LOCAL_SLIDING")
        branches = [ringjax.Segments(query.shape[1])] if pattern is None else pattern
        if self.attention_type == AttentionType.LOCAL_SLIDING:
            branches = [ringjax.Window(self.sliding_window_size)]
        out = ringjax.ring_dilated_attention(
            query,
            key,
            value,
            pattern=branches,
            is_causal=True,
            scale=1.0,  # queries are scaled before
            logits_soft_cap=self.attn_logits_soft_cap,
            document_ids=decoder_segment_ids,
            sinks=sinks,
            mesh=self.mesh,
            axis_name=axis_name,
            spec=spec,
        )
        return out, None, None

    return apply_attention
