"""Reads the `config.json` of a language model, as transformers 4 or 5 writes it."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ringjax

FULL, WINDOWED = "full_attention", "sliding_attention"
ALL_TOKENS = ringjax.DilatedPattern([ringjax.Segments(2**30)])


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The attention of a layer: its pattern, and the frequencies and the factor of its rotary embedding."""

    pattern: ringjax.DilatedPattern
    rope: tuple[tuple[float, ...], float]


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a feed-forward layer: how many, how many a token has, and the limits of their activation."""

    count: int
    per_token: int
    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model comes from, and how it is written again.

    Attributes:
      folder: its checkpoint's.
      settings: the configuration to write with its parameters.
      lost: what transformers cannot express.
    """

    folder: Path
    settings: Mapping[str, Any]
    lost: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of pre-norm blocks, each with attention and a gated feed-forward layer.

    Gemma's models scale their embeddings, have norms of their own, and normalise what both parts of a block add.
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
    source: Source = dataclasses.field(compare=False)
    activation: str = "silu"
    experts: ExpertsConfig | None = None
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_sinks: bool = False
    attention_cap: float | None = None
    logits_cap: float | None = None
    is_gemma: bool = False

    @property
    def period(self) -> int:
        """The number of layers after which the kinds of layers repeat."""
        count = len(self.layers)
        return next(size for size in range(1, count + 1) if self.layers[size:] == self.layers[: count - size])


def read_config(folder: str | Path, *, pattern: Any = None, rope: Mapping[str, Any] | None = None) -> ModelConfig:
    """Returns the configuration in a folder.

    Args:
      folder: the checkpoint's.
      pattern: the branches of layers that attend to all tokens, merged as a union; all tokens by default.
      rope: the rotary embedding of these layers, as transformers has it: ``{"rope_type": "yarn", "factor": 4.0}``; what
        it does not say is the checkpoint's, and the model's length becomes the factor times the original one.

    Raises:
      ValueError: for an unknown architecture, a setting that is missing, or a wrong pattern or rotary embedding.
      OSError: if there is no configuration.
    """
    settings = json.loads((Path(folder) / "config.json").read_text())
    if not isinstance(settings, dict):
        raise ValueError(f"{folder}/config.json holds no settings: give a checkpoint's own")
    settings = settings.get("text_config", settings)  # the text's part of a model of texts and images
    return make_config(settings, folder, pattern=pattern, rope=rope)


