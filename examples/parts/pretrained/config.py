"""What a checkpoint's `config.json` says of a language model, of either generation of transformers."""

import dataclasses
import functools
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
      lost: what of it no configuration of transformers can say.
    """

    folder: Path
    settings: Mapping[str, Any]
    lost: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of pre-norm blocks, each with attention and a gated feed-forward layer.

    Gemma's models scale their embeddings, have norms of their own, and have norms behind both parts of a block as well.
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
        """The fewest layers of which all are repetitions, the last of them perhaps cut short."""
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
      ValueError: for an architecture that is not known, naming it, and a wrong pattern or rotary embedding.
      OSError: if there is no configuration.
    """
    given = json.loads((Path(folder) / "config.json").read_text())
    given = given.get("text_config", given)  # of a model of texts and images, its part of texts
    return make_config(given, folder, pattern=pattern, rope=rope)


def make_config(
    given: dict[str, Any], folder: str | Path, *, pattern: Any = None, rope: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Returns the configuration that a folder has or is to have, from its settings; see :func:`read_config`."""
    kind = given["model_type"]
    if kind not in _ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} in config.json is unknown: use one of {', '.join(_ARCHITECTURES)}")
    width, num_heads = given["hidden_size"], given["num_attention_heads"]
    head_dim = given.get("head_dim") or width // num_heads
    kinds = given.get("layer_types") or [_kind_of_layer(given, number) for number in range(given["num_hidden_layers"])]
    ropes = {one: _rope_parameters(given, one) for one in {*kinds}}
    lost = [] if pattern is None else ["the pattern of layers that attend to all tokens"]
    if rope is not None:
        ropes[FULL] = _scaled(given, rope)
        is_apart = given.keys() & {"rope_local_base_freq"} or FULL in given.get("rope_parameters", ())
        if WINDOWED in kinds and not is_apart:
            lost.append("the rotary embedding of layers with windows, which it takes from the others")
        given |= _written(given, ropes[FULL])
    frequencies = functools.partial(ringjax.rope_frequencies, max_position_embeddings=given["max_position_embeddings"])
    patterns = {FULL: ALL_TOKENS if pattern is None else ringjax.DilatedPattern(pattern, merge="union")}
    if WINDOWED in kinds:
        patterns[WINDOWED] = ringjax.DilatedPattern([ringjax.Window(given["sliding_window"])])
    ropes = {one: frequencies(parameters, head_dim) for one, parameters in ropes.items()}
    of_kind = {one: LayerConfig(patterns[one], (tuple(ropes[one][0].tolist()), ropes[one][1])) for one in {*kinds}}
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
        "layers": tuple(of_kind[one] for one in kinds),
        "scale": head_dim**-0.5,
        "source": Source(Path(folder), given, tuple(lost)),
    }
    return ModelConfig(**{**shared, **_ARCHITECTURES[kind](given)})


def _kind_of_layer(given: Mapping[str, Any], number: int) -> str:
    """Returns the kind of a layer where the configuration, of transformers 4, does not list them."""
    kind, window = given["model_type"], given.get("sliding_window")
    is_windowed = {
        "mistral": window is not None,
        "qwen2": given.get("use_sliding_window", False) and number >= given.get("max_window_layers", 0),
        "qwen3": given.get("use_sliding_window", False) and number >= given.get("max_window_layers", 0),
        "gemma2": number % 2 == 0,
        "gemma3_text": (number + 1) % given.get("sliding_window_pattern", 6) != 0,
        "gpt_oss": number % 2 == 0,
    }
    return WINDOWED if is_windowed.get(kind, False) else FULL


def _rope_parameters(given: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Returns the rotary embedding of layers of a kind, as transformers 5 has it."""
    parameters = given.get("rope_parameters")
    if parameters is not None:
        return parameters.get(kind, parameters)
    if kind == WINDOWED and "rope_local_base_freq" in given:
        return {"rope_theta": given["rope_local_base_freq"]}
    return {**(given.get("rope_scaling") or {}), "rope_theta": given.get("rope_theta", 10_000.0)}


def _scaled(given: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a new rotary embedding with what it does not say of itself."""
    before = _rope_parameters(given, FULL)
    after = {"rope_theta": before["rope_theta"], **rope}
    if after.get("rope_type") in _OF_AN_ORIGINAL:
        original = before.get("original_max_position_embeddings", given["max_position_embeddings"])
        after.setdefault("original_max_position_embeddings", original)
    return after


def _written(given: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a new rotary embedding of the layers that attend to all tokens changes in a configuration."""
    original = rope.get("original_max_position_embeddings", given["max_position_embeddings"])
    length = max(int(rope.get("factor", 1) * original), given["max_position_embeddings"])
    parameters = given.get("rope_parameters")
    if parameters is None:  # of transformers 4
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        return {"max_position_embeddings": length, "rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    parameters = {**parameters, FULL: rope} if FULL in parameters else rope
    return {"max_position_embeddings": length, "rope_parameters": parameters}


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


def _gpt_oss(given: Mapping[str, Any]) -> dict[str, Any]:
    count, per_token = given["num_local_experts"], given["num_experts_per_tok"]
    limits = given.get("swiglu_alpha", 1.702), given.get("swiglu_limit", 7.0)
    has_bias = bool(given.get("attention_bias", True))
    shared = {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "has_sinks": True}
    return {**shared, "experts": ExpertsConfig(count, per_token, *limits)}


_OF_AN_ORIGINAL = ("yarn", "llama3", "longrope")  # rotary embeddings that know the length before they were scaled
_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": lambda given: {},
    "qwen2": lambda given: {"has_qkv_bias": True},
    "qwen3": _qwen3,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt_oss": _gpt_oss,
}
