"""The dilated pattern: which pairs of tokens attend to each other, and how often each counts, in integers alone."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from ringjax._pattern.branch import Branch, Segments, spaced_tokens
from ringjax._pattern.counts import check_count, check_flags, is_integer

Offsets = Literal["interleaved", "blocked", "branch"]
Merge = Literal["lse", "union"]
Heads = Literal["all", "grouped"]

_CHOICES = {"offsets": get_args(Offsets), "merge": get_args(Merge), "heads": get_args(Heads)}


class Reach(NamedTuple):
    """How far the queries of a pattern see.

    `beyond` has, for each key/value head, the share of queries that see a key outside the range of the smallest branch.
    `in_any_head` is the share of queries that do so in one head at least. `num_keys` has, for each head, the mean
    number of keys that a query sees; a key counts once for each branch that holds it.
    """

    beyond: np.ndarray
    in_any_head: float
    num_keys: np.ndarray


@dataclasses.dataclass(frozen=True)
class DilatedPattern:
    """A list of branches, which heads run each, and how their pairs are counted.

    Args:
      branches: the branches, each a :class:`Segments` or a :class:`Window`.
      offsets: how the key/value heads shift their rows: ``"interleaved"`` (head mod r, the paper), ``"blocked"``
        (head // ceil(heads / r), torchscale), or ``"branch"`` (number of the branch mod r, dilated-attention-pytorch).
        Query heads that share a key/value head share its rows.
      merge: how often a pair that several branches hold counts: ``"lse"``, once for each (the paper), or ``"union"``,
        once.
      heads: which heads run a branch: ``"all"`` (the paper), or ``"grouped"``: key/value heads are dealt out in order
        over the branches, and the first branches get one more if the division is not even (dilated-attention-pytorch).

    Raises:
      ValueError: for an empty pattern, or unknown offsets, merge or heads.
      TypeError: for a branch of another type.

    Example:
      >>> pattern = DilatedPattern([Segments(4), Segments(8, rate=2)])
      >>> pattern.multiplicity(8, num_kv_heads=1)[0, 0]
      array([2, 1, 2, 1, 1, 0, 1, 0])
    """

    branches: Sequence[Branch]
    offsets: Offsets = "interleaved"
    merge: Merge = "lse"
    heads: Heads = "all"

    # `ringjax._tools.pictures.plot_pattern`, which imports this module: `ringjax/__init__.py` sets it.
    plot: ClassVar[Callable[..., Any]]

    def __post_init__(self) -> None:
        branches = tuple(self.branches) if isinstance(self.branches, Iterable) else (self.branches,)
        for branch in branches:
            if not isinstance(branch, Branch):
                raise TypeError(
                    f"pattern has the branch {branch!r}: make each a ringjax.Segments(length, rate) or a "
                    "ringjax.Window(size, rate)"
                )
        if not branches:
            raise ValueError("pattern has no branches: give at least one, such as ringjax.Segments(2048)")
        object.__setattr__(self, "branches", branches)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {known}")

    @classmethod
    def of_lengths(
        cls,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        offsets: Offsets = "interleaved",
        merge: Merge = "lse",
        heads: Heads = "all",
    ) -> "DilatedPattern":
        """Returns the pattern with a branch for each segment length and its dilation rate.

        Args:
          segment_lengths: the segment length of each branch, in tokens.
          dilation_rates: the dilation rate of each branch, at most its segment length.
          offsets: as the class takes it; the same holds for the others.
          merge: how often a pair of several branches counts.
          heads: which heads run a branch.

        Raises:
          ValueError, TypeError: for an empty pattern, unequal numbers of lengths and rates, values below 1 or that are
            no integers, or a rate above its segment length.

        Example:
          >>> DilatedPattern.of_lengths((4, 8), (1, 2)) == DilatedPattern([Segments(4), Segments(8, 2)])
          True
        """
        lengths = _positive_integers("segment_lengths", segment_lengths)
        rates = _positive_integers("dilation_rates", dilation_rates)
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
        return cls(tuple(map(Segments, lengths, rates)), offsets, merge, heads)

    def offset(self, kv_head: Any, branch: Branch, number: int, num_kv_heads: int) -> Any:
        """Returns the offset of a key/value head, given by its global number, in a branch of the pattern."""
        rate = branch.offset_rate
        if self.offsets == "branch":
            return kv_head * 0 + number % rate
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
        count = len(self.branches)
        if num_kv_heads < count:
            raise ValueError(
                f"heads={self.heads!r} deals {num_kv_heads} key/value heads out over {count} branches: "
                'use at least as many heads, fewer branches, or heads="all"'
            )
        size, extra = divmod(num_kv_heads, count)
        first = branch * size + min(branch, extra)
        return range(first, first + size + (branch < extra))

    def within(self, end: int, num_kv_heads: int, stop: int | None = None) -> tuple[Branch, ...]:
        """Returns equivalent branches in 32-bit numbers, for tokens that end at `end`, and at `stop` with padding."""
        stop = end if stop is None else stop
        most = max(stop, num_kv_heads, len(self.branches))
        return tuple(branch.within(stop, end, most) for branch in self.branches)

    def reach(self, length: int, num_kv_heads: int, is_causal: bool = False) -> Reach:
        """Returns how far the queries of a sequence of `length` tokens see in each of the key/value heads.

        A head keeps one of every `rate` tokens: with rates far above the number of heads, no head keeps most tokens. Of
        more than 2^17 queries, an evenly spaced sample is counted.

        Args:
          length: the number of tokens.
          num_kv_heads: the number of key/value heads K.
          is_causal: whether a query sees only keys that are not after it.

        Returns:
          `in_any_head`, the share of queries that see beyond their smallest branch in one head at least; `beyond` [K],
          that share in each head; and `num_keys` [K], the mean number of keys that a query sees, each counted once for
          each branch that holds it.

        Raises:
          ValueError: for a number below 1.
          TypeError: if `is_causal` is neither true nor false.

        Example:
          >>> DilatedPattern([Segments(4), Segments(16, rate=8)]).reach(16, num_kv_heads=2).in_any_head
          0.25
        """
        check_count("length", length)
        check_count("num_kv_heads", num_kv_heads)
        check_flags(is_causal=is_causal)
        query, branches = spaced_tokens(length), self.within(length, num_kv_heads)
        first, last = min(branches, key=lambda branch: branch.extent).seen(query)
        in_any_head = np.zeros(len(query), bool)
        beyond, num_keys = np.zeros((2, num_kv_heads))
        for offsets, heads in self._classes(branches, num_kv_heads).items():
            count = seen = np.zeros(len(query), np.int64)
            for number, offset in offsets:
                count = count + branches[number].count(query, 0, length, offset, length, is_causal)
                seen = seen + branches[number].count(query, first, last + 1, offset, length, is_causal)
            in_any_head |= count > seen
            beyond[heads], num_keys[heads] = (count > seen).mean(), count.mean()
        return Reach(beyond, float(in_any_head.mean()), num_keys)

    def _classes(self, branches: tuple[Branch, ...], num_kv_heads: int) -> dict[tuple[tuple[int, int], ...], list[int]]:
        """Returns the heads that keep the same tokens, keyed by the branch numbers and offsets that they have."""
        classes: dict[tuple[tuple[int, int], ...], list[int]] = {}
        runs = [self.heads_of(number, num_kv_heads) for number in range(len(branches))]
        for head in range(num_kv_heads):
            offsets = (
                (number, self.offset(head, branch, number, num_kv_heads))
                for number, branch in enumerate(branches)
                if head in runs[number]
            )
            classes.setdefault(tuple(offsets), []).append(head)
        return classes

    def multiplicity(
        self,
        length: int,
        num_kv_heads: int,
        is_causal: bool = False,
        key_length: int | None = None,
        query_offset: int = 0,
    ) -> np.ndarray:
        """Returns M [K, T, S]: how often the pair of a query t and a key s counts for a head.

        That is the number of branches of the head in which the query sees the key; at most one in a union.

        Args:
          length: the number of queries T.
          num_kv_heads: the number of key/value heads K.
          is_causal: count only the pairs whose key is not after their query.
          key_length: the number of keys S; T by default.
          query_offset: the position of the first query; that of the first key is 0.

        Raises:
          ValueError: for a number of tokens or heads below 1, or a negative offset.
          TypeError: if `is_causal` is neither true nor false.
        """
        check_count("length", length)
        check_count("num_kv_heads", num_kv_heads)
        if key_length is not None:
            check_count("key_length", key_length)
        if not is_integer(query_offset) or query_offset < 0:
            raise ValueError(f"query_offset={query_offset!r} must be an integer that is not negative")
        check_flags(is_causal=is_causal)
        query = query_offset + np.arange(length)[:, None]
        key = np.arange(length if key_length is None else key_length)
        count = np.zeros((num_kv_heads, len(query), len(key)), dtype=np.int64)
        for number, branch in enumerate(self.within(max(query_offset + length, len(key)), num_kv_heads)):
            for head in self.heads_of(number, num_kv_heads):
                count[head] += branch.holds(query, key, self.offset(head, branch, number, num_kv_heads))
        if self.merge == "union":
            count = np.minimum(count, 1)
        return count * (key <= query) if is_causal else count


def read_pattern(
    pattern: Any, segment_lengths: Any, dilation_rates: Any, offsets: Any, merge: Any, heads: Any
) -> DilatedPattern:
    """Returns the pattern that the arguments of a call give, as branches or as lists of lengths and rates.

    Raises:
      ValueError, TypeError: for both forms or neither, or an option that contradicts the pattern; see also
        :class:`DilatedPattern`.
    """
    lists = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    given = [name for name, values in lists.items() if values is not None]
    if pattern is None and len(given) < 2:
        missing = "pattern" if not given else next(name for name in lists if name not in given)
        raise ValueError(
            f"{missing} is missing: say which tokens attend with pattern=[ringjax.Segments(length, rate), "
            "ringjax.Window(size), ...], or with segment_lengths= and dilation_rates="
        )
    if pattern is None:
        return DilatedPattern.of_lengths(segment_lengths, dilation_rates, offsets, merge, heads)
    if given:
        raise ValueError(f"pattern={pattern!r} is given beside {given[0]}={lists[given[0]]!r}: leave one out")
    if not isinstance(pattern, DilatedPattern):
        return DilatedPattern(pattern, offsets, merge, heads)
    choices = {"offsets": offsets, "merge": merge, "heads": heads}
    for name, choice in choices.items():
        if choice not in (_CHOICES[name][0], getattr(pattern, name)):
            raise ValueError(
                f"{name}={choice!r} is given beside a pattern that says {getattr(pattern, name)!r}: leave it out"
            )
    return pattern


def _positive_integers(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or not all(map(is_integer, values := tuple(values))):
        raise TypeError(f"{name}={values!r} must be a sequence of integers, one for each branch")
    result = tuple(map(int, values))
    if not result:
        raise ValueError(f"{name}={values!r} is empty: give at least one branch, such as ({name[:-1]},)")
    if min(result) < 1:
        raise ValueError(
            f"{name}={result} has a value below 1: lengths count tokens, rates say of how many one is kept"
        )
    return result
