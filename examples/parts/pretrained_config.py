"""What a checkpoint's `config.json` says of a language model, of either generation of transformers."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ringjax

Rope = tuple[tuple[float, ...], float]  # the frequencies of a rotary embedding, and its factor


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The attention of a layer: its window, None for all tokens, and its rotary embedding."""

    window: int | None
    rope: Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of pre-norm blocks, each with attention and a gated feed-forward layer.

    Gemma's models scale their embeddings, multiply norms with one more than their weight, and have norms behind both
    parts of a block as well.
    """

    vocab_size: int
    width: int
    hidden_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    epsilon: float
    is_tied: bool
    layers: tuple[LayerConfig, ...]
    scale: float
    activation: str = "silu"
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    attention_cap: float | None = None
    logits_cap: float | None = None
    is_gemma: bool = False


def read_config(folder: str | Path) -> ModelConfig:
    """Returns the configuration in a folder.

    Raises:
      ValueError: for an architecture that is not known, naming it.
      OSError: if there is none.
    """
    given = json.loads((Path(folder) / "config.json").read_text())
    given = given.get("text_config", given)  # of a model of texts and images, its part of texts
    kind = given["model_type"]
    if kind not in _ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} in config.json is unknown: use one of {', '.join(_ARCHITECTURES)}")
    width, num_heads = given["hidden_size"], given["num_attention_heads"]
    head_dim = given.get("head_dim") or width // num_heads
    shared = {
        "vocab_size": given["vocab_size"],
        "width": width,
        "hidden_width": given["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": given.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_length": given["max_position_embeddings"],
        "epsilon": given["rms_norm_eps"],
        "is_tied": given.get("tie_word_embeddings", kind.startswith("gemma")),
        "scale": head_dim**-0.5,
    }
    own = _ARCHITECTURES[kind](given)
    kinds = given.get("layer_types") or [_kind_of_layer(given, number) for number in range(given["num_hidden_layers"])]
    window = given.get("sliding_window")
    layers = tuple(
        LayerConfig(window if one == "sliding_attention" else None, _rope(given, one, head_dim)) for one in kinds
    )
    return ModelConfig(**{**shared, **own}, layers=layers)


def _kind_of_layer(given: Mapping[str, Any], number: int) -> str:
    """Returns the kind of a layer where the configuration, of transformers 4, does not list them."""
    kind, window = given["model_type"], given.get("sliding_window")
    is_windowed = {
        "mistral": window is not None,
        "qwen2": given.get("use_sliding_window", False) and number >= given.get("max_window_layers", 0),
        "qwen3": given.get("use_sliding_window", False) and number >= given.get("max_window_layers", 0),
        "gemma2": number % 2 == 0,
        "gemma3_text": (number + 1) % given.get("sliding_window_pattern", 6) != 0,
    }
    return "sliding_attention" if is_windowed.get(kind, False) else "full_attention"


def _rope(given: Mapping[str, Any], kind: str, head_dim: int) -> Rope:
    """Returns the rotary embedding of layers of a kind."""
    parameters = given.get("rope_parameters")
    if parameters is None:  # of transformers 4
        parameters = {**(given.get("rope_scaling") or {}), "rope_theta": given.get("rope_theta", 10_000.0)}
        if kind == "sliding_attention" and "rope_local_base_freq" in given:
            parameters = {"rope_theta": given["rope_local_base_freq"]}
    parameters = parameters.get(kind, parameters)
    frequencies, factor = ringjax.rope_frequencies(
        parameters, head_dim, max_position_embeddings=given["max_position_embeddings"]
    )
    return tuple(frequencies.tolist()), factor


def _llama(given: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(given.get("attention_bias", False))
    return {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "has_mlp_bias": bool(given.get("mlp_bias", False))}


def _qwen3(given: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(given.get("attention_bias", False))
    return {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "has_qk_norm": True}


def _gemma(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "scale": given["query_pre_attn_scalar"] ** -0.5,
        "activation": "gelu_tanh",
        "has_qk_norm": given["model_type"] == "gemma3_text",
        "attention_cap": given.get("attn_logit_softcapping"),
        "logits_cap": given.get("final_logit_softcapping"),
        "is_gemma": True,
    }


_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": lambda given: {},
    "qwen2": lambda given: {"has_qkv_bias": True},
    "qwen3": _qwen3,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
}
