"""The frequencies of rotary embeddings, scaled to longer contexts as the configuration of a model says."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from ringjax._pattern.counts import check_count, is_real

Frequencies = Float[np.ndarray, "pairs"]


def rope_frequencies(
    rope_parameters: Mapping[str, Any],
    head_dim: int,
    *,
    length: int | None = None,
    max_position_embeddings: int | None = None,
) -> tuple[Frequencies, float]:
    """Returns the frequencies of a model's rotary embedding, and the factor of its cosines and sines.

    :func:`rotary_embedding` and `rope=` of the modules take both. The types are those of configurations on the Hugging
    Face hub: ``"default"``, ``"linear"`` and ``"dynamic"`` (NTK), ``"llama3"``, ``"yarn"`` (arXiv 2309.00071),
    ``"longrope"`` (arXiv 2402.13753).

    Args:
      rope_parameters: as `config.json` has them, under ``rope_parameters``, or ``rope_scaling`` with ``rope_theta``
        beside it: ``rope_type`` (or ``type``), ``rope_theta``, ``partial_rotary_factor`` and what the type takes.
      head_dim: the width H of a head; R = int(H * partial_rotary_factor) dimensions of it are rotated.
      length: the most tokens of a sequence, by default `max_position_embeddings`. ``"dynamic"`` scales to it, and
        ``"longrope"`` uses its long factors if it exceeds the original length. The scale is fixed: code that rescales
        as a sequence grows gives other numbers.
      max_position_embeddings: the model's, needed where `rope_parameters` do not say a factor or an original length.

    Returns:
      The frequencies [R / 2] in float64, in radians a token, and the factor.

    Raises:
      ValueError: for an unknown type, or if a parameter that the type needs is missing or not a positive number.

    Example:
      >>> frequencies, factor = rope_frequencies({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 128)
      >>> frequencies.shape, factor
      ((64,), 1.0)
    """
    check_count("head_dim", head_dim)
    kind = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    if kind not in _TYPES:
        raise ValueError(f"rope_type={kind!r} is unknown: use one of {', '.join(map(repr, _TYPES))}")
    asked = _Parameters(rope_parameters, kind, max_position_embeddings, length)
    width = int(head_dim * asked.number("partial_rotary_factor", 1.0))
    if width < 2 or width % 2:
        raise ValueError(f"head_dim={head_dim} leaves {width} dimensions to rotate: make these even")
    exponent = np.arange(0, width, 2) / width
    return _TYPES[kind](asked, asked.number("rope_theta") ** -exponent)


class _Parameters:
    """The parameters of an embedding, and the lengths that are given separately."""

    def __init__(self, given: Mapping[str, Any], kind: str, most: int | None, length: int | None) -> None:
        self.given, self.kind = given, kind
        for name, value in (("max_position_embeddings", most), ("length", length)):
            if value is not None:
                check_count(name, value)
        self.most = None if most is None else float(most)
        self._length = None if length is None else float(length)

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a parameter that must be a positive number, or the default if it is missing."""
        value = self.given.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"rope_parameters have no {name!r}, which rope_type={self.kind!r} needs: add it")
        if not is_real(value) or not 0 < value < math.inf:
            raise ValueError(f"rope_parameters[{name!r}]={value!r} must be a positive number")
        return float(value)

    @property
    def original(self) -> float:
        """The context length before scaling."""
        return self.number("original_max_position_embeddings", self.most)

    @property
    def factor(self) -> float:
        """How much longer contexts become; by default the ratio of the two lengths."""
        return self.number("factor", None if self.most is None else self.most / self.original)

    @property
    def length(self) -> float:
        """The length to scale to."""
        length = self.most if self._length is None else self._length
        if length is None:
            raise ValueError(f"rope_type={self.kind!r} scales to a length: pass length or max_position_embeddings")
        return length


def _dynamic(asked: _Parameters, frequency: Frequencies) -> tuple[Frequencies, float]:
    """Changes the base (NTK) so that the lowest frequency scales with the length."""
    original = asked.original if asked.most is None else asked.most
    pairs = frequency.size
    excess = asked.factor * max(asked.length, original) / original - (asked.factor - 1)
    exponent = np.arange(pairs) / max(1, pairs - 1)  # multiplies the base by excess ** (R / (R - 2))
    return frequency * excess**-exponent, 1.0


def _llama3(asked: _Parameters, frequency: Frequencies) -> tuple[Frequencies, float]:
    """Scales long wavelengths, keeps short ones, and interpolates between."""
    low, high = asked.number("low_freq_factor"), asked.number("high_freq_factor")
    turns = asked.original * frequency / (2 * np.pi)  # in the original length
    share = ((turns - low) / (high - low)).clip(0, 1)
    return frequency * (share + (1 - share) / asked.factor), 1.0


def _yarn(asked: _Parameters, frequency: Frequencies) -> tuple[Frequencies, float]:
    """Keeps frequencies with many turns in the original length, scales those with few, and interpolates between."""
    width, factor, base = 2 * frequency.size, asked.factor, asked.number("rope_theta")
    place = lambda turns: width * math.log(asked.original / (turns * 2 * math.pi)) / (2 * math.log(base))
    first, last = place(asked.number("beta_fast", 32.0)), place(asked.number("beta_slow", 1.0))
    if asked.given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    scaled = ((np.arange(frequency.size) - first) / max(last - first, 1e-3)).clip(0, 1)
    return frequency * (scaled / factor + 1 - scaled), _yarn_attention_factor(asked)


def _yarn_attention_factor(asked: _Parameters) -> float:
    growth = lambda scale: 1.0 if asked.factor <= 1 else 0.1 * scale * math.log(asked.factor) + 1.0
    given = [asked.given.get(name) for name in ("mscale", "mscale_all_dim")]
    usual = growth(given[0]) / growth(given[1]) if all(given) else growth(1.0)
    return asked.number("attention_factor", usual)


def _longrope(asked: _Parameters, frequency: Frequencies) -> tuple[Frequencies, float]:
    """Divides each frequency by its own factor, from one list for short contexts and another for long ones."""
    name = "long_factor" if asked.length > asked.original else "short_factor"
    factors = np.asarray(asked.given.get(name, []), np.float64)
    if factors.shape != frequency.shape or not (factors > 0).all():
        raise ValueError(
            f"rope_parameters[{name!r}] has the shape {factors.shape}: make it {frequency.size} positive numbers"
        )
    usual = 1.0 if asked.factor <= 1 else math.sqrt(1 + math.log(asked.factor) / math.log(asked.original))
    return frequency / factors, asked.number("attention_factor", usual)


_TYPES: dict[str, Callable[[_Parameters, Frequencies], tuple[Frequencies, float]]] = {
    "default": lambda _, frequency: (frequency, 1.0),
    "linear": lambda asked, frequency: (frequency / asked.factor, 1.0),
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
