"""What implementations by kernels share: each kernel returns an output with its lse, or a finished gradient."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax._kernels.interface import Implementation, per_row, width_axis
from ringjax._kernels.softmax import Keys, Weighting, accumulation_dtype


class KernelPartial(NamedTuple):
    """The attention on some of the keys, in the kernels' layout, and the greatest logit of each row if asked for."""

    out: Float[Array, "*rows V"]
    lse: Float[Array, "*rows"]
    maximum: Float[Array, "*rows"] | None = None


class KernelGradients(NamedTuple):
    """Partial sums of gradients, in the kernels' layout; None for those that a kernel starts."""

    query: Float[Array, "*rows H"]
    key: Float[Array, "*keys H"]
    value: Float[Array, "*keys V"]


class KernelImplementation(Implementation):
    """An implementation whose kernels divide, scale and take logarithms themselves: nothing is left to finish."""

    def start(
        self,
        query: Float[Array, "*rows H"],
        keys: Keys,
        before: tuple[Array, ...] | None = None,
        has_maximum: bool = False,
    ) -> KernelPartial:
        if before is not None:
            out, *narrow = before
            return KernelPartial(out, *(per_row(array, self.rows_axis) for array in narrow))
        row = jnp.zeros_like(per_row(query, self.rows_axis), accumulation_dtype(query, *keys))
        shape, axis = list(query.shape), width_axis(self.rows_axis)
        shape[axis] = keys.value.shape[axis]
        nothing = row - jnp.inf
        return KernelPartial(jnp.zeros_like(row, shape=tuple(shape)), nothing, nothing if has_maximum else None)

    def finish(self, partial: KernelPartial) -> tuple[Array, ...]:
        return tuple(array for array in partial if array is not None)

    def finish_gradients(self, grads: KernelGradients, weighting: Weighting) -> tuple[Array, Array, Array]:
        del weighting
        return grads.query, grads.key, grads.value
