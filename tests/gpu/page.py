"""The page docs/gpu.md, made of the rows that `report.py` measures: `python tests/gpu/page.py` writes it anew."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GROUPS = (("step", "tf32", "compiled", "slow", "heavyball"), ("decomposition", "host"), ("capture",), ("training",))
"""Parts whose rows are in one table."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
RESULTS = Path(__file__).with_name("results.jsonl")
"""Rows of the last run of each part. The key `note` of a row is a remark that was written by hand."""
NOT_RUN = "Not run."
NOBODY = "No run on a GPU is recorded. [Limits](limits.md) says what was run in its place."
HEAD = """# On a GPU

{where}

```sh
make gpu                    # on one CUDA device, in under 10 minutes; writes this page
make gpu ARGS=--simulated   # with tiny sizes, without a GPU; writes to runs/gpu-simulated/
```

The second line runs the same code on a simulated accelerator. No network is needed for either line. `make gpu` also
writes each measurement as a line of JSON to `tests/gpu/results.jsonl`, and renews the times of solvers in
`preconditioners/roots/timings.json`. It also measures HeavyBall and Distributed Shampoo if they are installed."""
ADVICE = """```yaml
base: adamw                                                # on a GPU
set: {compile: true, graph: true, failure.detect: device}
```

The table [In training](#in-training) shows the time that an optimizer adds to a training step. The table
[Steps](#steps) shows the time of an optimizer step alone.

- **AdamW.** Set `compile`, `graph` and `failure.detect: device` together. The host then never waits, and the compiled
  kernel also skips gradients with inf or nan. By default a step uses torch's fused kernel. The host launches this
  kernel, and then waits once for the check that all gradients are finite. torch's AdamW makes no such check.
  `failure.detect: device` without `compile` is slow: each step copies parameters and moments before the update, and
  afterwards selects the old or the new value of each.
- **Muon.** Set `graph: true`. The time of the host then falls to a third, and a training step takes less time.
- **SOAP, Shampoo.** Call `torch.set_float32_matmul_precision("high")` for products in TF32. Refreshes of roots and
  bases are computed in float32 in any case, because their iterations need all bits.
- **SOAP.** With `refresh.stagger: none` all bases are refreshed in the same step. Decompositions of many matrices at
  once take less time for each matrix, so the mean step is shorter, and one step in each interval is long. The setting
  changes which steps refresh a basis, and so the results.
- **SOAP.** `refresh.delay` computes new bases beside the steps, on a second stream. A step alone takes less time with
  it. A training step took the same time with and without it, probably because forward and backward keep the device
  busy. The delay takes memory for the inputs of late refreshes, and makes the loss a little higher ([how
  much](../papers/late_refreshes/README.md)).
- **Shampoo.** Most of the time is spent in roots. A longer interval between refreshes saves the most."""
STEPS = """Milliseconds of a step on the parameters of GPT-2 small in float32, with refreshes every 10 steps.

- *total*: the time until the device has finished. The columns have the median, the mean and the longest step.
- *host*: the time until `step` returns. *device*: the time between CUDA events around the step.
- *kernels*: the number of kernels of a step. *ms of kernels*: the milliseconds in which they run, without the gaps
  between them. Three steps were measured; the table has the step with the fewest kernels. SOAP and Shampoo refresh some
  of their blocks in every step.
- *waits*: how often the host waits for the device, in the step with the fewest waits. The number includes waits that
  torch's synchronization debug mode reports, and waits for CUDA events. *most*: how often the host waits in the step
  with the most waits."""
TRAINING = """Milliseconds of a training step of GPT-2 small: the mean of 20 steps on 16 sequences of 1024 tokens. The
model computes in bfloat16 by autocast, products of float32 are in TF32, and refreshes are due every 10 steps.

In training the host launches kernels ahead of the device. While the host is ahead, its work for the optimizer costs no
time. After a wait for the device, the host is no longer ahead.

*added*: the time of the step minus that of forward and backward alone."""
MEMORY = """Megabytes (10^6 bytes):

- *state*: the memory that the state takes on the device. It includes memory that torch and cuBLAS keep: 32 MB for
  workspaces, and whole blocks of 2 MB.
- *plan*: the size of the state by `eigengraft plan`. It includes a step count of 8 bytes for each parameter, which is
  stored on the host.
- *peak beyond the state*: the most that a step allocates beyond the state.

A graph keeps the memory of its intermediate results, and refreshes under way keep copies of their inputs. The plan
counts neither."""
CAPTURE = """Steps with `graph: true` and refreshes every 10 steps. The learning rate changes in every step.

- *replays*: the number of replays of graphs, summed over all graphs of a recipe. A recipe may have several graphs for
  different parameters.
- *differing*: the number of tensors of parameters and state whose bits differ from those of the same steps launched
  one by one, summed over all steps.
- *apart*: the largest difference between the parameters at the end and those of a run without `graph`, divided by the
  largest change of a parameter in that run. The difference is not 0, because a graph reads the learning rate and other
  numbers of a step on the device, in the dtype of the state. Without a graph, the host passes these numbers to the
  kernels."""
TORCH = """Recipes are compared with `torch.optim` on the options that torch's own tests list for SGD, Adam, AdamW,
Adagrad, RMSprop and Muon (`torch.testing._internal.common_optimizers`). Both receive the same gradients for 8 steps."""
DECOMPOSITIONS = """Milliseconds of an operation on a stack of matrices in float32: the shortest of up to five calls.

- *householder* is `geqrf` with `householder_product`.
- *eigh_on_host* includes the copies to the host and back.
- `coupled_newton` and `newton_db` compute roots of the power -1/4."""


