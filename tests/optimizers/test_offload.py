"""State in host memory and in files: the bits of the same run without, in the memory of two stacks."""

import copy
import gc
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eigengraft import Optimizer, RecipeError, Stage, compose, load_recipe
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.stacks.streams import Streams
from eigengraft.optimizers.step import traced
from eigengraft.optimizers.step.exchange import LocalStep
from eigengraft.optimizers.step.offload import CopiedState, OffloadedState
from eigengraft.quantization import Offload
from eigengraft.quantization.offload import in_memory
from eigengraft.slots import Slot
from eigengraft.testing import accelerator

from ..gpu.models import Run, gradients
from ..laws.quantizers import small
from ..processes import run as run_process
from ..recipes import COVER
from ..refusals import check_said, refused, warned

To = Literal["cpu", "disk"]
FEW = ("adamw", "soap", "shampoo_4bit", "muon")


def storage_of(recipe: str, to: To | None) -> dict[str, Any]:
    """All that a recipe may offload: by role, around the formats of the recipe. None: these formats alone."""
    loaded = load_recipe(recipe)
    formats = {key: small(inner.model_dump(mode="json")) for key, inner in loaded.storage.items()}
    if to is None:
        return {key: own.model_dump(mode="json") for key, own in formats.items()}
    roles = dict.fromkeys(role for rule in loaded.rules().values() for role in rule.storable_roles())
    found = {role: Offload(to=to, min_elements=1) for role in roles}
    found |= {key: Offload(to=to, inner=inner, min_elements=1) for key, inner in formats.items()}
    return {key: own.model_dump(mode="json") for key, own in found.items()}


def made(recipe: str, to: To | None, place: torch.device | None = None, **options: Any) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of offload to a CPU's own memory
        return Run(recipe, place, **options, storage=storage_of(recipe, to))


def state_of(optimizer: Optimizer) -> dict[Any, Tensor]:
    state = optimizer.state_dict()["state"]
    return {(i, key): value.detach().cpu().clone() for i, own in state.items() for key, value in own.items()}


