"""What stands in for the libraries that torchscale imports and its numbers do not need."""

import sys
import types
from typing import Any

import torch


def stand_in(name: str, **members: Any) -> None:
    """Puts a module with these members where an import looks for it."""
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def stand_in_for_libraries() -> None:
    """Puts empty modules in the places of those libraries."""
    identity = lambda thing: thing
    stand_in("timm")
    stand_in("timm.models")
    stand_in("timm.models.registry", register_model=identity)
    stand_in("timm.models.layers", drop_path=lambda x, *_: x)  # it drops nothing in evaluation
    stand_in("huggingface_hub")
    stand_in("fairscale")
    stand_in("fairscale.nn", checkpoint_wrapper=identity, wrap=identity)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    bias: Any,
    scale: Any,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dense attention [B, T, N, H] and its lse [B, N, T], in place of flash-attn's."""
    assert bias is None
    assert scale is None
    logits = torch.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    return torch.einsum("bnts,bsnh->btnh", torch.exp(logits - lse[..., None]), value), lse
