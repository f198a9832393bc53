"""What implementations by kernels share: each kernel returns an output with its lse, or a finished gradient."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax._kernels.interface import Implementation, per_row, width_axis
from ringjax._kernels.softmax import Keys, Weighting, accumulation_dtype


class KernelPartial(NamedTuple):
    """The attention on some of the keys, in the kernels' layout."""

    out: Float[Array, "*rows V"]
    lse: Float[Array, "*rows"]


class KernelGradients(NamedTuple):
    """Partial sums of gradients, in the kernels' layout; None for those that a kernel starts."""

    query: Float[Array, "*rows H"]
    key: Float[Array, "*keys H"]
    value: Float[Array, "*keys V"]


class KernelImplementation(Implementation):
    """An implementation whose kernels divide, scale and take logarithms themselves: nothing is left to finish."""

    def start(
        self, query: Float[Array, "*rows H"], keys: Keys, before: tuple[Array, ...] | None = None
    ) -> KernelPartial:
        if before is not None:
            out, lse = before
            return KernelPartial(out, per_row(lse, self.rows_axis))
        row = jnp.zeros_like(per_row(query, self.rows_axis), accumulation_dtype(query, *keys))
        shape, axis = list(query.shape), width_axis(self.rows_axis)
        shape[axis] = keys.value.shape[axis]
        return KernelPartial(jnp.zeros_like(row, shape=tuple(shape)), row - jnp.inf)

    def finish(self, partial: KernelPartial) -> tuple[Array, Array]:
        return partial.out, partial.lse

    def finish_gradients(self, grads: KernelGradients, weighting: Weighting) -> tuple[Array, Array, Array]:
        del weighting
        return grads.query, grads.key, grads.value
