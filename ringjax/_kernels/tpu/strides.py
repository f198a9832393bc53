"""Every r-th token of each head on TPUs, where the tokens of narrow heads are the last axis, [B, N, D, n].

XLA would take rows from arrays with the width last, which a TPU pads to whole registers. These kernels transpose a
block of tokens, whose rows are then a stride apart, and need no arrays besides their inputs and outputs.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from ringjax._kernels.strides import Combine, Strides

LANES = 128  # the columns of a register; rows a stride apart are read within one register's columns
_MOST_ROWS, _MOST_TOKENS = 512, 4096  # of a block
_LEAST_WIDTH = 32  # of a block, if heads are wider than a register and cut into parts
_VMEM_BYTES = 64 * 2**20


class _Blocks(NamedTuple):
    """The blocks of tokens [B * N, D, n] and of their rows: each has `rows` rows of a phase.

    `phases` is one if only the rows at its offset are wanted of each head, or the rate if those of all phases are.
    """

    shape: tuple[int, int, int]
    rate: int
    rows: int
    phases: int

    @property
    def width(self) -> int:
        """The width of a block."""
        width = self.shape[1]
        return width if width <= LANES else math.gcd(width, LANES)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a head."""
        return self.shape[2] // (self.rate * self.rows)

    @property
    def num_rows(self) -> int:
        """The number of rows of a head."""
        return self.phases * self.num_blocks * self.rows

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """The grid: heads, parts of their width, blocks of their tokens, and phases."""
        return self.shape[0], self.shape[1] // self.width, self.num_blocks, self.phases

    @property
    def of_tokens(self) -> pl.BlockSpec:
        """The tokens of a step."""
        block = 1, self.width, self.rows * self.rate
        return pl.BlockSpec(block, lambda head, part, number, phase, offsets: (head, part, number))

    @property
    def of_rows(self) -> pl.BlockSpec:
        """The rows of a step."""

        def index(head: Any, part: Any, number: Any, phase: Any, offsets: Any) -> tuple[Any, ...]:
            del offsets
            return head, part, phase * self.num_blocks + number

        return pl.BlockSpec((1, self.width, self.rows), index)

    def at(self, offset: Any) -> Any:
        """Returns the index of the rows of a phase among the tokens of a block."""
        return pl.ds(offset, self.rows, self.rate), slice(None)

    def run(self, kernel: Any, offsets: Array, *arrays: Array, name: str, is_put: bool, interpret: Any) -> Array:
        """Runs `kernel(offset, phase, *refs, transposed)`, with scratch memory for a `transposed` block of tokens.

        If `is_put`, the kernel reads rows and tokens, and writes tokens in place; else it reads tokens and writes rows.
        """
        *_, tokens = arrays

        def body(offsets: Any, *refs: Any) -> None:
            number = jax.lax.rem(pl.program_id(0), np.int32(offsets.shape[0]))
            phase = pl.program_id(3)
            kernel(phase if self.phases > 1 else offsets[number], phase, *refs)

        num_bytes = 2 * sum(array.size * array.dtype.itemsize for array in arrays)
        specs = [self.of_rows, self.of_tokens] if is_put else [self.of_tokens]
        num_rows = self.shape[2] if is_put else self.num_rows
        call = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=self.grid,
                in_specs=specs,
                out_specs=self.of_tokens if is_put else self.of_rows,
                scratch_shapes=[pltpu.VMEM((self.rows * self.rate, self.width), jnp.float32)],
            ),
            out_shape=jax.ShapeDtypeStruct(
                (*self.shape[:2], num_rows), tokens.dtype, manual_axis_type=jax.typeof(tokens).manual_axis_type
            ),
            input_output_aliases={2: 0} if is_put else {},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
            ),
            cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=num_bytes),
            name=f"ringjax_{name}",
            interpret=interpret,
        )
        with jax.enable_x64(False):  # kernels know no int64
            return call(offsets, *arrays)


