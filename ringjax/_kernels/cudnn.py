"""The kernel "cudnn": cuDNN's fused attention, through the primitives beneath jax's public function.

The backward of the public function uses the lse of the given keys; rings need that of some keys with the lse of all.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ringjax._kernels.fused import FusedQueries
from ringjax._kernels.sequences import Sequences
from ringjax._kernels.softmax import Keys
from ringjax._kernels.sub_blocks import Pairs
from ringjax._pattern.warning import warn

try:
    from jax._src.cudnn import fused_attention_stablehlo as _jax
except ImportError:
    _jax = None

_NAMES = (
    "MaskType",
    "AttentionLayout",
    "check_compute_capability",
    "check_cudnn_version",
    "_dot_product_attention_fwd_impl",
    "_dot_product_attention_bwd_impl",
)
# The arrays that both primitives take, in this order, the additional ones of the backward, and the parameters of both.
_ARRAYS = ("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets")
_ARRAYS += ("page_table_k", "page_table_v")
_OF_BACKWARD = ("activation", "fwd_output", "grad_output")
_PARAMETERS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
_NEWER_PARAMETERS = {"score_mod": None}  # from jax 0.12 on
_MOST_NUMBERS = 2**31 - 1  # elements of an array with sequences, whose memory offsets are 32-bit integers


@functools.cache
def _missing() -> str | None:
    """Returns what jax or the machine lacks for cuDNN's attention, None if nothing; warns of it once."""
    missing = _find_missing(_jax) or (_find_lacking(_jax) if jax.default_backend() == "gpu" else None)
    if missing:
        warn(f"cuDNN's attention is not used: {missing}")
    return missing


def _find_lacking(module: Any) -> str | None:
    if not module.check_compute_capability("8.0"):
        return "it needs an NVIDIA GPU of compute capability 8.0 at least"
    try:
        module.check_cudnn_version()
    except RuntimeError as error:
        return str(error)
    return None


def _find_missing(module: Any) -> str | None:
    for name in _NAMES:
        if not hasattr(module, name):
            return f"this version of jax has no {name}"
    for direction in ("fwd", "bwd"):
        name = f"_dot_product_attention_{direction}_p_wrapper"
        if not hasattr(getattr(module, name, None), "bind"):
            return f"this version of jax has no primitive {name}"
        names = list(inspect.signature(getattr(module, f"_dot_product_attention_{direction}_impl")).parameters)
        if "score_mod_args" in names:  # none of them is passed
            names.remove("score_mod_args")
        arrays = _ARRAYS + (_OF_BACKWARD if direction == "bwd" else ())
        known = {*_PARAMETERS, *_NEWER_PARAMETERS, "is_training"}
        parameters = set(names[len(arrays) :])
        if tuple(names[: len(arrays)]) != arrays or not set(_PARAMETERS) <= parameters <= known:
            return f"this version of jax has other parameters of {name}"
    return None


def _most_width() -> int:
    """Returns the maximum head width on the GPUs of this machine; without GPUs, the smallest maximum of any GPU."""
    is_hopper = jax.default_backend() == "gpu" and _jax is not None and _jax.check_compute_capability("9.0")
    return 256 if is_hopper else 128


def obstacle(
    query: Any, key: Any, value: Any, platform: str, widening: int = 0, has_sequences: bool = False
) -> str | None:
    """Returns why cuDNN cannot compute these arrays on this platform, None if it can.

    The backward may need heads that are wider by `widening`.
    """
    if platform != "cuda":
        return f"it runs on NVIDIA GPUs, and the devices are of platform {platform!r}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, and query is of {query.dtype}"
    reason = _missing() or _too_wide(query.shape[-1], value.shape[-1], widening)
    return reason or (_no_spans(query.shape[-2] != key.shape[-2]) if has_sequences else None)


