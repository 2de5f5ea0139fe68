"""What a step of each recipe asks a device for, on the parameters of GPT-2 at 1/48 of its width: rows of `budgets.csv`.

    python tests/gpu/budgets.py            # measure all recipes and write the table

A steady step is one in which no refresh is due: cadences are set to 10,000 steps, so that all refreshes are the first
ones. The vocabulary is 131, for recipes that keep square matrices of its size. Recipes that merge axes beyond the
size of their blocks get blocks of an eighth of it, because roots of order 1024 would take half a minute.

waits, uploads, kernels: of a steady step with 4 layers. layers: kernels that 8 more layers add. traffic: bytes given to
and made by kernels, peak: most bytes held beyond state and gradients, both with 12 layers, in units of the parameters'
bytes. refresh: most waits of a step from the first on, with the first refreshes and with checks of new stages, those of
decompositions on the device left out.

A call of a fused kernel is counted as CUDA launches it, once for 36 tensors (or 320 pieces of 65,536 entries), and its
traffic is the bytes of parameters, gradients and both moments; as everywhere, what is written in place counts once.

graph, outside: with `graph: true` and 4 layers, kernels of the replayed graph, which one launch starts, and kernels
that a steady step launches beside it. Recipes without a graph have 0 and all of their kernels.

Aims: no wait and no upload but of a step's numbers; 12 layers cost the kernels of 4, with one more for 36 tensors of
Adam's chain; adamw 40 kernels and 16 times traffic, muon 200 kernels, soap 260, shampoo 350. torch's AdamW takes 7
kernels and 4 times (fused) or 21 and 14 times.
"""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import eigengraft
from eigengraft.optimizers.step import capture, capturers, stack_step
from eigengraft.optimizers.step.stack_step import CHECKED_UPDATES
from eigengraft.testing import DeviceCounts, accelerator
from eigengraft.testing.accelerator import SimulatedTensor
from eigengraft.testing.device_costs import DECOMPOSITIONS

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TABLE = Path(__file__).with_suffix(".csv")
WIDTH, VOCABULARY, LENGTH = 16, 131, 21
STEPS = CHECKED_UPDATES + 2
"""A first gradient that updates nothing, updates in which new stages are checked, and a steady step."""


@dataclass(frozen=True)
class Budget:
    waits: int
    uploads: int
    kernels: int
    layers: int
    traffic: float
    peak: float
    refresh: int
    graph: int
    outside: int

    def exceeded(self, limit: Budget) -> dict[str, tuple[float, float]]:
        """(measured, limit) of the numbers that are larger than those of `limit`."""
        pairs = {own.name: (getattr(self, own.name), getattr(limit, own.name)) for own in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] > pair[1]}


def gpt2(layers: int, width: int = WIDTH) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of GPT-2."""
    block = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
        "mlp.c_proj.bias": (width,),
    }
    inner = [(f"h.{layer}.{name}", shape) for layer in range(layers) for name, shape in block.items()]
    ends = [("ln_f.weight", (width,)), ("ln_f.bias", (width,))]
    return [("wte.weight", (VOCABULARY, width)), ("wpe.weight", (LENGTH, width)), *inner, *ends]


def without_refreshes(declaration: Any) -> Any:
    """A declaration in which no refresh but the first is due for a long time."""
    if isinstance(declaration, dict):
        rare = {"steps": 10_000} if declaration.get("kind") == "every" else {}
        return {key: without_refreshes(value) for key, value in declaration.items()} | rare
    return [without_refreshes(item) for item in declaration] if isinstance(declaration, list) else declaration


def declared(recipe: Any) -> dict[str, Any]:
    """The declaration that is measured; recipe: a name, or a declaration."""
    declaration: dict[str, Any] = without_refreshes(eigengraft.load_recipe(recipe).model_dump(mode="json"))
    blocking = declaration["blocking"]
    if (blocking["merge"] or 0) > (blocking["size"] or 0) > 0:
        blocking.update(size=blocking["size"] // 8, merge=blocking["merge"] // 8)
    return declaration


@contextmanager
def unchecked() -> Iterator[int]:
    """Leave out the checks of new stages, for counts of steady steps alone. Give the steps before the first of them."""
    with ExitStack() as stack:
        for module in (stack_step, capture):
            stack.enter_context(mock.patch.object(module, "CHECKED_UPDATES", 0))
        yield STEPS - CHECKED_UPDATES


def steady(recipe: Any, layers: int, dtype: torch.dtype = torch.float32) -> tuple[int, DeviceCounts]:
    """(bytes of the parameters, counts of a steady step)."""
    with unchecked() as before:
        size, found = steps(recipe, layers, dtype, before + 1)
    return size, found[-1]


def steps(
    recipe: Any, layers: int, dtype: torch.dtype = torch.float32, number: int = STEPS
) -> tuple[int, list[DeviceCounts]]:
    """(bytes of the parameters, counts of the first steps); recipe: a name, or a declaration."""
    declaration = declared(recipe)
    generator, found = torch.Generator().manual_seed(0), list[DeviceCounts]()
    shapes = dict(gpt2(layers))
    numbers = [random_tensors(shapes.values(), generator, dtype) for _ in range(1 + number)]
    with accelerator("cuda"):
        named = [(name, nn.Parameter(SimulatedTensor(x))) for name, x in zip(shapes, numbers[0], strict=True)]
        optimizer = eigengraft.Optimizer(named, declaration, lr=1e-3, weight_decay=0.1)
        for gradients in numbers[1:]:
            for (_, parameter), gradient in zip(named, gradients, strict=True):
                parameter.grad = SimulatedTensor(gradient)
            with accelerator("cuda") as counts:
                optimizer.step()
            found.append(counts)
    return sum(x.nbytes for x in numbers[0]), found


def random_tensors(
    shapes: Iterable[tuple[int, ...]], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return a tensor of random numbers on the host for each shape. Each tensor has memory of its own."""
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class Counted:
    """A way to capture steps: a replay launches the step again, and its kernels are counted apart."""

    def __init__(self) -> None:
        self.kernels = 0

    def __call__(self, device: torch.device) -> Counted:
        return self

    def warm_up(self, body: capturers.Body) -> None:
        body()

    def capture(self, body: capturers.Body) -> capturers.Body:
        def replay() -> None:
            with accelerator("cuda") as own:
                body()
            self.kernels += own.kernels

        return replay


