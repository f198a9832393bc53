"""The kernel "cudnn": cuDNN's fused attention, by the primitives of jax that its public function stands on.

The public function differentiates with an lse of its own; the rings need the backward of some keys with the lse of all.
"""

import functools
import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax._block import Keys
from ringjax._fused import FusedQueries

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
# The arrays that the primitives take after query, key and value, and do not need; then the parameters of both.
_UNUSED_ARRAYS = 7  # bias, lengths and offsets of both sides, two page tables
_PARAMETERS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
_NEWER_PARAMETERS = {"score_mod": None}  # from jax 0.12 on


@functools.cache
def _missing() -> str | None:
    """Returns what jax or the machine lack of what is used here, with one warning."""
    missing = _find_missing(_jax) or (_find_lacking(_jax) if jax.default_backend() == "gpu" else None)
    if missing:
        warnings.warn(f"cuDNN's attention is not used: {missing}", stacklevel=2)
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
        arrays = 3 + _UNUSED_ARRAYS + (3 if direction == "bwd" else 0)
        if "score_mod_args" in names:  # none of them is passed
            names.remove("score_mod_args")
        known = {*_PARAMETERS, *_NEWER_PARAMETERS, "is_training"}
        if "scale" not in names[arrays : arrays + 1] or not set(_PARAMETERS) <= set(names[arrays:]) <= known:
            return f"this version of jax has other parameters of {name}"
    return None


def _most_width() -> int:
    """Returns the width of the widest heads on the GPUs that there are; the least of all GPUs where there are none."""
    is_hopper = jax.default_backend() == "gpu" and _jax is not None and _jax.check_compute_capability("9.0")
    return 256 if is_hopper else 128


def obstacle(query: Any, key: Any, value: Any, platform: str, widening: int = 0) -> str | None:
    """Returns why cuDNN cannot compute such arrays on such a platform, None where it can.

    Gradients may ask for arrays that are wider by `widening`.
    """
    if platform not in ("gpu", "cuda"):
        return f"it runs on NVIDIA GPUs, and the devices are of platform {platform!r}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16, and query is of {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return f"it takes one dtype, and query, key and value are of {query.dtype}, {key.dtype} and {value.dtype}"
    return _missing() or _too_wide(query.shape[-1], value.shape[-1], widening)


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
    is_causal: bool,
    scale: float,
) -> tuple[Float[Array, "B Rq N V"], Float[Array, "B Rq N"]]:
    """Returns the output and the lse of each row."""
    out, lse = _bind("fwd", (query, key, value), is_causal, scale, is_training=True)
    return out, lse.swapaxes(1, 2)


def differentiate(
    queries: FusedQueries, keys: Keys, is_causal: bool, scale: float
) -> tuple[Float[Array, "B Rq N H"], Float[Array, "B Rk K H"], Float[Array, "B Rk K V"]]:
    """Returns what these pairs add to the gradients, given the output and the lse over all pairs of the rows."""
    dtype = queries.query.dtype
    given = queries.lse.astype(jnp.float32).swapaxes(1, 2), queries.out.astype(dtype), queries.out_grad.astype(dtype)
    return _bind("bwd", (queries.query, *keys, *given), is_causal, scale)


def _bind(direction: str, arrays: tuple[Array, ...], is_causal: bool, scale: float, **more: Any) -> Any:
    module: Any = _jax
    names = inspect.signature(getattr(module, f"_dot_product_attention_{direction}_impl")).parameters
    primitive = getattr(module, f"_dot_product_attention_{direction}_p_wrapper")
    parameters = dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=module.MaskType.CAUSAL if is_causal else module.MaskType.NO_MASK,
        layout=module.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **{name: value for name, value in _NEWER_PARAMETERS.items() if name in names},
        **more,
    )

    # Under vmap more batches: the primitive's own rule fails, in some versions, where not all arrays have them.
    @jax.custom_batching.custom_vmap
    def bind(*arrays: Array) -> tuple[Array, ...]:
        unused = [jnp.zeros(0, arrays[0].dtype)] * _UNUSED_ARRAYS
        return tuple(primitive.bind(*arrays[:3], *unused, *arrays[3:], **parameters))

    @bind.def_vmap
    def bind_batches(size: int, is_batched: list[bool], *arrays: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        spread = lambda array, has: array if has else jnp.broadcast_to(array, (size, *array.shape))
        whole = [spread(array, has) for array, has in zip(arrays, is_batched, strict=True)]
        results = bind(*(array.reshape(-1, *array.shape[2:]) for array in whole))
        results = tuple(array.reshape(size, -1, *array.shape[1:]) for array in results)
        return results, (True,) * len(results)

    return bind(*arrays)