def _no_spans(is_grouped: bool) -> str | None:
    """Returns why cuDNN cannot compute rows of several documents."""
    if jax.default_backend() == "gpu" and not _jax.check_compute_capability("9.0"):  # type: ignore[union-attr]
        return "rows of several documents need a GPU of compute capability 9.0 at least"
    if is_grouped and "score_mod" not in inspect.signature(_jax._dot_product_attention_fwd_impl).parameters:  # type: ignore[union-attr]
        return "before jax 0.12, rows of several documents need as many key/value heads as query heads"
    return None


def _too_wide(width: int, value_width: int, widening: int) -> str | None:
    most = _most_width()
    if width != value_width or width % 8 or width > most:
        return f"heads must be as wide in value as in query, a multiple of 8 up to {most}: {width}, {value_width}"
    if width + widening > most:
        return f"with the gradient of the lse, heads of {width} are {width + widening} wide, and {most} is the most"
    return None


def attend(
    query: Float[Array, "B Rq N H"],
    key: Float[Array, "B Rk K H"],
    value: Float[Array, "B Rk K V"],
    pairs: Pairs,
    scale: float,
) -> tuple[Float[Array, "B Rq N V"], Float[Array, "B Rq N"]]:
    """Returns the output and the lse of each row: zeros and -inf for one outside of all sequences."""
    if _is_beyond_offsets(pairs, query, key):
        halve = lambda one, sequences: attend(one[0], one[1], one[2], pairs._replace(sequences=sequences), scale)
        return _in_halves(halve, (query, key, value), pairs.sequences)
    pairs = _two_spans(pairs)
    out, stats = _bind("fwd", (query, key, value), pairs, scale, is_training=True)
    if pairs.sequences is None:
        return out, stats.swapaxes(1, 2)
    of_queries, _ = pairs.sequences
    lse, is_inside = _take_from_sequences(stats, of_queries), of_queries.contains(query.shape[1])
    # cuDNN writes nothing to rows outside of all sequences.
    return jnp.where(is_inside[..., None, None], out, 0), jnp.where(is_inside[..., None], lse, -jnp.inf)


def differentiate(
    queries: FusedQueries, keys: Keys, pairs: Pairs, scale: float
) -> tuple[Float[Array, "B Rq N H"], Float[Array, "B Rk K H"], Float[Array, "B Rk K V"]]:
    """Returns what these pairs add to the gradients, given each query's output and lse over all of its keys."""
    if _is_beyond_offsets(pairs, queries.query, keys.key):
        halve = lambda one, sequences: differentiate(one[0], one[1], pairs._replace(sequences=sequences), scale)
        return _in_halves(halve, (queries, keys), pairs.sequences)
    pairs, dtype, lse = _two_spans(pairs), queries.query.dtype, queries.lse.astype(jnp.float32)
    stats = lse.swapaxes(1, 2) if pairs.sequences is None else _put_in_sequences(lse, pairs.sequences[0])
    given = stats, queries.out.astype(dtype), queries.out_grad.astype(dtype)
    grads = _bind("bwd", (queries.query, *keys, *given), pairs, scale)
    if pairs.sequences is None:
        return grads
    sides = pairs.sequences[0], *2 * (pairs.sequences[1],)
    inside = (sequence.contains(grad.shape[1])[..., None, None] for sequence, grad in zip(sides, grads, strict=True))
    query_grad, key_grad, value_grad = (jnp.where(*one, 0) for one in zip(inside, grads, strict=True))
    return query_grad, key_grad, value_grad


def _is_beyond_offsets(pairs: Pairs, query: Array, key: Array) -> bool:
    return pairs.sequences is not None and max(query.size, key.size) > _MOST_NUMBERS


def _in_halves(compute: Callable[[Any, Any], Any], arrays: Any, sequences: Any) -> Any:
    """Computes the two halves of the batch separately, and concatenates the results.

    Raises:
      ValueError: if the batch has size one.
    """
    batch = sequences[0].start.shape[0]
    if batch == 1:
        raise ValueError(
            f"implementation='cudnn' takes {_MOST_NUMBERS} numbers at most of one sequence with documents on a device: "
            "shard it over more devices, or say implementation='xla'"
        )
    halves = slice(None, batch // 2), slice(batch // 2, None)
    parts = [compute(*jax.tree.map(lambda array, half=half: array[half], (arrays, sequences))) for half in halves]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)


