"""A benchopt solver that trains with a recipe, for benchmarks that train a torch model, such as benchmark_nanogpt.

`eigengraft export benchopt` copies this file into the folder `solvers` of a benchmark. The objective must pass `model`
and `train_dataloader`. A call of `model` must return a tuple that begins with the loss. `train_dataloader` must have
the method `get_distributed_data_generator`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from benchopt import BaseSolver

from eigengraft import compose

_COOLDOWN = 0.4
"""Fraction of the steps, at the end, in which the learning rate falls to 0. It is that of the benchmark's own
solvers.
"""


class Solver(BaseSolver):
    """A solver that trains with a recipe. The learning rate falls linearly to 0 in the last 40 % of the steps.

    `benchopt run . -s eigengraft[recipe=muon,learning_rate=0.02]` chooses the recipe.
    """

    name = "eigengraft"
    parameters = {  # noqa: RUF012  benchopt reads the attribute of the class
        "recipe": ["soap"],
        "learning_rate": [3e-3],
        "weight_decay": [0.1],
        "num_steps": [6200],
        "batch_size": [64],
        "slurm_nodes": [1],
    }
    requirements = ["pip::eigengraft"]  # noqa: RUF012
    sampling_strategy = "callback"

    def set_objective(self, train_dataloader: Any, model: Any) -> None:
        """Receive the data and the model. If a launcher has started several ranks, join their process group."""
        self.dist = _process_group()
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.train_dataloader, self.model = train_dataloader, model.to(device=device)
        self.model.device = device  # loaders of the benchmark read it
        # the initial weights are kept in the model, because the next solver receives the same, trained model
        first = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.initial = vars(model).setdefault("_first_weights", first)

    def get_next(self, stop_val: int) -> int:
        """Return the step of the next evaluation, 250 steps after the last one.

        stop_val: step of the last evaluation.
        """
        return stop_val + 250

    def warm_up(self) -> None:
        """Run a few steps before the clock starts, so that kernels are compiled."""
        self.run_once(stop_val=10)

    def run(self, cb: Any) -> None:
        """Train from the initial weights until the callback ends the run or all steps are made.

        cb: function of benchopt that evaluates the model, and returns True if the run continues.
        """
        self.model.load_state_dict(self.initial)
        rank, ranks = (0, 1) if self.dist is None else (self.dist.get_rank(), self.dist.get_world_size())
        data = self.train_dataloader.get_distributed_data_generator(
            batch_size=self.batch_size, world_size=ranks, rank=rank
        )
        optimizer = compose(self.recipe, self.model, self.learning_rate, self.weight_decay, steps=self.num_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (1 - step / self.num_steps) / _COOLDOWN)
        )
        step = 0
        while self._evaluated(cb, optimizer) and step < self.num_steps:
            self.model.train()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.model.device.type == "cuda"):
                loss, *_ = self.model(*next(data))
            loss.backward()
            for parameter in self.model.parameters() if ranks > 1 else ():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            scheduler.step()
            step += 1

    def _evaluated(self, cb: Any, optimizer: Any) -> bool:
        """Let benchopt evaluate the model with the weights that the recipe provides for evaluation, such as averaged
        weights. Return True if the run continues.

        cb: as in `run`.
        """
        optimizer.eval()
        try:
            return bool(cb())
        finally:
            optimizer.train()

    def get_result(self) -> dict[str, Any]:
        """Return the model and the process group, which the objective uses to compute the validation loss."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {"model": self.model, "dist": self.dist}


def _process_group() -> Any:
    """Return `torch.distributed` after initializing its process group, or None in a single process."""
    try:
        import submitit

        submitit.helpers.TorchDistributedEnvironment().export()
    except (ImportError, RuntimeError):  # no job of submitit
        if "RANK" not in os.environ:
            return None
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist
