"""One training run. After a kill at any time it continues from its last checkpoint with the same trajectory.

A run can be extended to more steps: training then continues from the last checkpoint up to which the learning rates of
the short and of the long run are equal. The extended run ends with the same weights as a run that had the larger number
of steps from the start. Its metrics have one row more: that of the last step of the short run, which was evaluated.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import eigengraft
from eigengraft.errors import RecipeError
from eigengraft.numerics import local

from ..provenance import provenance_of
from ..tasks import Batch, Metrics
from ..tasks.base import training_batch
from .callbacks import Callbacks, RunView, may_provide, no_batch
from .divergence import Divergence, Fault, worse_than_at_first
from .environment import describe_environment, describe_provenance, record_environment, require_provenance
from .experiment import Experiment
from .layers import LayerRecord, Layers
from .outcome import MetricsWindow, Result, Tick, finite_or_none, further_metrics
from .parallel import Ranks, local_device, process_group, report_lost_rank, reshard_model, seed_step
from .rundir import RunDirectory, load_checkpoint, save_checkpoint


def branch_step(experiment: Experiment) -> int | None:
    """Return the last step up to which the learning rates of a run do not depend on its length.

    The checkpoint of this step is kept, so that a longer run can continue from it. Returns None if no checkpoint has to
    be kept, because the learning rates depend on the length right after the warm-up, or not at all.
    """
    last = experiment.schedule.shared_steps(experiment.steps) - 1
    return last if experiment.schedule.warmup_steps < last < experiment.steps else None


def _prune(run: RunDirectory, experiment: Experiment) -> None:
    """Remove the checkpoints of a complete run.

    With `keep_checkpoint`, two are kept: the last one, and that of `branch_step`, from which a longer run continues.
    Without it, none is kept.
    """
    kept = [*list(run.checkpoints())[-1:], branch_step(experiment)] if experiment.keep_checkpoint else []
    run.keep_checkpoints(kept)


def extend_run(run: RunDirectory, experiment: Experiment) -> None:
    """Change the run in a directory, finished or not, to an unfinished run with the steps of `experiment`.

    Nothing is changed if the run has these steps already. A kill at any time leaves a run that can be extended again.

    Raises:
        RecipeError: there is no run, its experiment differs in more than the steps, its code or data have changed, it
            cannot be extended (`_require_extensible`), or it has no checkpoint of a step up to which its learning rates
            are those of the longer run.
    """
    known = run.read("config")
    if known is None:
        raise RecipeError(f"{run.path}: there is no run to extend; train it first, without --extend")
    run.require_config({**known, "steps": experiment.steps}, experiment.model_dump(mode="json"))
    steps = known["steps"]
    if experiment.steps == steps:
        return
    with run.locked():
        found = describe_provenance(experiment.task.new_data().fingerprint, experiment)
        require_provenance(run, found)
        _require_extensible(run, experiment, steps)
        shared = experiment.schedule.shared_steps(steps, experiment.steps)
        kept = [step for step in run.checkpoints() if step < shared]
        if not kept:
            raise RecipeError(_no_checkpoint(run, experiment, steps, shared))
        (run.path / "result.json").unlink(missing_ok=True)
        run.keep_checkpoints(kept)
        run.write("config", {**known, "steps": experiment.steps})


def _require_extensible(run: RunDirectory, experiment: Experiment, steps: int) -> None:
    """Raise RecipeError if the run cannot be extended to the steps of `experiment`.

    It cannot be extended if these are fewer than its own steps, if it diverged, if a callback ended it early, or if the
    updates of its recipe depend on the number of steps.

    steps: length of the run so far.
    """
    if experiment.steps < steps:
        raise RecipeError(f"{run.path}: the run has {steps} steps; --extend needs more, got {experiment.steps}")
    result: dict[str, Any] = run.read("result") or {}
    if result.get("diverged"):
        raise RecipeError(f"{run.path}: the run diverged at step {result['steps']}, so there is nothing to extend")
    if result.get("steps", steps) < steps:
        raise RecipeError(
            f"{run.path}: the run cannot be extended, because a callback ended it at step {result['steps']} of {steps} "
            "and would end a longer run too"
        )
    path = experiment.recipe.lacks_total_steps()
    if path is not None:
        raise RecipeError(
            f"{run.path}: recipe.{path} depends on the length of the run, so the first {steps} steps of a longer run "
            "would differ from this run; train the longer run in another directory"
        )


def _no_checkpoint(run: RunDirectory, experiment: Experiment, steps: int, shared: int) -> str:
    kept = run.checkpoints()
    if not kept:
        return f"{run.path}: the run has no checkpoint to continue from; train the longer run in another directory"
    kind, longer = getattr(experiment.schedule, "kind", "?"), experiment.steps
    rates = [experiment.schedule.factor(shared, length) for length in (steps, longer)]
    return (
        f"{run.path}: schedule.{kind} depends on the length of the run: its factor at step {shared + 1} is "
        f"{rates[0]:.4g} in a run of {steps} steps and {rates[1]:.4g} in a run of {longer}, and no checkpoint is from "
        f"an earlier step (the first is from step {min(kept)}); train the longer run in another directory. The "
        "schedules constant and wsd allow extensions"
    )


class Trainer:
    """Model, optimizer, schedule and data of one run in its directory, on one rank."""

    def __init__(
        self, experiment: Experiment, directory: RunDirectory, ranks: Ranks | None = None, checked: bool = False
    ) -> None:
        self.experiment, self.directory = experiment, directory
        self.ranks = ranks or Ranks(device=local_device(experiment.device, 0))
        self.device = self.ranks.device
        self.dataset, self.gradients = experiment.task.new_data(), experiment.gradient_pass
        self.model = experiment.task.new_model(experiment.seed).to(self.device)
        # The model is wrapped before the optimizer is made, because the optimizer reads the placements of parameters.
        self.module = experiment.parallel.wrap(self.model, self.ranks)
        options: dict[str, Any] = {"checked": checked, "steps": experiment.steps, "silence": experiment.silence}
        rates = (experiment.lr, experiment.weight_decay)
        self.optimizer = eigengraft.compose(experiment.run_recipe, self.model, *rates, **options)
        self.scheduler = experiment.schedule.scheduler(self.optimizer, experiment.steps)
        self.branch = branch_step(experiment)
        self.layers = Layers(self.model, self.optimizer, self.ranks)
        self.batch: Batch | None = None
        self.rows: list[dict[str, Any]] = []  # rows of metrics.jsonl; rank 0 alone appends new ones
        self.inspected: list[dict[str, Any]] = []  # rows of diagnostics about the optimizer in the present step
        view = RunView(self.model, self.optimizer, directory.path, self.rows, lambda: self.batch or no_batch())
        self.callbacks = Callbacks(experiment.callbacks, view, self.ranks)
        self.step, self.seconds, self.window, self.middle = 0, 0.0, MetricsWindow(), 0.0
        self.tokens = 0  # targets so far: tokens of a text, or images
        self.first_loss: float | None = None
        self.last_loss: float | None = None  # median over the steps since the row before, robust against a single spike
        self.fault: Fault | None = None
        self.skipped, self.clipped = 0, torch.zeros((), dtype=torch.int64, device=self.device)

    def run(
        self, progress: Callable[[Tick], None] | None, require: Callable[[Mapping[str, Any]], None] | None = None
    ) -> Result:
        """Train from the last checkpoint, or from the start, to the end, and return the result. See `train`.

        progress: function that is called after each step. None: no function is called.
        require: function that refuses the notes of a checkpoint by an error. None: every checkpoint is accepted.
        """
        self._continue(require)
        with self._recorded_errors(self.step + 1):
            self.callbacks.start()
        metrics: Metrics | None = None
        while self.step < self.experiment.steps:
            lr = float(self.optimizer.param_groups[0]["lr"])
            with self._recorded_errors(self.step + 1):
                self._train_step()
            with self._recorded_errors(self.step, evaluation=True):
                metrics = self._evaluate() if self._due(self.step, self.experiment.eval_every) else None
            losses = [self.window.losses[-1], *([] if metrics is None else [metrics.val_loss])]
            finite = all(map(math.isfinite, losses)) and not self._lost()
            tick = self._tick(metrics)
            if progress is not None:
                progress(tick)
            if not finite:
                fault = self._divergence(self.step, *losses).fault()
                self._note_fault(fault)
            elif self.window.skipped and self.fault is None:
                # This rank searches alone for the cause: other ranks may have skipped no gradient, and do not search.
                alone = Ranks(device=self.device)
                self._note_fault(replace(self._divergence(self.step), ranks=alone).fault())
            if metrics is not None or not finite or self._due(self.step, self.experiment.log_every):
                self._write_row(lr, metrics)
            with self._recorded_errors(self.step):
                ends = not self.window.losses and self.callbacks.stop(tick, finite)  # a row was written
            if not finite or ends or self.step == self.experiment.steps:
                # Written before the checkpoint of this step, because a checkpoint does not contain the table of layers.
                self._write_layers()
            if not finite:
                return self._finish(None, fault.text)
            if ends:
                break
            if self._due(self.step, self.experiment.checkpoint_every) or self.step == self.branch:
                self._save()
        return self._finish(metrics or self._evaluate())

    def _divergence(self, step: int, loss: float | None = None, val_loss: float | None = None) -> Divergence:
        """Return a `Divergence` for a step of this run. Its methods search for the first value that is not finite.

        step, loss, val_loss: fields of `Divergence`.
        """
        key = (self.experiment.seed, step - 1)
        shown = (self.model, self.optimizer, self.gradients, self.dataset, self.dataset.batch(*key))
        return Divergence(*shown, self.dataset.batch_rows(*key), step, loss, val_loss, self.ranks)

    def _note_fault(self, fault: Fault) -> None:
        """Write the first fault of the run to fault.json. Later faults follow from it, and are not written."""
        if self.fault is None:
            self.fault = fault
            if self.ranks.first:
                self.directory.write("fault", asdict(fault))

    @contextmanager
    def _recorded_errors(self, step: int, evaluation: bool = False) -> Iterator[None]:
        """Write the fault behind an error to fault.json, and raise it again. The error was raised by a step, by the
        evaluation after it, or by a callback.

        On several ranks nothing is written, because the launcher reports the error of a rank.
        """
        try:
            yield
        except Exception as error:
            if not self.ranks.distributed:
                try:
                    loss = self.window.losses[-1] if evaluation else None
                    fault = self._divergence(step, loss).of_error(error, self.experiment.recipe.failure.roots)
                except Exception:  # the search for the fault failed; the first error says more
                    fault = Fault.of_error(error, step)
                self.fault = None  # the error ends the run, and replaces an earlier fault, such as a skipped gradient
                self._note_fault(replace(fault, place="evaluation") if evaluation else fault)
            raise

    def _lost(self) -> bool:
        """Return True if so many steps in a row had no usable gradient that the run counts as diverged."""
        return all(param_set.finite_check.lost() for param_set in self.optimizer.param_sets)

    def _train_step(self) -> None:
        if measured := self._measured(self.step + 1):
            self.layers.before()
        start, cpu = self._now(), time.process_time()
        whole = training_batch(self.experiment.task, self.dataset, self.experiment.seed, self.step)
        self.tokens += whole.targets.numel()
        rows, weight = self.ranks.shard_batch(whole)
        self.batch = batch = rows.to(self.device)
        if self.ranks.distributed:
            # Only several processes are seeded in every step. The checkpoint of a single process has its random state.
            seed_step(self.experiment.seed, self.step, self.ranks.rank)
        every = self.experiment.diagnostics_every
        if inspected := every is not None and self._due(self.step + 1, every):
            self.optimizer.watch_next_step()
        loss = self.optimizer.step(lambda: self._backward(batch, weight))
        end, cpu = self._now(), time.process_time() - cpu
        self.scheduler.step()
        self.step += 1
        self.inspected = self._inspect() if inspected else []
        if measured:
            self.layers.after()
        # An update that was skipped in a step on a device is counted after the next step.
        skipped = self.optimizer.param_sets.skip_counts.total()
        self.window.skipped, self.skipped = self.window.skipped + skipped - self.skipped, skipped
        self.seconds += end - start
        self.window.losses.append(self.ranks.mean(loss.item()))
        self.first_loss = self.window.losses[-1] if self.step == 1 else self.first_loss
        self.window.step_ms.append(1e3 * (end - start))
        self.window.cpu_ms.append(1e3 * cpu)
        self.window.optimizer_ms.append(1e3 * (end - self.middle))

    def _measured(self, step: int) -> bool:
        """Return True if norms are measured in a step: in the first step, and in all steps with a row of metrics."""
        return step == 1 or self._due(step, self.experiment.log_every, self.experiment.eval_every)

    def _inspect(self) -> list[dict[str, Any]]:
        """Write and return the measures of `optimizer.inspect()` as rows of diagnostics.

        There is a row for each parameter, stage and measure. The blocks of a parameter have one row together.
        """
        found = self.optimizer.inspect().by_parameter().records()
        rows = [{"step": self.step, **{key: v for key, v in row.items() if key != "block"}} for row in found]
        if self.ranks.first:
            self.directory.diagnostics.append(*rows)
        return rows

    def _write_layers(self) -> None:
        """Write rows of diagnostics, one for each layer and measure.

        A row is left out if `_inspect` has already written one for the same parameter and measure in this step.
        """
        known = {(row["parameter"], row["measure"]) for row in self.inspected}
        rows = (row for row in self.layers.table() if (row["parameter"], row["measure"]) not in known)
        if self.ranks.first:
            self.directory.diagnostics.append(*({"step": self.step, **row} for row in rows))

    def _backward(self, batch: Batch, weight: float) -> Tensor:
        """Compute the gradient of `weight` times the mean loss of a batch, clip it, and return this product.

        batch: rows of this rank.
        weight: weight of these rows, see `Ranks.shard_batch`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradients.backward(self.module, batch, weight)
        if self.experiment.grad_clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.experiment.grad_clip)
            self.clipped += local(norm > self.experiment.grad_clip)
        self.middle = self._now()
        return loss

    def _now(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _evaluate(self) -> Metrics:
        """Return the metrics of the iterate that the recipe evaluates. The model then holds the training iterate again.

        Every rank evaluates all data. All ranks use the metrics of rank 0, so that they decide alike.
        """
        self.optimizer.eval()
        try:
            metrics = self.experiment.task.evaluate(self.model, self.dataset, self.device)
            return self.ranks.on_first(lambda: metrics)
        finally:
            self.optimizer.train()
            reshard_model(self.module)

    def _due(self, step: int, *periods: int) -> bool:
        """Return True for the last step of the run and for every step that one of the periods divides."""
        return step == self.experiment.steps or any(step % every == 0 for every in periods)

    def _tick(self, metrics: Metrics | None) -> Tick:
        val_loss, window = metrics.val_loss if metrics is not None else None, self.window
        return Tick(self.step, self.experiment.steps, window.losses[-1], val_loss, window.step_ms[-1], self.seconds)

    def _write_row(self, lr: float, metrics: Metrics | None) -> None:
        self.last_loss = median(self.window.losses)
        self._read_clipped()
        if self.ranks.first:
            layers = dict(self.layers.row(self._measured(self.step)))
            if (counts := self.optimizer.spikes) is not None:
                layers["spikes"] = counts.spikes
            weights = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            flops = 6 * weights * self.tokens  # of forward and backward passes (Kaplan et al. 2020)
            spent = {"lr": lr, "seconds": self.seconds, "tokens": self.tokens, "flops": flops}
            self.rows.append(self.window.row(self.step, metrics, spent, layers))
            self.directory.metrics.append(self.rows[-1])
        self.window = MetricsWindow()

    def _read_clipped(self) -> None:
        """Read the number of clipped steps that was counted on the device, and add it to the window of metrics."""
        if self.experiment.grad_clip is not None:
            self.window.clipped += int(self.clipped)
            self.clipped.zero_()

    def _finish(self, metrics: Metrics | None, diagnosis: str = "") -> Result:
        """Write and return the result.

        The file result.json marks the run as complete, so it is written last. After a kill before that, the run
        continues from its last checkpoint, and the callbacks are called again. The model is left with the iterate that
        the recipe evaluates. Checkpoints contain the training iterate.

        metrics: metrics at the end; None: the run has diverged.
        diagnosis: reason of the divergence.
        """
        parameters = sum(p.numel() for p in self.model.parameters())
        held = max(self.ranks.all_gather(self.optimizer.state_bytes()))
        self.optimizer.eval()

        def end() -> Result:
            result = self._result(metrics, parameters, held, diagnosis)
            self.callbacks.finished(result)
            self.directory.write("result", asdict(result))
            _prune(self.directory, self.experiment)
            return result

        return self.ranks.on_first(end)

    def _result(self, metrics: Metrics | None, parameters: int, state_bytes: int, diagnosis: str) -> Result:
        rows = self.rows
        return Result(
            diagnosis=diagnosis or worse_than_at_first(self.first_loss, rows[-1]["loss"], self.last_loss),
            diverged=metrics is None,
            val_loss=metrics.val_loss if metrics is not None else None,
            val_accuracy=metrics.val_accuracy if metrics is not None else None,
            steps=self.step,
            seconds=self.seconds,
            parameters=parameters,
            state_bytes=state_bytes,
            state_bytes_per_parameter=state_bytes / parameters,
            step_ms=median(row["step_ms"] for row in rows),
            optimizer_ms=median(row["optimizer_ms"] for row in rows),
            train_loss=rows[-1]["loss"],
            first_loss=finite_or_none(self.first_loss),
            metrics=further_metrics(metrics),
        )

    def _save(self) -> None:
        self._read_clipped()
        notes = {"step": self.step, "seconds": self.seconds, "window": asdict(self.window)}
        notes |= {"first_loss": self.first_loss, "last_loss": self.last_loss, "layers": asdict(self.layers.record)}
        notes |= {"tokens": self.tokens, "scheduler": self.scheduler.state_dict(), "rows": len(self.rows)}
        if not self.ranks.distributed:
            notes["rng"] = torch.get_rng_state()
            notes["device_rng"] = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        save_checkpoint(self.directory, self.ranks, self.model, self.optimizer, notes, self.branch)

    def _continue(self, require: Callable[[Mapping[str, Any]], None] | None) -> None:
        """Restore the last checkpoint, if any. Raises RecipeError if code or data have changed since the first step.

        require: see `train`.
        """
        found = describe_environment(self.dataset.fingerprint, self.device, self.ranks.size, self.experiment)
        declared = self.experiment.model_dump_json(exclude={"imports"})
        if len(set(self.ranks.all_gather((declared, *sorted(provenance_of(found).items()))))) > 1:
            raise RecipeError(
                "ranks: experiment, code or data differ between ranks; compare the versions of torch, numpy and "
                "eigengraft, the files in `imports` and the files of the task on each machine"
            )
        if require is not None:
            self.ranks.on_first(lambda: require(found))
        self.ranks.on_first(lambda: record_environment(self.directory, found))
        notes = load_checkpoint(self.directory, self.ranks, self.model, self.optimizer)
        if notes is not None:
            self._restore_random(notes)
            self.scheduler.load_state_dict(notes["scheduler"])
            self.step, self.seconds, self.window = notes["step"], notes["seconds"], MetricsWindow(**notes["window"])
            self.first_loss, self.last_loss, self.tokens = notes["first_loss"], notes["last_loss"], notes["tokens"]
            self.layers.record = LayerRecord(**notes["layers"])
        self.rows += self.directory.metrics.rows()
        if notes is not None and len(self.rows) < notes["rows"]:
            file = self.directory.metrics.path
            raise RecipeError(
                f"{file}: has only {len(self.rows)} of the {notes['rows']} rows that were logged before the last "
                f"checkpoint; remove the run {file.parent}"
            )
        known = self.ranks.on_first(lambda: self.directory.read("fault"))
        self.fault = Fault(**known) if known is not None else None

    def _restore_random(self, notes: dict[str, Any]) -> None:
        """Restore the random state from the checkpoint if this run has a single process. Do nothing for several
        processes, which seed their generators in every step.

        A checkpoint of several processes has no random state. A single process that continues from it seeds its
        generator for the next step.

        notes: content of the checkpoint besides the states of model and optimizer.
        """
        if self.ranks.distributed:
            return
        if notes.get("rng") is None:
            seed_step(self.experiment.seed, notes["step"])
            return
        torch.set_rng_state(notes["rng"])
        if notes["device_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(notes["device_rng"], self.device)


def train(
    experiment: Experiment,
    directory: str | Path,
    progress: Callable[[Tick], None] | None = None,
    checked: bool = False,
    extend: bool = False,
    require: Callable[[Mapping[str, Any]], None] | None = None,
) -> Result:
    """Run an experiment in a directory, continue it there, or return the result that it already has.

    With `parallel`, every process that torchrun has started calls this. Rank 0 owns the directory and reports progress.
    A loss that is not finite ends the run with `diverged=True`.

    Args:
        experiment: the run to do.
        directory: directory of the run, which is created if it does not exist.
        progress: function that receives a `Tick` after every step. None: no progress is reported.
        checked: if True, a stage that breaks its contract raises ContractError; steps are slower.
        extend: if True, a run in the directory that has fewer steps is continued to those of the experiment.
        require: function that receives the environment of the run before its first step, and raises an error if the run
            may not be trained. None: every environment is accepted.

    Returns:
        The result, which is also written to result.json.

    Raises:
        RecipeError: the directory contains another experiment, or a run with other code or data, or a run that cannot
            be extended.
        DistributedError: another rank was lost.
    """
    if not isinstance(experiment, Experiment):
        raise TypeError(
            f"train: an Experiment is required, got {type(experiment).__name__}; load a file or mapping by "
            "load_experiment(source)"
        )
    run = RunDirectory(directory)
    with (
        process_group(experiment.parallel, experiment.device) as ranks,
        report_lost_rank(ranks, lambda: _advice(run)),
        ExitStack() as stack,
    ):

        def acquire() -> dict[str, Any] | None:
            if extend:
                extend_run(run, experiment)
            config = experiment.model_dump(mode="json")
            run.acquire(config, extensible=True)
            stack.enter_context(run.locked())
            if not run.begun:
                run.write("config", config)  # the folder of the data may be another than in an earlier attempt
            result = run.read("result")
            if result is not None:
                data = experiment.task.new_data().fingerprint
                require_provenance(run, describe_provenance(data, experiment))
                _prune(run, experiment)
            return result

        done = ranks.on_first(acquire)
        if done is not None:
            return Result(**done)
        with isolated_run(experiment, ranks):
            try:
                trainer = Trainer(experiment, run, ranks, checked)
            except Exception as error:
                if not ranks.distributed:
                    next_step = max(run.checkpoints(), default=0) + 1
                    run.write("fault", asdict(Fault.of_error(error, next_step)))
                raise
            return trainer.run(progress if ranks.first else None, require)


def require_startable(experiment: Experiment) -> None:
    """Raise RecipeError if a run would end before its first step: the optimizer cannot be made, nothing provides a
    signal that the recipe needs, or the package of a callback is not installed. Nothing is written.

    A run with callbacks that have their own `started` is not checked, because `started` may provide signals and write
    files.
    """
    if any(map(may_provide, experiment.callbacks)):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        model, rates = experiment.task.new_model(experiment.seed), (experiment.lr, experiment.weight_decay)
        options: dict[str, Any] = {"steps": experiment.steps, "silence": experiment.silence}
        optimizer = eigengraft.compose(experiment.run_recipe, model, *rates, **options)
        Callbacks(experiment.callbacks, RunView(model, optimizer, Path(), ()), Ranks()).start()


def _advice(run: RunDirectory) -> str:
    last = max(run.checkpoints(), default=None)
    where = f"from step {last}" if last is not None else "from the start"
    return (
        f"Give the same command again to continue {where}, with any number of ranks, or with parallel=none in a single "
        "process."
    )


@contextmanager
def isolated_run(experiment: Experiment, ranks: Ranks | None = None) -> Iterator[None]:
    """Give the code inside a `with` statement its own random state and thread count.

    At the end of the statement, the random state and the thread count of the caller are restored.

    experiment: the experiment, whose fields `seed` and `threads` apply inside.
    ranks: processes of the run. None: the run has one process.
    """
    threads = torch.get_num_threads()
    device = experiment.device if ranks is None else str(ranks.device)
    on_device = device != "cpu" and torch.cuda.is_available()
    with torch.random.fork_rng(devices=[device] if on_device else []):
        torch.manual_seed(experiment.seed)
        torch.set_num_threads(experiment.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
