"""Low-rank adapters of a pretrained model's projections (LoRA, arXiv 2106.09685)."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parts.distribution import fitting
from parts.pretrained.model import LanguageModel

PROJECTIONS = {"attention": ("query", "key", "value", "out"), "feed_forward": ("gate", "up", "down")}
SCALE = 2.0  # alpha over the rank


class Adapted(nnx.Module):
    """A projection with a product of two thin matrices beside it, zero at first.

    Args:
      base: the projection, alone or of several layers that are stacked.
      num_stacked: how many dimensions of its kernel are of such layers.
      num_inputs: how many dimensions of its kernel are contracted.
      rank: of the product.
      key: the random key of the first matrix.
    """

    def __init__(self, base: Any, num_stacked: int, num_inputs: int, rank: int, key: jax.Array) -> None:
        self.base, self.num_stacked, self.num_inputs = base, num_stacked, num_inputs
        kernel = base.kernel.get_value()
        axes, begin = base.kernel.get_metadata()["out_sharding"], num_stacked + num_inputs  # of the outputs
        stacked, rows, columns = kernel.shape[:num_stacked], kernel.shape[num_stacked:begin], kernel.shape[begin:]
        down = jax.random.normal(key, (*stacked, *rows, rank)) / math.sqrt(math.prod(rows))
        up = jnp.zeros((*stacked, rank, *columns))

        def lay(array: jax.Array, *axes: Any) -> nnx.LoRAParam[jax.Array]:
            sharding = NamedSharding(kernel.sharding.mesh, fitting(kernel.sharding.mesh, P(*axes), array.shape))
            return nnx.LoRAParam(jax.device_put(array, sharding), out_sharding=axes, eager_sharding=False)

        self.down, self.up = lay(down, *axes[:begin], None), lay(up, *axes[:num_stacked], None, *axes[begin:])

    def __call__(self, inputs: jax.Array, **options: Any) -> jax.Array:
        """Returns the projection of inputs [..., *rows], with the options of the base."""
        out = self.base(inputs, **options)
        down, up = (param.get_value().astype(out.dtype) for param in (self.down, self.up))
        narrow = jnp.tensordot(inputs.astype(out.dtype), down, self.num_inputs)  # [..., rank]
        return out + SCALE * jnp.tensordot(narrow, up, 1)

    def merged(self) -> jax.Array:
        """Returns the kernel of the base with the product added."""
        multiply = lambda down, up: jnp.tensordot(down, up, 1)
        for _ in range(self.num_stacked):
            multiply = jax.vmap(multiply)
        kernel = self.base.kernel.get_value()
        return (kernel + SCALE * multiply(self.down.get_value(), self.up.get_value())).astype(kernel.dtype)


def adapt(model: LanguageModel, rank: int, seed: int = 0) -> None:
    """Gives the seven projections of each block adapters of a rank, their parameters of the type `nnx.LoRAParam`."""
    for number, (owner, name, num_stacked) in enumerate(_projections(model)):
        key = jax.random.fold_in(jax.random.key(seed), number)
        setattr(owner, name, Adapted(getattr(owner, name), num_stacked, 2 if name == "out" else 1, rank, key))


def merge(model: LanguageModel) -> LanguageModel:
    """Returns a copy of the model with its adapters added to the kernels."""
    model = nnx.clone(model)
    for owner, name, _ in _projections(model):
        projection = getattr(owner, name)
        if isinstance(projection, Adapted):
            projection.base.kernel.set_value(projection.merged())
            setattr(owner, name, projection.base)
    return model


def _projections(model: LanguageModel) -> Iterator[tuple[Any, str, int]]:
    """Yields the owner of each projection, its name there, and how many dimensions of its kernel are of layers."""
    for num_stacked, blocks in ((1, model.stacked), (0, model.rest)):
        for block in blocks:
            for part, names in PROJECTIONS.items():
                owner = getattr(block, part)
                are_there = (name for name in names if isinstance(getattr(owner, name, None), nnx.Module))
                yield from ((owner, name, num_stacked) for name in are_there)