def make_config(
    settings: Mapping[str, Any], folder: str | Path, *, pattern: Any = None, rope: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Returns the configuration of a model from the settings in config.json; see :func:`read_config`."""
    kind = settings.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} in config.json is unknown: use one of {', '.join(_ARCHITECTURES)}")
    try:
        _check_supported(settings)
        return _make_config({**_DEFAULTS.get(kind, {}), **settings}, Path(folder), pattern, rope)
    except KeyError as error:
        raise ValueError(f"config.json of {folder} has no {error}: the configuration is not complete") from None


def _make_config(settings: dict[str, Any], folder: Path, pattern: Any, rope: Mapping[str, Any] | None) -> ModelConfig:
    kind, width, num_heads = settings["model_type"], settings["hidden_size"], settings["num_attention_heads"]
    head_dim = settings.get("head_dim") or width // num_heads
    layers, written, lost = _layers(settings, head_dim, pattern, rope)
    shared = {
        "vocab_size": settings["vocab_size"],
        "width": width,
        "hidden_width": settings["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": settings.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_length": written["max_position_embeddings"],
        "epsilon": settings["rms_norm_eps"],
        "is_tied": settings.get("tie_word_embeddings", kind.startswith("gemma")),
        "layers": layers,
        "scale": head_dim**-0.5,
        "source": Source(folder, written, lost),
    }
    return ModelConfig(**{**shared, **_ARCHITECTURES[kind](settings)})


def _layers(
    settings: dict[str, Any], head_dim: int, pattern: Any, rope: Mapping[str, Any] | None
) -> tuple[tuple[LayerConfig, ...], dict[str, Any], tuple[str, ...]]:
    """Returns the layers, the settings to write with them, and what transformers cannot express of them."""
    kinds = settings.get("layer_types") or [_kind(settings, layer) for layer in range(settings["num_hidden_layers"])]
    if FULL not in kinds and (pattern is not None or rope is not None):
        raise ValueError(
            "pattern and rope are of layers that attend to all tokens: this model has none, leave them out"
        )
    if unknown := {*kinds} - {FULL, WINDOWED}:
        raise ValueError(f"layer_types in config.json have {min(unknown)!r}: use {FULL!r} and {WINDOWED!r}")
    patterns = {FULL: ALL_TOKENS if pattern is None else ringjax.DilatedPattern(pattern, merge="union")}
    if WINDOWED in kinds:
        patterns[WINDOWED] = ringjax.DilatedPattern([ringjax.Window(settings["sliding_window"])])
    lost = [] if pattern is None else ["the pattern of layers that attend to all tokens"]
    ropes = {kind: _rope_parameters(settings, kind) for kind in {*kinds}}
    if rope is not None:
        has_rope_per_kind = settings["model_type"] == "gemma3_text"
        if WINDOWED in kinds and not has_rope_per_kind:
            lost.append("the rotary embedding of layers with windows, which it takes from the others")
        ropes[FULL] = _completed(settings, rope)
        settings = {**settings, **_changed(settings, ropes[FULL])}
    of_kind = {}
    for kind, parameters in ropes.items():
        length = settings["max_position_embeddings"]
        frequencies, factor = ringjax.rope_frequencies(parameters, head_dim, max_position_embeddings=length)
        of_kind[kind] = LayerConfig(patterns[kind], (tuple(frequencies.tolist()), factor))
    return tuple(of_kind[kind] for kind in kinds), settings, tuple(lost)


def _check_supported(settings: Mapping[str, Any]) -> None:
    """Checks settings that the model has no other values of."""
    activation = "gelu_pytorch_tanh" if settings["model_type"].startswith("gemma") else "silu"
    supported = {
        "hidden_act": (None, activation),
        "hidden_activation": (None, activation),
        "use_bidirectional_attention": (None, False),
        "partial_rotary_factor": (None, 1.0),
    }
    for name, values in supported.items():
        if settings.get(name) not in values:
            raise ValueError(f"{name}={settings[name]!r} in config.json is not supported: it must be {values[1]!r}")


def _kind(settings: Mapping[str, Any], number: int) -> str:
    """Returns the kind of a layer where the configuration, of transformers 4, does not list them."""
    kind, window = settings["model_type"], settings.get("sliding_window")
    is_windowed = {
        "mistral": window is not None,
        "qwen2": settings.get("use_sliding_window", False) and number >= settings.get("max_window_layers", 0),
        "qwen3": settings.get("use_sliding_window", False) and number >= settings.get("max_window_layers", 0),
        "gemma2": number % 2 == 0,
        "gemma3_text": (number + 1) % settings.get("sliding_window_pattern", 6) != 0,
        "gpt_oss": number % 2 == 0,
    }
    return WINDOWED if is_windowed.get(kind, False) else FULL


def _rope_parameters(settings: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Returns the rotary embedding of layers of a kind, as transformers 5 has it."""
    parameters = settings.get("rope_parameters")
    if parameters is not None:
        return parameters.get(kind, parameters)
    is_gemma3 = settings["model_type"] == "gemma3_text"
    if kind == WINDOWED and is_gemma3:
        return {"rope_theta": settings.get("rope_local_base_freq", 10_000.0)}
    theta = settings.get("rope_theta", 1_000_000.0 if is_gemma3 else 10_000.0)
    return {**(settings.get("rope_scaling") or {}), "rope_theta": theta}


def _completed(settings: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the new rotary embedding, completed from the checkpoint's."""
    before, rope_type = _rope_parameters(settings, FULL), rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "dynamic" or (rope_type == "default" and "factor" in rope):
        raise ValueError(f"{rope_type=} has no frequencies for one longer context: use 'linear' or 'yarn'")
    is_same = before.get("rope_type", before.get("type", "default")) == rope_type
    kept = before if is_same else {"rope_theta": before["rope_theta"]}
    after = {**kept, **rope, "rope_type": rope_type}
    after.pop("type", None)
    if rope_type in _NEEDS_ORIGINAL:
        original = before.get("original_max_position_embeddings", settings["max_position_embeddings"])
        after.setdefault("original_max_position_embeddings", original)
    return after


def _changed(settings: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that change with the rotary embedding of layers that attend to all tokens."""
    original = rope.get("original_max_position_embeddings", settings["max_position_embeddings"])
    length = max(int(rope.get("factor", 1) * original), settings["max_position_embeddings"])
    parameters = settings.get("rope_parameters")
    if parameters is None:  # of transformers 4
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        return {"max_position_embeddings": length, "rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    parameters = {**parameters, FULL: rope} if FULL in parameters else rope
    return {"max_position_embeddings": length, "rope_parameters": parameters}


def _llama(settings: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(settings.get("attention_bias", False))
    return {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "has_mlp_bias": bool(settings.get("mlp_bias", False))}


def _qwen3(settings: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(settings.get("attention_bias", False))
    return {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "has_qk_norm": True}


def _gemma(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "scale": settings["query_pre_attn_scalar"] ** -0.5,
        "activation": "gelu_tanh",
        "has_qk_norm": settings["model_type"] == "gemma3_text",
        "attention_cap": settings.get("attn_logit_softcapping"),
        "logits_cap": settings.get("final_logit_softcapping"),
        "is_gemma": True,
    }


def _gpt_oss(settings: Mapping[str, Any]) -> dict[str, Any]:
    count, per_token = settings["num_local_experts"], settings["num_experts_per_tok"]
    limits = settings.get("swiglu_alpha", 1.702), settings.get("swiglu_limit", 7.0)
    has_bias = bool(settings.get("attention_bias", True))
    shared = {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "has_sinks": True}
    return {**shared, "experts": ExpertsConfig(count, per_token, *limits)}


_NEEDS_ORIGINAL = ("yarn", "llama3", "longrope")  # rotary embeddings that know the length before they were scaled
# What configurations may leave out, as that of a text that is part of a model of texts and images.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
}
_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": lambda settings: {},
    "qwen2": lambda settings: {"has_qkv_bias": True},
    "qwen3": _qwen3,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt_oss": _gpt_oss,
}
