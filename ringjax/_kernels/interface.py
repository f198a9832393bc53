"""The interface of implementations, which compute attention steps."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Shaped

from ringjax._kernels.attention_step import AttentionStep, DropoutCounters, PaddedRows
from ringjax._kernels.softmax import Keys, Queries, Weighting, residuals
from ringjax._kernels.strides import Strides
from ringjax._schedule.schedule import Addition, Balance, BranchSchedule
from ringjax._schedule.side import Side


class Request(NamedTuple):
    """What a call asks of implementations: the arrays or their shapes, the platform, and options.

    `unmapped` are the mesh axes that shard_map does not map over. `needs` names the given arguments that few
    implementations serve. If `needs_lse`, the lse is returned, and may have a gradient. `device_kind` is jax's name of
    the devices, `block_size` the most rows of a tile, and `balance` how rings deal rows, if the caller sets them. If
    `documents_are_sorted`, document numbers do not decrease along the tokens.
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
    balance: Balance | None = None

    @classmethod
    def of(cls, asked: Any, query: Any, key: Any, value: Any, platform: str, **others: Any) -> "Request":
        """Returns the request of a call with the options `asked`."""
        return cls(
            query,
            key,
            value,
            platform,
            block_size=None if asked.block_size is None else int(asked.block_size),
            precision=asked.precision,
            documents_are_sorted=bool(asked.documents_are_sorted),
            balance=asked.balance,
            **others,
        )

    @property
    def orders_collectives(self) -> bool:
        """Whether collectives wait for each other, see `ringjax._mesh.order`: then XLA eliminates no unused one."""
        return self.platform == "cpu"

    def obstacle_to_kernels(self) -> str | None:
        """Returns why no kernel can serve the request, None where one may."""
        dtypes = self.query.dtype, self.key.dtype, self.value.dtype
        if len(set(dtypes)) > 1:
            return "it takes one dtype, and query, key and value are of {}, {} and {}".format(*dtypes)
        if self.unmapped:
            # XLA's partitioner cannot split a kernel: it would gather arrays that these axes cut.
            return f"the mesh axes {self.unmapped} are Auto: say with spec=P(...) what they cut, or make them Explicit"
        return None


class Implementation(abc.ABC):
    """Computes attention steps in its own layout of rows, and states what it cannot serve.

    Queries and partial softmaxes are trees of arrays in that layout, gradients named tuples of query, key and value.
    Other modules know only the axis of their padded rows.
    """

    rows_axis: int  # of a shard's rows in laid-out arrays; the width is last, or before rows that are last
    platform: str | None  # the platform that it runs on, as jax names it; None for any
    addition: Addition = "one by one"  # how results of branches are added

    @abc.abstractmethod
    def serve(self, request: Request, schedule: BranchSchedule) -> tuple[BranchSchedule, str | None]:
        """Returns the schedule of a branch in its own tiles, and why it cannot serve it, None if it can."""

    @property
    def strides(self) -> Strides:
        """How it takes and puts every r-th token of each head, for branches that keep these."""
        return Strides()

    @abc.abstractmethod
    def lay_out(self, side: Side, rows: Shaped[Array, "B m N D"], groups: int | None = None) -> Array:
        """Lays out rows; `groups` is the number of query heads of a key/value head, None for keys and values."""

    @abc.abstractmethod
    def take_back(self, side: Side, tiles: Array) -> Shaped[Array, "B m N D"]:
        """Undoes `lay_out`."""

    @abc.abstractmethod
    def see(self, padded: PaddedRows, counters: DropoutCounters | None = None) -> Any:
        """Returns one side of a step, given padded rows of keys, or of queries with their dropout `counters`."""

    @abc.abstractmethod
    def start(
        self, query: Array, keys: Keys, before: tuple[Array, ...] | None = None, has_maximum: bool = False
    ) -> Any:
        """Returns an empty partial softmax, or one with the results `before`, laid out as `finish` returns them.

        Only an implementation that adds in place is given `before`. If it `has_maximum`, `finish` returns the greatest
        logit of each row too.
        """

    @abc.abstractmethod
    def forward(self, query: Array, keys: Keys, step: AttentionStep, weighting: Weighting, partial: Any) -> Any:
        """Adds the attention of queries on keys to a partial softmax."""

    @abc.abstractmethod
    def finish(self, partial: Any) -> tuple[Array, ...]:
        """Returns the output, the lse and the maximum of each row, see `start`: zeros and -inf for an empty one."""

    def residuals(
        self,
        out: Float[Array, "*B n N V"],
        lse: Float[Array, "*B n N"],
        out_grad: Float[Array, "*B n N V"],
        lse_grad: Any,
    ) -> tuple[Array, ...]:
        """Returns what the backward needs of each query besides the query: arrays [*B, n, N, ...] of any width."""
        return residuals(out, lse, out_grad, lse_grad)

    def make_queries(self, *arrays: Array) -> Any:
        """Returns the `queries` of `backward`, given laid-out queries and their `residuals`."""
        query, out_grad, *narrow = arrays
        return Queries(query, out_grad, *(per_row(array, self.rows_axis) for array in narrow))

    @abc.abstractmethod
    def start_gradients(self, queries: Any, keys: Keys, zeros: Sequence[Array], **given: Array | None) -> Any:
        """Returns the gradients to add to: those given; the others may start from the scalar `zeros`, one of each.

        A gradient that is returned as None may be given as None.
        """

    @abc.abstractmethod
    def backward(self, queries: Any, keys: Keys, step: AttentionStep, weighting: Weighting, grads: Any) -> Any:
        """Adds the contributions of an attention step to sums of gradients."""

    @abc.abstractmethod
    def finish_gradients(self, grads: Any, weighting: Weighting) -> tuple[Array, Array, Array]:
        """Returns the gradients of queries, keys and values, laid out as these are."""


def width_axis(rows_axis: int) -> int:
    """Returns the axis of the width of laid-out rows."""
    return -2 if rows_axis == -1 else -1


def per_row(tiles: Array, rows_axis: int) -> Array:
    """Returns the first number of each laid-out row, without the width axis."""
    return jax.lax.index_in_dim(tiles, 0, width_axis(rows_axis), keepdims=False)