def in_a_graph(recipe: str) -> tuple[int, int]:
    """(kernels in graphs, kernels outside) of a steady step with 4 layers and `graph: true`."""
    declaration = eigengraft.load_recipe(declared(recipe) | {"graph": True})
    generator, graphs, shapes = torch.Generator().manual_seed(0), Counted(), dict(gpt2(4))
    values, gradients = (random_tensors(shapes.values(), generator) for _ in range(2))
    grafts = [
        stage.start for rule in declaration.rules().values() for _, stage in rule.stages() if stage.kind == "graft"
    ]
    with (
        accelerator("cuda"),
        mock.patch.dict(capturers.CAPTURERS, {"cuda": graphs}),
        warnings.catch_warnings(),
        unchecked() as before,
    ):
        warnings.simplefilter("ignore")  # of recipes without a graph
        named = [(name, nn.Parameter(SimulatedTensor(x))) for name, x in zip(shapes, values, strict=True)]
        optimizer = eigengraft.Optimizer(named, declaration, lr=1e-3, weight_decay=0.1)
        for (_, parameter), gradient in zip(named, gradients, strict=True):
            parameter.grad = SimulatedTensor(gradient)
        # then once as it is, once recorded, once captured and checked, once replayed
        for _ in range(max(before, *(start - 1 for start in grafts), 0) + 4):
            graphs.kernels = 0
            with accelerator("cuda") as counts:
                optimizer.step()
    return graphs.kernels, counts.kernels - graphs.kernels


def measure(recipe: str) -> tuple[Budget, DeviceCounts]:
    """(numbers of a recipe, counts of its steady step with 4 layers)."""
    (_, few), (size, more) = steps(recipe, 4), steady(recipe, 12)
    own = few[-1]
    waits = [
        sum(found.waits for line, found in counts.by_line("waits").items() if line.split()[1] not in DECOMPOSITIONS)
        for counts in few
    ]
    numbers = (own.waits, own.uploads, own.kernels, more.kernels - own.kernels)
    return Budget(
        *numbers, round(more.traffic / size, 1), round(more.peak / size, 2), max(waits), *in_a_graph(recipe)
    ), own


def table() -> dict[str, Budget]:
    """The budget of each recipe."""
    with TABLE.open() as file:
        rows = list(csv.reader(file))[1:]
    kinds = [float if own.name in ("traffic", "peak") else int for own in fields(Budget)]
    return {name: Budget(*(kind(x) for kind, x in zip(kinds, numbers, strict=True))) for name, *numbers in rows}


def main() -> None:
    from tests.recipes import ALONE

    with TABLE.open("w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["recipe", *(own.name for own in fields(Budget))])
        for name in sorted(ALONE):
            writer.writerow([name, *astuple(measure(name)[0])])
            file.flush()


if __name__ == "__main__":
    main()
