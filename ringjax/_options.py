"""The options that say how attention is computed, and those of each function; see also `ringjax._pattern.options`."""

from typing import Annotated, Any, TypedDict

from jax.lax import Precision
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ringjax._kernels.implementation import ImplementationName, check_implementation
from ringjax._mesh.axes import AxisName
from ringjax._mesh.mesh import check_axis_name, check_has_axis, check_mesh, check_spec
from ringjax._pattern.arguments import check_precision
from ringjax._pattern.counts import check_flag, check_optional_count, check_optional_flag
from ringjax._pattern.option import Option, read_options
from ringjax._pattern.options import (
    DropoutOptions,
    LogitOptions,
    PatternOptions,
    ResultOptions,
    ScaleOptions,
    SeedOptions,
    SinkOptions,
    TokenOptions,
    pattern_of,
)
from ringjax._pattern.pattern import DilatedPattern
from ringjax._schedule.schedule import Balance
from ringjax._schedule.strategy import Strategy, check_balance, check_exchange, check_strategy, read_strategy


class PrecisionOptions(TypedDict, total=False):
    """How products are computed."""

    precision: Annotated[
        Any,
        Option(
            None,
            "the precision of products, as :func:`jax.numpy.einsum` takes it; jax's default by default.",
            check_precision,
        ),
    ]


class KernelOptions(PrecisionOptions, total=False):
    """Which implementation computes, and in which pieces."""

    exchange_size: Annotated[
        int | None,
        Option(
            None,
            'the number u of consecutive devices that exchange in ``"all_to_all"`` and ``"auto"``, where u divides the '
            "devices along the sequence, or its last axis, and the query heads of a device; its key/value heads are a "
            "multiple or a divisor of u. By default the smallest u after which nothing else travels, else the largest.",
            check_optional_count,
        ),
    ]
    implementation: Annotated[
        ImplementationName | None,
        Option(
            None,
            '``"xla"``, which computes everything everywhere, ``"cudnn"``, a fused kernel for NVIDIA GPUs, or '
            '``"mosaic"``, kernels for TPUs and Hopper GPUs. By default each branch takes the fastest that can compute '
            "it on these devices, but not the kernels for TPUs, which no TPU has run yet: they run if you name them. "
            "cuDNN takes bfloat16 and float16. It takes segments of rate 1; other segments whose rate divides them, "
            "and which divide, or are divided by, what a device holds; and causal windows, with limits. The kernels "
            "for TPUs take bfloat16 and float32. Those for Hopper GPUs take bfloat16 and float16, and heads that are "
            "at most 128 wide.",
            check_implementation,
        ),
    ]
    block_size: Annotated[
        int | None,
        Option(
            None,
            "the most rows of queries, and of keys, whose logits are computed at once. By default it is chosen from "
            "shapes and devices. cuDNN and the kernels for Hopper GPUs ignore it. Smaller blocks take less memory, and "
            "less work where a mask cuts them; larger ones run faster.",
            check_optional_count,
        ),
    ]
    balance: Annotated[
        Balance | None,
        Option(
            None,
            "how the devices of a ring that goes all the way around share its work; other branches ignore it. With "
            'document_ids, by default, they deal their rows in ``"stripes"`` of at most 512, round robin: then packed '
            "documents keep all of them busy in each step. Without documents, with fewer than 128 rows on a device for "
            "each device of the ring, with cuDNN's kernel, and in rings of unequal size, causal rings take "
            '``"zigzag"``, which swaps half of the rows. ``"none"`` moves no rows. The results are the same.',
            check_balance,
        ),
    ]
    documents_are_sorted: Annotated[
        bool | None,
        Option(
            None,
            "whether the numbers of documents do not decrease along a sequence, and negative ones stand only between "
            "documents or at the ends: then cuDNN's kernel serves packed documents, on GPUs where no other does. "
            "Nobody looks at the numbers: a wrong True gives NaN where the kernel would be wrong.",
            check_optional_flag,
        ),
    ]


