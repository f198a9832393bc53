"""The step that fine-tunes a pretrained model: AdamW, its loss in chunks, all parameters or adapters alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parts.distribution import on_own_tokens
from parts.pretrained.model import LanguageModel
from parts.pretrained.text import PADDING, Rows
from parts.training import by_position, state_shardings

MAX_TOKENS = 1024  # of which a device holds the logits at once
MATRICES = ("kernel", "gate_up", "down", "up")


class State(NamedTuple):
    """What a checkpoint holds: the parameters that are trained, and the optimizer's state."""

    params: Any
    opt_state: Any


class Trainer(NamedTuple):
    """A model's functions, compiled at their first call.

    Attributes:
      init: params -> the first state; donates the parameters.
      step: (state, fixed, rows [accumulate, B, T]) -> the next state and the loss; donates the state.
      held_out: (params, fixed, rows [B, T]) -> sums and counts of losses by position, [2, n].
      abstract: shapes and shardings of a state.
      params: the parameters that are trained, as they are at first.
      fixed: variables that are not trained.
      merge: params -> the model with them.
    """

    init: Callable[..., State]
    step: Any
    held_out: Callable[..., jax.Array]
    abstract: State
    params: Any
    fixed: Any
    merge: Callable[..., LanguageModel]


def make_trainer(model: LanguageModel, mesh: Mesh, steps: int, learning_rate: float) -> Trainer:
    """Returns the functions that train a model: its adapters, if it has any, or else all parameters."""
    has_adapters = bool(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    definition, params, fixed = nnx.split(model, nnx.LoRAParam if has_adapters else nnx.Param, ...)
    optimizer = make_optimizer(steps, learning_rate)

    def losses(params: Any, fixed: Any, rows: Rows) -> jax.Array:
        model = nnx.merge(definition, params, fixed, copy=True)  # as the variables in `fixed` are of an outer trace
        states = model.states(rows.tokens, document_ids=rows.document_ids, positions=rows.positions)
        return token_losses(model, states, rows.targets)

    def held_out(params: Any, fixed: Any, rows: Rows) -> jax.Array:
        ids = jnp.zeros_like(rows.tokens) if rows.document_ids is None else rows.document_ids
        return by_position(losses(params, fixed, rows), jnp.where(rows.targets == PADDING, PADDING, ids))

    def step(state: State, fixed: Any, batches: Rows) -> tuple[State, jax.Array]:
        count = jnp.maximum((batches.targets != PADDING).sum(), 1)
        loss = jax.value_and_grad(lambda params, rows: losses(params, fixed, rows).sum() / count)

        def add(totals: Any, rows: Rows) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, totals, loss(state.params, rows)), None

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(loss, state.params, jax.tree.map(lambda a: a[0], batches)))
        (value, grads), _ = jax.lax.scan(add, zeros, batches)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

    init = lambda params: State(params, optimizer.init(params))
    shapes = jax.eval_shape(init, params)
    shardings, whole = state_shardings(shapes, mesh), NamedSharding(mesh, P())
    of_shape = lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    return Trainer(
        init=jax.jit(init, donate_argnums=0, out_shardings=shardings),
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole)),
        held_out=jax.jit(held_out, out_shardings=whole),
        abstract=jax.tree.map(of_shape, shapes, shardings),
        params=params,
        fixed=fixed,
        merge=lambda params: nnx.merge(definition, params, fixed),
    )


def make_optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """Returns AdamW with clipped gradients; matrices decay, adapters too."""
    warmup = max(1, steps // 20)
    total = max(steps, warmup + 1)
    first, last = learning_rate / warmup, learning_rate / 10
    schedule = optax.warmup_cosine_decay_schedule(first, learning_rate, warmup, total, last)

    def is_matrix(path: Any, _: Any) -> bool:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return names[-1] in MATRICES

    decayed = lambda params: jax.tree_util.tree_map_with_path(is_matrix, params)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed))


def token_losses(model: LanguageModel, states: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the losses [B, T] of targets, zero where there is none.

    Each device holds the logits of `MAX_TOKENS` of its tokens at once, and computes them again in the gradient.
    """

    def run(tokens: tuple[jax.Array, jax.Array], kernel: jax.Array) -> jax.Array:
        states, targets = (array.reshape(-1, *array.shape[2:]) for array in tokens)  # [B T, D], [B T]
        size = min(MAX_TOKENS, len(targets))
        num_padding = -len(targets) % size
        states = jnp.pad(states, ((0, num_padding), (0, 0))).reshape(-1, size, states.shape[-1])  # [chunks, n, D]
        targets = jnp.pad(targets, (0, num_padding), constant_values=PADDING).reshape(-1, size)  # [chunks, n]

        @jax.checkpoint
        def run_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
            states, targets = chunk
            logits = model.cap(states @ kernel.astype(states.dtype))
            logits = logits.astype(jnp.promote_types(states.dtype, jnp.float32))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
            return jnp.where(targets == PADDING, 0, losses)

        losses = jax.lax.map(run_chunk, (states, targets)).reshape(-1)
        return losses[: losses.size - num_padding].reshape(tokens[1].shape)  # [B, T]

    # The kernel is narrowed in each chunk, so that its gradient is added up in its own dtype.
    return on_own_tokens(run, (states, targets), model.head_kernel())
