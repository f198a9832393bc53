"""The dilated pattern: which pairs of tokens attend to each other, and how often, in integers alone."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

Offsets = Literal["interleaved", "blocked"]


@dataclasses.dataclass(frozen=True)
class DilatedPattern:
    """A list of branches (segment length, dilation rate) and the rule that offsets the heads.

    In branch (w, r) the sequence is cut into segments of w tokens. Inside its segment, a head keeps the tokens whose
    position t satisfies ``(t % w) % r == offset``, and the kept tokens of one segment attend to each other
    (LongNet, arXiv 2307.02486, section 3.1 and equation 9).

    Args:
      segment_lengths: the segment length w of each branch, in tokens; the last segment of a sequence may be short, and
        w may exceed the sequence.
      dilation_rates: the rate r of each branch, at most its segment length; it need not divide it.
      offsets: how the key/value heads shift their rows: ``"interleaved"`` (head mod r, the paper) or ``"blocked"``
        (head // ceil(heads / r), torchscale). Query heads that share a key/value head share its rows.

    Raises:
      ValueError: for an empty pattern, unequal numbers of lengths and rates, values below 1, a rate above its segment
        length, or unknown offsets.
      TypeError: for a length or rate that is no integer.

    Example:
      >>> pattern = DilatedPattern(segment_lengths=(4, 8), dilation_rates=(1, 2))
      >>> pattern.multiplicity(8, num_kv_heads=1)[0, 0]
      array([2, 1, 2, 1, 1, 0, 1, 0])
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offsets: Offsets = "interleaved"

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):
            object.__setattr__(self, name, _positive_integers(name, getattr(self, name)))
        lengths, rates = self.segment_lengths, self.dilation_rates
        if len(lengths) != len(rates):
            raise ValueError(
                f"segment_lengths={lengths} and dilation_rates={rates} have {len(lengths)} and {len(rates)} entries: "
                "give one rate for each segment length"
            )
        for length, rate in zip(lengths, rates, strict=True):
            if rate > length:
                raise ValueError(
                    f"dilation_rates={rates} has the rate {rate} above its segment length {length}: "
                    "some heads would keep nothing; lower the rate or lengthen the segment"
                )
        if self.offsets not in ("interleaved", "blocked"):
            raise ValueError(f'offsets={self.offsets!r} is unknown: use "interleaved" or "blocked"')

    @property
    def branches(self) -> Iterator[tuple[int, int]]:
        """The (segment length, dilation rate) of each branch."""
        return zip(self.segment_lengths, self.dilation_rates, strict=True)

    def offset(self, kv_head: Any, rate: int, num_kv_heads: int) -> Any:
        """Returns the offset of a key/value head, given by its global number, in a branch of the given rate."""
        if self.offsets == "interleaved":
            return kv_head % rate
        return kv_head // math.ceil(num_kv_heads / rate)

    def multiplicity(self, length: int, num_kv_heads: int, is_causal: bool = False) -> np.ndarray:
        """Returns M [K, T, T]: the number of branches in which a head keeps both t and s, in the same segment.

        Args:
          length: the number of tokens T.
          num_kv_heads: the number of key/value heads K.
          is_causal: count only the pairs with s <= t.
        """
        position = np.arange(length)
        heads = np.arange(num_kv_heads)[:, None]
        count = np.zeros((num_kv_heads, length, length), dtype=np.int64)
        for segment_length, rate in self.branches:
            kept = (position % segment_length) % rate == self.offset(heads, rate, num_kv_heads)  # [K, T]
            segment = position // segment_length
            count += kept[:, :, None] & kept[:, None, :] & (segment[:, None] == segment[None, :])
        return np.tril(count) if is_causal else count


def _positive_integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        result = tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name}={values!r} must be a sequence of integers, one for each branch") from None
    if not result:
        raise ValueError(f"{name}={values!r} is empty: give at least one branch, such as ({name[:-1]},)")
    if min(result) < 1:
        raise ValueError(f"{name}={result} has a value below 1: segment lengths and rates count tokens, from 1 on")
    return result
