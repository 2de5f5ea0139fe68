"""Count the bytes of Shampoo's state with and without 4-bit storage, from the shapes of four models alone.

The paper (Wang et al. 2024, arXiv:2405.18144, Table 2) reports the peak memory of training runs. The difference between
a run with Shampoo and a run without it is Shampoo's state. Here an Optimizer is made for parameters of the same shapes,
and the bytes of its state are counted. Nothing is trained.

    python memory.py            writes memory.json and memory.md
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eigengraft import load_recipe
from eigengraft.optimizers.plan.plan import plan

HERE = Path(__file__).parent
MIB = 2**20
Shape = tuple[int, ...]


def convolution(out: int, into: int, size: int, bias: bool = False) -> Iterator[Shape]:
    """Yield the shapes of a convolution and of the batch normalization after it."""
    yield out, into, size, size
    yield from [(out,)] * (3 if bias else 2)


def linear(out: int, into: int, bias: bool = True) -> Iterator[Shape]:
    yield out, into
    if bias:
        yield (out,)


def vgg19(classes: int = 100) -> Iterator[Shape]:
    """Yield the shapes of VGG19 with batch normalization for images of 32 x 32. Its classifier is one layer."""
    width = 3
    for out in [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8:
        yield from convolution(out, width, 3, bias=True)
        width = out
    yield from linear(classes, width)


def resnet34(classes: int = 100) -> Iterator[Shape]:
    """Yield the shapes of ResNet34 for images of 32 x 32. The first convolution is 3 x 3."""
    yield from convolution(64, 3, 3)
    width = 64
    for out, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(depth):
            into = width if block == 0 else out
            yield from convolution(out, into, 3)
            yield from convolution(out, out, 3)
            if into != out:
                yield from convolution(out, into, 1)
        width = out
    yield from linear(classes, width)


def transformer(dim: int) -> Iterator[Shape]:
    """Yield the shapes of a transformer block.

    It has two normalizations, attention with one matrix for queries, keys and values, and a feed-forward part of width
    4 dim.
    """
    yield from [(dim,)] * 4
    for out, into in ((3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)):
        yield from linear(out, into)


def vit_small(classes: int = 100, dim: int = 384, depth: int = 12) -> Iterator[Shape]:
    """Yield the shapes of ViT-S for images of 32 x 32, in patches of 4 x 4: 64 patches and the class token."""
    yield from ((dim, 3, 4, 4), (dim,), (1, 1, dim), (1, 65, dim))
    for _ in range(depth):
        yield from transformer(dim)
    yield from [(dim,)] * 2
    yield from linear(classes, dim)


def swin_tiny(classes: int = 100, window: int = 4) -> Iterator[Shape]:
    """Yield the shapes of Swin-T for images of 32 x 32, in patches of 2 x 2.

    Each head has a table of relative positions.
    """
    yield from ((96, 3, 2, 2), (96,), (96,), (96,))
    for stage, depth in enumerate((2, 2, 6, 2)):
        dim = 96 * 2**stage
        for _ in range(depth):
            yield (2 * window - 1) ** 2, 3 * 2**stage
            yield from transformer(dim)
        if stage < 3:
            yield from ((4 * dim,), (4 * dim,))
            yield from linear(2 * dim, 4 * dim, bias=False)
    yield from [(768,)] * 2
    yield from linear(classes, 768)


MODELS = {"VGG19": vgg19, "ResNet34": resnet34, "ViT-S": vit_small, "Swin-T": swin_tiny}
PAPER = ["routes=[]", "blocking.size=1200", "blocking.merge=1000000000", "blocking.min_axes=2"]
"""All matrices are preconditioned, as `[first axis, the rest]` in blocks of at most 1200; vectors are not."""


def state_bytes(shapes: list[Shape], recipe: str, *overrides: str) -> int:
    """Return the bytes of state of a recipe for parameters of the given shapes."""
    named = [(f"p{index}", shape) for index, shape in enumerate(shapes)]
    return int(plan(load_recipe(recipe, [*PAPER, *overrides]), named, (1,)).state.max())


STORED = (
    'storage.root={"kind": "exact_diagonal", "inner": {"kind": "int4"}}',
    "storage.first_moment=float32",
    "storage.second_moment=float32",
)
"""Storage of the paper's Table 2: both triangles of a root, and moments in 32 bits."""
FACTORS = "update.transform.before.graft.direction.shampoo.statistic.axes.max_skew=null"
"""Override by which every axis has a factor, however long it is."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "shampoo": ("shampoo_4bit", FACTORS, "storage={}"),
    "shampoo_4bit": ("shampoo_4bit", FACTORS, *STORED),
    "shampoo_4bit_naive": ("shampoo_4bit_naive", FACTORS, *STORED),
    "shampoo_cq_ef": ("shampoo_cq_ef", FACTORS, *STORED),
    "shampoo_cq": ("shampoo_cq", FACTORS, *STORED),
}
"""Recipes that are counted, with their overrides."""


def compare(model: str) -> dict[str, Any]:
    """Return a row with the counted MiB of Shampoo's state beyond that of AdamW, and with the published difference."""
    shapes = list(MODELS[model]())
    adamw = state_bytes(shapes, "adamw")
    row = {"model": model, "parameters": sum(map(math.prod, shapes))}
    row |= {name: (state_bytes(shapes, *variant) - adamw) / MIB for name, variant in VARIANTS.items()}
    peaks = json.loads((HERE / "published.json").read_text())["memory"][model]
    return row | {f"published_{key}": peaks[key] - peaks["first_order"] for key in ("shampoo", "shampoo_4bit")}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    head = ["model", "parameters", "32 bits published", "counted", "4 bits published", "counted"]
    head += ["naive", "Cholesky with error feedback", "Cholesky"]
    about = "The table has the MiB of state beyond the state of AdamW."
    lines = [about, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        sizes = [row[key] for key in ("published_shampoo", "shampoo", "published_shampoo_4bit", *list(VARIANTS)[1:])]
        cells = [row["model"], f"{row['parameters'] / 1e6:.2f} M", *(f"{size:.1f}" for size in sizes)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    rows = [compare(model) for model in MODELS]
    (HERE / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "memory.md").write_text(markdown(rows))
    sys.stdout.write(markdown(rows))


if __name__ == "__main__":
    main()
