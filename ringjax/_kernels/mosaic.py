"""The implementation "mosaic": Pallas kernels for any mask, over lists of active blocks.

Queries and keys are laid out as [B, N, T, H] and [B, K, S, H] for TPUs, as [B, N, H, T] and [B, K, H, S] for narrow
heads there, and as [B, T, N, H] and [B, S, K, H] for GPUs. T and S are the padded rows of a shard, chunk after chunk.
The tiles of masks have the kernels' size, and may span several chunks: then the masks keep chunks apart.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Shaped

from ringjax._kernels.attention_step import (
    AttentionStep,
    DropoutCounters,
    PaddedRows,
    View,
    make_mask,
    mask_keys,
    mask_queries,
)
from ringjax._kernels.hopper import ptxas
from ringjax._kernels.interface import Request, width_axis
from ringjax._kernels.kernel import KernelGradients, KernelImplementation, KernelPartial
from ringjax._kernels.mask import EMPTY, bounds_of_keys, bounds_of_queries
from ringjax._kernels.operands import Given, Stats
from ringjax._kernels.softmax import Keys, Queries, Weighting
from ringjax._kernels.strides import Strides
from ringjax._schedule.make import MAX_STRIPE_ROWS
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side

LANES = 128  # the number of rows of a tile is a multiple of this
# The rows of tiles of queries and of keys, by the kind of a TPU; 512 each on others. Larger tiles compute longer for
# each byte that is read, which the v6e needs, as its products are faster.
ROWS_BY_KIND = {"v6": (1024, 512)}
# If rows are copied, a local branch lays out those of at least this many tokens at a time.
GROUP_TOKENS = 8192
MAX_TILE_ROWS = 1024  # VMEM holds all pairs of two tiles of this size
# The same for TPUs with less memory, and the most bytes of a head's row there.
MAX_TILE_ROWS_BY_KIND = {"v4": 512}
MAX_HEAD_BYTES_BY_KIND = {"v4": 512}
TOO_SMALL = "v2", "v3"  # the TPUs whose scalar memory has no room for a block list
# Heads on GPUs are padded to whole lines of shared memory; registers limit their width.
LINE_WIDTH, MOST_WIDTH = 64, 128
# The GPUs with the matrix units that the kernels for GPUs use.
HOPPER = "H100", "H200", "H800", "H20", "GH200"
FIRST_JAX = 0, 12  # the first version whose Pallas has what the kernels for GPUs use
FIRST_PYTHON = 3, 12  # the first version that this jax supports
# The values in padding rows of a mask, by the names of its fields; zero for others.
_NONE = {"first": EMPTY[0], "last": EMPTY[1], "label": -1}
_PRECISIONS = None, "default", "highest", jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST


@runtime_checkable
class Kernels(Protocol):
    """The kernels for one kind of devices; `tpu.kernels` says what each computes."""

    parts_of: Any
    forward: Any
    backward_queries: Any
    backward_keys: Any


@dataclasses.dataclass(frozen=True)
class Mosaic(KernelImplementation):
    """The implementation by kernels; `interpret` is that of Pallas, which runs them anywhere, slowly."""

    interpret: Any = False

    dtypes: ClassVar[tuple[str, str]]  # the dtypes that it computes in
    order: ClassVar[str]  # of the dimensions of arrays; rows m are at `rows_axis`
    width_multiple: ClassVar[int] = 1  # heads are padded to a multiple of it

    @property
    @abc.abstractmethod
    def kernels(self) -> Kernels:
        """The kernels."""

    @abc.abstractmethod
    def obstacle_of_hardware(self, request: Request) -> str | None:
        """Returns why the devices cannot run the kernels on such arrays, None where they can."""

    @abc.abstractmethod
    def tile_rows(self, request: Request) -> tuple[int, int]:
        """Returns the most rows of tiles of queries and of keys."""

    def serve(self, request: Request, schedule: BranchSchedule) -> tuple[BranchSchedule, str | None]:
        """Returns the schedule in whole chunks, one after the other, and why the kernels cannot serve it."""
        whole, tile_rows = schedule.in_whole_chunks(), self.tile_rows(request)
        if whole.balance == "stripes":  # each of which is a tile, and fills registers
            dealt = whole.in_stripes(min(*tile_rows, MAX_STRIPE_ROWS), LANES)
            if request.balance is None and dealt.pads_much:
                whole = whole.in_zigzag()
            else:
                whole, tile_rows = dealt, (dealt.queries.block_rows, dealt.keys.block_rows)
        # Masks are made from positions, so zigzag halves may be in any order.
        return dataclasses.replace(whole, tile_rows=tile_rows, sorts_halves=False), self._obstacle(request)

    def _obstacle(self, request: Request) -> str | None:
        if not self.interpret and (reason := self.obstacle_of_hardware(request)):
            return reason
        if request.query.dtype not in self.dtypes:
            return f"it computes in {' and '.join(self.dtypes)}, and query is of {request.query.dtype}"
        if request.precision not in _PRECISIONS:
            return f"it computes products at the default precision or the highest, and precision={request.precision!r}"
        return request.obstacle_to_kernels()

    def lay_out(self, side: Side, rows: Shaped[Array, "B m N D"], groups: int | None = None) -> Array:
        """Transposes rows to the kernels' layout."""
        del side, groups
        return rearrange(rows, f"B m N D -> {self.order}")

    def take_back(self, side: Side, tiles: Array) -> Shaped[Array, "B m N D"]:
        del side
        return rearrange(tiles, f"{self.order} -> B m N D")

    def see(self, padded: PaddedRows, counters: DropoutCounters | None = None) -> View:
        """Returns the masks of tiles of queries, or of keys."""
        if not padded.rows.is_of_keys:
            mask = mask_queries(self._unfold(padded), counters, are_chunks_apart=False)
            mask = self._tile(mask, _tile_rows(padded)[0])
            return View(mask, bounds_of_queries(mask, 1), padded.documents is not None)
        mask = mask_keys(self._unfold(padded), are_chunks_apart=False)
        # Explicit even if all rows are keys, because `_tile` adds padding rows, with False.
        is_key = jnp.ones_like(mask.position, bool)
        mask = mask._replace(is_key=is_key if mask.is_key is None else is_key & mask.is_key)
        mask = self._tile(mask, _tile_rows(padded)[1])
        is_member = padded.rows.heads.is_member
        return View(mask, bounds_of_keys(mask, 1, True if is_member is None else is_member.all()))

    def forward(
        self, query: Array, keys: Keys, step: AttentionStep, weighting: Weighting, partial: KernelPartial
    ) -> KernelPartial:
        """Adds the attention of queries on these keys to `partial`, that on others, if there are any."""
        mask, length = make_mask(step), query.shape[self.rows_axis]
        of_queries, of_keys = mask.queries.last, mask.keys.position
        key, value = (self._pad(array, of_keys) for array in keys)
        before, (out, *narrow) = None, self.finish(partial)
        if not step.is_only:
            before = self._pad(out, of_queries), *(self._by_heads(self._pad(one, of_queries)) for one in narrow)
        given = self._given(step, self._pad(query, of_queries), key, value, mask, weighting)
        out, *narrow = self.kernels.forward(given._replace(has_maximum=partial.maximum is not None), before)
        narrow = (self._cut(self._by_rows(one), length) for one in narrow)
        return KernelPartial(self._cut(out, length, keys.value), *narrow)

    def start_gradients(
        self, queries: Queries, keys: Keys, zeros: Sequence[Array], **given: Array | None
    ) -> KernelGradients:
        del queries, keys, zeros
        # Kernels start the others themselves: zeros would be arrays that they read.
        return KernelGradients(**{**dict.fromkeys(KernelGradients._fields), **given})

    def backward(
        self, queries: Queries, keys: Keys, step: AttentionStep, weighting: Weighting, grads: KernelGradients
    ) -> KernelGradients:
        mask, axis = make_mask(step), self.rows_axis
        length, key_length = queries.query.shape[axis], keys.key.shape[axis]
        of_queries, of_keys = mask.queries.last, mask.keys.position
        padded = Queries(*(self._pad(array, of_queries) for array in queries))
        key, value = (self._pad(array, of_keys) for array in keys)
        given = self._given(step, padded.query, key, value, mask, weighting)._replace(
            out_grad=padded.out_grad.astype(padded.query.dtype),  # both operands of a product have one dtype
            stats=Stats(self._by_heads(padded.lse), self._by_heads(padded.delta)),
        )

        def before(of_mask: Array, *sums: Any) -> Any:
            return None if sums[0] is None else tuple(self._pad(one, of_mask) for one in sums)

        query_grad = self.kernels.backward_queries(given, before(of_queries, grads.query))
        keys_grad = self.kernels.backward_keys(given, before(of_keys, grads.key, grads.value))
        keys_grad = (self._cut(grad, key_length, like) for grad, like in zip(keys_grad, keys, strict=True))
        return KernelGradients(self._cut(query_grad, length, queries.query), *keys_grad)

    def _given(
        self, step: AttentionStep, query: Array, key: Array, value: Array, mask: Any, weighting: Weighting
    ) -> Given:
        dtype = query.dtype if step.is_final else jnp.float32
        rows_axis = self.rows_axis % query.ndim
        return Given(query, key, value, mask, weighting, rows_axis, self.interpret, dtype)

    def _unfold(self, padded: PaddedRows) -> PaddedRows:
        """Returns padded rows with their documents in the tiles of the side."""
        if padded.documents is None:
            return padded
        sizes = {"C": padded.side.chunks_per_tile, "R": padded.side.block_rows}
        by_heads = self._by_heads(padded.documents)
        return padded._replace(documents=rearrange(by_heads, "B O (J C R) -> J B C O R", **sizes))

    def _tile(self, mask: Any, most_rows: int) -> Any:
        return _tile(mask, most_rows, self.kernels.parts_of)

    def _pad(self, array: Array, of_mask: Array) -> Array:
        """Pads an array with zeros: rows to those of the mask, and heads to a width that the kernels take."""
        ends = _ends(array, self.rows_axis, of_mask.shape[0] * of_mask.shape[-1])
        if array.ndim == 4:
            axis = width_axis(self.rows_axis)
            ends[axis] = 0, -array.shape[axis] % self.width_multiple
        return jnp.pad(array, ends)

    def _cut(self, array: Array, length: int, like: Array | None = None) -> Array:
        rows, axis = jax.lax.slice_in_dim(array, 0, length, axis=self.rows_axis), width_axis(self.rows_axis)
        return rows if like is None else jax.lax.slice_in_dim(rows, 0, like.shape[axis], axis=axis)

    # Kernels take per-row values as [B, N, T].

    def _by_heads(self, values: Array) -> Array:
        return jnp.moveaxis(values, self.rows_axis, 2)

    def _by_rows(self, values: Array) -> Array:
        return jnp.moveaxis(values, 2, self.rows_axis)


