"""Maps the tensors of a checkpoint to the parameters of the model, and back."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from parts.pretrained.config import ModelConfig

UNUSED = r"vision_tower|multi_modal_projector|rotary_emb\.inv_freq"
INDEX = "model.safetensors.index.json"
# The parts of a block, and what a checkpoint calls them.
NAMES = {
    ("input_norm",): "input_layernorm",
    ("attention",): "self_attn",  # its sinks
    ("attention", "query"): "self_attn.q_proj",
    ("attention", "key"): "self_attn.k_proj",
    ("attention", "value"): "self_attn.v_proj",
    ("attention", "out"): "self_attn.o_proj",
    ("attention", "query_ln"): "self_attn.q_norm",
    ("attention", "key_ln"): "self_attn.k_norm",
    ("hidden_norm",): "post_attention_layernorm",
    ("feed_forward", "gate"): "mlp.gate_proj",
    ("feed_forward", "up"): "mlp.up_proj",
    ("feed_forward", "down"): "mlp.down_proj",
    ("feed_forward", "router"): "mlp.router",
    ("feed_forward",): "mlp.experts",
}
# Gemma has norms behind attention and the feed-forward layer too.
GEMMA_NAMES = {
    ("attended_norm",): "post_attention_layernorm",
    ("hidden_norm",): "pre_feedforward_layernorm",
    ("output_norm",): "post_feedforward_layernorm",
}
OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
KINDS = {
    "kernel": ".weight",
    "embedding": ".weight",
    "scale": ".weight",
    "bias": ".bias",
    "sinks": ".sinks",
    "gate_up": ".gate_up_proj",
    "gate_up_bias": ".gate_up_proj_bias",
    "down": ".down_proj",
    "down_bias": ".down_proj_bias",
}
# The numbers of MXFP4's four bits (OCP Microscaling Formats 1.0, table 5).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


Tensors = dict[str, Callable[[], np.ndarray]]  # functions that read or make tensors, by their names


class Tensor(NamedTuple):
    """A tensor of a checkpoint, the shape of its parameter, and the functions that turn one into the other."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


def tensors_of(config: ModelConfig, path: tuple[Any, ...], shape: tuple[int, ...]) -> list[Tensor]:
    """Returns the checkpoint tensors of a parameter: one, or one for each stacked layer."""
    *place, kind = path
    if place[0] in OUTSIDE:
        return [_tensor(OUTSIDE[place[0]], kind, shape, num_inputs=1)]
    group, number, *part = place
    names = NAMES | (GEMMA_NAMES if config.is_gemma else {})
    name, num_inputs = names[tuple(part)], 2 if part == ["attention", "out"] else 1
    num_stacked = len(config.layers) // config.period * config.period
    if group == "rest":
        return [_tensor(f"model.layers.{num_stacked + number}.{name}", kind, shape, num_inputs)]
    layers = range(number, num_stacked, config.period)
    return [_tensor(f"model.layers.{layer}.{name}", kind, shape[1:], num_inputs) for layer in layers]


def _tensor(name: str, kind: str, shape: tuple[int, ...], num_inputs: int) -> Tensor:
    name += KINDS[kind]
    to_shape = lambda array: array.reshape(shape) if array.size == math.prod(shape) else array
    if kind == "kernel":  # torch has outputs first, and heads and their width in one dimension
        num_rows = math.prod(shape[:num_inputs])
        return Tensor(name, shape, lambda array: to_shape(array.T), lambda array: array.reshape(num_rows, -1).T)
    is_bias = kind == "bias"
    return Tensor(name, shape, to_shape if is_bias else np.asarray, np.ravel if is_bias else np.asarray)


def read_tensors(folder: Path) -> Tensors:
    """Returns functions that read the tensors of a folder, in one file or in shards, by their names."""
    index = folder / INDEX
    weight_map = json.loads(index.read_text()).get("weight_map", {}) if index.exists() else {}
    found: Tensors = {}
    for file in sorted({*weight_map.values()} or {"model.safetensors"}):
        try:
            opened = safe_open(folder / file, framework="np")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / file} cannot be read ({error}): download the checkpoint again") from None
        for name in opened.keys():  # noqa: SIM118  # which is not a dictionary
            found[name] = lambda name=name, opened=opened: opened.get_tensor(name)
    # Of a model of texts and images the text's part; and frequencies that old checkpoints keep.
    for prefix in ("language_model.model.", "model.language_model."):
        found = {name.replace(prefix, "model."): read for name, read in found.items()}
    found = {name: read for name, read in found.items() if not re.search(UNUSED, name)}
    for name in [name for name in found if name.endswith("_blocks")]:
        name = name.removesuffix("_blocks")  # noqa: PLW2901
        blocks, scales = found.pop(f"{name}_blocks"), found.pop(f"{name}_scales")
        found[name] = lambda blocks=blocks, scales=scales: dequantize(blocks(), scales())
    return found


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the weights [E, inputs, outputs], in bfloat16, of experts in MXFP4.

    Args:
      blocks: [E, outputs, inputs / 32, 16], two numbers of four bits in each byte, the lower bits first.
      scales: [E, outputs, inputs / 32], the exponents of the blocks, from -127 on.
    """
    numbers = FP4[np.stack([blocks & 15, blocks >> 4], axis=-1)]  # [E, outputs, inputs / 32, 16, 2]
    numbers = np.ldexp(numbers.reshape(*scales.shape, 32), scales[..., None].astype(np.int32) - 127)
    numbers = numbers.reshape(*scales.shape[:2], -1)  # [E, outputs, inputs]
    return np.swapaxes(numbers.astype(ml_dtypes.bfloat16), 1, 2)


def write_tensors(folder: Path, tensors: Tensors, most_bytes: int = 2**32) -> None:
    """Writes tensors in files of up to so many bytes, or of one tensor, with their index."""
    files: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(tensors, most_bytes), 1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
        total += sum(array.nbytes for array in shard.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))


def _shards(tensors: Tensors, most_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    for name, make in tensors.items():
        array = np.ascontiguousarray(make())
        if shard and sum(one.nbytes for one in shard.values()) + array.nbytes > most_bytes:
            yield shard
            shard = {}
        shard[name] = array
    yield shard
