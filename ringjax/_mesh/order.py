"""Orders operations that do not depend on each other, where XLA needs it: collectives on CPUs, arrays elsewhere.

XLA:CPU tells the collectives of a program apart by their channel and their devices, which are the same for all permutes
of a shard_map. It starts them in one order on every device, but does not wait for the end of a loop before it starts
operations that are independent of it. A permute after a loop can then be matched with one inside the loop, and the
process aborts or hangs. Other platforms order collectives themselves, and stay free to overlap them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ringjax._mesh.axes import vary, varying_axes

LANES = 128  # the columns of a TPU's register


def after(arrays: Any, earlier: Any, *, is_copied: bool = False) -> Any:
    """Returns the arrays. On CPUs they depend on the arrays `earlier`, and so come after them.

    On TPUs they do so only if they are copied anyway (`is_copied`): otherwise it would cost an extra pass.
    """
    if not jax.tree.leaves(earlier):
        return arrays
    by_platform = {"cpu": wait, "tpu": wait} if is_copied else {"cpu": wait}
    return jax.lax.platform_dependent(arrays, earlier, **by_platform, default=lambda arrays, _: arrays)


def wait(arrays: Any, earlier: Any) -> Any:
    """Returns the arrays, which depend on the arrays `earlier` on all platforms. It costs a pass over the arrays."""
    # XLA drops a dependency that it can prove to change nothing. It cannot prove that a word has at most 32 set bits,
    # so it keeps this one.
    is_there = _count_bits(earlier) <= 32 * len(jax.tree.leaves(earlier))
    return jax.tree.map(lambda array: jnp.where(is_there, array, jnp.zeros_like(array)), arrays)


def when_lowered(default: Callable[..., Any], by_platform: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns the function of the platform that a program is lowered for, or else the default one."""
    return lambda *arrays: jax.lax.platform_dependent(*arrays, default=default, **by_platform)


def unroll(numbers: Array, platform: str | None) -> int:
    """Returns the unroll factor of a loop with a step for each of the numbers, around kernels for a platform.

    Around kernels for TPUs, without unrolling, XLA copies what an iteration receives before the next one sends it. On
    GPUs, and around XLA's own tiles, two steps per iteration take more memory, and on GPUs their permutes do not
    overlap. At least two iterations remain, so that it stays a loop: if it were fully unrolled, XLA would merge the
    backward's permutes with the forward's, and keep every shard live in between.
    """
    return 2 if platform == "tpu" and len(numbers) >= 4 else 1


def in_turn(arrays: Any, computed: Any, platform: str | None) -> Any:
    """Returns the arrays; with kernels for TPUs, an ordering barrier keeps their uses after what is `computed`.

    The inputs of these kernels are copied: if XLA began several branches at once, all their copies would be live.
    """
    return behind(arrays, computed) if platform == "tpu" else arrays


def documents_behind(documents: Array | None, computed: Any, platform: str | None) -> Array | None:
    """Returns the documents; with kernels for TPUs they are read only after what is `computed`.

    Otherwise XLA makes the mask of the next kernel before it starts this one, and waits for documents on their way.
    """
    return wait(documents, computed) if documents is not None and platform == "tpu" else documents


def behind(arrays: Any, computed: Any) -> Any:
    """Returns the arrays [B, n, ...]. On TPUs a barrier keeps their uses after what is `computed`, in other passes."""
    if not jax.tree.leaves(computed):
        return arrays

    def with_barrier(arrays: Any, computed: Any) -> Any:
        # XLA chooses the layout of an array at a barrier by its shape. Narrow arrays pass it with their rows last:
        # otherwise they would get a relayout copy, to lanes that they do not fill.
        is_narrow = lambda array: array.shape[-1] % LANES != 0
        transposed = jax.tree.map(lambda array: jnp.moveaxis(array, 1, -1) if is_narrow(array) else array, arrays)
        passed, _ = jax.lax.optimization_barrier((transposed, computed))
        restore = lambda array, one: jnp.moveaxis(one, -1, 1) if is_narrow(array) else one
        return jax.tree.map(restore, arrays, passed)

    return jax.lax.platform_dependent(arrays, computed, tpu=with_barrier, default=lambda arrays, _: arrays)


def zeros_behind(arrays: Any, dtype: Any, count: int, others: Any = ()) -> tuple[Array, ...]:
    """Returns `count` zeros that XLA cannot constant-fold, so that what is made of them comes after the arrays.

    XLA hoists constants: it makes one array long before it is needed, and a copy of it for each use. It removes
    barriers before it schedules. The zeros come after `others` as well, except on TPUs, which relayout what is read.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((arrays, others))))
    bits_of = lambda *trees: vary(_count_bits(trees), axes)
    few = lambda arrays, others: bits_of(arrays)
    bits = jax.lax.platform_dependent(arrays, others, tpu=few, default=bits_of) if others else bits_of(arrays)
    return tuple((bits >> (16 + number)).astype(dtype) for number in range(count))


def _count_bits(arrays: Any) -> Array:
    """Returns the sum, over the arrays, of the set bits in one word of each."""
    words = (jax.lax.population_count(_word(jnp.asarray(array))) for array in jax.tree.leaves(arrays))
    return sum(words, jnp.uint32(0))


def _word(array: Array) -> Array:
    element = jax.lax.squeeze(jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim), range(array.ndim))
    return (element != 0).astype(jnp.uint32)
