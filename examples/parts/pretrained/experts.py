"""A feed-forward layer of experts, of which each token has a few."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parts.byte_model import sharded
from parts.distribution import on_own_tokens
from parts.pretrained.config import ExpertsConfig, ModelConfig


class Experts(nnx.Module):
    """The experts of gpt-oss: each token goes to its top-k experts, weighted by a softmax over their router logits."""

    def __init__(self, config: ModelConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        assert config.experts is not None
        self.config, self.dtype = config.experts, dtype
        count, width, hidden = config.experts.count, config.width, config.hidden_width
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.router = nnx.Linear(width, count, kernel_init=sharded("fsdp", None), **types)
        normal = nnx.initializers.normal(width**-0.5)
        make = lambda shape, *axes: nnx.Param(sharded(*axes, initializer=normal)(rngs.params(), shape, param_dtype))
        # Gates and what they multiply take turns in the last dimension.
        self.gate_up = make((count, width, 2 * hidden), None, "fsdp", "tensor")
        self.gate_up_bias = make((count, 2 * hidden), None, "tensor")
        self.down = make((count, hidden, width), None, "tensor", "fsdp")
        self.down_bias = make((count, width), None, None)

    def __call__(self, states: jax.Array) -> jax.Array:
        """Returns the update that is added to the states [B, T, D]."""
        best, chosen = jax.lax.top_k(self.router(states), self.config.per_token)  # [B, T, k]
        params = self.gate_up, self.gate_up_bias, self.down, self.down_bias
        weights = [param.get_value().astype(states.dtype) for param in params]
        # Else sorting tokens by their experts would gather those of all devices.
        run = functools.partial(run_experts, self.config)
        return on_own_tokens(run, (states, jax.nn.softmax(best), chosen), weights)


def run_experts(config: ExpertsConfig, tokens: tuple[jax.Array, ...], weights: list[jax.Array]) -> jax.Array:
    """Returns the sums [B, T, D] of the chosen experts [B, T, k], each with its share."""
    states, shares, chosen = tokens
    gate_up, gate_up_bias, down, down_bias = weights
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert)  # of pairs of a token and an expert, by expert
    expert, token = expert[order], order // config.per_token
    sizes = jnp.bincount(expert, length=config.count)
    rows = states.reshape(-1, states.shape[-1])  # [B T, D]
    hidden = jax.lax.ragged_dot(rows[token], gate_up, sizes) + gate_up_bias[expert]  # [B T k, 2 F]
    gate = jnp.minimum(hidden[:, ::2], config.limit)
    up = jnp.clip(hidden[:, 1::2], -config.limit, config.limit)
    hidden = gate * jax.nn.sigmoid(config.alpha * gate) * (up + 1)
    out = jax.lax.ragged_dot(hidden, down, sizes) + down_bias[expert]  # [B T k, D]
    out = out[jnp.argsort(order)].reshape(*chosen.shape, -1)  # [B, T, k, D]
    return (out * shares[..., None]).sum(axis=-2)
