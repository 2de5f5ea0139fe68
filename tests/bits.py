"""Print a hash of the parameters after 30 steps of every shipped recipe, to compare the library before and after a
change that must keep all bits.

    python tests/bits.py > before.txt     # one process; about two minutes
    python tests/bits.py > after.txt      # after the change
    diff before.txt after.txt
    torchrun --nproc-per-node 2 tests/bits.py adamw soap > ranks.txt     # on two ranks, two recipes

A line has the recipe, the dtype of the parameters, and the hash. Bits depend on the machine and on torch, so no hashes
are stored.
"""

import hashlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

import eigengraft

STEPS = 30
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def parameter_hash(recipe: str, dtype: torch.dtype) -> str:
    """Train a small model with a convolution, matrices and vectors for 30 steps. Return a hash of its parameters, or
    the type of the error that stopped the training.
    """
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 12), nn.LayerNorm(12))
    model = nn.Sequential(features, nn.Linear(12, 12, bias=False), nn.Linear(12, 5)).to(dtype)
    inputs, labels = torch.randn(2, 8, 3, 4, 4).to(dtype), torch.randint(0, 5, (2, 8))
    try:
        optimizer = eigengraft.compose(recipe, model, lr=0.01, steps=STEPS)
        for step in range(STEPS):

            def closure(batch: int = step % 2) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs[batch]).float(), labels[batch])
                loss.backward()
                return loss

            optimizer.step(closure)
    except Exception as error:  # recipes that need signals or adapters
        return type(error).__name__
    held = (p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return hashlib.sha1(b"".join(held)).hexdigest()[:12]


def main(recipes: list[str]) -> None:
    """Print a line for each recipe and dtype. Raises RuntimeError if ranks end with different bits."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for recipe in recipes or eigengraft.shipped_recipes():
        for dtype in DTYPES:
            found = [parameter_hash(recipe, dtype)]
            if dist.is_initialized():
                found *= dist.get_world_size()
                dist.all_gather_object(found, found[0])
            if len({*found}) > 1:
                raise RuntimeError(f"{recipe}, {dtype}: ranks end with different bits: {found}")
            if not dist.is_initialized() or dist.get_rank() == 0:
                sys.stdout.write(f"{recipe} {dtype} {found[0]}\n")
                sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