def require_same(one: Run, two: Run) -> None:
    """The same parameters, and the same state under the same keys, in the same order, bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))
    first, second = state_of(one.optimizer), state_of(two.optimizer)
    assert [*first] == [*second]
    assert all(torch.equal(first[key], second[key]) for key in first)


EVERY = [
    *(pytest.param(name, ("cpu", "disk"), id=name) for name in FEW),
    *(
        pytest.param(name, (("cpu", "disk")[place % 2],), id=name, marks=pytest.mark.slow)
        for place, name in enumerate(name for name in COVER if name not in FEW)
    ),
]
"""Recipes, and where a device has their state: in one of the two places in turn where stages cannot see which."""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "places"), EVERY)
def test_bits_are_those_of_a_run_without(recipe: str, places: tuple[To, ...]) -> None:
    """In a file beside a CPU, in pinned memory or in a file beside a device, whose copies are as late as can be."""
    given = gradients(4)
    plain, mapped = made(recipe, None), made(recipe, "disk")
    for run in (plain, mapped):
        run.step(*given)
    require_same(plain, mapped)
    with accelerator("cuda") as device:
        runs = [made(recipe, to, device.device) for to in (None, *places)]
        for run in runs:
            run.step(*given)
        for run in runs[1:]:
            run.optimizer.inspect()
            require_same(runs[0], run)
        for run in (mapped, *runs[1:]):
            assert sum(run.optimizer.offloaded_bytes().values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_a_device_holds_two_stacks(to: To) -> None:
    """A step with pinned memory waits for nothing, and copies each stack once in each direction."""
    shapes = [(32, 24 + n) for n in range(8)]
    with accelerator("cuda") as device:
        lives, peaks = list[int](), list[int]()
        for storage in ({}, storage_of("soap", to)):
            torch.manual_seed(0)
            parameters = [nn.Parameter(torch.randn(shape).to(device.device)) for shape in shapes]
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).to(device.device)
            with accelerator("cuda") as all_state:
                changes = {"storage": storage, "routes": [], "failure": {"detect": "device"}}
                optimizer = Optimizer(parameters, "soap", overrides=changes)
                for _ in range(6):
                    with accelerator("cuda") as step:
                        optimizer.step()
                gc.collect()
                lives.append(all_state.live)
                peaks.append(step.peak)
        sizes = [sum(buffer.memory.numel() for buffer in own.host_buffers) for own in optimizer.stack_states()]
        (offloaded,) = optimizer.offloaded_bytes().values()
        assert len(sizes) == 8 and offloaded <= sum(sizes) < 1.05 * offloaded
        assert lives[1] <= lives[0] - offloaded + 2 * max(sizes) < lives[0] / 3
        assert peaks[1] <= peaks[0]
        if to == "cpu":  # a thread copies files, whenever it runs
            assert (step.uploads, step.downloads, step.waits) == (8, 9, 0), step.by_line("waits")


def test_stacks_that_are_updated_together_are_copied_to_one_buffer() -> None:
    """Two shapes of blocks, whose stages sum over the parameter: one group, which nothing alternates with."""
    with accelerator("cuda") as device:
        parameter = nn.Parameter(torch.randn(96, 64).to(device.device))
        parameter.grad = torch.randn(96, 64).to(device.device)
        update = ["momentum", {"kind": "clip_norm", "max_norm": 1.0, "per": "parameter"}]
        storage = {"first_moment": {"kind": "offload", "min_elements": 1}}
        recipe = {"update": update, "routes": [], "blocking": {"size": 64}, "storage": storage}
        with accelerator("cuda") as step:
            optimizer = Optimizer([parameter], recipe, lr=0.1)
            optimizer.step()
            gc.collect()
        sizes = [sum(buffer.memory.numel() for buffer in own.host_buffers) for own in optimizer.stack_states()]
        assert len(sizes) == 2 and sum(sizes) <= step.live < sum(sizes) + min(sizes)


class Breaks(Stage):
    """The direction; an error in the third step of wide blocks."""

    kind: Literal["breaks_for_test"] = "breaks_for_test"

    def slots(self, block: tuple[int, ...]) -> dict[str, Slot]:
        return {"sum": Slot(block, role="first_moment")}

    def apply(self, state: Any, gradient: Tensor, direction: Tensor, context: Any) -> Tensor:
        state["sum"] = state["sum"] + gradient
        if context.steps[0] == 3 and gradient.shape[-1] == 5:
            raise ArithmeticError("broken")
        return state["sum"]


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_a_direction_outlasts_the_state_that_it_is(to: To) -> None:
    """Ranks send directions after the next stacks have used the buffers."""
    stored = {"storage": {"first_moment": {"kind": "offload", "to": to, "min_elements": 1}}}
    with accelerator("cuda") as device:
        delivered = []
        for changes in ({}, stored):
            torch.manual_seed(0)
            parameters = [nn.Parameter(torch.randn(3, n).to(device.device)) for n in (4, 6, 7)]
            optimizer = Optimizer(parameters, {"update": ["breaks_for_test"], "routes": []} | changes, lr=0.1)
            found = list[Tensor]()
            with mock.patch.object(LocalStep, "deliver", lambda own, blocks, direction, to=found: to.append(direction)):
                for index, parameter in enumerate(parameters):
                    parameter.grad = torch.full_like(parameter, index + 1.0)
                optimizer.step()
            delivered.append([x.cpu() for x in found])
        assert [x.shape for x in delivered[1]] == [(1, 3, 4), (1, 3, 6), (1, 3, 7)]
        assert all(torch.equal(a, b) for a, b in zip(*delivered, strict=True))


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_an_error_in_a_step_leaves_the_state_that_it_leaves_without(to: To) -> None:
    update = {"update": ["breaks_for_test"], "routes": []}
    stored = {"storage": {"first_moment": {"kind": "offload", "to": to, "min_elements": 1}}}
    with accelerator("cuda") as device:
        states = []
        for changes in ({}, stored):
            torch.manual_seed(0)
            parameters = [nn.Parameter(torch.randn(3, n).to(device.device)) for n in (4, 5, 6)]
            optimizer = Optimizer(parameters, update | changes, lr=0.1)
            for step in range(5):
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, step + 1.0)
                try:
                    optimizer.step()
                except ArithmeticError:
                    assert step == 2
            states.append(state_of(optimizer) | {i: x.detach().cpu() for i, x in enumerate(parameters)})
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FEW)
def test_checkpoints_do_not_depend_on_the_memory(recipe: str, tmp_path: Path) -> None:
    """A state dict of either run goes on in the other, without a warning, from a file that is mapped."""
    given = gradients(6)
    wanted = made(recipe, None)
    wanted.step(*given)
    for first, second in ((None, "disk"), ("disk", None), ("disk", "disk")):
        start, resumed = made(recipe, first), made(recipe, second)
        start.step(*given[:3])
        torch.save(start.optimizer.state_dict(), tmp_path / "state.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, mmap=True))
        resumed.model.load_state_dict(start.model.state_dict())
        resumed.step(*given[3:])
        require_same(wanted, resumed)


@pytest.mark.slow
def test_stacks_that_share_sums_are_brought_in_together() -> None:
    """Blocks of one parameter in several stacks, whose norm is that of the parameter."""
    given, changes = gradients(4), ("update.graft.per=parameter", "blocking.size=5")
    with accelerator("cuda") as device:
        runs = [made("shampoo", to, device.device, changes=changes) for to in (None, "cpu", "disk")]
        for run in runs:
            run.step(*given[:3])
            run.optimizer.watch_next_step()
            run.step(given[3])
        assert max(len(group) for one in runs[1].optimizer.param_sets for group in one.together) > 1
        rows = [run.optimizer.inspect().records() for run in runs]
        assert rows[0] == rows[1] == rows[2] != []
        require_same(runs[0], runs[1])
        require_same(runs[0], runs[2])


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies_have_files_of_their_own(copied: str) -> None:
    given, run = gradients(6), made("soap", "disk")
    run.step(*given[:3])
    file = io.BytesIO(pickle.dumps((run.model, run.optimizer)))
    both = copy.deepcopy((run.model, run.optimizer)) if copied == "deepcopy" else pickle.load(file)
    again = copy.copy(run)
    again.model, again.optimizer = both
    run.step(*given[3:])
    again.step(*given[3:])
    require_same(run, again)
    host_buffers = [
        {x.memory.data_ptr() for own in one.optimizer.stack_states() for x in own.host_buffers} for one in (run, again)
    ]
    assert host_buffers[0] and not host_buffers[0] & host_buffers[1]


@pytest.mark.slow
def test_state_follows_a_model_to_a_device() -> None:
    """Composed on a CPU, where offload to its own memory has no effect, and says so."""
    given = gradients(4)
    with accelerator("cuda") as device:
        plain = made("soap", None, device.device)
        with warned(UserWarning, "storage.first_moment", "cpu", "disk"):
            moved = Run("soap", device.device, moved=True, storage=storage_of("soap", "cpu"))
        for run in (plain, moved):
            run.step(*given)
        require_same(plain, moved)
        assert any(own.host_buffers for own in moved.optimizer.stack_states())
        moved.model.to("cpu")
        moved.place = torch.device("cpu")
        moved.step(given[0])
        assert not any(own.host_buffers for own in moved.optimizer.stack_states())


def test_state_that_a_host_changed_is_brought_in() -> None:
    given = gradients(4)
    with accelerator("cuda") as device:
        runs = [made("adamw", to, device.device) for to in (None, "cpu", "disk")]
        for run in runs:
            run.step(*given[:2])
            run.optimizer.state_dict()  # waits until state is where it is read
            for own in run.optimizer.state.values():
                for key, value in own.items():
                    if key != "step":
                        own[key] = value * 2
            run.step(*given[2:])
        require_same(runs[0], runs[1])
        require_same(runs[0], runs[2])


def test_a_parameter_without_a_gradient_is_not_brought_in() -> None:
    given = gradients(3)
    with accelerator("cuda") as device:
        plain, run = made("adamw", None, device.device), made("adamw", "cpu", device.device)
        for own in (plain, run):
            own.step(*given[:2])
            own.give(given[2])
            for parameter in list(own.model.parameters())[1:]:
                parameter.grad = None
            with accelerator("cuda") as step:
                own.optimizer.step()
        assert step.uploads == 1
        require_same(plain, run)


def test_a_file_has_no_name_and_is_gone_with_the_optimizer(tmp_path: Path) -> None:
    offload = {"kind": "offload", "to": "disk", "directory": str(tmp_path), "min_elements": 1}
    optimizer = Optimizer([nn.Parameter(torch.ones(64, 64))], "adamw", overrides={"storage": {"first_moment": offload}})
    assert [*tmp_path.iterdir()] == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 1
    del optimizer
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_directory_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*numbers: int) -> None:
        raise OSError(28, "No space left on device")

    for directory in (tmp_path / "none", tmp_path):
        offload = {"kind": "offload", "to": "disk", "directory": str(directory), "min_elements": 1}
        with refused(OSError, "storage", directory, "directory", "TMPDIR"):
            Optimizer([nn.Parameter(torch.ones(3, 3))], "adamw", overrides={"storage": {"first_moment": offload}})
        monkeypatch.setattr(os, "posix_fallocate", full)
    assert [*tmp_path.iterdir()] == []


def test_a_forked_process_does_not_write_the_file_of_its_parent() -> None:
    given, run = gradients(2), made("adamw", "disk")
    run.step(given[0])
    before = state_of(run.optimizer)
    process = os.fork()
    if process == 0:
        try:
            run.step(given[1])
        except RuntimeError as error:
            os._exit(3 if str(os.getpid()) in str(error) and str(os.getppid()) in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 3
    after = state_of(run.optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_graph_is_refused() -> None:
    with refused(RecipeError, "graph", "storage.first_moment"):
        load_recipe("adamw", {"graph": True, "storage": {"first_moment": {"kind": "offload"}}})


def test_a_file_system_in_memory_is_named(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not in_memory(Offload(to="disk", directory=str(memory)).location):
        pytest.skip("no file system in memory is mounted here")
    model = nn.Linear(64, 64)
    with warned(UserWarning, "storage.first_moment", memory, "directory"):
        compose(
            "adamw",
            model,
            overrides={"storage": {"first_moment": {"kind": "offload", "to": "disk", "directory": str(memory)}}},
        )


def test_offload_to_a_cpu_on_a_cpu_warns_and_counts_no_bytes() -> None:
    storage = {"first_moment": {"kind": "offload", "to": "cpu", "min_elements": 1}}
    with warned(UserWarning, "storage.first_moment", "cpu"):
        optimizer = compose("adamw", nn.Linear(64, 64), overrides={"storage": storage})
    assert optimizer.offloaded_bytes() == {} and "offloaded" not in repr(optimizer)


def test_bytes_are_counted_where_they_are() -> None:
    storage = {
        "first_moment": {"kind": "offload", "to": "disk"},
        "statistic": {"kind": "offload", "to": "disk", "inner": "int8"},
    }
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False))
    optimizer = compose("soap", model, overrides={"storage": storage})
    rows = {row.key: row for row in optimizer.slot_sizes()}
    moved = {key: row.stored for key, row in rows.items() if row.location == "disk"}
    assert moved["update.eigenbasis.inner.momentum/m"] == 4 * 64 * 64
    assert optimizer.offloaded_bytes() == {"disk": sum(moved.values())}
    assert sum(row.stored for row in rows.values()) == optimizer.state_bytes()
    check_said(repr(optimizer), optimizer.offloaded_bytes()["disk"], "disk")

    planned = plan(optimizer.recipe, optimizer.param_sets.infos, (1,), "ddp")
    assert {key: own.tolist() for key, own in planned.offloaded.items()} == {
        "disk": [optimizer.offloaded_bytes()["disk"]]
    }


@pytest.mark.slow
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_compiled_programs_read_state_where_it_is(to: To, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of entries and of whole stacks, run as they were traced; some steps have no gradient."""
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: lambda tensors: graph(*tensors))
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    given = gradients(5)
    with accelerator("cuda") as device:
        for recipe in ("lion", "soap_fitted"):
            runs = [made(recipe, place, device.device, compile=True) for place in (None, to)]
            for run in runs:
                run.step(*given[:3])
                run.give(given[3])
                next(iter(run.model.parameters())).grad = None
                run.optimizer.step()
                run.step(given[4])
            assert any(how.compiled for one in runs[1].optimizer.param_sets for how in one.executions)
            require_same(*runs)


