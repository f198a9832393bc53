"""Times torch's fused causal attention on the CPU; prints the seconds of each round as JSON.

`python torch_attention.py LENGTH ROUNDS`, in an environment of its own.
"""

import json
import sys
import time

import torch

length, rounds = map(int, sys.argv[1:])
generator = torch.Generator().manual_seed(0)
arrays = [torch.randn(1, 8, length, 64, generator=generator, requires_grad=True) for _ in range(3)]
attend = torch.nn.functional.scaled_dot_product_attention


def forward():
    """Computes the output."""
    with torch.no_grad():
        attend(*arrays, is_causal=True)


def gradient():
    """Computes the output and the gradients."""
    torch.autograd.grad(attend(*arrays, is_causal=True).sum(), arrays)


seconds = {"forward": [], "gradient": []}
for name, call in (("forward", forward), ("gradient", gradient)):
    call()
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - begin)
print(json.dumps(seconds))
