"""Probable causes of a broken law, by line of code: random numbers, operations that mix blocks, and writes to inputs.

A law is a test that every component of a family must pass. If one fails, the component runs once more under an
`OperationWatch`, which records operations that can explain the wrong numbers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eigengraft.component import Component

from .accelerator import tensors_in

WATCHED_BLOCKS = 11
"""Number of blocks of the stack on which a component is watched. No axis of a block has this length, so every axis of
this length is the stack axis."""
_ALONG = {"cumsum", "cumprod", "logcumsumexp", "cummax", "_softmax", "_log_softmax", "sort", "flip", "roll"}
"""Operations that keep the shape and mix entries along axes. The axes are their last arguments."""
_BY_ENTRY = "`eigengraft.noise.words`, with seeds made of each entry's value; the constraint `rounding` is an example"
RANDOM_NUMBERS: Mapping[str, str] = {
    "stage": "`eigengraft.noise.normal(context.seed, context.step, shape, dtype)`",
    "statistic": "`eigengraft.noise.normal(context.seed, context.step, shape, dtype)`",
    "cadence": "`eigengraft.noise.uniform`, called with `context.seeds` and `context.steps` as tensors",
    "quantizer": "the function `uniform` that encode() receives",
    "task": "`eigengraft.experiments.tasks.generator(seed, step)`, or for weights from torch's generator in build()",
    "root_solver": "a new `torch.Generator` with the same seed in every call",
    "basis_solver": "a new `torch.Generator` with the same seed in every call",
    "polar_solver": "a new `torch.Generator` with the same seed in every call",
    "averaging": _BY_ENTRY,
    "constraint": _BY_ENTRY,
}
"""Text for errors: where members of a family must get random numbers from, by family."""


class RandomStates(NamedTuple):
    """The states of the global generators of torch, NumPy and Python."""

    torch: bytes
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    @classmethod
    def now(cls) -> RandomStates:
        """Return the present states of the global generators of torch, numpy and `random`."""
        numpy: Any = np.random.get_state()
        keys, *rest = numpy[1:]
        return cls(torch.get_rng_state().numpy().tobytes(), (bytes(keys), *rest), random.getstate())

    def drawn_from(self) -> str | None:
        """Return the name of a generator that has been used since these states were recorded; None if none has."""
        now = RandomStates.now()
        names = ("torch's global generator", "NumPy's global generator", "the global generator of Python's `random`")
        return next((name for name, old, new in zip(names, self, now, strict=True) if old != new), None)


class OperationWatch(TorchDispatchMode):
    """Records operations of a component, as "operation at file:line in function", in the order of the calls.

    A stack is a tensor `[N, *block]` of N blocks.

    global_draws: draws of random numbers from torch's global generator.
    draws: draws from generators of torch that the component passes to the operation.
    mixes: operations whose result for a block depends on other blocks of the stack.
    places: operations that make the numbers 0 to N - 1, or split the stack into its blocks. With them, the result for a
        block may depend on its index in the stack.
    writes: in-place operations on the watched inputs, with the name of the input.
    casts: conversions of nan or inf to integers, whose result differs between devices.
    overflows: conversions of finite numbers to an integer dtype whose range they exceed.
    """

    def __init__(self, component: Component, blocks: int = 0, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Prepare a watch. It records the torch operations that run inside its `with` statement.

        component: the component under test. The record of an operation names the innermost line that was reached in a
            file of the component's class, or the line that called the operation if none was reached.
        blocks: number N of blocks in the tensors `[N, *block]` that the component receives; 0: operations that mix
            blocks are not recorded.
        inputs: tensors that must not be written to, by name. None: writes are not recorded.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.files, self.blocks = files_of(component), blocks
        self.inputs = {tensor.untyped_storage()._cdata: name for name, tensor in (inputs or {}).items()}
        self.global_draws, self.draws, self.mixes = list[str](), list[str](), list[str]()
        self.places, self.writes, self.casts = list[str](), list[str](), list[str]()
        self.overflows = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        for given, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(given):
                    if (known := self.inputs.get(tensor.untyped_storage()._cdata)) is not None:
                        self._record(self.writes, f"`{name}` on {known}")
        result = func(*args, **kwargs)
        if name in ("_to_copy", "copy_") and _is_integer(result):
            given = args[name == "copy_"]
            if given.is_floating_point() and not bool(given.isfinite().all()):
                self._record(self.casts, f"a cast to {result.dtype}")
            elif given.numel() and not _fits(given, result.dtype):
                self._record(self.overflows, f"a cast to {result.dtype}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            own = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
            self._record(self.draws if own else self.global_draws, f"`{name}`")
        elif self.blocks and (name == "unbind" or (name == "arange" and result.numel() == self.blocks)):
            self._record(self.places, f"`{name}`")
        elif self.blocks and self._mixes(func, name, args, result):
            self._record(self.mixes, f"`{name}`")
        return result

    def _record(self, found: list[str], operation: str) -> None:
        """Add an operation to a list, with the line of the component that caused it.

        Operations that the law runs itself, outside of the component, are left out. Operations that mix blocks are left
        out, too, if they run directly in a function of this library that is not in a file of the component. An example
        is `finite_blocks`, whose result for a block does not depend on other blocks.

        found: the list, such as `mixes`.
        operation: name of the operation.
        """
        calls = list(_calls())
        if not calls or (found is self.mixes and calls[0].of_library and calls[0].file not in self.files):
            return
        call = next((call for call in calls if call.file in self.files), calls[0])
        found.append(f"{operation} at {Path(call.file).name}:{call.line} in {call.function}()")

    def _mixes(self, func: Any, name: str, args: Any, result: Any) -> bool:
        n = self.blocks
        stacks = [x for x in tensors_in(args) if x.ndim and x.shape[0] and x.shape[0] % n == 0]
        if not stacks:
            return False
        if name in ("select", "slice"):
            axis = args[1] if len(args) > 1 else 0
            return axis in (0, -args[0].ndim) and tensors_in(result)[0].shape[:1] != args[0].shape[:1]
        if func.is_view:
            return False
        if name in _ALONG:
            axes = [x for value in args[1:] for x in (value if isinstance(value, (list, tuple)) else [value])]
            return any(not isinstance(axis, bool) and axis in (0, -args[0].ndim) for axis in axes)
        made = [x for x in tensors_in(result) if x.numel()]
        return any(x.ndim == 0 or x.shape[0] % n for x in made)


def global_draw(component: Component, generator: str, run: Callable[[], object]) -> str:
    """Return the text of an error about a component that uses a global generator, with the line and the remedy.

    generator: name of the generator, from `RandomStates.drawn_from`.
    run: function that runs the component again, so that the line of the draw is found.
    """
    found: list[str] = []
    if generator.startswith("torch"):
        found = _watched(OperationWatch(component), run).global_draws
    remedy = RANDOM_NUMBERS.get(str(component.family_name))
    where = f" ({found[0]})" if found else ""
    advice = (
        f"get random numbers from {remedy}"
        if remedy
        else f"compute results of the {str(component.family_name).replace('_', ' ')} from fields and arguments alone"
    )
    return f"{generator} is used{where}, whose state is not in checkpoints and differs between ranks; {advice}"


def stack_cause(component: Component, run: Callable[[], object]) -> str:
    """Return the probable reason why a block gets another result in a stack than alone, in parentheses.

    run: function that runs the component on a stack of `WATCHED_BLOCKS` blocks.
    """
    watch = _watched(OperationWatch(component, WATCHED_BLOCKS), run)
    if watch.draws:
        remedy = RANDOM_NUMBERS.get(str(component.family_name), "numbers that follow from the block alone")
        return f" ({watch.draws[0]} draws numbers by the place of a block in the stack; get them from {remedy})"
    if watch.mixes:
        return f" ({watch.mixes[0]} mixes the blocks along axis 0, the stack; compute over the other axes)"
    if watch.places:
        return f" ({watch.places[0]} depends on the place of a block on axis 0, the stack, which differs between runs)"
    return " (no operation along axis 0, the stack, was found; is there a loop, a cache or a count of blocks?)"


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the range of an integer dtype contains all numbers of a tensor, after their fractions are cut off.

    x: tensor that is not empty.
    """
    known = torch.iinfo(dtype)
    return x.dtype == dtype or (known.min - 1 < float(x.min()) and float(x.max()) < known.max + 1)


