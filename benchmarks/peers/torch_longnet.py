"""LongNet's branches by torch's flash attention with gathers, on a GPU: its seconds, forward and gradient, as JSON.

`python torch_longnet.py LENGTH HEADS WIDTH ROUNDS`, five branches of 2048 kept rows each, causal.
"""

import json
import sys
import time

import torch

ROWS, RATES = 2048, (1, 2, 4, 8, 16)


def select(tokens, rate):
    """The kept rows of each segment, [segments, heads, rows, width]: head h keeps token h mod r of each r."""
    _, heads, width = tokens.shape
    split = tokens.view(-1, ROWS, rate, heads, width)  # [segments, rows, r, heads, width]
    index = (torch.arange(heads, device=tokens.device) % rate).view(1, 1, 1, heads, 1)
    index = index.expand(split.shape[0], ROWS, 1, heads, width)
    return split.gather(2, index).squeeze(2).transpose(1, 2), index


def attend(query, key, value):
    """All branches, mixed by their softmax denominators, without a gradient through these."""
    outs, sums = [], []
    for rate in RATES:
        (q, index), (k, _), (v, _) = (select(tokens, rate) for tokens in (query, key, value))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        shape = (out.shape[0], ROWS, rate, *query.shape[1:])
        rows = out.transpose(1, 2).unsqueeze(2)
        outs.append(torch.zeros(shape, dtype=out.dtype, device=out.device).scatter(2, index, rows).view_as(query))
        empty = torch.full((*shape[:-1], 1), -torch.inf, device=out.device)
        lse = lse.detach().transpose(1, 2)[:, :, None, :, None]
        sums.append(empty.scatter(2, index[..., :1], lse).view(*query.shape[:-1], 1))
    weights = torch.softmax(torch.stack(sums), dim=0)
    return sum(weight.to(out.dtype) * out for weight, out in zip(weights, outs, strict=True))


def main(length, heads, width, rounds):
    """Times forward and gradient."""
    make = lambda: torch.randn(length, heads, width, device="cuda", dtype=torch.bfloat16)
    arrays = [make().requires_grad_() for _ in range(3)]
    cotangent = make()

    def forward():
        with torch.no_grad():
            attend(*arrays)

    def gradient():
        torch.autograd.grad(attend(*arrays), arrays, cotangent)

    seconds = {}
    for name, call in (("forward", forward), ("gradient", gradient)):
        seconds[name] = []
        for count in range(rounds + 2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if count >= 2:
                seconds[name].append(time.perf_counter() - begin)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
