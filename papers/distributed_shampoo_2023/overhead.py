"""Compare the cost of a step of Distributed Shampoo with that of the gradient, by operations and by milliseconds.

The paper (Shi et al. 2023, arXiv:2309.06497, abstract) reports at most 10 % more time for a step than with a diagonal
method. Operations are counted by plans, for ResNet-50 at 224 x 224 and for the matrices of a transformer with 1.2
billion parameters. The gradient is counted as six operations for each parameter and token, or for each parameter and
place of a convolution. Seconds are computed from operations and bytes of messages, with the data sheet of a V100.
Milliseconds are measured in gloo processes on this machine, for the threads that compute, so that messages and waiting
do not count.

    python overhead.py            writes results/overhead.json and results/overhead.md
    python overhead.py --counted  counts again and keeps the stored milliseconds
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eigengraft import load_recipe
from eigengraft.optimizers import Optimizer, Recipe
from eigengraft.optimizers.plan.plan import plan

RESULTS = Path(__file__).parent / "results"
Shape = tuple[int, ...]
Layer = tuple[Shape, int]
"""The shape of a parameter, and how often each of its entries is used for one example."""
REFRESH = "update.graft.direction.shampoo.refresh"
RATE = 15.7e12
"""Peak speed of a V100 SXM2 in float32, in operations a second (data sheet)."""
LINKS = {1: float("inf"), 8: 150e9, 64: 12.5e9}
"""Speed of messages into a GPU in bytes a second, by number of ranks: for 8 ranks, one direction of NVLink in a
machine (data sheet); for 64 ranks, a network adapter of 100 Gb/s."""
TOKENS = (512, 2048, 8192)
"""Numbers of tokens of one rank in a step, in the measurement."""


def shampoo(block: int, interval: int) -> Recipe:
    """Return the reference recipe with blocks of side `block`, and with new roots every `interval` steps."""
    choices = [f"blocking.size={block}", f"blocking.merge={block}", f"{REFRESH}.steps={interval}"]
    return load_recipe("reference/distributed_shampoo", choices)


def resnet50(classes: int = 1000) -> Iterator[Layer]:
    """Yield the layers of ResNet-50 for images of 224 x 224."""

    def convolution(out: int, into: int, size: int, side: int) -> Iterator[Layer]:
        yield (out, into, size, size), side * side
        yield from [((out,), 0)] * 2

    yield from convolution(64, 3, 7, 112)
    into = 64
    for width, depth, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(depth):
            before = side * 2 if block == 0 and width > 64 else side  # the second convolution has the stride
            yield from convolution(width, into, 1, before)
            yield from convolution(width, width, 3, side)
            yield from convolution(4 * width, width, 1, side)
            if block == 0:
                yield from convolution(4 * width, into, 1, side)
            into = 4 * width
    yield (classes, into), 1
    yield (classes,), 0


def transformer(width: int, layers: int) -> Iterator[Layer]:
    """Yield the matrices of a transformer. Every token uses each of them once."""
    for _ in range(layers):
        for out, into in ((3, 1), (1, 1), (4, 1), (1, 4)):
            yield (out * width, into * width), 1


MODELS = {"ResNet-50": (list(resnet50()), 32, "images"), "transformer": (list(transformer(2048, 24)), 8192, "tokens")}
"""Layers of each model, the number of examples of one rank in a step, and the unit of this number."""


def counted(model: str, block: int, interval: int, ranks: int) -> dict[str, Any]:
    """Return a row with the operations of a step and of the gradient, for the rank with the most operations."""
    layers, examples, unit = MODELS[model]
    named = [(f"p{i}", shape) for i, (shape, _) in enumerate(layers)]
    planned = plan(shampoo(block, interval), named, (ranks,), "ddp")
    row = {"model": model, "parameters": sum(math.prod(s) for s, _ in layers), "examples": f"{examples} {unit}"}
    gradient = 6 * examples * sum(math.prod(s) * uses for s, uses in layers)
    row |= {"block": block, "interval": interval, "ranks": ranks, "gradient": gradient}
    received = int(planned.traffic["updates"].received.max())
    return row | {"step": float(planned.work.max()), "state": int(planned.state.max()), "received": received}


def seconds_over(row: dict[str, Any]) -> float:
    """Return the time of a step of the optimizer, divided by the time of the gradient, by the data sheets.

    The time of the step is that of its operations, and then that of its messages, without overlap.
    """
    step = row["step"] / RATE + row["received"] / LINKS[row["ranks"]]
    return float(step * RATE / row["gradient"])


def gradient_ms(shapes: list[Shape], tokens: int, repeats: int = 5) -> float:
    """Return the milliseconds of one thread for the three products of every matrix with `tokens` rows.

    They are the product of forward and the two products of backward. The result is the median of `repeats` times.
    """

    def products(matrix: Tensor) -> None:
        x, g = torch.ones(tokens, matrix.shape[1]), torch.ones(tokens, matrix.shape[0])
        _ = x @ matrix.mT, g @ matrix, g.mT @ x

    matrices, times = [torch.randn(shape) for shape in shapes], []
    for _ in range(repeats):
        start = time.thread_time()
        for matrix in matrices:
            products(matrix)
        times.append(1e3 * (time.thread_time() - start))
    return median(times)


@dataclass(frozen=True)
class RankJob:
    """A job of the ranks: steps of one recipe, which every rank runs.

    recipe: the recipe as JSON text.
    shapes: shapes of the parameters, by name.
    warm: number of first steps, which are not measured.
    steps: number of steps that are measured.
    seed: seed of parameters and gradients, which are the same on all ranks.
    """

    recipe: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    warm: int
    steps: int
    seed: int


def busy_times(jobs: Sequence[RankJob], ranks: int) -> list[list[list[float]]]:
    """For each job the milliseconds that each rank computes in each step, without the time that it waits.

    Each rank is a new process with one thread.
    """
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (list(jobs), rank, ranks, Path(folder) / "store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            found = [ours.recv() for _, ours in started]
        finally:
            for process, _ in started:
                process.terminate()
                process.join()
    return [[rank[job] for rank in found] for job in range(len(jobs))]


def _serve(jobs: Sequence[RankJob], rank: int, ranks: int, store: Path, theirs: Connection) -> None:
    """Run all jobs as one rank and send the times. This is the main function of a process."""
    # Ranks of a bench are expected to wait for each other, so that they need not warn about it.
    warnings.filterwarnings("ignore", message=".*ranks wait for each other's refreshes")
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    theirs.send([_milliseconds(job) for job in jobs])
    if ranks > 1:
        dist.destroy_process_group()


def _milliseconds(job: RankJob) -> list[float]:
    """Return the milliseconds of each step by the clock of this thread, which stops while the thread waits."""
    generator = torch.Generator().manual_seed(job.seed)
    named = [(name, torch.nn.Parameter(0.02 * torch.randn(s, generator=generator))) for name, s in job.shapes]
    optimizer, times = Optimizer(named, load_recipe(job.recipe), lr=1e-3), []
    for _ in range(job.warm + job.steps):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        start = time.thread_time()
        optimizer.step()
        times.append(1e3 * (time.thread_time() - start))
    return times[job.warm :]


def path_of(busy: Sequence[Sequence[float]]) -> float:
    """Return the length of the critical path of a step: the longest time of all ranks, as a mean over steps."""
    return fmean(max(step) for step in zip(*busy, strict=True))


def measured() -> list[dict[str, Any]]:
    """Return rows of milliseconds of a step on 1, 2 and 4 ranks, for AdamW and for four choices of Shampoo.

    The time of a step is that of the rank with the longest time.
    """
    shapes = [shape for shape, _ in transformer(256, 2)]
    named = tuple((f"p{i}", shape) for i, shape in enumerate(shapes))
    choices = ((1024, 10), (1024, 50), (256, 10), (256, 50))
    adamw = RankJob(load_recipe("adamw").to_json(), named, 20, 40, 0)
    jobs = [RankJob(shampoo(*c).to_json(), named, c[1] + 1, c[1], 0) for c in choices]
    gradients, rows = {str(tokens): gradient_ms(shapes, tokens) for tokens in TOKENS}, []
    for ranks in (1, 2, 4):
        diagonal, *paths = [path_of(busy) for busy in busy_times([adamw, *jobs], ranks)]
        about = {"ranks": ranks, "gradient": gradients, "diagonal": diagonal}
        rows += [
            {"block": b, "interval": i, **about, "step": path} for (b, i), path in zip(choices, paths, strict=True)
        ]
    return rows


def markdown(found: dict[str, Any]) -> str:
    """Return the page with the tables of counted operations and of measured milliseconds."""
    head = "| model | parameters | a rank's examples | block | roots every | ranks | step, TFLOP | of gradient | state "
    head += "| updates received | of the gradient's time |"
    about = "Operations of a step of the optimizer were counted for the rank with the most work. *Of gradient*: these "
    about += "operations, divided by the operations of the gradient. *Of the gradient's time*: the computed time of "
    about += "these operations and of messages, divided by the computed time of the gradient."
    lines = [about, "", head, "|" + " --- |" * 11]
    for row in found["counted"]:
        start = f"| {row['model']} | {row['parameters'] / 1e6:.1f} M | {row['examples']} | {row['block']} "
        share = row["step"] / row["gradient"]
        end = f"| {row['interval']} | {row['ranks']} | {row['step'] / 1e12:.3f} | {100 * share:.1f} % "
        end += f"| {row['state'] / 1e9:.2f} GB | {row['received'] / 1e6:.0f} MB | {100 * seconds_over(row):.1f} % |"
        lines.append(start + end)
    gradients = ", ".join(f"{ms:.0f} ms for {n} tokens" for n, ms in found["measured"][0]["gradient"].items())
    about = "The next table has measured times of an update by AdamW and by Shampoo, in milliseconds "
    lines += ["", f"{about}({found['made']}). The gradient takes {gradients}.", ""]
    lines += ["| block | roots every | ranks | AdamW | Shampoo |", "|" + " --- |" * 5]
    for row in found["measured"]:
        start = f"| {row['block']} | {row['interval']} | {row['ranks']} "
        lines.append(start + f"| {row['diagonal']:.1f} | {row['step']:.1f} |")
    about = "The last table says how much longer a step of gradient and update takes with Shampoo than with AdamW:"
    lines += ["", about, ""]
    return "\n".join([*lines, *shares_table(found["measured"]), ""])


def shares_table(measured: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of the additional time of a step with Shampoo, in percent of a step with AdamW.

    It has a row for each block size, interval and number of tokens, and a column for each number of ranks.
    """
    shares: dict[tuple[int, int, str], list[str]] = {}
    for row in measured:
        for tokens, ms in row["gradient"].items():
            more = (row["step"] - row["diagonal"]) / (ms + row["diagonal"])
            shares.setdefault((row["block"], row["interval"], tokens), []).append(f"{100 * more:.0f} %")
    lines = ["| block | roots every | tokens a rank | 1 rank | 2 ranks | 4 ranks |", "|" + " --- |" * 6]
    return lines + [f"| {' | '.join(map(str, key))} | {' | '.join(found)} |" for key, found in shares.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of steps of Distributed Shampoo.")
    parser.add_argument("--counted", action="store_true", help="count anew, keep what was measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    choices = [(b, i, r) for b, i in ((1024, 10), (1024, 50), (256, 50)) for r in (1, 8, 64)]
    made = f"{datetime.now(UTC):%Y-%m-%d}, one thread a rank, torch {torch.__version__}, seed 0"
    found = {"made": made, "counted": [counted(m, *c) for m in MODELS for c in choices]}
    if given.counted:
        before = json.loads((RESULTS / "overhead.json").read_text())
        found |= {key: before[key] for key in ("made", "measured")}
    else:
        found["measured"] = measured()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overhead.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "overhead.md").write_text(markdown(found))
    sys.stdout.write(markdown(found))


if __name__ == "__main__":
    main()