def page(rows: Sequence[Row]) -> str:
    """Make the page; a part that has no rows was not run."""
    steps, decompositions, captured, trained = ([row for row in rows if row["part"] in own] for own in GROUPS)
    done, times = ([row for row in own if "problem" not in row] for own in (steps, decompositions))
    sections = {
        "What to set": ADVICE if done else "",
        "Tests on the device": "".join(_laws(row) for row in rows if row["part"] == "laws"),
        "torch's optimizer tests": _section(TORCH, "".join(_torch(row) for row in rows if row["part"] == "torch")),
        "Steps": _section(STEPS, _steps(done)) + _notes(steps),
        "In training": _section(TRAINING, _training(trained)) + _notes(trained),
        "Memory against the plan": _section(MEMORY, _memory(done)),
        "Capture in a CUDA graph": _section(CAPTURE, _captures(captured)) + _notes(captured),
        "Decompositions": _section(DECOMPOSITIONS, _times(times)) + _notes(decompositions),
    }
    where = "".join(_where(row) for row in rows if row["part"] == "machine")
    parts = [f"## {title}\n\n{text.strip() or NOT_RUN}" for title, text in sections.items()]
    return "\n\n".join([HEAD.format(where=where or NOBODY), *parts]) + "\n"


def _where(row: Row) -> str:
    return (
        f"Measured on {row['date']} on {row['card']}, with torch {row['torch']}, CUDA {row['cuda']} and products of "
        f"float32 at precision `{row['products']}`. The host is {row['host']}; torch uses {row['threads']} threads."
    )


def _section(about: str, table: str) -> str:
    return f"{about}\n\n{table}" if table else ""


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *rows]) if rows else ""


def _laws(row: Row) -> str:
    if "problem" in row:
        return f"Not finished: {row['problem']}"
    wrong = f" Failed: {', '.join(f'`{name}`' for name in row['failed'])}." if row["failed"] else ""
    return (
        f"{row['tests']} tests ran in {row['seconds']:.0f} s: {len(row['failed'])} failed, "
        f"{row['skipped']} skipped.{wrong}"
        f" {row.get('note', '')}"
    ).strip()


def _torch(row: Row) -> str:
    if "problem" in row:
        return f"Not finished: {row['problem']}"
    wrong = f" Failed: {', '.join(row['failed'])}." if row["failed"] else ""
    left = "".join(f"\n- {name}: {reason}" for name, reason in row["left"].items())
    return (
        f"{row['compared']} sets of options were compared, and {len(row['failed'])} of them failed.{wrong} "
        f"The following sets were not compared, because no recipe does the same:\n{left}"
    )


def _captures(rows: Sequence[Row]) -> str:
    done = [row for row in rows if "problem" not in row]
    names = ("steps", "replays", "differing", "apart")
    lines = [[row["candidate"], *(f"{row[name]:.3g}" for name in names)] for row in done]
    return _table(("recipe", *names), lines)


def _steps(rows: Sequence[Row]) -> str:
    columns = (
        "optimizer",
        "total, median",
        "mean",
        "longest",
        "host",
        "device",
        "kernels",
        "ms of kernels",
        "waits",
        "most",
    )
    lines = [
        (
            *(row["total_ms"][name] for name in ("median", "mean", "longest")),
            *(row[name]["median"] for name in ("host_ms", "device_ms")),
            row["kernels"],
            row["kernels_ms"],
            sum(row["waits"].values()),
            row["most_waits"],
        )
        for row in rows
    ]
    return _table(columns, ([row["candidate"], *map(_number, line)] for row, line in zip(rows, lines, strict=True)))


def _training(rows: Sequence[Row]) -> str:
    """Make the table; the first row is that of forward and backward alone."""
    alone = rows[0].get("training_ms") if rows else None
    done = [(row["candidate"], row["training_ms"]) for row in rows if "problem" not in row]
    lines = [[name, _number(x), _number(None if alone is None else x - alone)] for name, x in done]
    return _table(("optimizer", "step", "added"), lines)


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}" if isinstance(x, float) else str(x)


def _notes(rows: Sequence[Row]) -> str:
    named = [(row.get("candidate") or f"{row['operation']} of order {row['order']}", row) for row in rows]
    notes = [f"{name}: {row[key]}" for name, row in named for key in ("problem", "note") if key in row]
    places = dict.fromkeys(place for row in rows for place in row.get("waits", ()))
    for place in places:
        waiting = [name for name, row in named if place in row.get("waits", ())]
        notes.append(f"the host waits at `{place}` in steps of: {'; '.join(waiting)}")
    return "".join(["\n", *(f"\n- {note}" for note in notes)]) if notes else ""


def _memory(rows: Sequence[Row]) -> str:
    names = ("state_bytes", "planned_bytes", "peak_bytes")
    lines = ([None if row[name] is None else row[name] / 1e6 for name in names] for row in rows)
    columns = ("optimizer", "state", "plan", "peak beyond the state")
    return _table(columns, ([row["candidate"], *map(_number, line)] for row, line in zip(rows, lines, strict=True)))


def _times(rows: Sequence[Row]) -> str:
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    cells = {(row["device"], row["order"], row["batch"], row["operation"]): row["milliseconds"] for row in rows}
    places = dict.fromkeys(place[:3] for place in cells)
    lines = ([*place, *(cells.get((*place, operation)) for operation in operations)] for place in places)
    return _table(("device", "order", "matrices", *operations), (map(_number, line) for line in lines))


def read(path: Path = RESULTS) -> list[Row]:
    """Read the rows of the last run."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")
