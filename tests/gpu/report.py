"""Measure what this library does on a GPU, and write it down: `make gpu`.

    python tests/gpu/report.py                  # needs a CUDA device, no network, under 10 minutes
    python tests/gpu/report.py --only step      # some of the parts; rows of other parts are kept
    python tests/gpu/report.py --simulated      # the same code on the simulated accelerator, with tiny sizes

One line of JSON for each measurement goes to `tests/gpu/results.jsonl`; `page.py` makes `docs/gpu.md` of it. Times of
solvers also go to `preconditioners/roots/timings.json`, by which a solver with `by_device: true` chooses. A simulated
run, whose times mean nothing, writes to a folder of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock
from xml.etree import ElementTree

import torch
from torch.nn import Parameter, functional

from eigengraft.experiments.benches.bench import first_line
from eigengraft.experiments.benches.step import StepCase
from eigengraft.experiments.benches.step_times import (
    Contender,
    StepTime,
    give,
    kernels,
    peak_bytes,
    take_turns,
)
from eigengraft.experiments.tasks.model_shapes import GPT2, MODELS
from eigengraft.experiments.tasks.models import GPT
from eigengraft.experiments.training.environment import processor_name
from eigengraft.optimizers import Optimizer
from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.step import capturers
from eigengraft.preconditioners import (
    BasisSolver,
    CholeskyQR,
    CoupledMinimax,
    CoupledNewton,
    Eigh,
    NewtonDB,
    PowerIteration,
    PowerQR,
    RootSolver,
)
from eigengraft.testing import DeviceCounts, accelerator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from places import waits  # noqa: E402
from recording import Recording  # noqa: E402

ROOT = HERE.parents[1]
TIMINGS = ROOT / "preconditioners" / "roots" / "timings.json"
INTERVAL = 10
"""Steps between refreshes, of the shipped recipes and of their peers."""
COMPILED = {"heavyball.utils:compile_mode": "default"}  # its own default tunes for minutes
SECOND_ORDER = {"precondition_frequency": INTERVAL, "max_precond_dim": 1024, "use_precond_schedule": False}
ROUTES = ("compile=true", "routes.adam.compile=true")
DEVICE = ("graph=true", "failure.detect=device")
"""A step that waits for nothing, launched as one graph."""
DELAY = ("update.eigenbasis.refresh.delay=2",)
AT_ONCE = ("update.eigenbasis.refresh.stagger=none",)
"""Refreshes of all blocks in one step: fewer and larger launches, but one long step in each interval."""
CASES = (
    StepCase(recipe="adamw"),
    StepCase(recipe="adamw", overrides=("failure.detect=device",), name="adamw, detect: device"),
    StepCase(recipe="adamw", overrides=("graph=true",), name="adamw, graph: true"),
    StepCase(peer="torch.optim:AdamW", options={"fused": True}, name="torch AdamW, fused"),
    StepCase(recipe="muon"),
    StepCase(recipe="muon", overrides=("graph=true",), name="muon, graph: true"),
    StepCase(peer=f"{HERE}/peers.py:TorchMuon", name="torch Muon and AdamW, fused"),
    StepCase(recipe="soap_fitted"),
    StepCase(recipe="soap_fitted", overrides=("graph=true",), name="soap_fitted, graph: true"),
    StepCase(recipe="soap_fitted", overrides=DELAY, name="soap_fitted, delay: 2"),
    StepCase(recipe="shampoo"),
    StepCase(recipe="shampoo", overrides=("graph=true",), name="shampoo, graph: true"),
)
TF32_CASES = (
    StepCase(recipe="muon", name="muon, products in TF32"),
    StepCase(recipe="soap_fitted", name="soap_fitted, products in TF32"),
    StepCase(recipe="soap_fitted", overrides=DELAY, name="soap_fitted, delay: 2, products in TF32"),
    StepCase(recipe="soap_fitted", overrides=AT_ONCE, name="soap_fitted, stagger: none, products in TF32"),
    StepCase(recipe="shampoo", name="shampoo, products in TF32"),
)
"""Measured with `torch.set_float32_matmul_precision("high")`, as most training scripts set it."""
COMPILED_CASES = (
    StepCase(recipe="adamw", overrides=("compile=true", *DEVICE), name="adamw, compile, graph, detect: device"),
    StepCase(recipe="muon", overrides=ROUTES, name="muon, compile: true"),
    StepCase(recipe="muon", overrides=(*ROUTES, *DEVICE), name="muon, compile, graph, detect: device"),
    StepCase(recipe="soap_fitted", overrides=ROUTES, name="soap_fitted, compile: true"),
    StepCase(recipe="shampoo", overrides=ROUTES, name="shampoo, compile: true"),
)
SLOW_CASES = (
    StepCase(
        recipe="soap_fitted",
        overrides=("update.eigenbasis.solver.by_device=false",),
        name="soap_fitted, by_device: false",
    ),
    StepCase(
        recipe="shampoo",
        overrides=("update.graft.direction.shampoo.solver.by_device=false",),
        name="shampoo, by_device: false",
    ),
    StepCase(peer=f"{HERE}/peers.py:Shampoo", name="Distributed Shampoo"),
)
"""Their libraries decompose one matrix after the other."""
HEAVYBALL_CASES = (
    StepCase(peer="heavyball:SOAP", options=SECOND_ORDER, switches=COMPILED, name="HeavyBall SOAP, compiled"),
    StepCase(peer="heavyball:Muon", switches=COMPILED, name="HeavyBall Muon, compiled"),
    StepCase(peer="heavyball:AdamW", switches=COMPILED, name="HeavyBall AdamW, compiled"),
)
"""Compiled for a minute each."""
UNTRAINED = ("adamw, detect: device", "adamw, graph: true", "soap_fitted, graph: true", "shampoo, graph: true")
"""Candidates that were no faster than their base recipe. The part `training` leaves them out."""
TRAINED = (
    *(case for case in (*CASES, *COMPILED_CASES) if case.label() not in UNTRAINED),
    StepCase(recipe="soap_fitted", overrides=DEVICE[1:], name="soap_fitted, detect: device"),
    StepCase(recipe="soap_fitted", overrides=AT_ONCE, name="soap_fitted, stagger: none"),
)
"""Candidates that are measured in training."""
CAPTURED = ("adamw", "muon", "soap_fitted", "shampoo")
"""Recipes whose captured steps are compared with steps that are launched one by one."""
SHARED = ("-n", str(min(12, len(os.sched_getaffinity(0)))))
"""Processes that the tests are spread over."""
TESTS = ("tests/gpu", "tests/experiments/test_train.py")
"""Tests, of which some need an accelerator."""


class Sizes(NamedTuple):
    """What is measured.

    model: the model whose parameters are updated, and that is trained.
    batch: sequences of a training step, each as long as the model allows.
    captured: the model whose parameters captured steps update.
    intervals: intervals between refreshes that the captured steps go through.
    warm, steps: steps before the measurement, and in it.
    device, host: (order, batch) of the matrices that are decomposed there.
    tests: what pytest is called with.
    """

    model: Any
    batch: int
    captured: Any
    intervals: float
    warm: int
    steps: int
    device: tuple[tuple[int, int], ...]
    host: tuple[tuple[int, int], ...]
    tests: tuple[str, ...]


SMALL = ((32, 64), (64, 64))
"""Orders on both sides of the one from which on CUDA decomposes one matrix after the other."""
LARGE = tuple((order, batch) for order in (256, 512, 1024, 2048, 4096) for batch in (1, 8) if order * batch < 32768)
REAL = Sizes(
    MODELS["gpt2"],
    16,
    GPT2(2, 128, 512, 64),
    3,
    12,
    20,
    (*SMALL, *LARGE),
    (*SMALL, *LARGE[:6]),
    (*SHARED, *TESTS, "-m", "gpu"),
)
TINY = Sizes(
    GPT2(1, 32, 64, 16),
    2,
    GPT2(1, 32, 64, 16),
    1.5,
    2,
    2,
    ((8, 2),),
    ((8, 2),),
    ("-n", "0", "tests/gpu/test_laws_on_device.py", "-k", "simulated and momentum"),
)
Row = dict[str, Any]


def tried(row: Row, measure: Callable[..., Row], *given: Any) -> Row:
    """Add a measurement to a row, or the error that ended it, so that the next candidate is measured in any case."""
    try:
        return row | measure(*given)
    except Exception as error:
        return row | {"problem": first_line(error)}


@contextmanager
def in_tf32() -> Iterator[None]:
    """Compute products of float32 in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def laws(sizes: Sizes) -> Iterator[Row]:
    """Run the tests that need an accelerator, in a process of their own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    with TemporaryDirectory() as folder:
        report = Path(folder, "laws.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *sizes.tests]
        try:
            subprocess.run(command, cwd=ROOT, env=environment, timeout=300, check=False, stdout=sys.stderr)
            suite = next(ElementTree.parse(report).iter("testsuite"))
        except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError) as error:
            yield {"problem": first_line(error)}
            return
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    wrong = [case.attrib["name"] for case in suite.iter("testcase") if {"failure", "error"} & {own.tag for own in case}]
    yield {**counts, "failed": wrong, "seconds": float(suite.attrib["time"])}


def inputs_of_torch(simulated: bool) -> Iterator[Row]:
    """Compare recipes with torch's optimizers on the inputs of torch's own tests, in a process of its own."""
    command = [sys.executable, str(HERE / "torch_inputs.py"), *["--simulated"] * simulated]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=300, check=False, capture_output=True, text=True)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        yield {"problem": first_line(error)}
        return
    if not rows or done.returncode not in (0, 1):
        yield {"problem": done.stderr.strip().rpartition("\n")[2]}
        return
    failed = [row["candidate"] for row in rows if row.get("equal") is False]
    left = {row["candidate"]: row["left"] for row in rows if "left" in row}
    yield {"compared": len(rows) - len(left), "failed": failed, "left": left}


class Counted:
    """A way to record the work of a device that counts replays; of: the way, None to launch all work one by one."""

    def __init__(self, of: capturers.Capturer | None) -> None:
        self.of, self.replays = of, 0

    def __call__(self, device: torch.device) -> Counted:
        return self

    def warm_up(self, body: capturers.Body) -> None:
        body() if self.of is None else self.of.warm_up(body)

    def capture(self, body: capturers.Body) -> capturers.Body:
        run = body if self.of is None else self.of.capture(body)

        def replay() -> None:
            self.replays += 1
            run()

        return replay


def captures(sizes: Sizes) -> Iterator[Row]:
    """Compare captured steps with the same steps launched one by one, bit by bit, while the learning rate moves."""
    for recipe in CAPTURED:
        yield tried({"candidate": recipe}, _captured, recipe, sizes)


def _captured(recipe: str, sizes: Sizes) -> Row:
    device, shapes = torch.device("cuda:0"), list(sizes.captured.shapes())
    generator = torch.Generator().manual_seed(0)
    start = [(name, 0.02 * torch.randn(shape, generator=generator)) for name, shape in shapes]
    ways = [Counted(capturers.CAPTURERS["cuda"](device)), Counted(None), None]
    runs = []
    for way in ways:
        with mock.patch.dict(capturers.CAPTURERS, {} if way is None else {"cuda": way}):
            named = [(name, Parameter(x.to(device))) for name, x in start]
            runs.append((named, Optimizer(named, recipe, lr=1e-3, overrides={"graph": way is not None})))
    differing, total = 0, int(sizes.intervals * INTERVAL)
    for step in range(total):
        given = [1e-2 * torch.randn(x.shape, generator=generator).to(device) for _, x in start]
        for named, optimizer in runs:
            for (_, parameter), gradient in zip(named, given, strict=True):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad.copy_(gradient)
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
            optimizer.step()
        one, other = ([*(x for _, x in named), *_state(optimizer)] for named, optimizer in runs[:2])
        differing += sum(not torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in zip(one, other, strict=True))
    ends = [[x.detach().cpu() for _, x in named] for named, _ in runs]
    way_gone = max(float((x - y).abs().max()) for (_, x), y in zip(start, ends[2], strict=True))
    apart = max(float((x - y).abs().max()) for x, y in zip(ends[0], ends[2], strict=True)) / way_gone
    replays = ways[0].replays if ways[0] is not None else 0
    failed = [f"{differing} tensors have other bits"] * bool(differing) + ["no step was replayed"] * (not replays)
    left = {reason: count for own in runs[0][1].param_sets if own.graphs for reason, count in own.graphs.left.items()}
    return {"steps": total, "replays": replays, "differing": differing, "apart": apart, "left": left, "failed": failed}


def _state(optimizer: Optimizer) -> list[torch.Tensor]:
    return [x for own in optimizer.stack_states() for x in own.tensors.values()]


def steps(sizes: Sizes, cases: Sequence[StepCase]) -> Iterator[Row]:
    """Measure the steps of candidates on the same parameters, one candidate after the other."""
    for case in cases:
        row: Row = {"candidate": case.label(), "own": case.recipe is not None}
        with in_tf32() if cases is TF32_CASES else nullcontext():
            yield tried(row, _steps, case, sizes)


def _steps(case: StepCase, sizes: Sizes) -> Row:
    gc.collect()  # frees the tensors of the last candidate
    shapes = list(sizes.model.shapes())
    named = [(name, Parameter(0.02 * torch.randn(shape, device="cuda"))) for name, shape in shapes]
    parameters: Any = [parameter for _, parameter in named]
    gradients = [[1e-2 * torch.randn(shape, device="cuda") for _, shape in shapes] for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer = case.build(named if case.recipe else parameters, INTERVAL)
    contender = Contender(optimizer, parameters, 0.0)
    (times,) = take_turns([contender], gradients, warm=sizes.warm, steps=sizes.steps)
    state = torch.cuda.memory_allocated() - before
    found = [kernels(contender, gradients[0]) for _ in range(3)]
    launched, busy = min(totals for totals in found if totals is not None)
    waited = [waits_of(contender, gradients[0]) for _ in range(min(sizes.steps, INTERVAL))]
    planned = None
    if isinstance(optimizer, Optimizer):
        planned = int(plan(optimizer.recipe, shapes, (1,), "ddp").state[0])
    return {
        "numbers": sum(parameter.numel() for parameter in parameters),
        **{f"{name}_ms": _spread(times, name) for name in StepTime._fields},
        "kernels": launched,
        "kernels_ms": busy,
        "waits": dict(min(waited, key=Counter.total)),
        "most_waits": max(map(Counter.total, waited)),
        "state_bytes": state,
        "planned_bytes": planned,
        "peak_bytes": peak_bytes(contender, gradients[0]),
    }


def _spread(times: list[StepTime], name: str) -> Row:
    values = [getattr(step, name) for step in times]
    return {"median": median(values), "mean": mean(values), "longest": max(values)}


def waits_of(contender: Contender, gradients: Any) -> Counter[str]:
    """Times that the host waited for the device in one step, by file and line."""
    give(contender, gradients)
    with waits() as found:
        contender.optimizer.step()
    return found.lines


def training(sizes: Sizes) -> Iterator[Row]:
    """Measure training steps. As in practice, the device still has queued work when the optimizer begins.

    The first row is that of forward and backward alone.
    """
    for case in (None, *TRAINED):
        row: Row = {"candidate": "forward and backward", "own": True}
        row |= {} if case is None else {"candidate": case.label(), "own": case.recipe is not None}
        with in_tf32():
            yield tried(row, _training, case, sizes)


def _training(case: StepCase | None, sizes: Sizes) -> Row:
    gc.collect()  # frees the tensors of the last candidate
    torch.manual_seed(0)
    own = sizes.model
    model = GPT(own.vocabulary, own.length, own.layers, own.width, heads=max(1, own.width // 64)).to("cuda")
    model.head.weight = model.embedding.weight
    tokens = torch.randint(own.vocabulary, (sizes.batch, own.length + 1), device="cuda")
    named = list(model.named_parameters())
    parameters: Any = [parameter for _, parameter in named]
    optimizer = None if case is None else case.build(named if case.recipe else parameters, INTERVAL)
    for step in range(sizes.warm + 2 * INTERVAL):
        if step == sizes.warm:
            torch.cuda.synchronize()
            start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if optimizer is not None:
            optimizer.step()
        # in place, because captured graphs read gradients at fixed addresses
        torch._foreach_zero_([parameter.grad for parameter in parameters])
    torch.cuda.synchronize()
    return {"training_ms": 1e3 * (time.perf_counter() - start) / (2 * INTERVAL)}


def decompositions(device: str, card: str, matrices: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    """Measure solvers of roots and bases, and operations that they are made of, on stacks of symmetric matrices."""
    power, minimax = PowerQR(), CoupledMinimax.equal_to(Eigh(eps=1e-6, relative=True), torch.float32)
    cholesky = CholeskyQR.equal_to(power, torch.float32)
    assert minimax is not None and cholesky is not None
    roots: dict[str, RootSolver] = {
        "coupled_minimax": minimax,
        "coupled_newton": CoupledNewton(eps=1e-6, relative_to=PowerIteration(steps=100)),
        "newton_db": NewtonDB(),
    }
    bases: dict[str, BasisSolver] = {"power_qr": power, "cholesky_qr": cholesky}
    same = {"device": device, "card": card, "date": today()}
    source = f"measured: make gpu, torch {torch.__version__}"
    for order, batch in ((32, 1), *matrices):
        x = torch.randn(batch, order, order, device=device)
        a, q = x @ x.mT / order, torch.linalg.qr(x).Q
        work: dict[str, Callable[[], Any]] = {
            "product": partial(torch.bmm, x, x),
            "eigh": partial(torch.linalg.eigh, a),
            "qr": partial(torch.linalg.qr, x),
            "householder": lambda x=x: torch.linalg.householder_product(*torch.geqrf(x)),
            **{kind: partial(solver.basis, a, q, False) for kind, solver in bases.items()},
            **{kind: partial(solver.root, a, Fraction(1, 4)) for kind, solver in roots.items()},
        }
        if device != "cpu":
            work["eigh_on_host"] = lambda a=a: [found.to(a.device) for found in torch.linalg.eigh(a.cpu())]
        for operation, run in work.items():
            row = same | {"operation": operation, "order": order, "batch": batch, "dtype": "float32"}
            try:
                found: Row = {"milliseconds": milliseconds(run), "source": source}
            except RuntimeError as error:  # of memory, or of a library
                found = {"problem": first_line(error)}
            if (order, batch) in matrices:  # at the first order torch loads its libraries
                yield row | found


def milliseconds(run: Callable[[], Any]) -> float:
    """The shortest of up to five calls within two seconds."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < 2000:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return round(min(times), 4)


