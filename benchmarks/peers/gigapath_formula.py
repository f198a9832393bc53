"""Weights and inputs of a slide encoder from formulas, the same here and where the original runs."""

from typing import Any

import numpy as np

# Slides of so many tiles: as the original has it, all its branches one segment, the last of them with phantoms; and of
# several segments, the last of which are not full. Of the states every so many rows are kept.
_SIZES: dict[str, Any] = {"depth": 3, "width": 64, "in_chans": 24, "segment_lengths": None, "global_pool": False}
CASES: dict[str, dict[str, Any]] = {
    "61 tiles": {**_SIZES, "length": 61, "every": 2},
    "197 tiles": {**_SIZES, "length": 197, "segment_lengths": [16, 34, 64, 152, 400], "global_pool": True, "every": 5},
    "1068 tiles": {**_SIZES, "length": 1068, "depth": 2, "every": 30},
    "10000 tiles": {**_SIZES, "length": 10_000, "depth": 2, "every": 200},
}


def formula(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the weights of a parameter: of the size that models have, and different in each."""
    number = np.arange(np.prod(shape, dtype=int)).reshape(shape) + sum(map(ord, name))
    wave = np.sin(number * 0.7) + np.cos(number * number * 0.013)
    if len(shape) == 1:
        return 0.1 * wave + (name.endswith("weight"))
    return wave * shape[-1] ** -0.5


def inputs(length: int, in_chans: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns embeddings [1, T, C] and coordinates [1, T, 2] in pixels."""
    number = np.arange(length * in_chans).reshape(1, length, in_chans)
    tile = np.arange(length)
    coordinates = np.stack([256 * (tile * 7 % 997) + 13, 256 * (tile * 3 % 991) + 200], axis=-1)[None]
    return np.sin(number * 0.37) + np.cos(number * 0.011), coordinates.astype(np.float64)


def parameters(depth: int, width: int, in_chans: int) -> dict[str, np.ndarray]:
    """Returns the checkpoint of an encoder, by the original's names."""
    vector = lambda name, size: {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    matrix = lambda name, out, size: {f"{name}.weight": (out, size), f"{name}.bias": (out,)}
    shapes = {"cls_token": (1, 1, width), **matrix("patch_embed.proj", width, in_chans)}
    for layer in (f"encoder.layers.{number}" for number in range(depth)):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= matrix(f"{layer}.self_attn.{name}", width, width)
        for name in ("self_attn.inner_attn_ln", "self_attn_layer_norm", "final_layer_norm"):
            shapes |= vector(f"{layer}.{name}", width)
        shapes |= matrix(f"{layer}.ffn.fc1", 4 * width, width) | matrix(f"{layer}.ffn.fc2", width, 4 * width)
        shapes |= vector(f"{layer}.ffn.ffn_layernorm", 4 * width)
    shapes |= vector("encoder.layer_norm", width) | vector("norm", width)
    return {name: formula(name, shape) for name, shape in shapes.items()}
