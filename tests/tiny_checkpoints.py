"""Tiny checkpoints of pretrained architectures, drawn from a NumPy seed: the same wherever they are written."""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SHARED = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
THETA = {"rope_type": "default", "rope_theta": 1000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# Two periods, and a layer of the next one.
ALTERNATING = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
}
GEMMA = {"query_pre_attn_scalar": 6, "sliding_window": 5, "hidden_activation": "gelu_pytorch_tanh"}
# As transformers 5 writes them.
CONFIGS = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", "rope_parameters": THETA, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "rope_parameters": THETA, "head_dim": 4, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rope_parameters": YARN, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "rope_parameters": THETA,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        **ALTERNATING,
        **GEMMA,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "rope_parameters": {"sliding_attention": THETA, "full_attention": {**YARN, "rope_theta": 1e4}},
        "tie_word_embeddings": True,
        **ALTERNATING,
        **GEMMA,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "rope_parameters": {**YARN, "truncate": False},
        "hidden_size": 32,  # a block of MXFP4
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "quantization_config": {"quant_method": "mxfp4"},
        **ALTERNATING,
    },
}
# Another rotary embedding of layers that attend to all tokens, and how it is written.
EXTENDED = {"rope_type": "yarn", "factor": 2.0}
_EXTENDED = {**EXTENDED, "rope_theta": 1000.0, "original_max_position_embeddings": 256}
WRITTEN = {
    "qwen2": {"max_position_embeddings": 512, "rope_parameters": _EXTENDED},
    "gemma3": {
        "rope_parameters": {
            "sliding_attention": THETA,
            "full_attention": {**_EXTENDED, "rope_theta": 1e4, "original_max_position_embeddings": 64},
        },
    },
}
# The same as transformers 4 wrote them.
_OLD_THETA = {"rope_theta": 1000.0}
_OLD_YARN = {name: value for name, value in YARN.items() if name != "rope_theta"}
OLD = {
    "llama": {**_OLD_THETA, "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"}},
    "mistral": _OLD_THETA,
    "qwen2": {**_OLD_THETA, "use_sliding_window": False, "sliding_window": 5, "max_window_layers": 3},
    "qwen3": {**_OLD_THETA, "rope_scaling": _OLD_YARN},
    "gemma2": _OLD_THETA,
    "gemma3": {
        "rope_theta": 1e4,
        "rope_scaling": _OLD_YARN,
        "rope_local_base_freq": 1000.0,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {**_OLD_THETA, "rope_scaling": {**_OLD_YARN, "truncate": False}},
}


def config_of(name, is_old=False):
    """The configuration of a checkpoint."""
    config = {**SHARED, **CONFIGS[name]}
    if is_old:
        config = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
        config |= OLD[name]
    return config


def shapes_of(config):
    """The shape of each tensor by its name."""
    width, hidden, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    kind, shapes = config["model_type"], {"model.embed_tokens.weight": (config["vocab_size"], width)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if kind.startswith("gemma") else []
    for number in range(config["num_hidden_layers"]):
        block = f"model.layers.{number}."
        shapes |= {f"{block}{norm}.weight": (width,) for norm in norms}
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{block}self_attn.{name}_proj.weight"] = rows, width
            if kind in ("qwen2", "gpt_oss"):
                shapes[f"{block}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{block}self_attn.o_proj.weight"] = width, queries
        if kind == "gpt_oss":
            shapes |= {f"{block}{name}": shape for name, shape in _of_experts(config).items()}
            continue
        if kind in ("qwen3", "gemma3_text"):
            shapes |= {f"{block}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        for name in ("gate", "up"):
            shapes[f"{block}mlp.{name}_proj.weight"] = hidden, width
        shapes[f"{block}mlp.down_proj.weight"] = width, hidden
    shapes["model.norm.weight"] = (width,)
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (config["vocab_size"], width)}


def _of_experts(config):
    """The shapes of a layer of gpt-oss, beside those that it shares with others; its experts are in MXFP4."""
    width, hidden, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    shapes = {"self_attn.o_proj.bias": (width,), "self_attn.sinks": (config["num_attention_heads"],)}
    shapes |= {"mlp.router.weight": (count, width), "mlp.router.bias": (count,)}
    for name, inputs, outputs in (("gate_up", width, 2 * hidden), ("down", hidden, width)):
        name = f"mlp.experts.{name}_proj"  # noqa: PLW2901
        shapes[f"{name}_bias"] = count, outputs
        shapes[f"{name}_blocks"] = count, outputs, inputs // 32, 16
        shapes[f"{name}_scales"] = count, outputs, inputs // 32
    return shapes


def tensors_of(config):
    """The tensors, each drawn by its name."""
    is_gemma = config["model_type"].startswith("gemma")
    found = {}
    for name, shape in shapes_of(config).items():
        draw = np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith(("_blocks", "_scales")):
            found[name] = draw.integers(*((0, 256) if "_blocks" in name else (123, 126)), shape, dtype=np.uint8)
            continue
        drawn = draw.normal(size=shape)
        if "norm" in name:
            drawn = 0.2 * drawn + (not is_gemma)
        elif not name.endswith(("bias", "sinks")):
            drawn = drawn * (1.0 if "embed" in name else 2 / np.sqrt(shape[-1]))
        found[name] = drawn.astype(np.float32)
    return found


def write(folder, name, is_old=False, num_shards=1, **changes):
    """Writes a checkpoint; the changes are those of its configuration."""
    folder, config = Path(folder), config_of(name, is_old) | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(config)
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    files = {key: f"model-{number % num_shards}.safetensors" for number, key in enumerate(tensors)}
    for file in {*files.values()}:
        save_file({key: tensors[key] for key in tensors if files[key] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
