"""The schedule of a branch: which shards' rows meet, on which way they travel, and how work is balanced, in integers.

What is said of a shard or a slot uses arithmetic operators only, so that the same line serves Python integers, NumPy
arrays (the tests) and traced JAX integers (the shard's own number inside shard_map).
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np

from ringjax._definition.branch import MAX_POSITIONS, Branch, remainder
from ringjax._definition.pattern import DilatedPattern
from ringjax._schedule.side import Side
from ringjax._schedule.traits import OF_TILES, Traits

MAX_BLOCK_ROWS = 512


class Leg(NamedTuple):
    """A way that rows go: to later shards (`direction` 1) or to earlier ones (-1), one after the other.

    All rows of a shard make so many `rotations` by one shard. Behind these, the `halo` is the number of the shard's
    tokens, the last ones or the first, whose rows the next shard still needs: they go there in one hop.
    """

    direction: Literal[1, -1]
    rotations: int
    halo: int = 0

    @property
    def halo_hops(self) -> int:
        """The distance of the shard that gets the halo, signed."""
        return self.direction * (self.rotations + 1)

    def of_halo(self, side: Side) -> Side:
        """Returns the rows of the halo."""
        return side.part(side.shard_length - self.halo if self.direction > 0 else 0, self.halo)

    @property
    def hops(self) -> int:
        """The number of hops, that of the halo included."""
        return self.rotations + (self.halo > 0)

    def halo_rows(self, side: Side) -> int:
        """Returns the number of rows of the halo."""
        halo = self.of_halo(side)
        return halo.num_chunks * halo.num_rows if self.halo else 0

    def num_rows(self, side: Side) -> int:
        """Returns the number of rows that a shard sends."""
        return self.rotations * side.num_slots + self.halo_rows(side)


@dataclasses.dataclass(frozen=True)
class BranchSchedule:
    """One branch of a pattern on shards of `queries` and of `keys`, whose rows meet on their ways.

    Rotations go round rings of `ring_size` consecutive shards; the last ring may be shorter. Either rings are closed,
    and one leg brings each shard the rows of all others in its ring. Or rings are open, and the legs bring only the
    rows of neighbours that are seen. `is_general` says that queries and keys differ in their positions or their number:
    then all shards form one ring.

    In a union, `earlier` has the numbers of earlier branches and these branches, whose pairs are left out. A shard is
    `exchange_size` consecutive devices that have exchanged tokens for heads. Where it `exchanges_rows`, they have
    exchanged only the rows of this branch. The `strategy` says how rows meet, the `implementation` what computes them,
    and its `traits` how.
    Where it `sorts_halves`, the two halves of balanced shards are sorted. `tile_rows` are the most rows of its tiles of
    queries and of keys, where tiles do not end with chunks.
    """

    branch: Branch
    number: int
    queries: Side
    keys: Side
    key_legs: tuple[Leg, ...] = ()
    query_legs: tuple[Leg, ...] = ()
    ring_size: int = 1
    is_causal: bool = False
    is_general: bool = False
    earlier: tuple[tuple[int, Branch], ...] = ()
    exchange_size: int = 1
    exchanges_rows: bool = False
    sorts_halves: bool = True
    strategy: str = "ring"
    implementation: str = "xla"
    traits: Traits = OF_TILES
    tile_rows: tuple[int, int] | None = None

    @property
    def num_shards(self) -> int:
        """The number of shards of the sequence."""
        return self.queries.num_shards

    @property
    def is_local(self) -> bool:
        """Whether nothing travels."""
        return not self.key_legs

    @property
    def is_closed(self) -> bool:
        """Whether rows go all the way round their ring."""
        return not any(leg.halo for leg in self.key_legs)

    def at(self, first_token: Any) -> "BranchSchedule":
        """Returns the schedule of queries that begin at this position, where that was not known."""
        return dataclasses.replace(self, queries=self.queries.at(first_token))

    def of_devices(self) -> "BranchSchedule":
        """Returns the schedule in which each device is a shard of its own: as rows lie before they are exchanged."""
        queries, keys = self.queries.of_devices(self.exchange_size), self.keys.of_devices(self.exchange_size)
        return dataclasses.replace(self, queries=queries, keys=keys, exchange_size=1, exchanges_rows=False)

    @property
    def can_exchange_rows(self) -> bool:
        """Whether the rows of a shard are those of its devices, one after the other."""
        side = self.of_devices().queries
        is_cut_evenly = side.num_rows * self.branch.offset_rate == side.shard_length
        return is_cut_evenly and side.is_strided and self.queries.is_strided and self.is_closed and not self.is_general

    def of_group(self) -> "BranchSchedule":
        """Returns the schedule in which each group of each shard is a shard of its own."""
        return dataclasses.replace(self, queries=self.queries.of_group(), keys=self.keys.of_group())

    def in_whole_chunks(self) -> "BranchSchedule":
        """Returns the schedule in which chunks are computed as a whole."""
        whole = lambda side: dataclasses.replace(side, max_block_rows=side.span + side.chunk_length)
        return dataclasses.replace(self, queries=whole(self.queries), keys=whole(self.keys))

    # Ways: where rows are after some rotations.

    def ring(self, shard: Any) -> tuple[Any, Any]:
        """Returns the first shard and the number of shards of the ring that a shard belongs to."""
        if self.ring_size == self.num_shards:
            return shard - shard, self.ring_size  # zero, of the kind that the shard's number is
        rest = self.num_shards % self.ring_size
        in_short_ring = shard // (self.num_shards - rest) if rest else 0
        return shard // self.ring_size * self.ring_size, self.ring_size - in_short_ring * (self.ring_size - rest)

    def source(self, shard: Any, hops: Any, direction: int = 1) -> Any:
        """Returns the shard whose rows are at `shard` after so many rotations in this direction."""
        if isinstance(hops, int) and hops == 0:
            return shard
        first, size = self.ring(shard)
        back = self.ring_size * size - hops if direction > 0 else hops  # not below zero
        return first + remainder(shard - first + back, size)

    def is_new(self, shard: Any, hops: Any, direction: int = 1) -> Any:
        """Returns whether the rows that are at `shard` after so many rotations are there for the first time.

        Those of open rings are not where they came round from the other end.
        """
        if isinstance(hops, int) and hops == 0:
            return True
        if self.is_closed and self.num_shards % self.ring_size == 0:
            return True
        if self.is_closed:
            return hops < self.ring(shard)[1]
        first, size = self.ring(shard)
        return shard >= first + hops if direction > 0 else shard + hops < first + size

    def permutation(self, hops: int) -> tuple[tuple[int, int], ...]:
        """Returns the (source, destination) pairs that move every shard's rows by `hops` shards along its ring."""
        shards = np.arange(self.num_shards)
        return tuple(zip(self.source(shards, *_way(hops)).tolist(), shards.tolist(), strict=True))

    def hop(self, hops: int) -> tuple[tuple[int, int], ...]:
        """Returns those pairs of `permutation` that do not lead round the end of a ring."""
        shards = np.arange(self.num_shards)
        is_new = np.broadcast_to(self.is_new(shards, *_way(hops)), shards.shape)
        return tuple(pair for pair, is_one in zip(self.permutation(hops), is_new, strict=True) if is_one)

    @property
    def gather_size(self) -> int:
        """The number of consecutive shards that gather together: a ring; all shards where the last ring is shorter."""
        return self.num_shards if self.num_shards % self.ring_size else self.ring_size

    @property
    def gather_groups(self) -> list[list[int]]:
        """The shards that gather together."""
        size = self.gather_size
        return [list(range(first, first + size)) for first in range(0, self.num_shards, size)]

    @property
    def is_one_segment(self) -> bool:
        """Whether the rows of each ring, or else of each chunk, all see each other."""
        if self.is_local:
            return self.queries.chunks == "segments"
        return self.is_closed and self.queries.is_in_one_segment and not self.is_general

    @property
    def is_dense(self) -> bool:
        """Whether every slot holds a row, and rows that meet all share a segment."""
        return self.queries.is_full and self.is_one_segment

    # Balance: in a causal ring a later shard has more keys to see, in each step all or nothing. So each shard cuts its
    # slots in halves, of which shard j of g holds number 2j and 2j + 1, and swaps the second with shard g - 1 - j. It
    # then has the halves 2j and 2(g-1-j) + 1. Of two shards j and i, half 2j is after 2i, or 2(g-1-j) + 1 is after
    # 2(g-1-i) + 1, never both, and likewise for the other two pairs: in each step each shard computes two whole halves,
    # in the first one whole half and two triangles. Where masks tell positions, the order of the halves is nothing to
    # them; kernels that tell rows by their places have them sorted.

    @property
    def is_balanced(self) -> bool:
        """Whether shards swap halves to compute."""
        return self.queries.halves > 1

    def partner(self, shard: Any) -> Any:
        """Returns the shard with which a shard swaps the second half of its slots."""
        first, size = self.ring(shard)
        return first + (size - 1 - (shard - first))

    def is_late(self, shard: Any) -> Any:
        """Returns whether a shard's own half comes after the one that it gets from its partner."""
        first, size = self.ring(shard)
        return 2 * (shard - first) + 1 > size

    def origin(self, shard: Any, slot: Any) -> tuple[Any, Any]:
        """Returns the shard and the slot that hold what `shard` computes in `slot`."""
        if not self.is_balanced:
            return shard, slot
        half = self.queries.num_slots // 2
        if not self.sorts_halves:
            return shard + (slot >= half) * (self.partner(shard) - shard), slot
        is_swapped = (slot >= half) != self.is_late(shard)
        return shard + is_swapped * (self.partner(shard) - shard), remainder(slot, half) + is_swapped * half

    def swap_permutation(self) -> tuple[tuple[int, int], ...]:
        """Returns the (source, destination) pairs that swap the halves."""
        return tuple((shard, self.partner(shard)) for shard in range(self.num_shards))