LIMITED = """
import hashlib, mmap, resource, sys
import torch
from torch import nn
from eigengraft import Optimizer

def private():
    rows = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(rows["VmData"].split()[0]) << 10

def parameters(count):
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(192, 192) / 20) for _ in range(count)]
    for parameter in found:
        parameter.grad = torch.randn(192, 192)
    return found

torch.set_num_threads(1)
offload = {"kind": "offload", "to": "disk", "directory": sys.argv[1]}
roles = ("statistic", "basis", "first_moment", "second_moment") if sys.argv[2] == "disk" else ()
storage = dict.fromkeys(roles, offload)
warm = Optimizer(parameters(2), "soap", overrides={"storage": storage, "routes": []})
warm.step(), warm.step()
given = parameters(96)
room = 50 << 20
limit = private() + room
if sys.argv[3] == "limited":
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
optimizer = Optimizer(given, "soap", overrides={"storage": storage, "routes": []})
assert optimizer.state_bytes() > 1.5 * room
for _ in range(3):
    optimizer.step()
torch.save(optimizer.state_dict(), "state.pt")
torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)  # a private mapping would count
optimizer.load_state_dict(torch.load("state.pt", weights_only=True, mmap=True))
optimizer.step()
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in given)).hexdigest())
"""


@pytest.mark.slow
def test_steps_and_checkpoints_take_less_memory_than_the_state(tmp_path: Path) -> None:
    """50 MiB of private memory beside parameters and gradients suffice for 80 MiB of state in a file alone."""
    runs = [
        run_process("-c", LIMITED, str(tmp_path), *how, folder=tmp_path)
        for how in (("disk", "limited"), ("memory", "limited"), ("memory", "free"))
    ]
    assert [own.returncode for own in runs] == [0, 1, 0], runs[0].stderr
    assert "alloc" in runs[1].stderr
    assert runs[0].stdout == runs[2].stdout != ""


