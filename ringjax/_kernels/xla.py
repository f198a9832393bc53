"""The implementation "xla": masked tiles of rows, for any branch and any device.

Arrays have the layout of `tiles`: queries [I, B, C, K, G, R, H], keys [J, B, C, K, R, H].
"""

import dataclasses
from collections.abc import Sequence

from einops import rearrange
from jaxtyping import Array, Shaped

from ringjax._kernels import tiles
from ringjax._kernels.attention_step import (
    AttentionStep,
    DropoutCounters,
    PaddedRows,
    View,
    make_mask,
    see_keys,
    see_queries,
)
from ringjax._kernels.interface import Implementation, Request
from ringjax._kernels.softmax import Keys, Queries, Weighting
from ringjax._kernels.tiles import Gradients, Partial
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side


class Xla(Implementation):
    """The implementation by tiles."""

    rows_axis = 0
    platform = None

    def serve(self, request: Request, schedule: BranchSchedule) -> tuple[BranchSchedule, None]:
        # Sorting is a pass over the rows, and slow to compile. But programs compiled for GPUs take less memory with it.
        return dataclasses.replace(schedule, sorts_halves=request.platform != "cpu"), None

    def lay_out(self, side: Side, rows: Shaped[Array, "B m N D"], groups: int | None = None) -> Array:
        sizes = {"C": side.chunks_per_tile, "R": side.block_rows}
        if groups is None:
            return rearrange(rows, "B (I C R) K H -> I B C K R H", **sizes)
        return rearrange(rows, "B (I C R) (K G) H -> I B C K G R H", G=groups, **sizes)

    def take_back(self, side: Side, tiles: Array) -> Shaped[Array, "B m N D"]:
        del side
        if tiles.ndim == 6:
            return rearrange(tiles, "I B C K R H -> B (I C R) K H")
        return rearrange(tiles, "I B C K G R H -> B (I C R) (K G) H")

    def see(self, padded: PaddedRows, counters: DropoutCounters | None = None) -> View:
        return see_keys(padded) if padded.rows.is_of_keys else see_queries(padded, counters)

    def start(
        self, query: Array, keys: Keys, before: tuple[Array, ...] | None = None, has_maximum: bool = False
    ) -> Partial:
        del before, has_maximum
        return tiles.start(query, keys)

    def forward(self, query: Array, keys: Keys, step: AttentionStep, weighting: Weighting, partial: Partial) -> Partial:
        return tiles.forward(query, keys, make_mask(step), weighting, partial)

    def finish(self, partial: Partial) -> tuple[Array, ...]:
        return *tiles.finish(partial), partial.maximum

    def start_gradients(self, queries: Queries, keys: Keys, zeros: Sequence[Array], **given: Array) -> Gradients:
        return tiles.start_gradients(queries, keys, zeros, **given)

    def backward(
        self, queries: Queries, keys: Keys, step: AttentionStep, weighting: Weighting, grads: Gradients
    ) -> Gradients:
        return tiles.backward(queries, keys, make_mask(step), weighting, grads)

    def finish_gradients(self, grads: Gradients, weighting: Weighting) -> tuple[Array, Array, Array]:
        return tiles.finish_gradients(grads, weighting)
