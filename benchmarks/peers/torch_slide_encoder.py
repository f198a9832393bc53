"""A slide encoder of twelve layers in torch: the processor time of a slide, as JSON.

`python torch_slide_encoder.py TILES KIND ROUNDS`: with dense attention, or with `branches`: those of LongNet, each by
torch's fused attention on the rows that it keeps, mixed by their softmax denominators. Weights are random.
"""

import json
import sys
import time

import torch
from torch import nn

LAYERS, WIDTH, HEADS, IN_FEATURES = 12, 768, 16, 1536
SEGMENT_LENGTHS, RATES = (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16)


def select(tokens, size, rate):
    """The kept rows of each segment, [segments, heads, rows, width], and where they come from; zeros fill segments."""
    length, heads, width = tokens.shape
    segments, filled = -(-length // size), -(-size // rate) * rate
    tokens = nn.functional.pad(tokens, (0, 0, 0, 0, 0, segments * size - length)).view(segments, size, heads, width)
    tokens = nn.functional.pad(tokens, (0, 0, 0, 0, 0, filled - size)).view(segments, -1, rate, heads, width)
    index = (torch.arange(heads) // -(-heads // rate)).view(1, 1, 1, heads, 1)
    index = index.expand(segments, tokens.shape[1], 1, heads, width)
    return tokens.gather(2, index).squeeze(2).transpose(1, 2), index


def attend_to_branches(query, key, value):
    """All branches [T, heads, width]."""
    outs, sums, length = [], [], query.shape[0]
    for segment_length, rate in zip(SEGMENT_LENGTHS, RATES, strict=True):
        size = min(segment_length, length)
        (q, index), (k, _), (v, _) = (select(tokens, size, rate) for tokens in (query, key, value))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)
        segments, rows, _, heads, width = index.shape
        back = lambda array, size=size, segments=segments: array.flatten(1, 2)[:, :size].flatten(0, 1)[:length]
        whole = torch.zeros(segments, rows, rate, heads, width).scatter(2, index, out.transpose(1, 2).unsqueeze(2))
        empty = torch.full((segments, rows, rate, heads, 1), -torch.inf)
        outs.append(back(whole))
        sums.append(back(empty.scatter(2, index[..., :1], lse.transpose(1, 2)[:, :, None, :, None])))
    weights = torch.softmax(torch.stack(sums), dim=0)
    return sum(weight * out for weight, out in zip(weights, outs, strict=True))


def attend_densely(query, key, value):
    """Dense attention [T, heads, width]."""
    swapped = (array.transpose(0, 1)[None] for array in (query, key, value))
    return nn.functional.scaled_dot_product_attention(*swapped)[0].transpose(0, 1)


class Layer(nn.Module):
    """Attention and a network, each after a norm and with one inside."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.before, self.inside, self.norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.inner, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.LayerNorm(4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, states):
        """Maps states [T, width]."""
        hidden = self.before(states)
        heads = (linear(hidden).view(-1, HEADS, WIDTH // HEADS) for linear in (self.query, self.key, self.value))
        states = states + self.out(self.inside(self.attend(*heads).reshape(-1, WIDTH)))
        return states + self.down(self.inner(nn.functional.gelu(self.up(self.norm(states)))))


def main(tiles, kind, rounds):
    """Times some rounds, after one that is not counted."""
    torch.manual_seed(0)
    attend = {"dense": attend_densely, "branches": attend_to_branches}[kind]
    patch, layers = nn.Linear(IN_FEATURES, WIDTH), nn.Sequential(*(Layer(attend) for _ in range(LAYERS)))
    slide, seconds = torch.randn(tiles + 1, IN_FEATURES), []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            begin = time.process_time()
            layers(patch(slide))
            seconds.append(time.process_time() - begin)
    print(json.dumps(seconds[1:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