KILLED = """
import os, signal, sys
import torch
from torch import nn
from eigengraft import Optimizer

folder, until, die = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "die"
torch.manual_seed(0)
parameters = [nn.Parameter(torch.randn(24, 32)), nn.Parameter(torch.randn(24, 40))]
offload = {"kind": "offload", "to": "disk", "directory": folder, "min_elements": 1}
storage = dict.fromkeys(("statistic", "basis", "first_moment", "second_moment"), offload)
optimizer = Optimizer(parameters, "soap", overrides={"storage": storage, "routes": []})
start = 0
if os.path.exists("saved.pt"):
    saved = torch.load("saved.pt", weights_only=True, mmap=True)
    optimizer.load_state_dict(saved["optimizer"])
    for parameter, value in zip(parameters, saved["parameters"]):
        parameter.data.copy_(value)
    start = saved["step"]
for step in range(start, until):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    if step == 3 and die:
        saved = {"optimizer": optimizer.state_dict(), "parameters": [p.detach() for p in parameters], "step": 4}
        torch.save(saved, "saved.pt")
    if step == 5 and die:
        os.kill(os.getpid(), signal.SIGKILL)
print([float(p.double().square().sum()) for p in parameters])
"""


@pytest.mark.slow
def test_a_killed_run_resumes_and_leaves_no_file(tmp_path: Path) -> None:
    files, one, two = tmp_path / "files", tmp_path / "one", tmp_path / "two"
    for folder in (files, one, two):
        folder.mkdir()
    whole = run_process("-c", KILLED, str(files), "9", "live", folder=one)
    killed = run_process("-c", KILLED, str(files), "9", "die", folder=two)
    assert killed.returncode == -9 and (two / "saved.pt").exists() and [*files.iterdir()] == []
    resumed = run_process("-c", KILLED, str(files), "9", "live", folder=two)
    assert whole.returncode == resumed.returncode == 0, (whole.stderr, resumed.stderr)
    assert whole.stdout == resumed.stdout