def renew(table: Path, rows: list[Row]) -> None:
    """Write times of solvers into a table, in place of older ones of the same device and solver."""
    solvers = {*RootSolver.members, *BasisSolver.members, "eigh_on_host"}
    good = [row for row in rows if row.get("operation") in solvers and "problem" not in row]
    new = [{key: row[key] for key in row if key != "part"} for row in good]
    renewed = {(row["device"], row["operation"]) for row in new}
    known = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else []
    kept = [row for row in known if (row["device"], row["operation"]) not in renewed]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in (*kept, *new))
    table.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def machine() -> Row:
    """Describe the hardware and the software that all other rows were measured with."""
    return {
        "card": torch.cuda.get_device_name(),
        "host": processor_name(),
        "threads": torch.get_num_threads(),
        "date": today(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "products": torch.get_float32_matmul_precision(),
    }


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


NEEDS_DEVICE = ("compiled", "training", "heavyball")
"""Parts that need a compiler or a backward pass. The simulated accelerator has neither."""


def parts(simulated: bool) -> dict[str, Iterator[Row]]:
    """Return by name what is measured, in order. Nothing is measured before its iterator is asked."""
    sizes = TINY if simulated else REAL
    every = {
        "machine": iter([machine()]),
        "laws": laws(sizes),
        "torch": inputs_of_torch(simulated),
        "step": steps(sizes, CASES),
        "tf32": steps(sizes, TF32_CASES),
        "compiled": steps(sizes, COMPILED_CASES),
        "training": training(sizes),
        "capture": captures(sizes),
        "decomposition": decompositions("cuda", torch.cuda.get_device_name(), sizes.device),
        "slow": steps(sizes, SLOW_CASES),
        "host": decompositions("cpu", processor_name(), sizes.host),
        "heavyball": steps(sizes, HEAVYBALL_CASES),
    }
    return {name: rows for name, rows in every.items() if not (simulated and name in NEEDS_DEVICE)}


class _Profile:
    """What `torch.profiler.profile` is asked here, answered by the counts of the simulated accelerator."""

    def __init__(self, **options: Any) -> None:
        self.stack = ExitStack()

    def __enter__(self) -> _Profile:
        self.counts = self.stack.enter_context(accelerator("cuda"))
        return self

    def __exit__(self, *raised: object) -> None:
        self.stack.close()

    def events(self) -> list[Any]:
        kernel = {"device_type": torch.autograd.DeviceType.CUDA, "is_user_annotation": False, "name": "kernel"}
        return [SimpleNamespace(**kernel, time_range=SimpleNamespace(elapsed_us=float))] * self.counts.kernels


@contextmanager
def simulated() -> Iterator[None]:
    """Enter the simulated accelerator, with answers to all that this file asks of `torch.cuda` and the profiler."""
    block, counts = ExitStack(), DeviceCounts()

    def set_sync_debug_mode(mode: str) -> None:
        nonlocal counts
        if mode == "warn":
            counts = block.enter_context(accelerator("cuda"))
            return
        block.close()
        for (file, line, operation), own in counts.lines.items():
            for _ in range(own.waits * (operation != "Event.synchronize")):  # CUDA does not warn of events either
                warnings.warn_explicit("called a synchronizing operation", UserWarning, file, line)

    with accelerator("cuda") as run:
        answers = {
            "memory_allocated": lambda *device: run.live,
            "max_memory_allocated": lambda *device: run.peak,
            "reset_peak_memory_stats": lambda *device: setattr(run, "peak", run.live),
            "get_device_name": lambda: "a simulated accelerator",
            "set_sync_debug_mode": set_sync_debug_mode,
        }
        with (
            mock.patch.multiple(torch.cuda, **answers),
            mock.patch.dict(capturers.CAPTURERS, {"cuda": lambda device: Recording()}),
            mock.patch.object(torch.cuda.Event, "elapsed_time", create=True, return_value=0.0),
            mock.patch.object(torch.profiler, "profile", _Profile),
        ):
            yield


def main() -> int:
    parser = argparse.ArgumentParser(description="What this library does on a GPU.")
    parser.add_argument("--simulated", action="store_true", help="use the simulated accelerator and tiny sizes")
    parser.add_argument("--out", type=Path, help="folder of a simulated run; default runs/gpu-simulated")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to measure; rows of other parts are kept")
    given = parser.parse_args()
    if given.out and not given.simulated:
        parser.error("--out: --simulated is required, without which results have their place")
    if not given.simulated and not torch.cuda.is_available():
        sys.exit("make gpu: a CUDA device is required, but torch finds none; `make gpu ARGS=--simulated` needs none")
    from page import PAGE, RESULTS, page, read

    targets = (RESULTS, PAGE, TIMINGS)
    if given.simulated:
        folder = (given.out or ROOT / "runs" / "gpu-simulated").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        targets = tuple(folder / path.name for path in targets)
    known = read(targets[0]) if given.only and targets[0].is_file() else []
    rows: list[Row] = []
    with simulated() if given.simulated else nullcontext():
        measured = parts(given.simulated)
        if unknown := {*(given.only or ())} - {*measured}:
            parser.error(f"--only: no part is named {', '.join(sorted(unknown))}; parts are {', '.join(measured)}")
        asked = {"machine", *(given.only or measured)}
        with targets[0].open("w", encoding="utf-8") as file:
            for name, own in measured.items():
                found = own if name in asked else (row for row in known if row["part"] == name)
                for row in found:
                    rows.append({"part": name, **row})
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()  # a run that is stopped leaves what it has measured
                    if name in asked:
                        sys.stdout.write(json.dumps(rows[-1]) + "\n")
    targets[1].write_text(page(rows), encoding="utf-8")
    renew(targets[2], rows)
    wrong = [row for row in rows if row.get("failed") or ("problem" in row and row.get("own", True))]
    sys.stdout.write(f"{', '.join(map(str, targets))}: {len(rows)} rows, {len(wrong)} with a problem\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
