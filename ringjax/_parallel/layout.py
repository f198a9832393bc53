"""One branch on one shard: takes rows and their documents, lays them out for the kernel, and puts results back.

B batch, n tokens of the shard, m padded rows, N heads of the rows: query heads, or key/value heads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from ringjax._kernels.attention_step import AttentionStep, DropoutCounters, PaddedRows, Tiles
from ringjax._kernels.interface import Implementation, per_row
from ringjax._kernels.rows import Rows
from ringjax._kernels.softmax import Keys, accumulation_dtype
from ringjax._kernels.strides import Combine, combined_dtype
from ringjax._mesh.order import after, documents_behind, zeros_behind
from ringjax._parallel.collectives import Collectives, Moved
from ringjax._parallel.plan import Plan
from ringjax._schedule.schedule import BranchSchedule, Rotation
from ringjax._schedule.side import Side


class Layout(NamedTuple):
    """The layout that an implementation gives the rows of queries, or of keys, of a branch.

    `rows` has key/value heads. `groups` is the number of query heads of each, None for the rows of keys.
    """

    rows: Rows
    implementation: Implementation
    groups: int | None = None

    @property
    def _own_rows(self) -> Rows:
        """The rows with query heads for queries, and key/value heads for keys."""
        return self.rows if self.groups is None else self.rows.in_groups(self.groups)

    def of_keys(self) -> "Layout":
        """Returns the layout of keys."""
        return self._replace(rows=self.rows.of_keys(), groups=None)

    def take(self, tokens: Array) -> Array:
        """Takes rows of tokens, and lays them out."""
        return self.lay_out(self.take_rows(tokens))

    def take_rows(self, tokens: Shaped[Array, "B n all D"]) -> Shaped[Array, "B m N D"]:
        """Takes rows of tokens as they are."""
        own = self._own_rows
        return own.take(own.heads.cut(tokens))

    def lay_out(self, rows: Shaped[Array, "B m N D"]) -> Array:
        """Lays rows out."""
        return self.implementation.lay_out(self.rows.side, self.rows.pad(rows), self.groups)

    def lay_out_documents(self, documents: Int[Array, "B m O 1"]) -> Int[Array, "*rows"]:
        """Lays out the documents of rows, which have key/value heads even for queries."""
        return per_row(self._replace(groups=None).lay_out(documents), self.implementation.rows_axis)

    def take_back(self, tiles: Array) -> Shaped[Array, "B m N D"]:
        """Undoes `lay_out`."""
        return self.rows.unpad(self.implementation.take_back(self.rows.side, tiles))

    def put(self, tokens: Array, tiles: Array, *combine: Combine) -> Array:
        """Puts laid-out rows in their places among tokens."""
        return self.put_rows(tokens, self.take_back(tiles), *combine)

    def put_rows(self, tokens: Array, rows: Array, *combine: Combine) -> Array:
        """Puts rows in their places among tokens, in the dtype that `combine` gives."""
        own, tokens = self._own_rows, tokens.astype(combined_dtype(tokens, rows, *combine))
        return own.heads.paste(tokens, own.put(own.heads.cut(tokens), rows, *combine))

    def spread(self, tiles: Array, num_heads: int, fill: float) -> Array:
        """Returns tokens of `num_heads` heads: laid-out rows in their places, and `fill` elsewhere."""
        own = self._own_rows
        heads, part = own.heads, own.spread(self.take_back(tiles), fill)
        if heads.size == num_heads:
            return part
        return heads.paste(jnp.full_like(part, fill, shape=(*part.shape[:2], num_heads, part.shape[3])), part)


class Operand(NamedTuple):
    """The queries, or the keys and values, of a shard; `make` builds kernel inputs from laid-out rows of `tokens`."""

    layout: Layout
    tokens: tuple[Array, ...]
    documents: Int[Array, "B n"] | None
    make: Callable[..., Any]

    @property
    def side(self) -> Side:
        """The side of the branch that the operand is."""
        return self.layout.rows.side

    def of_part(self, side: Side) -> "Operand":
        """Returns a part of the operand."""
        return self._replace(layout=self.layout._replace(rows=self.layout.rows._replace(side=side)))

    def of_halo(self, rotation: Rotation) -> "Operand":
        """Returns the part that the last hop of a rotation sends."""
        return self.of_part(rotation.of_halo(self.side))

    def take(self) -> Tiles:
        """Takes the rows, laid out."""
        return self.lay_out(self.take_rows())

    def take_rows(self) -> Any:
        """Takes the rows as they are, and their documents for each class of heads."""
        rows = tuple(map(self.layout.take_rows, self.tokens))
        if self.documents is None:
            return rows, None
        of_classes = self.layout.rows.of_classes()
        shape = (*self.documents.shape, of_classes.offset.size, 1)
        return rows, of_classes.take(jnp.broadcast_to(self.documents[:, :, None, None], shape))

    def lay_out(self, taken: Any) -> Tiles:
        """Lays out the result of `take_rows`."""
        rows, documents = taken
        arrays = self.make(*map(self.layout.lay_out, rows))
        return Tiles(arrays, None if documents is None else self.layout.lay_out_documents(documents))


class Task(NamedTuple):
    """One branch on one shard, with its queries and keys. It sends only after the arrays `earlier` have arrived.

    Where `is_branch_final`, nothing is added to the results of the branch, so they are sent in the dtypes of the
    caller's arrays. `total` is the total of the earlier branches. `before` has its laid-out rows if the branch adds to
    them in place.
    """

    queries: Operand
    keys: Operand
    counters: DropoutCounters | None
    plan: Plan
    earlier: Any = None
    is_branch_final: bool = False
    total: Any = ()
    before: tuple[Array, ...] | None = None

    @property
    def schedule(self) -> BranchSchedule:
        """The schedule of the branch."""
        return self.queries.layout.rows.schedule

    @property
    def implementation(self) -> Implementation:
        """What computes the branch."""
        return self.queries.layout.implementation

    @property
    def collectives(self) -> Collectives:
        """How its rows move."""
        return self.plan.collectives(self.schedule)

    def narrow(self, results: Sequence[Array], like: Sequence[Array]) -> tuple[Array, ...]:
        """Returns results in the dtypes in which they are sent."""
        if not self.is_branch_final:
            return tuple(results)
        return tuple(result.astype(array.dtype) for result, array in zip(results, like, strict=True))

    def start(self, queries: Tiles, keys: Tiles) -> Any:
        """Returns the partial softmax to which the branch adds."""
        return self.implementation.start(queries.arrays, keys.arrays, self.before, self.plan.has_maximum)

    def before_of(self, *names: str) -> dict[str, Array]:
        """Returns the named gradients of earlier branches to which this one adds in place; {} if it does not."""
        of_each = zip(("query", "key", "value"), self.before or (), strict=False)
        return {name: array for name, array in of_each if name in names}

    def meet(self, queries: Any, keys: Any, is_new: Any = True, hops: Any = 0) -> AttentionStep:
        """Returns the attention step of queries and keys, as the implementation's `see` returns them."""
        continues = self.before is not None
        return AttentionStep(self.schedule, queries, keys, is_new, hops, self.is_branch_final, continues)

    def zeros(self, hops: Any = 0, before: Any = ()) -> tuple[Array, ...]:
        """Returns the zeros from which gradient sums start after `hops` hops, once the arrays `before` are there.

        By default these are the inputs of the branch.
        """
        rows, tokens = self.queries.layout.rows, (*self.queries.tokens, *self.keys.tokens)
        # Reading an element of an array that the compiler may shard would be a collective.
        arrays = (before or (self.total, tokens)) if rows.is_whole else ()
        return zeros_behind((rows.shard, hops), accumulation_dtype(*tokens), 3, arrays)

    def take(self, operand: Operand, *, is_copied: bool = False) -> Tiles:
        """Takes the rows of an operand, on the shard that keeps them."""
        return after(operand.take(), self.earlier, is_copied=is_copied)

    def take_dealt(self, operand: Operand) -> Tiles:
        """Takes the rows of an operand, on the shard that computes them."""
        # Dealing copies the rows. `is_copied` keeps XLA from making the backward's copies during the forward's
        # ring. Several branches wait for each other anyway.
        is_only = len(self.plan.schedules) == 1
        is_copied = is_only and self.schedule.is_dealt and operand.layout.rows.is_whole
        return self.collectives.deal(self.take(operand, is_copied=is_copied), operand.side)

    def read_behind(self, tiles: Tiles, computed: Any) -> Tiles:
        """Returns arriving tiles, with documents that kernels for TPUs read only after what is `computed`."""
        return tiles._replace(documents=documents_behind(tiles.documents, computed, self.implementation.platform))

    def send(self, operand: Operand, rotation: Rotation) -> "Halo":
        """Sends the halo of an operand, and returns the one that arrives."""
        halo = operand.of_halo(rotation)
        rows, documents = after(halo.take_rows(), self.earlier)
        moved = self.collectives.hop_rows(rows, rotation.halo_hops)
        if documents is not None:
            documents = self.collectives.hop(documents, rotation.halo_hops)
        return Halo(halo, moved, documents)

    def padded(self, operand: Operand, tiles: Tiles, hops: Any = 0, direction: int = 1) -> PaddedRows:
        """Returns the padded rows of an operand's tiles after so many hops."""
        rows = operand.layout.rows
        shard = self.schedule.source(rows.shard.astype(jnp.uint32), hops, direction)
        return PaddedRows(rows, shard[None], self.schedule.is_dealt, tiles.documents)


class Halo(NamedTuple):
    """A part of an operand in transit."""

    operand: Operand
    rows: Moved
    documents: Array | None

    @property
    def arrays(self) -> Any:
        """The arrays in transit."""
        return self.rows.messages, self.documents

    def behind(self, computed: Any) -> tuple[Tiles, Any]:
        """Lays out the halo after an ordering barrier with what is `computed` meanwhile, and returns both.

        Without the barrier XLA may split the messages before it computes, and so wait for them first.
        """
        (messages, documents), computed = jax.lax.optimization_barrier((self.arrays, computed))
        return self.operand.lay_out((self.rows._replace(messages=messages).take_apart(), documents)), computed


def operand_of_keys(layout: Layout, key: Array, value: Array, documents: Array | None) -> Operand:
    """Returns keys and values as an operand, given the layout of queries."""
    return Operand(layout.of_keys(), (key, value), documents, Keys)
