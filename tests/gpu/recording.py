"""A stand-in for CUDA graphs: it records operations, and does them again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class Operations(TorchDispatchMode):
    """A graph of operations with the tensors and numbers that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Any, Any, Any, Any]] = []
        self.replays, self.paused = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.paused:
            self.rows.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        self.replays += 1
        now: dict[int, Any] = {}

        def present(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(present, x))
            return now.get(id(x), x) if isinstance(x, Tensor) else x

        for func, args, kwargs, made in self.rows:
            found = func(*present(args), **{key: present(x) for key, x in kwargs.items()})
            pairs = zip(made, found, strict=True) if isinstance(made, (list, tuple)) else [(made, found)]
            now.update({id(a): b for a, b in pairs if isinstance(a, Tensor)})


class Recording:
    """Captures by recording: unlike a device, it does the work while it records.

    kind: the graphs that it makes.
    """

    graphs: list[Operations]

    def __init__(self, kind: type[Operations] = Operations) -> None:
        self.graphs, self.kind = [], kind

    def __call__(self, device: object = None) -> Recording:
        return self

    def warm_up(self, body: Callable[[], None]) -> None:
        body()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        graph = self.kind()
        with graph:
            body()
        self.graphs.append(graph)
        return graph.replay


def as_operation(program: Callable[[list[Tensor]], Any]) -> Callable[[list[Tensor]], Any]:
    """A program whose call is one operation of a graph that is recorded, as a compiled kernel of a device is one."""

    def run(tensors: list[Tensor]) -> Any:
        given = list(tensors)  # compiled programs empty the list that they are given
        graphs = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Operations)]
        for graph in graphs:
            graph.paused = True
        found = program(tensors)
        for graph in graphs:
            graph.rows.append((run, (given,), {}, found))
            graph.paused = False
        return found

    return run