def overflow_cause(component: Component, run: Callable[[], object]) -> str:
    """Return the line at which a component converts numbers to an integer dtype whose range they exceed, with advice,
    in parentheses; "" if there is none.

    run: function that runs the component.
    """
    found = _watched(OperationWatch(component), run).overflows
    text = "receives numbers outside of its range, which it changes; clamp them before the cast"
    return f" ({found[0]} {text})" if found else ""


def casts_of_nan(component: Component, run: Callable[[], object]) -> list[str]:
    """Return the lines at which a component converts nan or inf to integers.

    run: function that runs the component on finite numbers.
    """
    return _watched(OperationWatch(component), run).casts


def write_cause(component: Component, inputs: Mapping[str, Tensor], run: Callable[[], object]) -> str:
    """Return the line that writes to inputs, in parentheses; "" if it is not found.

    run: function that runs the component on the inputs.
    """
    watch = _watched(OperationWatch(component, inputs=inputs), run)
    return f" (changed in place by {watch.writes[0]})" if watch.writes else ""


def _watched(watch: OperationWatch, run: Callable[[], object]) -> OperationWatch:
    """Run a function under a watch, and return the watch. Exceptions of the function are suppressed."""
    with suppress(Exception), watch:
        run()
    return watch


def files_of(component: Component) -> frozenset[str]:
    """Return the files of the functions of a component's class."""
    own = vars(type(component)).values()
    values = (getattr(value, "fget", None) or getattr(value, "__func__", value) for value in own)
    return frozenset(value.__code__.co_filename for value in values if isinstance(value, FunctionType))


class _Call(NamedTuple):
    """A call on Python's call stack: file, line, name of the function, and True for a function of this library."""

    file: str
    line: int
    function: str
    of_library: bool


def _calls() -> Iterator[_Call]:
    """Yield the calls on Python's stack from the present operation up to the law that checks the component.

    The innermost call is first. Calls inside torch are left out.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and Path(file).parent == _HERE:
            return
        if file != __file__ and "/torch/" not in file and not file.startswith("<frozen"):
            library = str(frame.f_globals.get("__name__")).startswith("eigengraft.")
            yield _Call(file, frame.f_lineno, frame.f_code.co_name, library)
        frame = frame.f_back


_HERE = Path(__file__).parent