class MosaicTpu(Mosaic):
    """The implementation by kernels for TPUs."""

    # A TPU's registers hold the last two dimensions of an array.
    order, rows_axis = "B N m D", 2
    platform = "tpu"
    addition = "in place"
    dtypes = "bfloat16", "float32"

    @property
    def kernels(self) -> Kernels:
        """The kernels, imported on use: importing Pallas takes longer than this package, and few devices need it."""
        from ringjax._kernels.tpu import kernels  # noqa: PLC0415

        return kernels

    def obstacle_of_hardware(self, request: Request) -> str | None:
        """Returns why the devices cannot run the kernels on such arrays, None where they can."""
        if request.platform != self.platform:
            return f"it runs on TPUs and on Hopper GPUs, and the devices are of platform {request.platform!r}"
        if any(part in request.device_kind for part in TOO_SMALL):
            return f"of TPUs it runs on the v4 and later ones, and the devices are {request.device_kind!r}"
        most = _of_kind(MAX_HEAD_BYTES_BY_KIND, request, None)
        width = max(request.query.shape[-1], request.value.shape[-1])
        if most is not None and width * request.query.dtype.itemsize > most:
            return (
                f"the memory of {request.device_kind!r} has room for heads of {most} bytes, and these are {width} wide"
            )
        return None

    def serve(self, request: Request, schedule: BranchSchedule) -> tuple[BranchSchedule, str | None]:
        """Returns the schedule in groups of segments as well, so that rows are copied one group at a time."""
        schedule, reason = super().serve(request, schedule)
        return schedule.in_groups(GROUP_TOKENS), reason

    def tile_rows(self, request: Request) -> tuple[int, int]:
        """Returns the most rows of tiles of queries and of keys."""
        if request.block_size is not None:
            rows = min(request.block_size, _of_kind(MAX_TILE_ROWS_BY_KIND, request, MAX_TILE_ROWS))
            return rows, rows
        return _of_kind(ROWS_BY_KIND, request, (512, 512))


class NarrowMosaicTpu(MosaicTpu):
    """The same for heads that do not fill whole registers: rows are the last dimension instead, and fill them.

    A TPU pads the last dimension of an array to 128: heads of width 64 would take twice the memory and the bandwidth.
    """

    order, rows_axis = "B N D m", -1

    @property
    def strides(self) -> Strides:
        """How it takes and puts every r-th token of each head."""
        from ringjax._kernels.tpu.strides import TpuStrides  # noqa: PLC0415

        return TpuStrides(self.interpret)

    def obstacle_of_hardware(self, request: Request) -> str | None:
        """Returns why the devices cannot run the kernels on such arrays, or had better not; None where they can."""
        widths = request.query.shape[-1], request.value.shape[-1]
        if all(width % LANES == 0 for width in widths):
            return f"it is for heads that fill no whole registers of {LANES}, and their widths are {widths}"
        return super().obstacle_of_hardware(request)


def _of_kind(table: dict[str, Any], request: Request, usual: Any) -> Any:
    """Returns the entry of a table for the kind of the devices, or else `usual`."""
    return next((entry for part, entry in table.items() if part in request.device_kind), usual)


class MosaicGpu(Mosaic):
    """The implementation by kernels for Hopper GPUs."""

    # As in the caller's arrays: GPU copies can select the rows of one head from those of all.
    order, rows_axis = "B m N D", 1
    addition = "at once"
    platform = "cuda"
    dtypes = "bfloat16", "float16"
    width_multiple = LINE_WIDTH

    @property
    def kernels(self) -> Kernels:
        """The kernels, imported on use: with other devices the import may fail."""
        from ringjax._kernels.hopper import kernels  # noqa: PLC0415

        return kernels

    def obstacle_of_hardware(self, request: Request) -> str | None:
        """Returns why the devices cannot run the kernels on such arrays, None where they can."""
        if request.platform != self.platform:
            return f"it runs on TPUs and on Hopper GPUs, and the devices are of platform {request.platform!r}"
        if not any(name in request.device_kind.upper() for name in HOPPER):
            return f"of GPUs it runs on {', '.join(HOPPER)}, and the devices are {request.device_kind!r}"
        if jax.__version_info__ < FIRST_JAX:
            needed, python = (".".join(map(str, version)) for version in (FIRST_JAX, FIRST_PYTHON))
            return f"on GPUs it needs jax {needed}, which needs Python {python}, and this is jax {jax.__version__}"
        widths = request.query.shape[-1], request.value.shape[-1]
        if max(widths) > MOST_WIDTH:
            return (
                f"on GPUs heads may be at most {MOST_WIDTH} wide in query and in value: "
                f"they are {widths[0]} and {widths[1]}"
            )
        return ptxas.obstacle()

    def tile_rows(self, request: Request) -> tuple[int, int]:
        """Returns the most rows of tiles of queries and of keys: those that registers have room for."""
        del request
        return LANES, LANES


def _tile_rows(padded: PaddedRows) -> tuple[int, int]:
    assert padded.schedule.tile_rows is not None
    return padded.schedule.tile_rows


def _tile(mask: Any, most_rows: int, parts_of: Callable[[int], tuple[int, ...]]) -> Any:
    """Cuts masks of chunks [J, A, C, O, R], or [J, B, C, K, G, R], into tiles, and pads the last ones."""

    def cut(path: Any, array: Array) -> Array:
        rows = jnp.moveaxis(array, (0, 2), (-3, -2))
        rows = rows.reshape(*rows.shape[:-3], -1)  # [A, O, J * C * R]
        fill = jnp.asarray(_NONE.get(getattr(path[-1], "name", ""), 0), rows.dtype)
        count, size = _tiles(rows.shape[-1], most_rows, parts_of)
        rows = jnp.pad(rows, _ends(rows, -1, count * size), constant_values=fill)
        tiles = rows.reshape(*rows.shape[:-1], count, size)
        return jnp.moveaxis(tiles, -2, 0)[:, :, None]  # [I, A, 1, O, R]

    return jax.tree_util.tree_map_with_path(cut, mask)


def _ends(array: Array, axis: int, size: int) -> list[tuple[int, int]]:
    ends = [(0, 0)] * array.ndim
    ends[axis] = 0, size - array.shape[axis]
    return ends


def _tiles(length: int, most_rows: int, parts_of: Callable[[int], tuple[int, ...]]) -> tuple[int, int]:
    """Returns the number of tiles, a multiple of the tiles of a step, and the rows of each, a multiple of registers."""
    least = -(-length // most_rows)
    rows = -(-length // (least * LANES)) * LANES
    count = -(-length // rows)
    # Steps have the most tiles with which padding adds at most a quarter.
    parts = next(parts for parts in parts_of(rows) if 4 * (-(-count // parts) * parts) <= 5 * count)
    return -(-count // parts) * parts, rows
