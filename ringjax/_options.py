"""What a call of attention asks for beside its arguments: the types of its options, and their checks."""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Integer

from ringjax._kernels.implementation import NAMES, ImplementationName
from ringjax._mesh.mesh import check_mesh
from ringjax._pattern.arguments import (
    check_documents,
    check_implementation,
    check_numbers,
    check_precision,
)
from ringjax._pattern.branch import Branch
from ringjax._pattern.counts import check_flags, check_optional_flags
from ringjax._pattern.pattern import DilatedPattern, Heads, Merge, Offsets
from ringjax._pattern.sinks import check_sinks
from ringjax._schedule.strategy import Strategy, check_exchange_size, check_strategy

_Ids = Integer[Array | np.ndarray, "*B T"]
Documents = _Ids | tuple[_Ids, Integer[Array | np.ndarray, "*B S"]]


class Options(TypedDict, total=False):
    """The keyword arguments of `ring_dilated_attention`, but the one that its result's type depends on."""

    pattern: DilatedPattern | Sequence[Branch] | None
    segment_lengths: Sequence[int] | None
    dilation_rates: Sequence[int] | None
    is_causal: bool
    scale: float | None
    offsets: Offsets
    merge: Merge
    heads: Heads
    document_ids: Documents | None
    documents_are_sorted: bool | None
    query_offset: Any
    logits_soft_cap: float | None
    sinks: Array | np.ndarray | None
    dropout_rate: float
    dropout_seed: Any
    broadcast_dropout: bool
    precision: Any
    strategy: Strategy
    exchange_size: int | None
    implementation: ImplementationName | None
    block_size: int | None
    mesh: Mesh | AbstractMesh | None
    axis_name: str
    spec: PartitionSpec | None


def check_options(
    *,
    is_causal: Any = False,
    scale: Any = None,
    document_ids: Any = None,
    documents_are_sorted: Any = None,
    query_offset: Any = 0,
    logits_soft_cap: Any = None,
    sinks: Any = None,
    dropout_rate: Any = 0.0,
    broadcast_dropout: Any = False,
    precision: Any = None,
    return_residual: Any = False,
    strategy: Any = "ring",
    exchange_size: Any = None,
    implementation: Any = None,
    block_size: Any = None,
    mesh: Any = None,
    axis_name: Any = "seq",
    spec: Any = None,
) -> None:
    """Checks options, as far as no shape matters: when a module is made, and when attention is called.

    Raises:
      TypeError, ValueError: naming the option, its value and the remedy.
    """
    check_numbers(scale, logits_soft_cap, dropout_rate, query_offset, block_size)
    check_flags(is_causal=is_causal, broadcast_dropout=broadcast_dropout, return_residual=return_residual)
    check_optional_flags(documents_are_sorted=documents_are_sorted)
    check_strategy(strategy)
    check_implementation(implementation, NAMES)
    check_exchange_size(exchange_size, strategy)
    check_precision(precision)
    check_mesh(mesh, axis_name, spec)
    if document_ids is not None:
        check_documents(document_ids)
    if sinks is not None:
        check_sinks(sinks)
