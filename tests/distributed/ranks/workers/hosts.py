"""What hosts of training loops do to optimizers, in the order in which they do it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from eigengraft import Optimizer


def prepare(module: nn.Module, optimizer: Optimizer) -> None:
    """As accelerate prepares a model and an optimizer for FSDP2: the state goes out and in, placeholders with the
    addresses of the parameters take their places, the model is sharded, and its new parameters come in."""
    optimizer.load_state_dict(optimizer.state_dict())
    old = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            group["params"][index] = torch.empty(1, dtype=parameter.dtype)
            group["params"][index].data_ptr = parameter.data_ptr()
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    new = dict(module.named_parameters())
    addresses = {address: new[name] for name, address in old.items()}
    for group in optimizer.param_groups:
        group["params"] = [addresses[placeholder.data_ptr] for placeholder in group["params"]]