# Order of copies and programs: every two accesses to a buffer or to host memory, one of which writes, are ordered.


class Clocks(Streams):
    """Two streams whose marks carry what they know: for each stream, the number of operations that are done by then."""

    concurrent = True

    def __init__(self) -> None:
        self.names, self.time = ["program"], {"program": 0, "copies": 0}
        self.known = {"program": {"program": 0, "copies": 0}, "copies": {"program": 0, "copies": 0}}
        self.accesses: list[tuple[str, int, dict[str, int], int, bool]] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.names.append("copies")
        yield
        self.names.pop()

    def mark(self) -> Any:
        return dict(self.known[self.names[-1]])

    def wait(self, mark: Any) -> None:
        own = self.known[self.names[-1]]
        own.update({name: max(own[name], number) for name, number in mark.items()})

    def access(self, tensor: Tensor, writes: bool) -> None:
        """Note an access of the present stream to the memory of a tensor."""
        name = self.names[-1]
        before = dict(self.known[name])
        self.time[name] += 1
        self.known[name][name] = self.time[name]
        self.accesses.append((name, self.time[name], before, tensor.untyped_storage().data_ptr(), writes))

    def races(self) -> int:
        """Count pairs of accesses to one memory with a write among them, the later of which does not wait."""
        found = 0
        for later, (_, _, known, memory, writes) in enumerate(self.accesses):
            for name, number, _, other, wrote in self.accesses[:later]:
                found += memory == other and (writes or wrote) and known[name] < number
        return found