# With sequences, cuDNN's statistics have one batch entry for each sequence, whose first row is at index 0.


def _take_from_sequences(stats: Float[Array, "BM N R"], sequence: Sequences) -> Float[Array, "B R N"]:
    batch, rows = sequence.start.shape[0], stats.shape[2]
    row = jnp.arange(rows, dtype=jnp.int32)
    number = sequence.number(rows)  # [B, R]
    own_row = jnp.clip(row - jnp.take_along_axis(sequence.start, number, axis=1), 0, rows - 1)
    of_batch = stats.reshape(batch, -1, *stats.shape[1:])  # [B, M, N, R]
    return of_batch[jnp.arange(batch)[:, None], number, :, own_row]


def _put_in_sequences(lse: Float[Array, "B R N"], sequence: Sequences) -> Float[Array, "BM N R"]:
    batch, rows, heads = lse.shape
    row = jnp.minimum(sequence.start[..., None] + jnp.arange(rows, dtype=jnp.int32), rows - 1)  # [B, M, R]
    stats = lse[jnp.arange(batch)[:, None, None], row]  # [B, M, R, N]
    return stats.swapaxes(2, 3).reshape(-1, heads, rows)


def _offsets(sequence: Sequences) -> Int[Array, "B more"]:
    """Returns the first row of each sequence in its batch, followed by -1."""
    return jnp.pad(sequence.start, ((0, 0), (0, 1)), constant_values=-1)


def _bind(direction: str, arrays: tuple[Array, ...], pairs: Pairs, scale: float, **more: Any) -> Any:
    module: Any = _jax
    names = inspect.signature(getattr(module, f"_dot_product_attention_{direction}_impl")).parameters
    primitive = getattr(module, f"_dot_product_attention_{direction}_p_wrapper")
    parameters = dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=module.MaskType[_mask_name(pairs)],
        layout=module.AttentionLayout.BTNH.value,
        sliding_window_length=pairs.window,
        **{name: value for name, value in _NEWER_PARAMETERS.items() if name in names},
        **more,
    )

    # vmap enlarges the batch: in some versions, the primitive's own rule fails if only some arrays are batched.
    @jax.custom_batching.custom_vmap
    def bind(arrays: tuple[Array, ...], sequences: tuple[Sequences, Sequences] | None) -> tuple[Array, ...]:
        empty = jnp.zeros(0, arrays[0].dtype)
        lengths = offsets = (empty, empty)
        if sequences is not None:
            lengths, offsets = tuple(sequence.length for sequence in sequences), tuple(map(_offsets, sequences))
        unused = empty, *lengths, *offsets, empty, empty  # the first a bias, the last two page tables
        return tuple(primitive.bind(*arrays[:3], *unused, *arrays[3:], **parameters))

    @bind.def_vmap
    def bind_batches(size: int, is_batched: Any, *given: Any) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        arrays, tree = jax.tree.flatten(given)
        has_size = jax.tree.leaves(is_batched)
        spread = lambda array, has: array if has else jnp.broadcast_to(array, (size, *array.shape))
        whole = [spread(array, has) for array, has in zip(arrays, has_size, strict=True)]
        whole = tree.unflatten(array.reshape(-1, *array.shape[2:]) for array in whole)
        results = tuple(array.reshape(size, -1, *array.shape[1:]) for array in bind(*whole))
        return results, (True,) * len(results)

    return bind(arrays, pairs.sequences)


def _mask_name(pairs: Pairs) -> str:
    names = ["PADDING"] * (pairs.sequences is not None) + ["CAUSAL"] * pairs.is_causal
    return "_".join(names) or "NO_MASK"


def _two_spans(pairs: Pairs) -> Pairs:
    """Adds an empty sequence if each batch has only one, which jax would treat as no sequences."""
    if pairs.sequences is None or pairs.sequences[0].start.shape[1] > 1:
        return pairs
    return pairs._replace(sequences=jax.tree.map(lambda array: jnp.pad(array, ((0, 0), (0, 1))), pairs.sequences))
