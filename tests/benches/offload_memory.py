"""Memory and processor time of SOAP's steps for GPT-2 small, with its state in a file and in memory.

    python tests/benches/offload_memory.py             # a table for docs/measurements/storage.md; 6 GiB, minutes
    python tests/benches/offload_memory.py 1           # the same with one layer in place of twelve

Each case runs in a process of its own. The run with the file may allocate 350 MiB of private memory beside parameters
and gradients (RLIMIT_DATA). Linux only.
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from eigengraft import Optimizer

LIMIT, STEPS, WIDTH = 350 << 20, 5, 768
ROLES = ("statistic", "basis", "first_moment", "second_moment")
ROWS = ("state, MiB", "memory after the last step, without pages of the file, MiB", "largest memory, MiB")


def memory(row: str) -> int:
    """Return a number of bytes of /proc/self/status."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[row].split()[0]) << 10


def parameters(layers: int) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of GPT-2 small with gradients. The head is tied to the embedding."""
    w = WIDTH
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50_257, w), "wpe.weight": (1024, w)}
    for k in range(layers):
        for name, m, n in (("attn.qkv", 3 * w, w), ("attn.out", w, w), ("mlp.up", 4 * w, w), ("mlp.down", w, 4 * w)):
            shapes |= {f"h.{k}.{name}.weight": (m, n), f"h.{k}.{name}.bias": (m,)}
        shapes |= {f"h.{k}.norm_{i}.{name}": (w,) for i in (1, 2) for name in ("weight", "bias")}
    shapes |= {"norm.weight": (w,), "norm.bias": (w,)}
    found = [(name, nn.Parameter(0.02 * torch.randn(shape))) for name, shape in shapes.items()]
    for _, parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def measure(layers: int, place: str, folder: str) -> dict[str, object]:
    """Make some steps with the state in `place`, "disk" or "memory". Return rows of the table and a hash."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    given = parameters(layers)
    offload = {"kind": "offload", "to": "disk", "directory": folder}
    storage = dict.fromkeys(ROLES, offload) if place == "disk" else {}
    before = memory("RssAnon")
    if place == "disk":
        limit = memory("VmData") + LIMIT
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    optimizer, seconds = Optimizer(given, "soap", overrides={"storage": storage}), []
    for _ in range(STEPS):
        start = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - start)
    sizes = (optimizer.state_bytes(), memory("RssAnon") - before, memory("VmHWM") - before)
    digest = hashlib.sha256()
    for _, parameter in given:
        digest.update(parameter.detach().numpy())
    return {
        **{row: f"{size / 2**20:,.0f}" for row, size in zip(ROWS, sizes, strict=True)},
        "processor time of the first step, s": f"{seconds[0]:.1f}",
        "processor time of later steps, s": f"{min(seconds[1:]):.1f} to {max(seconds[1:]):.1f}",
        "hash of the parameters": digest.hexdigest()[:12],
    }


def main(layers: str = "12") -> None:
    """Print the table."""
    found = []
    for place in ("disk", "memory"):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            command = [sys.executable, __file__, layers, place, folder]
            found.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
    sys.stdout.write("| | state in a file | state in memory |\n| --- | --- | --- |\n")
    sys.stdout.writelines(f"| {row} | {found[0][row]} | {found[1][row]} |\n" for row in found[0])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.stdout.write(json.dumps(measure(int(sys.argv[1]), *sys.argv[2:])))
    else:
        main(*sys.argv[1:])
