"""The kinds of branches: which tokens a head keeps, and which keys a query sees, in integers alone.

Except for `count`, functions of tokens use arithmetic operators only, so that the same code serves Python integers,
NumPy arrays and traced JAX integers, signed or unsigned.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np

from ringjax._pattern.counts import is_integer

# Positions are int32.
MAX_POSITIONS = 2**31 - 1
_MOST_COUNTED = 2**16


def remainder(number: Any, divisor: Any) -> Any:
    """Returns ``number % divisor`` of a non-negative number; jax's own operator takes a dozen operations."""
    return number - number // divisor * divisor


def spaced_tokens(length: int) -> np.ndarray:
    """Returns the tokens of a sequence, or an evenly spaced sample of a very long one, which suffices for averages."""
    step = max(1, length // _MOST_COUNTED) | 1  # odd, to share no factor with power-of-two rates
    return np.arange(0, length, step)


@dataclasses.dataclass(frozen=True)
class Branch(abc.ABC):
    """A branch of a pattern: it defines which queries see which keys, and everything else follows from that.

    The `offset` of a head says which tokens it keeps. A kept query sees the kept keys of its `group` whose positions
    lie in the interval that `seen` returns.
    """

    # Whether all kept tokens of a group see each other: then, causality aside, the group implies the interval.
    is_by_group: ClassVar[bool]

    @property
    @abc.abstractmethod
    def offset_rate(self) -> int:
        """The number of offsets that heads may have."""

    @property
    def keeps_all(self) -> bool:
        """Whether each head keeps all tokens."""
        return self.offset_rate == 1

    @property
    @abc.abstractmethod
    def period(self) -> int | None:
        """The length of the parts of the sequence that do not see each other; None if all parts are linked."""

    @property
    @abc.abstractmethod
    def modulus(self) -> int:
        """A number m such that a query sees only keys with ``key % m == query % m``."""

    @property
    @abc.abstractmethod
    def extent(self) -> int:
        """The most tokens, up to and including its own, among which a causal query sees keys."""

    @abc.abstractmethod
    def keeps(self, token: Any, offset: Any) -> Any:
        """Returns whether a head of this offset keeps a token."""

    @abc.abstractmethod
    def group(self, token: Any) -> Any:
        """Returns the number of the group that a token is in."""

    @abc.abstractmethod
    def seen(self, query: Any, is_causal: bool = False) -> tuple[Any, Any]:
        """Returns the first and the last position at which a query sees keys."""

    @abc.abstractmethod
    def count(self, query: Any, start: Any, stop: Any, offset: Any, length: int, is_causal: bool = False) -> Any:
        """Returns how many keys at ``start <= key < stop``, of a sequence of `length`, a query sees in a head."""

    @abc.abstractmethod
    def within(self, stop: int, end: int, most: int) -> "Branch":
        """Returns an equivalent branch in 32-bit numbers, for tokens that end at `end`, and at `stop` with padding.

        `most` is at least `stop`, the number of heads and the number of branches.
        """

    # The rank of a kept token is its index among all kept tokens of the sequence.

    @abc.abstractmethod
    def rank(self, token: Any, offset: Any) -> Any:
        """Returns the number of kept tokens before a token."""

    @abc.abstractmethod
    def token(self, rank: Any, offset: Any) -> Any:
        """Returns the kept token of a rank."""

    @abc.abstractmethod
    def most_kept(self, tokens: int) -> int:
        """Returns an upper bound of the rows that a head keeps of `tokens` consecutive tokens, wherever they begin."""

    # The cache of decoding.

    # A cache is a ring of the last kept tokens: the one of rank k is in row k modulo its rows.

    def ring_rows(self, rewind: int = 0) -> int:
        """Returns the number of rows that the next tokens may see, also after `rewind` tokens are taken back."""
        return self.most_kept(min(self.extent, MAX_POSITIONS)) + self.most_kept(rewind)

    def num_cached(self, max_length: int, rewind: int = 0) -> int:
        """Returns how many of these rows up to `max_length` tokens fill."""
        return min(self.ring_rows(rewind), self.rank(max_length, 0))

    def cached(self, row: Any, last: Any, offset: Any, rewind: int = 0) -> tuple[Any, Any]:
        """Returns the token in a row of the cache after token `last`, and whether there is one."""
        rows = min(self.ring_rows(rewind), MAX_POSITIONS)  # within 32 bits
        newest = self.rank(last + 1, offset) - 1 + offset * 0  # of each head
        rank = newest - (newest - row) % rows
        is_row = (rank >= 0) & (row < rows)
        return self.token(rank * is_row, offset), is_row

    @abc.abstractmethod
    def recent(self, last: Any, count: int, start: Any, length: int, offset: Any) -> Any:
        """Returns tokens [..., R] among which the `count` tokens up to `last` see keys, in a shard.

        The shard has `length` tokens from `start` on; tokens that are returned may lie outside of it. None stands for
        all tokens of the shard, where R would be no smaller than `length`.
        """

    def holds(self, query: Any, key: Any, offset: Any, is_causal: bool = False) -> Any:
        """Returns whether a query of a head of this offset sees a key."""
        first, last = self.seen(query, is_causal)
        is_seen = (first <= key) & (key <= last) & (self.group(query) == self.group(key))
        return is_seen & self.keeps(query, offset) & self.keeps(key, offset)


@dataclasses.dataclass(frozen=True)
class Segments(Branch):
    """A branch of segments of `length` tokens: in each, every `rate`-th token attends to every `rate`-th token.

    Inside its segment, a head keeps the tokens whose position t satisfies ``(t % length) % rate == offset``, and the
    kept tokens of one segment attend to each other (LongNet, arXiv 2307.02486, section 3.1 and equation 9).

    Args:
      length: the segment length w, in tokens; the last segment of a sequence may be short, and w may exceed it.
      rate: the dilation rate r, at most the length; it need not divide it.

    Raises:
      ValueError: for a value below 1, or a rate above the length.
      TypeError: for a length or rate that is no integer.

    Example:
      >>> Segments(4, rate=2).holds(query=6, key=4, offset=0)
      True
    """

    length: int
    rate: int = 1

    is_by_group = True

    def __post_init__(self) -> None:
        _read_integers(self, "length", "rate")
        if self.rate > self.length:
            raise ValueError(
                f"{self} has a rate above its length: some heads would keep nothing; lower the rate or lengthen the "
                "segment"
            )

    @property
    def offset_rate(self) -> int:
        return self.rate

    @property
    def period(self) -> int:
        return self.length

    @property
    def modulus(self) -> int:
        return 1

    @property
    def extent(self) -> int:
        return self.length

    def keeps(self, token: Any, offset: Any) -> Any:
        return remainder(remainder(token, self.length), self.rate) == offset

    def group(self, token: Any) -> Any:
        return token // self.length

    def seen(self, query: Any, is_causal: bool = False) -> tuple[Any, Any]:
        first = query // self.length * self.length
        return first, query if is_causal else first + (self.length - 1)

    def count(self, query: Any, start: Any, stop: Any, offset: Any, length: int, is_causal: bool = False) -> Any:
        first, last = self.seen(query, is_causal)
        kept = lambda tokens: (np.maximum(tokens - offset, 0) + self.rate - 1) // self.rate
        end = np.minimum(np.minimum(stop, length), last + 1)
        count = kept(end - first) - kept(np.maximum(start, first) - first)
        return np.maximum(count, 0) * self.keeps(query, offset)

    def within(self, stop: int, end: int, most: int) -> "Segments":
        rate = min(self.rate, most)
        return Segments(max(stop, rate) if self.length >= end else self.length, rate)

    def rank(self, token: Any, offset: Any) -> Any:
        kept = self._kept_of_all(offset)
        return token // self.length * kept + self._kept(remainder(token, self.length), offset)

    def token(self, rank: Any, offset: Any) -> Any:
        kept = self._kept_of_all(offset)
        return (rank // kept) * self.length + offset + remainder(rank, kept) * self.rate

    def most_kept(self, tokens: int) -> int:
        if self.length >= MAX_POSITIONS:  # of all tokens
            return self._kept(tokens, 0)
        segments, rest = divmod(tokens, self.length)
        # The rest lies in at most two segments. A part of l tokens of a segment has at most ceil(l / rate) kept tokens.
        return segments * self._kept_of_all(0) + (rest if rest < 2 else (rest - 2) // self.rate + 2)

    def recent(self, last: Any, count: int, start: Any, length: int, offset: Any) -> Any:
        segments = 1 if count == 1 else (count - 2) // self.length + 2
        most = min(segments * self._kept_of_all(0), self.most_kept(length))
        if most >= length:
            return None
        query = last - (count - 1)
        first, _ = self.seen(query * (query > 0))
        first = first + (start > first) * (start - first)
        return self.token(self.rank(first, offset)[..., None] + np.arange(most, dtype=np.int32), offset[..., None])

    def _kept(self, tokens: Any, offset: Any) -> Any:
        """Returns how many of the first `tokens` tokens of a segment a head of this offset keeps."""
        return (tokens + self.rate - 1 - offset) // self.rate

    def _kept_of_all(self, offset: Any) -> Any:
        """Returns how many tokens of a whole segment a head of this offset keeps; no sum exceeds its length."""
        return (self.length - 1 - offset) // self.rate + 1


@dataclasses.dataclass(frozen=True)
class Window(Branch):
    """A branch that is a sliding window: each token attends to the `size` nearest on either side, itself included.

    Query t sees the keys s with ``|t - s| < size * rate`` and ``(t - s) % rate == 0``, and ``s <= t`` if causal: a
    causal ``Window(4096)`` is Mistral's (arXiv 2310.06825), with a rate it is Longformer's dilated window (arXiv
    2004.05150). Every token is a query and a key of every head, whatever the offsets.

    Args:
      size: the most keys w that a causal query sees, its own included. Without causality it sees up to ``2 * w - 1``.
      rate: the distance r of these keys, in tokens.

    Raises:
      ValueError: for a value below 1.
      TypeError: for a size or rate that is no integer.

    Example:
      >>> Window(2, rate=3).holds(query=6, key=np.arange(10), offset=0).nonzero()[0].tolist()
      [3, 6, 9]
    """

    size: int
    rate: int = 1

    is_by_group = False

    def __post_init__(self) -> None:
        _read_integers(self, "size", "rate")

    @property
    def offset_rate(self) -> int:
        return 1

    @property
    def period(self) -> None:
        return None

    @property
    def modulus(self) -> int:
        return self.rate

    @property
    def extent(self) -> int:
        return self.size * self.rate

    @property
    def _distance(self) -> int:
        """The distance of the furthest key."""
        return (self.size - 1) * self.rate

    def keeps(self, token: Any, offset: Any) -> Any:
        return token + offset >= token  # all, in the shape of both

    def group(self, token: Any) -> Any:
        return remainder(token, self.rate)

    def seen(self, query: Any, is_causal: bool = False) -> tuple[Any, Any]:
        distance = self._distance
        first = (query >= distance) * (query - distance)  # never below zero, because integers may be unsigned
        return first, query if is_causal else query + distance

    def count(self, query: Any, start: Any, stop: Any, offset: Any, length: int, is_causal: bool = False) -> Any:
        first, last = self.seen(query, is_causal)
        begin, end = np.maximum(start, first), np.minimum(np.minimum(stop, length), last + 1)
        before = lambda token: (token - 1 - query) // self.rate
        return np.maximum(before(end) - before(begin), 0)

    def within(self, stop: int, end: int, most: int) -> Branch:
        if self.rate == 1 and self.size >= end:
            return Segments(stop)  # which zigzag and the fused kernels support
        rate = 1 if self.size == 1 else min(self.rate, end)
        return Window(min(self.size, -(-end // rate)), rate)

    def rank(self, token: Any, offset: Any) -> Any:
        return token

    def token(self, rank: Any, offset: Any) -> Any:
        return rank

    def most_kept(self, tokens: int) -> int:
        return tokens

    def recent(self, last: Any, count: int, start: Any, length: int, offset: Any) -> Any:
        if min(self.extent, count * self.size) >= length:
            return None
        # Keys at a distance of i modulo the rate are those of every rate-th query before `last`, from the i-th on.
        phase, step = np.arange(min(count, self.rate))[:, None], np.arange(self.size + (count - 1) // self.rate)
        distance = (phase + step * self.rate)[step < self.size + (count - 1 - phase) // self.rate]
        return None if distance.size >= length else last[..., None] - distance.astype(np.int32)


def _read_integers(branch: Any, *names: str) -> None:
    """Checks the numbers of a branch, and stores them as Python integers.

    Raises:
      ValueError, TypeError: for a number below 1, or one that is no integer.
    """
    kind = type(branch).__name__
    for name in names:
        value, meaning = getattr(branch, name), "one of so many tokens" if name == "rate" else "it counts tokens"
        if not is_integer(value):
            raise TypeError(f"{name}={value!r} of {kind} must be an integer: {meaning}")
        number = int(value)
        if number < 1:
            raise ValueError(f"{name}={number} of {kind} is below 1: {meaning}, from 1 on")
        object.__setattr__(branch, name, number)
