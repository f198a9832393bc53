"""Weights, tokens and configurations of torchscale's LongNet, the same here and where the original runs."""

from typing import Any

import numpy as np
from gigapath_formula import formula

# Of the states every so many rows are kept.
EVERY = 5
WIDTH, FFN_WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 32, 48, 4, 2, 29, 61
# By torchscale's names, without "encoder_" or "decoder_" before them. The rates divide the segment lengths where there
# are several segments: elsewhere the original puts rows in wrong places.
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "norms after": {"subln": False, "normalize_before": False},
    "deepnorm": {"subln": False, "deepnorm": True, "activation_fn": "relu"},
    "no norms inside": {"subln": False, "xpos_rel_pos": True, "xpos_scale_base": 64},
    "xpos": {"xpos_rel_pos": True, "share_input_output_embed": True},
    "learned positions": {"learned_positions": 64, "activation_fn": "swish", "layernorm_embedding": True},
    "scaled": {"no_scale_embedding": False, "segment_length": [12, 100], "dilated_ratio": [1, 3]},
}
SEGMENT_LENGTHS, DILATION_RATES = [8, 32, 64], [1, 2, 4]


def tokens() -> np.ndarray:
    """Returns tokens [2, T]."""
    number = np.arange(2 * LENGTH).reshape(2, LENGTH)
    return (number * number * 7 + 3 * number) % VOCABULARY


def normalizes_before(kind: str, case: dict[str, Any]) -> bool:
    """Returns whether norms come before: DeepNorm's do in the original's decoder, and after in its encoder."""
    return case.get("normalize_before", True) and not (case.get("deepnorm") and kind == "encoder")


def parameters(kind: str, case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the checkpoint of an encoder or a decoder, by the original's names."""
    subln, is_tied = case.get("subln", True), case.get("share_input_output_embed", False)
    vector = lambda name, size: {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    matrix = lambda name, out, size: {f"{name}.weight": (out, size), f"{name}.bias": (out,)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in (f"layers.{number}" for number in range(LAYERS)):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= matrix(f"{layer}.self_attn.{name}", WIDTH, WIDTH)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= vector(f"{layer}.{name}", WIDTH)
        shapes |= matrix(f"{layer}.ffn.fc1", FFN_WIDTH, WIDTH) | matrix(f"{layer}.ffn.fc2", WIDTH, FFN_WIDTH)
        if subln:
            shapes |= vector(f"{layer}.self_attn.inner_attn_ln", WIDTH) | vector(
                f"{layer}.ffn.ffn_layernorm", FFN_WIDTH
            )
    if normalizes_before(kind, case):
        shapes |= vector("layer_norm", WIDTH)
    if case.get("layernorm_embedding"):
        shapes |= vector("layernorm_embedding", WIDTH)
    if positions := case.get("learned_positions"):
        shapes["embed_positions.weight"] = (positions, WIDTH)
    if not is_tied:
        shapes["output_projection.weight"] = (VOCABULARY, WIDTH)
    arrays = {name: formula(name, shape) for name, shape in shapes.items()}
    if is_tied:
        arrays["output_projection.weight"] = arrays["embed_tokens.weight"]
    if case.get("xpos_rel_pos"):
        head = WIDTH // HEADS
        scale = (np.arange(0, head, 2) + 0.4 * head) / (1.4 * head)
        arrays |= {f"layers.{number}.self_attn.xpos.scale": scale for number in range(LAYERS)}
    return arrays
