"""Peak memory and time of a training step with and without gradient release, each in a process of its own.

    python tests/benches/release_memory.py            # a table for docs/measurements/step.md

The model has 16 layers of four matrices of a transformer of width 512: 50 million parameters in float32.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

import eigengraft

WIDTH, LAYERS, TOKENS, STEPS = 512, 16, 64, 3
CASES = [(recipe, mode) for recipe in ("adamw", "muon") for mode in ("ordinary", "released")]


class Layer(nn.Module):
    """The matrices of one transformer block, without attention scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(q * k.sigmoid() + v)
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


def measure(recipe: str, mode: str) -> tuple[float, float]:
    """Return (peak of the process in MiB, seconds of a step), for some steps of one recipe."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = eigengraft.compose(recipe, model)
    release = eigengraft.release(model, optimizer) if mode == "released" else None
    x = torch.randn(TOKENS, WIDTH)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    assert release is None or not release.begun
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, min(seconds)


def main() -> None:
    """Print a row for each case."""
    sys.stdout.write("| recipe | step | peak, MiB | seconds a step |\n| --- | --- | --- | --- |\n")
    for recipe, mode in CASES:
        found = subprocess.run([sys.executable, __file__, recipe, mode], capture_output=True, text=True, check=True)
        sys.stdout.write(f"| `{recipe}` | {mode} | {found.stdout.strip()} |\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write("{:.0f} | {:.2f}".format(*measure(*sys.argv[1:])))
    else:
        main()
