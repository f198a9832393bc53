"""The schedule of a branch: which shards see each other's rows, how rows get there, and how work is balanced.

All are integers. Methods of shards or rows use arithmetic operators only, so that the same line serves Python integers,
NumPy arrays (the tests) and traced JAX integers (the shard's own number inside shard_map).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from ringjax._pattern.branch import Branch, remainder
from ringjax._schedule.side import Side

# How the results of branches are added: one by one, each to its rows; at once, dense branches in one pass over tokens;
# or in place, by kernels that start from the sums of earlier branches, which costs no more than to start from nothing.
Addition = Literal["one by one", "at once", "in place"]
# How the shards of a ring balance their work.
Balance = Literal["none", "zigzag", "stripes"]


class Rotation(NamedTuple):
    """A rotation of rows in one direction: to later shards (`direction` 1) or to earlier ones (-1).

    All rows of a shard make `steps` hops of one shard each. The shard after those needs only the rows of the shard's
    last or first `halo` tokens, which go there in one hop.
    """

    direction: Literal[1, -1]
    steps: int
    halo: int = 0

    @property
    def halo_hops(self) -> int:
        """The signed distance to the shard that gets the halo."""
        return self.direction * (self.steps + 1)

    def of_halo(self, side: Side) -> Side:
        """Returns the rows of the halo."""
        return side.part(side.shard_length - self.halo if self.direction > 0 else 0, self.halo)

    @property
    def hops(self) -> int:
        """The number of hops, that of the halo included."""
        return self.steps + (self.halo > 0)

    def halo_rows(self, side: Side) -> int:
        """Returns the number of rows of the halo."""
        halo = self.of_halo(side)
        return halo.num_chunks * halo.chunk_rows if self.halo else 0

    def num_rows(self, side: Side) -> int:
        """Returns the number of rows that a shard sends."""
        return self.steps * side.num_padded_rows + self.halo_rows(side)


@dataclasses.dataclass(frozen=True)
class BranchSchedule:
    """One branch of a pattern: its `queries` and `keys` on shards, and the rotations that bring them together.

    Rows rotate around rings of `ring_size` consecutive shards; the last ring may be shorter. In a closed ring, one
    rotation brings each shard the rows of all others; over two mesh axes it has `outer_size` groups of shards, see
    `inner_size`. In an open ring, rotations bring only the rows of neighbors that are seen. `is_general` says that
    queries and keys differ in their positions or their number: then all shards form one ring.

    In a union, `earlier_branches` has the earlier branches, whose pairs are left out, and their numbers. A shard is
    `ulysses_size` consecutive devices that have exchanged tokens for heads; if it `exchanges_rows`, only the rows of
    this branch. `strategy` says how rows are sent, `implementation` what computes them, and `addition` how results are
    added to those of other branches, see `Addition`. The backward needs `residual_bytes` for each row of a query head
    besides the query; None stands for those of XLA's tiles. If `rotates_queries`, the backward streams queries, not
    keys; if it `rotates_outputs`, so does the forward, with their outputs. The shards of a ring deal their rows as
    `balance` says; if a shard `sorts_halves`, its two zigzag halves are sorted by position. `tile_rows` has the most
    rows of its tiles of queries and of keys, if tiles do not end with chunks.
    """

    branch: Branch
    number: int
    queries: Side
    keys: Side
    key_rotations: tuple[Rotation, ...] = ()
    query_rotations: tuple[Rotation, ...] = ()
    ring_size: int = 1
    outer_size: int = 1
    is_causal: bool = False
    is_general: bool = False
    earlier_branches: tuple[tuple[int, Branch], ...] = ()
    ulysses_size: int = 1
    exchanges_rows: bool = False
    rotates_queries: bool = False
    rotates_outputs: bool = False
    balance: Balance = "none"
    sorts_halves: bool = True
    strategy: str = "ring"
    implementation: str = "xla"
    addition: Addition = "one by one"
    residual_bytes: int | None = None
    tile_rows: tuple[int, int] | None = None

    @property
    def num_shards(self) -> int:
        """The number of shards of the sequence."""
        return self.queries.num_shards

    @property
    def is_local(self) -> bool:
        """Whether a shard needs no rows of other shards."""
        return not self.key_rotations

    @property
    def is_gathered(self) -> bool:
        """Whether a shard gathers the keys of others all at once."""
        return self.strategy == "all_gather" and not self.is_local

    @property
    def gathers_queries(self) -> bool:
        """Whether a shard gathers the queries of others all at once, and computes their attention on its own keys."""
        return self.strategy == "gather_queries"

    @property
    def num_query_rows(self) -> int:
        """The padded rows of queries that a shard computes."""
        return self.queries.num_padded_rows * (self.gather_size if self.gathers_queries else 1)

    @property
    def has_one_step(self) -> bool:
        """Whether each shard computes a single step."""
        return self.is_local or self.is_gathered or self.gathers_queries

    @property
    def is_closed(self) -> bool:
        """Whether rows go all the way around their ring."""
        return not any(rotation.halo for rotation in self.key_rotations)

    def at(self, first_token: Any) -> "BranchSchedule":
        """Returns the schedule with this position of the first query, if it is known only at run time."""
        return dataclasses.replace(self, queries=self.queries.at(first_token))

    def of_devices(self) -> "BranchSchedule":
        """Returns the schedule in which each device is a shard of its own: as rows lie before they are exchanged."""
        queries, keys = self.queries.of_devices(self.ulysses_size), self.keys.of_devices(self.ulysses_size)
        lone = {"ulysses_size": 1, "exchanges_rows": False, "balance": "none"}
        return dataclasses.replace(self, queries=queries, keys=keys, **lone)

    @property
    def can_exchange_rows(self) -> bool:
        """Whether the rows of a shard are the concatenated rows of its devices."""
        side, own = self.of_devices().queries, self.queries
        is_cut_evenly = side.chunk_rows * self.branch.offset_rate == side.shard_length and own.is_cut_evenly
        return is_cut_evenly and side.is_strided and own.is_strided and self.is_closed and not self.is_general

    def of_group(self) -> "BranchSchedule":
        """Returns the schedule in which each group of each shard is a shard of its own."""
        return dataclasses.replace(self, queries=self.queries.of_group(), keys=self.keys.of_group())

    def in_whole_chunks(self) -> "BranchSchedule":
        """Returns the schedule in which chunks are computed as a whole."""
        whole = lambda side: dataclasses.replace(side, max_block_rows=side.num_tokens + side.chunk_length)
        return dataclasses.replace(self, queries=whole(self.queries), keys=whole(self.keys))

    def in_groups(self, least_tokens: int) -> "BranchSchedule":
        """Returns the schedule that computes segments in groups of at least so many tokens, one after the other."""
        in_groups = lambda side: side.in_groups(least_tokens)
        return dataclasses.replace(self, queries=in_groups(self.queries), keys=in_groups(self.keys))

    # Where rows are after some hops.

    def ring(self, shard: Any) -> tuple[Any, Any]:
        """Returns the first shard and the number of shards of the ring that a shard belongs to."""
        if self.ring_size == self.num_shards:
            return shard - shard, self.ring_size  # zero, of the kind that the shard's number is
        rest = self.num_shards % self.ring_size
        in_short_ring = shard // (self.num_shards - rest) if rest else 0
        return shard // self.ring_size * self.ring_size, self.ring_size - in_short_ring * (self.ring_size - rest)

    # A ring over two mesh axes goes around the shards of the inner axis, a group, with the rows of each group in turn:
    # a group's rows cross the outer axis to the next group, each to the shard of its place, and go around there. A hop
    # around the group costs the links of the inner axis alone, and each shard's rows cross the outer axis only as many
    # times as there are other groups. While rows go around one group, they are already on their way to the next.

    @property
    def inner_size(self) -> int:
        """The number of consecutive shards of a ring that rows go around before they cross to the next group."""
        return self.ring_size // self.outer_size

    @property
    def is_nested(self) -> bool:
        """Whether rows go around several groups of shards, one after the other."""
        return self.outer_size > 1

    def nested(self, inner_size: int) -> "BranchSchedule":
        """Returns the schedule whose rings go around groups of so many shards, if they have several of these."""
        is_closed = bool(self.key_rotations) and self.is_closed and self.num_shards % self.ring_size == 0
        if not is_closed or inner_size == 1 or self.ring_size % inner_size:
            return self
        return dataclasses.replace(self, outer_size=self.ring_size // inner_size)

    def turns(self, rotation: Rotation) -> tuple[Rotation, Rotation]:
        """Returns the rotations around a group, and from group to group, of which a rotation consists."""
        inner = self.inner_size - 1 if self.is_nested else rotation.steps
        return rotation._replace(steps=inner), rotation._replace(steps=self.outer_size - 1)

    def source(self, shard: Any, hops: Any, direction: int = 1) -> Any:
        """Returns the shard whose rows are at `shard` after `hops` hops in this direction."""
        if isinstance(hops, int) and hops == 0:
            return shard
        first, size = self.ring(shard)
        if self.is_nested:  # which is closed, and has a single direction
            inner, outer, place = self.inner_size, self.outer_size, shard - first
            group = remainder(place // inner + (outer - hops // inner), outer)
            return first + group * inner + remainder(remainder(place, inner) + (inner - remainder(hops, inner)), inner)
        back = self.ring_size * size - hops if direction > 0 else hops  # not below zero
        return first + remainder(shard - first + back, size)

    def is_new(self, shard: Any, hops: Any, direction: int = 1) -> Any:
        """Returns whether the rows that are at `shard` after `hops` hops are there for the first time.

        In an open ring, rows that have wrapped around its ends do not count as new.
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
        """Returns the (source, destination) pairs that move every shard's rows by `hops` shards around its group."""
        shards, of_groups = np.arange(self.num_shards), self._of_groups
        return tuple(zip(of_groups.source(shards, *_way(hops)).tolist(), shards.tolist(), strict=True))

    def crossing(self, hops: int) -> tuple[tuple[int, int], ...]:
        """Returns the pairs that move every shard's rows by `hops` groups along its ring."""
        shards = np.arange(self.num_shards)
        sources = self.source(shards, hops % self.outer_size * self.inner_size)
        return tuple(zip(sources.tolist(), shards.tolist(), strict=True))

    @property
    def _of_groups(self) -> "BranchSchedule":
        """The schedule in which each group of shards is a ring."""
        return dataclasses.replace(self, ring_size=self.inner_size, outer_size=1) if self.is_nested else self

    def hop(self, hops: int) -> tuple[tuple[int, int], ...]:
        """Returns the pairs of `permutation` that do not wrap around the ends of a ring."""
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
        """Whether all rows of a ring, or of a chunk if the branch is local, see each other."""
        if self.is_local:
            return self.queries.chunks == "segments"
        return self.is_closed and self.queries.is_in_one_segment and not self.is_general

    @property
    def is_dense(self) -> bool:
        """Whether no row is padding, and all rows that are computed together share a segment."""
        return self.queries.is_full and self.is_one_segment

    # In each step of a ring all shards wait for the one that computes most. So shards deal their rows, compute those
    # that they get, and deal the results back: masks are made from positions, and allow any order of rows.
    #
    # Zigzag: in a causal ring a later shard sees more keys, and in each step all of them or none. So each shard cuts
    # its padded rows into halves: shard j of g holds halves 2j and 2j + 1, and swaps the second with shard g - 1 - j.
    # It then has halves 2j and 2(g-1-j) + 1. For two shards j and i, half 2j is after 2i, or 2(g-1-j) + 1 is after
    # 2(g-1-i) + 1, never both, and likewise for the other two pairs: in each step each shard computes two whole halves,
    # in the first step one whole half and two triangles. Kernels that mask by row index get the halves sorted.
    #
    # Stripes: with packed documents a shard sees few others, and most steps have work for few shards. So each shard
    # cuts its padded rows into stripes, a multiple of g of them, and deals these round robin: stripe i goes to shard
    # i mod g. Shard j then has every g-th stripe of the ring, in order, and so an equal part of each long document: in
    # each step it has about as much work as the others. All rows but 1/g of them are sent, where zigzag sends half.

    @property
    def is_zigzag(self) -> bool:
        """Whether shards swap halves to compute."""
        return self.balance == "zigzag"

    @property
    def is_dealt(self) -> bool:
        """Whether shards compute rows of others, and these theirs."""
        return self.balance != "none"

    @property
    def can_deal_stripes(self) -> bool:
        """Whether the rows of a ring can be dealt in stripes: they go all the way around, in rings of one size."""
        return bool(self.key_rotations) and self.is_closed and self.num_shards % self.ring_size == 0

    def in_stripes(self, most_rows: int, multiple: int = 1) -> "BranchSchedule":
        """Returns the schedule that deals stripes, of at most so many rows and of a multiple of `multiple`."""
        deal = lambda side: side.in_stripes(self.ring_size, most_rows, multiple)
        return dataclasses.replace(self, balance="stripes", queries=deal(self.queries), keys=deal(self.keys))

    @property
    def pads_much(self) -> bool:
        """Whether padding adds more than an eighth to the rows of chunks."""
        sides = self.queries, self.keys
        return any(8 * side.num_blocks * side.block_rows > 9 * side.chunk_rows for side in sides)

    def in_zigzag(self) -> "BranchSchedule":
        """Returns the schedule that swaps halves where these balance a causal ring, and else deals nothing."""
        is_zigzag = self.is_causal and not self.is_local and self.is_one_segment
        balance, parts = ("zigzag", 2) if is_zigzag else ("none", 1)
        cut = lambda side: dataclasses.replace(side, parts=parts, row_multiple=1)
        return dataclasses.replace(self, balance=balance, queries=cut(self.queries), keys=cut(self.keys))

    @property
    def continues(self) -> bool:
        """Whether the branch adds to sums of earlier branches in place: its rows are all tokens, in token order."""
        are_in_order = self.queries.chunks != "phases" and not self.is_dealt
        do_queries_stay = not (self.gathers_queries or self.rotates_outputs)
        return self.addition == "in place" and self.branch.keeps_all and are_in_order and do_queries_stay

    def partner(self, shard: Any) -> Any:
        """Returns the shard with which a shard swaps the second half of its padded rows."""
        first, size = self.ring(shard)
        return first + (size - 1 - (shard - first))

    def is_late(self, shard: Any) -> Any:
        """Returns whether a shard's own half comes after the one that it gets from its partner."""
        first, size = self.ring(shard)
        return 2 * (shard - first) + 1 > size

    def origin(self, shard: Any, row: Any, side: Side) -> tuple[Any, Any]:
        """Returns the shard and the row that hold what `shard` computes in `row` of a chunk of this side."""
        if not self.is_dealt:
            return shard, row
        if self.balance == "stripes":
            first, size = self.ring(shard)
            stripe, own = row // side.part_rows, side.parts // size  # those from each shard
            dealt = remainder(stripe, own) * size + (shard - first)
            return first + stripe // own, dealt * side.part_rows + remainder(row, side.part_rows)
        half = side.part_rows
        if not self.sorts_halves:
            return shard + (row >= half) * (self.partner(shard) - shard), row
        is_swapped = (row >= half) != self.is_late(shard)
        return shard + is_swapped * (self.partner(shard) - shard), remainder(row, half) + is_swapped * half

    def swap_permutation(self) -> tuple[tuple[int, int], ...]:
        """Returns the (source, destination) pairs that swap the halves."""
        return tuple((shard, self.partner(shard)) for shard in range(self.num_shards))


Schedules = tuple[BranchSchedule, ...]


def exchanged_together(schedules: Iterable[BranchSchedule]) -> list[Schedules]:
    """Returns the schedules in groups of branches for which the same tokens are exchanged."""
    groups: dict[tuple[int, int | None], list[BranchSchedule]] = {}
    for schedule in schedules:
        rows_of = schedule.number if schedule.exchanges_rows else None
        groups.setdefault((schedule.ulysses_size, rows_of), []).append(schedule)
    return [tuple(group) for group in groups.values()]


def in_order_of_sums(schedules: Iterable[BranchSchedule]) -> list[BranchSchedule]:
    """Returns the schedules in the order of their addition: those that continue sums come after all others."""
    return sorted(schedules, key=lambda schedule: schedule.continues)


def _way(hops: int) -> tuple[int, int]:
    return abs(hops), 1 if hops > 0 else -1