class Copies(TorchDispatchMode):
    """Notes the memory that copies read and write."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "copy_":
            self.clocks.access(args[1], writes=False)
            self.clocks.access(args[0], writes=True)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lacking", ["nothing", "wait"])
def test_copies_and_programs_are_ordered(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of five stacks have no race. The second step leaves one stack out, so that later stacks use other
    buffers. Without any wait the test finds races, and buffers in memory that earlier work still uses."""
    monkeypatch.setattr("eigengraft.quantization.offload.available", lambda location, device: location)
    monkeypatch.setattr("eigengraft.optimizers.recipe.recipe.available", lambda location, device: location)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    zeros, empty = torch.zeros, torch.empty
    for name, made_by in (("zeros", zeros), ("empty", empty)):
        monkeypatch.setattr(torch, name, _without_pinning(made_by))
    parameters = [nn.Parameter(torch.randn(3, n)) for n in range(2, 7)]
    storage = {"first_moment": {"kind": "offload", "min_elements": 1}}
    optimizer = Optimizer(parameters, "sgd", overrides={"storage": storage, "routes": []})
    groups = [[own] for own in optimizer.stack_states()]
    clocks = Clocks()
    monkeypatch.setattr("eigengraft.optimizers.step.offload.Streams", lambda device: clocks)
    sizes = [sum(buffer.memory.numel() for buffer in own.host_buffers) for (own,) in groups]
    offloaded = OffloadedState(groups, torch.device("cpu"))
    if lacking == "wait":
        monkeypatch.setattr(Clocks, "wait", lambda self, mark: None)
    clocks.time["program"] = clocks.known["program"]["program"] = 1
    offloaded._copied = CopiedState(torch.device("cpu"), sizes, groups)
    assert clocks.known["copies"]["program"] == (lacking == "nothing")
    with Copies(clocks):
        for step in range(3):
            active = np.arange(5) != (1 if step == 1 else 5)
            offloaded.schedule(groups, active)
            for group in groups:
                if active[group[0].stack.param_ids].any():
                    with offloaded.held(group):
                        for tensor in group[0].tensors.values():
                            clocks.access(tensor, writes=True)
    assert len(groups) == 5 and len(clocks.accesses) == (5 + 4 + 5) * 5
    assert (clocks.races() == 0) == (lacking == "nothing")


def _without_pinning(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **options: function(*args, **{k: x for k, x in options.items() if k != "pin_memory"})
