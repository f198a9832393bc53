"""The interface of implementations: what computes where rows of queries and of keys meet."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Shaped

from ringjax._kernels.attention_step import AttentionStep, DropoutCounters, PaddedRows
from ringjax._kernels.softmax import Keys, Queries, Weighting, residuals
from ringjax._kernels.strides import Strides
from ringjax._schedule.schedule import Addition, BranchSchedule
from ringjax._schedule.side import Side


class Request(NamedTuple):
    """What a call asks for: the arrays or their shapes, and the platform.

    `unmapped` are the axes of the mesh that shard_map does not map over. `needs` is what is asked for beyond the
    pattern: arguments that few implementations serve. `needs_lse` says whether the lse is asked for, and may have a
    gradient.
    `device_kind` is what jax calls the devices, `block_size` the most rows of a tile, where the caller says so. Where
    the `documents_are_sorted`, the documents of tokens do not decrease.
    """

    query: Any
    key: Any
    value: Any
    platform: str
    unmapped: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    needs_lse: bool = False
    device_kind: str = ""
    block_size: int | None = None
    precision: Any = None
    documents_are_sorted: bool = False

    @classmethod
    def of(cls, asked: Any, query: Any, key: Any, value: Any, platform: str, **others: Any) -> "Request":
        """Returns the request of options that are read."""
        return cls(
            query,
            key,
            value,
            platform,
            block_size=None if asked.block_size is None else int(asked.block_size),
            precision=asked.precision,
            documents_are_sorted=bool(asked.documents_are_sorted),
            **others,
        )

    @property
    def orders_collectives(self) -> bool:
        """Whether collectives wait for each other, see `ringjax._mesh.order`: then nothing of theirs is left out."""
        return self.platform == "cpu"

    def obstacle_to_kernels(self) -> str | None:
        """Returns why no kernel can serve the request, None where one may."""
        dtypes = self.query.dtype, self.key.dtype, self.value.dtype
        if len(set(dtypes)) > 1:
            return "it takes one dtype, and query, key and value are of {}, {} and {}".format(*dtypes)
        if self.unmapped:
            # To the compiler's partitioner a kernel is opaque: it would gather what these axes cut.
            return f"the mesh axes {self.unmapped} are Auto: say with spec=P(...) what they cut, or make them Explicit"
        return None


class Implementation(abc.ABC):
    """Lays rows out as it wants them, adds what attention steps contribute, and says what it cannot serve.

    Queries, softmaxes under way (partials) and gradients are trees of arrays in a layout of its own. Others know only
    the axis of their padded rows.
    """

    rows_axis: int  # along which the rows of a shard follow each other; the width is last, or before rows that are
    platform: str | None  # the one that it runs on, as jax names it; None for any
    addition: Addition = "one by one"  # how results of branches are added

    @abc.abstractmethod
    def serve(self, request: Request, schedule: BranchSchedule) -> tuple[BranchSchedule, str | None]:
        """Returns the schedule of a branch in tiles of its own, and why it cannot serve that, None where it can."""

    @property
    def strides(self) -> Strides:
        """How it takes one of r tokens for each head, where a branch keeps such rows."""
        return Strides()

    @abc.abstractmethod
    def lay_out(self, side: Side, rows: Shaped[Array, "B m N D"], groups: int | None = None) -> Array:
        """Lays rows out; those of queries by groups, the heads of one key/value head."""

    @abc.abstractmethod
    def take_back(self, side: Side, tiles: Array) -> Shaped[Array, "B m N D"]:
        """Undoes `lay_out`."""

    @abc.abstractmethod
    def see(self, padded: PaddedRows, counters: DropoutCounters | None = None) -> Any:
        """Returns what it sees of padded rows of queries, whose dropout is drawn from `counters`, or of keys."""

    @abc.abstractmethod
    def start(self, query: Array, keys: Keys, before: tuple[Array, ...] | None = None) -> Any:
        """Returns the softmax of nothing, or the one that has the results `before`, laid out as `finish` returns them.

        Only an implementation that adds in place is given any.
        """

    @abc.abstractmethod
    def forward(self, query: Array, keys: Keys, step: AttentionStep, weighting: Weighting, partial: Any) -> Any:
        """Adds the attention of queries on keys to a softmax under way."""

    @abc.abstractmethod
    def finish(self, partial: Any) -> tuple[Array, Array]:
        """Returns the output and the lse of each row: zeros and -inf for a row that attends to nothing."""

    def residuals(
        self,
        out: Float[Array, "*B n N V"],
        lse: Float[Array, "*B n N"],
        out_grad: Float[Array, "*B n N V"],
        lse_grad: Any,
    ) -> tuple[Array, ...]:
        """Returns what the backward needs of each query, beside itself: arrays [*B, n, N, ...] of any width."""
        return residuals(out, lse, out_grad, lse_grad)

    def make_queries(self, *arrays: Array) -> Any:
        """Makes what `backward` takes, of queries and of their `residuals`, laid out."""
        query, out_grad, *narrow = arrays
        return Queries(query, out_grad, *(per_row(array, self.rows_axis) for array in narrow))

    @abc.abstractmethod
    def start_gradients(self, queries: Any, keys: Keys, zeros: Sequence[Array], **given: Array | None) -> Any:
        """Returns the gradients of nothing but those given. Those of queries, keys and values may begin as `zeros`.

        A gradient that is returned as None may be given as None.
        """

    @abc.abstractmethod
    def backward(self, queries: Any, keys: Keys, step: AttentionStep, weighting: Weighting, grads: Any) -> Any:
        """Adds what the pairs that meet contribute to sums of gradients under way."""

    @abc.abstractmethod
    def finish_gradients(self, grads: Any, weighting: Weighting) -> tuple[Array, Array, Array]:
        """Returns the gradients of queries, keys and values, laid out as these are."""


def width_axis(rows_axis: int) -> int:
    """Returns the axis of the width of rows that are laid out."""
    return -2 if rows_axis == -1 else -1


def per_row(tiles: Array, rows_axis: int) -> Array:
    """Returns the values of rows that are laid out, one in each: they have no width."""
    return jax.lax.index_in_dim(tiles, 0, width_axis(rows_axis), keepdims=False)
