"""The simulated accelerator itself: numbers of the CPU, refusals of CUDA, and counts that can be worked out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eigengraft.testing import DeviceCounts, accelerator
from eigengraft.testing.accelerator import SimulatedTensor, missing_names

from ..refusals import refused

Code = Callable[[Tensor], object]
HOST = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def x() -> Iterator[Tensor]:
    with accelerator("cuda") as run:
        yield HOST.to(run.device)


def counted(code: Code, x: Tensor) -> DeviceCounts:
    with accelerator("cuda") as counts:
        code(x)
    return counts


def test_torch_has_the_private_names() -> None:
    assert missing_names() == []


def test_tensors_are_on_the_device_with_the_numbers_of_the_host(x: Tensor) -> None:
    assert isinstance(x, SimulatedTensor) and x.device == torch.device("cuda:0") and x.is_cuda and not x.is_cpu
    assert torch.equal((x @ x.T + 1).cpu(), HOST @ HOST.T + 1)
    assert x.tolist() == HOST.tolist()
    assert torch.tensor([1.0], device="cuda").device.type == torch.zeros_like(x).device.type == "cuda"
    with pytest.raises(TypeError):
        x.numpy()


def test_views_share_memory_and_operations_in_place_return_their_tensor(x: Tensor) -> None:
    row = x[1]
    assert row.mul_(0) is row
    assert x.cpu()[1].tolist() == [0.0, 0.0, 0.0]
    assert x[:, 1:].data_ptr() == x.data_ptr() + 4
    host = torch.empty(2, 3)
    assert host.copy_(x) is host and type(host) is Tensor


def test_data_of_a_parameter_can_be_replaced(x: Tensor) -> None:
    parameter = nn.Parameter(x)
    parameter.data = parameter.data * 2
    assert torch.equal((parameter + 0).cpu(), HOST * 2)
    with refused(TypeError, "device", "shape", "dtype"):
        parameter.data = x[0]


def test_a_simulated_accelerator_leaves_no_patch_behind() -> None:
    with accelerator("cuda"):
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
    assert torch._C._only_lift_cpu_tensors() is False
    w = torch.ones(2, requires_grad=True)
    (w * w).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [2.0, 2.0]


def test_a_tensor_outside_of_the_block_is_an_error() -> None:
    with accelerator("cuda") as run:
        x = HOST.to(run.device)
    with refused(RuntimeError, "outside"):
        x + 1
    with accelerator("cuda"), refused(RuntimeError, "sim"), accelerator("sim"):
        pass


def test_copies_on_a_second_stream_run_when_something_waits_for_them(x: Tensor) -> None:
    side, back = torch.cuda.Stream(), torch.zeros(2, 3)
    with torch.cuda.stream(side):
        x.copy_(HOST + 10, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream())
    assert torch.equal(x.cpu(), HOST)
    torch.cuda.current_stream().wait_event(arrived)
    assert torch.equal(x.cpu(), HOST + 10)
    x.mul_(2)
    computed = torch.cuda.Event()
    computed.record()
    with torch.cuda.stream(side):
        side.wait_event(computed)
        back.copy_(x, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    assert not back.any()
    with accelerator("cuda") as counts:
        done.synchronize()
    assert torch.equal(back, 2 * (HOST + 10)) and counts.waits == 0  # the work was asked for before


def test_a_module_keeps_its_parameters_on_its_way_to_the_device() -> None:
    with accelerator("cuda") as run:
        module = nn.Linear(3, 2)
        before = list(module.parameters())
        module.to(run.device)
        assert all(a is b and b.device == run.device for a, b in zip(before, module.parameters(), strict=True))
        again = copy.deepcopy(module)
        assert isinstance(again.weight, nn.Parameter) and again.weight.device == run.device
        assert again.weight.data_ptr() != module.weight.data_ptr()


REFUSED: dict[str, Code] = {
    "add": lambda x: x + HOST,
    "foreach": lambda x: torch._foreach_add_([x], [HOST]),
    "out": lambda x: torch.add(x, x, out=torch.empty(2, 3)),
    "cat of a number": lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
    "where": lambda x: torch.where(HOST > 1, x, x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_mix_devices_are_refused(name: str, x: Tensor) -> None:
    with refused(RuntimeError, "device"):
        REFUSED[name](x)


WAITS: dict[str, tuple[Code, int, int, int]] = {
    # code, waits, uploads, downloads
    "item": (lambda x: x[0, 0].item(), 1, 0, 0),
    "bool": (lambda x: bool((x > 0).any()), 1, 0, 0),
    "tolist": (lambda x: x.tolist(), 1, 0, 1),
    "cpu": (lambda x: x.cpu(), 1, 0, 1),
    "cpu, not blocking": (lambda x: x.to("cpu", non_blocking=True), 0, 0, 1),
    "copy to the host": (lambda x: torch.empty(2, 3).copy_(x), 1, 0, 1),
    "copy to the device": (lambda x: x.copy_(HOST), 1, 1, 0),
    "copies to the device": (lambda x: torch._foreach_copy_([x, x[:1]], [HOST, HOST[:1]]), 2, 2, 0),
    "upload": (lambda x: torch.from_numpy(np.ones(2)).to("cuda"), 1, 1, 0),
    "pinned upload": (lambda x: HOST.pin_memory().to("cuda", non_blocking=True), 0, 1, 0),
    "tensor": (lambda x: torch.tensor([1, 2], device="cuda"), 1, 1, 0),
    "new_tensor": (lambda x: x.new_tensor(0.5), 1, 1, 0),
    "nonzero": (lambda x: x.nonzero(), 1, 0, 0),
    "mask": (lambda x: x[x > 1], 1, 0, 0),
    "indices of the host": (lambda x: x[[0, 1]], 1, 1, 0),
    "eigh": (lambda x: torch.linalg.eigh(x.mT @ x), 1, 0, 0),
    "cholesky": (lambda x: torch.linalg.cholesky(torch.eye(2, device="cuda")), 1, 0, 0),
    "cholesky_ex": (lambda x: torch.linalg.cholesky_ex(torch.eye(2, device="cuda")), 0, 0, 0),
    "where": (lambda x: torch.where(x > 1, x, torch.tensor(0.0)), 1, 1, 0),
    "synchronize": (lambda x: torch.cuda.synchronize(), 1, 0, 0),
    "numbers of the host": (lambda x: x * torch.tensor(2.0) + 1, 0, 0, 0),
    "where with a number": (lambda x: torch.where(x > 1, x, 0.0), 0, 0, 0),
    "fill": (lambda x: torch.full((2,), 0.5, device="cuda").fill_(1.0), 0, 0, 0),
    "same device": (lambda x: x.to("cuda", torch.float64), 0, 0, 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_and_copies(name: str, x: Tensor) -> None:
    code, *expected = WAITS[name]
    counts = counted(code, x)
    assert [counts.waits, counts.uploads, counts.downloads] == expected


def test_an_event_waits_for_work_of_its_own_block_alone(x: Tensor) -> None:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with accelerator("cuda") as first:
        event.record()
    with accelerator("cuda") as second:
        event.synchronize()
        event.record()
        event.synchronize()
    assert (first.waits, second.waits) == (0, 1)


KERNELS: dict[str, tuple[Code, int]] = {
    "views": (lambda x: x.T.unsqueeze(0).expand(4, 3, 2)[1].detach(), 0),
    "an allocation": (lambda x: torch.empty_like(x), 0),
    "entry-wise": (lambda x: x.mul(2).add_(1), 2),
    "a list": (lambda x: torch._foreach_mul_([x.clone() for _ in range(100)], 2.0), 101),
    "a long list": (lambda x: torch._foreach_mul_([x] * 250, 2.0), 3),
    "a list in which strides differ": (lambda x: torch._foreach_add_([x, x], [x.clone(), x.T.contiguous().T]), 2 + 2),
    "norms of a list": (lambda x: torch._foreach_norm([x, x]), 2),
    "decompositions": (lambda x: torch.linalg.qr(torch.empty(5, 3, 3, device="cuda")), 5 * 4),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, x: Tensor) -> None:
    code, expected = KERNELS[name]
    assert counted(code, x).kernels == expected


def test_traffic_live_and_peak_are_bytes(x: Tensor) -> None:
    size = HOST.numel() * 4
    assert counted(lambda x: x.mul_(2), x).traffic == size
    assert counted(lambda x: x + x[:1], x).traffic == size + size // 2 + size
    with accelerator("cuda") as counts:
        kept = x * 2
        view = kept[0]
        del kept
        assert counts.live == size
        (x * 2 + 1).sum()
    assert (counts.live, counts.peak) == (size, 3 * size) and view.shape == (3,)


def test_blocks_end_in_their_order(x: Tensor) -> None:
    with accelerator("cuda") as outer:
        with accelerator("cuda"):
            pass
        x + 1
    assert outer.kernels == 1


def test_blocks_count_what_is_inside_of_them_by_the_line_that_asked(x: Tensor) -> None:
    with accelerator("cuda") as outer:
        x + 1
        with accelerator("cuda") as inner:
            float(x.sum())
    assert (outer.kernels, inner.kernels, outer.waits) == (2, 1, 1)
    line = "tests/gpu/test_accelerator.py:"
    assert [key.startswith(line) for key in outer.by_line()] == [True] * 3
    [(key, counts)] = inner.by_line("waits").items()
    assert key.endswith("_local_scalar_dense") and (counts.waits, counts.kernels) == (1, 0)
