"""The dilated pattern: which pairs of tokens attend to each other, and how often, in integers alone."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

Offsets = Literal["interleaved", "blocked", "branch"]
Merge = Literal["lse", "union"]
Heads = Literal["all", "grouped"]

_CHOICES = {"offsets": get_args(Offsets), "merge": get_args(Merge), "heads": get_args(Heads)}


@dataclasses.dataclass(frozen=True)
class DilatedPattern:
    """A list of branches (segment length, dilation rate), which heads run each, and how their pairs are counted.

    In branch (w, r) the sequence is cut into segments of w tokens. Inside its segment, a head keeps the tokens whose
    position t satisfies ``(t % w) % r == offset``, and the kept tokens of one segment attend to each other
    (LongNet, arXiv 2307.02486, section 3.1 and equation 9).

    Args:
      segment_lengths: the segment length w of each branch, in tokens; the last segment of a sequence may be short, and
        w may exceed the sequence.
      dilation_rates: the rate r of each branch, at most its segment length; it need not divide it.
      offsets: how the key/value heads shift their rows: ``"interleaved"`` (head mod r, the paper), ``"blocked"``
        (head // ceil(heads / r), torchscale), or ``"branch"`` (number of the branch mod r, dilated-attention-pytorch).
        Query heads that share a key/value head share its rows.
      merge: how often a pair counts that several branches hold: ``"lse"``, once for each (the paper), or ``"union"``,
        once.
      heads: which heads run a branch: ``"all"`` (the paper), or ``"grouped"``: key/value heads are dealt out in order
        over the branches, the first branches taking one more where they do not divide (dilated-attention-pytorch).

    Raises:
      ValueError: for an empty pattern, unequal numbers of lengths and rates, values below 1, a rate above its segment
        length, or unknown offsets, merge or heads.
      TypeError: for a length or rate that is no integer.

    Example:
      >>> pattern = DilatedPattern(segment_lengths=(4, 8), dilation_rates=(1, 2))
      >>> pattern.multiplicity(8, num_kv_heads=1)[0, 0]
      array([2, 1, 2, 1, 1, 0, 1, 0])
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    offsets: Offsets = "interleaved"
    merge: Merge = "lse"
    heads: Heads = "all"

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
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {known}")

    @property
    def branches(self) -> Iterator[tuple[int, int]]:
        """The (segment length, dilation rate) of each branch."""
        return zip(self.segment_lengths, self.dilation_rates, strict=True)

    def offset(self, kv_head: Any, rate: int, num_kv_heads: int, branch: int) -> Any:
        """Returns the offset of a key/value head, given by its global number, in the branch of this rate and number."""
        if self.offsets == "branch":
            return kv_head * 0 + branch % rate
        if self.offsets == "interleaved":
            return kv_head % rate
        return kv_head // math.ceil(num_kv_heads / rate)

    def heads_of(self, branch: int, num_kv_heads: int) -> range:
        """Returns the key/value heads that run a branch.

        Raises:
          ValueError: if there are fewer heads than branches to deal them out over.
        """
        if self.heads == "all":
            return range(num_kv_heads)
        count = len(self.segment_lengths)
        if num_kv_heads < count:
            raise ValueError(
                f"heads={self.heads!r} deals {num_kv_heads} key/value heads out over {count} branches: "
                'use at least as many heads, fewer branches, or heads="all"'
            )
        size, extra = divmod(num_kv_heads, count)
        first = branch * size + min(branch, extra)
        return range(first, first + size + (branch < extra))

    def multiplicity(
        self,
        length: int,
        num_kv_heads: int,
        is_causal: bool = False,
        key_length: int | None = None,
        query_offset: int = 0,
    ) -> np.ndarray:
        """Returns M [K, T, S]: how often the pair of a query t and a key s counts for a head.

        That is the number of branches of the head that keep both, in the same segment; at most one in a union.

        Args:
          length: the number of queries T.
          num_kv_heads: the number of key/value heads K.
          is_causal: count only the pairs of which the key's position is not after the query's.
          key_length: the number of keys S; T by default.
          query_offset: the position of the first query; that of the first key is 0.
        """
        query = query_offset + np.arange(length)[:, None]
        key = np.arange(length if key_length is None else key_length)
        count = np.zeros((num_kv_heads, len(query), len(key)), dtype=np.int64)
        for branch, (segment_length, rate) in enumerate(self.branches):
            for head in self.heads_of(branch, num_kv_heads):
                offset = self.offset(head, rate, num_kv_heads, branch)
                is_kept = [(position % segment_length) % rate == offset for position in (query, key)]
                count[head] += is_kept[0] & is_kept[1] & (query // segment_length == key // segment_length)
        if self.merge == "union":
            count = np.minimum(count, 1)
        return count * (key <= query) if is_causal else count


def _positive_integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        result = tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name}={values!r} must be a sequence of integers, one for each branch") from None
    if not result:
        raise ValueError(f"{name}={values!r} is empty: give at least one branch, such as ({name[:-1]},)")
    if min(result) < 1:
        raise ValueError(f"{name}={result} has a value below 1: segment lengths and rates count tokens, from 1 on")
    return result