class TpuStrides(Strides):
    """Strides by kernels, or by XLA for arrays that are not a whole number of the kernels' blocks."""

    def __init__(self, interpret: Any = False) -> None:
        self.interpret = interpret

    def take(self, tokens: Shaped[Array, "B n N D"], rate: int, offset: Any, is_whole: bool) -> Array:
        blocks = _blocks(tokens, rate, phases=1)
        if blocks is None:
            return super().take(tokens, rate, offset, is_whole)
        return self._read(blocks, tokens, _of_heads(offset, tokens), "take")

    def put(
        self, tokens: Shaped[Array, "B n N D"], rows: Shaped[Array, "B m N D"], rate: int, offset: Any, combine: Combine
    ) -> Array:
        blocks = _blocks(tokens, rate, phases=1)
        if blocks is None:
            return super().put(tokens, rows, rate, offset, combine)
        return self._write(blocks, tokens, rows, _of_heads(offset, tokens), combine, "put")

    def sort(self, tokens: Shaped[Array, "B n N D"], rate: int) -> Array:
        blocks = _blocks(tokens, rate, phases=rate)
        if blocks is None:
            return super().sort(tokens, rate)
        return self._read(blocks, tokens, _of_heads(np.zeros(1), tokens), "sort")

    def put_sorted(self, tokens: Array, rows: Array, rate: int, combine: Combine) -> Array:
        blocks = _blocks(tokens, rate, phases=rate)
        if blocks is None:
            return super().put_sorted(tokens, rows, rate, combine)
        return self._write(blocks, tokens, rows, _of_heads(np.zeros(1), tokens), combine, "put_sorted")

    def _read(self, blocks: _Blocks, tokens: Array, offsets: Array, name: str) -> Array:
        def kernel(offset: Any, phase: Any, tokens_ref: Any, rows_ref: Any, transposed: Any) -> None:
            @pl.when(phase == 0)
            def _() -> None:
                transposed[...] = tokens_ref[0].astype(jnp.float32).T  # [n, D]

            rows_ref[0] = transposed[blocks.at(offset)].T.astype(rows_ref.dtype)

        flat = _tokens_last(tokens)
        rows = blocks.run(kernel, offsets, flat, name=name, is_put=False, interpret=self.interpret)
        return _tokens_first(rows, tokens)

    def _write(self, blocks: _Blocks, tokens: Array, rows: Array, offsets: Array, combine: Combine, name: str) -> Array:
        def kernel(offset: Any, phase: Any, rows_ref: Any, tokens_ref: Any, out_ref: Any, transposed: Any) -> None:
            transposed[blocks.at(offset)] = rows_ref[0].astype(jnp.float32).T

            @pl.when(phase == blocks.phases - 1)
            def _() -> None:
                spread, token = transposed[...].T.astype(out_ref.dtype), tokens_ref[0]  # [D, n]
                combined = combine(token, spread)
                if blocks.phases == 1:  # elsewhere, the scratch memory has rows of other blocks
                    number = jax.lax.broadcasted_iota(jnp.int32, (1, token.shape[1]), 1)
                    combined = jnp.where(jax.lax.rem(number, np.int32(blocks.rate)) == offset, combined, token)
                out_ref[0] = combined

        arrays = _tokens_last(rows), _tokens_last(tokens)
        out = blocks.run(kernel, offsets, *arrays, name=name, is_put=True, interpret=self.interpret)
        return _tokens_first(out, tokens)


def _blocks(tokens: Shaped[Array, "B n N D"], rate: int, phases: int) -> _Blocks | None:
    """Returns the blocks of tokens, None if blocks do not divide the length, or do not fit the width."""
    batch, length, heads, width = tokens.shape
    is_block = lambda rows: rows * rate <= _MOST_TOKENS and length % (rows * rate) == 0
    rows = next(filter(is_block, (_MOST_ROWS, 2 * LANES, LANES)), None)
    if rows is None or width % 8 or (width > LANES and width % _LEAST_WIDTH):
        return None
    return _Blocks((batch * heads, width, length), rate, rows, phases)


def _tokens_last(array: Shaped[Array, "B n N D"]) -> Shaped[Array, "BN D n"]:
    batch, length, heads, width = array.shape
    return array.transpose(0, 2, 3, 1).reshape(batch * heads, width, length)


def _tokens_first(array: Shaped[Array, "BN D m"], like: Shaped[Array, "B n N D"]) -> Shaped[Array, "B m N D"]:
    batch, _, heads, width = like.shape
    return array.reshape(batch, heads, width, -1).transpose(0, 3, 1, 2)


def _of_heads(offset: Any, tokens: Shaped[Array, "B n N D"]) -> Array:
    return jnp.broadcast_to(jnp.asarray(offset, jnp.int32), tokens.shape[2:3])