class StrategyOptions(TypedDict, total=False):
    """How rows get to the devices whose queries see them."""

    strategy: Annotated[
        Strategy,
        Option(
            "ring",
            'a name for all branches, or a tuple with one for each. ``"ring"`` sends keys and values around, in '
            "O(T / p) memory; queries of a longer context travel instead where they are lighter: gathered if they are "
            "no more than a device's keys, or else around with their outputs. "
            '``"all_gather"`` brings those of a segment to each of its devices at once, in O(segment '
            "length / dilation rate) memory, but what neighbors alone see as in a ring. "
            '``"all_to_all"`` gives each device all tokens of some heads, in O(T / p) memory (DeepSpeed-Ulysses, arXiv '
            "2309.14509), with a ring between groups of devices where heads do not suffice for all (USP, arXiv "
            '2405.07719). ``"auto"``, for all branches, is what :func:`plan` recommends for these devices. The results '
            "are the same.",
            check_strategy,
        ),
    ]


class MeshOptions(TypedDict, total=False):
    """The mesh, and how arrays lie on it."""

    mesh: Annotated[Mesh | AbstractMesh | None, Option(None, "the mesh to run on.", check_mesh)]
    axis_name: Annotated[
        AxisName,
        Option(
            "seq",
            'the mesh axis that the sequence is sharded along, or several, major first, such as ``("dcn", "ici")``. '
            "Then a ring goes around the devices of the last axis before it crosses the others, as few times as there "
            'are others, and ``"all_to_all"`` exchanges along the last one.',
            check_axis_name,
        ),
    ]
    spec: Annotated[
        PartitionSpec | None,
        Option(
            None,
            'how query lies on the mesh, such as ``P("data", "seq", "tensor")``; key and value lie likewise. By '
            "default what the arrays' types say. Where the mesh has other Auto axes, "
            '``"cudnn"`` and ``"mosaic"`` need it. Without a mesh it means nothing.',
            check_spec,
        ),
    ]


class ModuleOptions(
    PatternOptions, ScaleOptions, DropoutOptions, StrategyOptions, KernelOptions, MeshOptions, total=False
):
    """The options that a module has for all of its calls."""


class FactoryOptions(
    PatternOptions, ScaleOptions, TokenOptions, StrategyOptions, KernelOptions, MeshOptions, total=False
):
    """The options of :func:`attention_fn`, without those of dropout, which Flax's modules pass in each call."""


class DecodeOptions(PatternOptions, ScaleOptions, SinkOptions, PrecisionOptions, MeshOptions, total=False):
    """The options of :func:`decode_attention`, except the one on which the type of its result depends."""

    is_causal: Annotated[bool, Option(True, "always true: tokens that are decoded see no later ones.", check_flag)]


class AllDecodeOptions(DecodeOptions, ResultOptions, total=False):
    """The options of :func:`decode_attention`."""


class Options(ModuleOptions, TokenOptions, SeedOptions, total=False):
    """The options of :func:`ring_dilated_attention`, except those on which the type of its result depends."""


class AllOptions(Options, ResultOptions, LogitOptions, total=False):
    """The options of :func:`ring_dilated_attention`."""


def read_checked(table: Any, given: Any, remedies: Any, of: str) -> tuple[DilatedPattern, Any]:
    """Returns the pattern of the options, and all options as attributes; see `read_options`.

    Raises:
      TypeError, ValueError: naming the option, its value and the remedy.
    """
    asked = read_options(table, given, remedies, of)
    pattern = pattern_of(asked)
    asked.strategy = read_strategy(asked.strategy, len(pattern.branches))
    check_exchange(asked.exchange_size, asked.strategy)
    check_has_axis(asked.mesh, asked.axis_name)
    return pattern, asked


def needs_of(asked: Any) -> tuple[str, ...]:
    """Returns the names of the given options that only few implementations serve."""
    is_asked = {
        "document_ids": getattr(asked, "document_ids", None) is not None,
        "logits_soft_cap": asked.logits_soft_cap is not None,
        "dropout_rate": getattr(asked, "dropout_rate", 0) > 0,
        "return_max_logit": getattr(asked, "return_max_logit", False),
        "precision": asked.precision not in (None, "default", Precision.DEFAULT),
    }
    return tuple(name for name, is_one in is_asked.items() if is_one)
