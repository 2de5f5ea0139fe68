"""Generated code for traced steps: what Inductor makes of a graph, called without the guards of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eigengraft.errors import warn_user

Generated = Callable[[list[Tensor]], Any]
"""A step that changes some of its tensors in place; it empties the list that it is given."""


def generate(step: Callable[..., Sequence[Tensor]], samples: Sequence[Tensor]) -> Generated:
    """The code of a step of tensors that writes into them, for any length of their only long axis.

    samples: tensors of the dtypes and numbers of axes that the step will get; axes of one length keep sharing one.
    A call takes 4 us, where the guards of torch.compile take ten times as long (measured). Where this version of
    torch has other inner functions, it is torch.compile's code, with a warning.
    """
    traced = trace(step, samples)
    try:
        return _without_guards(traced)
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        warn_user(f"compile: torch {torch.__version__} is called with its guards, which take longer ({error!r})")
        guarded = torch.compile(lambda *tensors: traced(*tensors), dynamic=True, fullgraph=True)
        return lambda tensors: guarded(*tensors)


def trace(step: Callable[..., Sequence[Tensor]], samples: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The operations of a step, whose writes come last."""
    from torch._inductor.decomposition import select_decomp_table  # loads the compiler
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(step, remove="mutations_and_views")
    return make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(*samples)


def _without_guards(traced: torch.fx.GraphModule) -> Generated:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    given = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(given[0].fake_mode)):
        graph: Any = compile_fx_inner(traced, given)
    found: Generated = graph.current_callable
    return found