def _way(hops: int) -> tuple[int, int]:
    return abs(hops), 1 if hops > 0 else -1


@functools.lru_cache(maxsize=1024)
def make_schedule(
    pattern: DilatedPattern,
    length: int,
    num_devices: int,
    num_kv_heads: int,
    is_causal: bool = False,
    max_block_rows: int = MAX_BLOCK_ROWS,
    key_length: int | None = None,
    query_offset: int | None = 0,
    exchange_size: int = 1,
) -> tuple[BranchSchedule, ...]:
    """Returns the schedule of each branch for `length` queries, padded to equal shards, and `num_kv_heads` heads.

    There are `key_length` keys, as many as queries by default; `query_offset` is the position of the first query, None
    where it is known only when the program runs. Of the devices, `exchange_size` make up a shard.
    """
    key_length = length if key_length is None else key_length
    num_shards = num_devices // exchange_size
    shard_length, key_shard_length = (exchange_size * -(-tokens // num_devices) for tokens in (length, key_length))
    is_moving = query_offset is None
    if query_offset is None:  # as far as the last position: what holds there holds everywhere
        query_offset = MAX_POSITIONS - num_shards * shard_length
    is_union = pattern.merge == "union" and pattern.heads == "all"
    # Beyond these numbers nothing changes: a segment that holds all tokens holds the padding too, within 32 bits.
    stop = max(query_offset + num_shards * shard_length, num_shards * key_shard_length)
    end = max(query_offset + length, key_length)
    most = max(stop, num_kv_heads, len(pattern.branches))
    branches = [branch.within(stop, end, most) for branch in pattern.branches]
    is_general = query_offset > 0 or length != key_length

    def schedule(number: int, branch: Branch) -> BranchSchedule:
        sides = functools.partial(Side, branch, num_shards=num_shards, max_block_rows=max_block_rows)
        keys = sides(key_length, key_shard_length, span=key_shard_length)
        first_token = 0 if is_moving else query_offset
        queries = sides(length, shard_length, span=shard_length, first_token=first_token, is_moving=is_moving)
        earlier = tuple(enumerate(branches[:number])) if is_union else ()
        return _lay_ways(
            BranchSchedule(
                branch,
                number,
                queries,
                keys,
                is_causal=is_causal,
                is_general=is_general,
                earlier=earlier,
                exchange_size=exchange_size,
            )
        )

    return tuple(schedule(number, branch) for number, branch in enumerate(branches))


def _lay_ways(one: BranchSchedule) -> BranchSchedule:
    """Returns the schedule with its rings, legs and chunks."""
    side, branch, num_shards = one.queries, one.branch, one.num_shards
    if one.is_general:
        ring = (Leg(1, num_shards - 1),) if num_shards > 1 else ()
        return dataclasses.replace(one, ring_size=num_shards, key_legs=ring, query_legs=ring)
    period = branch.period or num_shards * side.shard_length
    # Shards between two boundaries that are boundaries of segments as well share nothing with the others.
    ring_size = min(num_shards, math.lcm(period, side.shard_length) // side.shard_length)
    back, ahead = _seen_across(branch, side)
    key_legs, query_legs = _legs(1, back, side), _legs(-1, ahead, side)
    if not one.is_causal:
        key_legs = query_legs = key_legs + query_legs
    # By bytes, then by messages; rows of segments that fill shards are seen all round their ring.
    of_ring = (ring_size - 1) * side.shard_length, ring_size - 1
    of_legs = back + (0 if one.is_causal else ahead), sum(leg.rotations + 1 for leg in key_legs)
    if not key_legs:
        ring_size = 1
    elif side.is_in_one_segment or of_ring < of_legs:
        key_legs = query_legs = (Leg(1, ring_size - 1),)
    one = dataclasses.replace(one, key_legs=key_legs, query_legs=query_legs, ring_size=ring_size)
    return _cut(one)


def _legs(direction: Literal[1, -1], tokens: int, side: Side) -> tuple[Leg, ...]:
    rotations = max(0, -(-tokens // side.shard_length) - 1)
    return (Leg(direction, rotations, tokens - rotations * side.shard_length),) if tokens else ()


def _seen_across(branch: Branch, side: Side) -> tuple[int, int]:
    """Returns how many tokens before the boundary of two shards those behind it see at most, and the other way."""
    back = ahead = 0
    for shard in range(1, side.num_shards):
        boundary = min(shard * side.shard_length, side.length)
        if boundary < side.length:
            back = max(back, boundary - branch.seen(boundary)[0])
            ahead = max(ahead, min(branch.seen(boundary - 1)[1] + 1, side.length) - boundary)
    # Whole rows of residues, where shards are cut into these.
    unit = branch.modulus if side.shard_length % branch.modulus == 0 else 1
    return -(-back // unit) * unit, -(-ahead // unit) * unit


def _cut(one: BranchSchedule) -> BranchSchedule:
    """Returns the schedule with shards cut into chunks, and into halves where the work is to be balanced."""
    branch, side = one.branch, one.queries
    if one.is_local and branch.period is not None:
        side = dataclasses.replace(side, chunks="segments")
    elif branch.modulus > 1 and side.shard_length % branch.modulus == 0:
        side = dataclasses.replace(side, chunks="residues")
    if one.is_causal and not one.is_local and one.is_one_segment:
        side = dataclasses.replace(side, halves=2)
    return dataclasses.replace(one, queries=side, keys=side)
