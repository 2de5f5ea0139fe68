"""Every tensor of the library is made with its device and dtype named, so that no default enters a number.

`torch.set_default_device`, `with torch.device(...)` and `torch.set_default_dtype` are the user's.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from .test_house import LOWEST, ROOT, package_of, sources

LIBRARY = {LOWEST, "preconditioners", "quantization", "distributed", "optimizers"}
"""Packages in which numbers of a step are made. The samples of `eigengraft.testing` follow the default device, which is
how the laws run on an accelerator."""

Rule = Callable[[ast.AST], Iterator[tuple[int, str]]]

FACTORIES = frozenset(
    {
        *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
        *("logspace", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
        *("complex", "normal", "tril_indices", "triu_indices", "bartlett_window", "blackman_window", "hamming_window"),
        *("hann_window", "kaiser_window", "frombuffer"),
    }
)
"""Functions of torch that make a tensor on the default device or in the default dtype, where none is named."""

TENSOR_CLASSES = frozenset({"Tensor", "FloatTensor", "DoubleTensor", "Generator"})
"""Classes whose call makes something on a default device, without a way to name dtype and device."""

NAMED = {"frombuffer": {"dtype"}, "complex": set[str](), "normal": {"dtype", "device"}}
"""What must be named where it is not dtype and device."""


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, call) of everything in a module that takes a default dtype or device."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        wanted = NAMED.get(name, {"dtype", "device"}) if name in FACTORIES else set()
        numbers = name == "where" and len(node.args) == 3 and all(map(_is_number, node.args[1:]))
        if wanted - given or numbers or name in TENSOR_CLASSES:
            yield node.lineno, ast.unparse(node)


def cached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of functions that keep tensors by functools, which would keep those of a fake mode too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.returns is not None and "Tensor" in ast.unparse(node.returns):
            names = {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}
            if names & {"lru_cache", "cache"}:
                yield node.lineno, node.name


def _is_number(node: ast.expr) -> bool:
    """Whether an argument is a literal number, of which `torch.where` makes the default dtype."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and isinstance(inner.value, (int, float))


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax of each module of the library."""
    paths = [path for module, path in sources().items() if package_of(module) in LIBRARY]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@pytest.mark.parametrize("rule", [faults, cached])
def test_every_tensor_names_its_device_and_dtype_and_none_is_kept_by_functools(rule: Rule) -> None:
    found = [f"{path.relative_to(ROOT)}:{line}: {what}" for path, tree in trees().items() for line, what in rule(tree)]
    assert not found, "\n".join(found)


def test_a_kept_tensor_is_found() -> None:
    source = "@lru_cache(maxsize=1)\ndef f(n: int) -> Tensor: ...\n@lru_cache\ndef g(n: int) -> int: ...\n"
    assert list(cached(ast.parse(source))) == [(2, "f")]


@pytest.mark.parametrize(
    "call",
    [
        "torch.zeros(3)",
        "torch.zeros(3, dtype=torch.int64)",
        "torch.arange(3, device=device)",
        "torch.as_tensor(x).to(y)",
        "torch.where(ok, -1.0, 1.0)",
        "torch.Generator()",
    ],
)
def test_a_default_is_found(call: str) -> None:
    assert [text for _, text in faults(ast.parse(call))] == [call.removesuffix(".to(y)")]


def test_every_factory_that_follows_the_default_device_is_known() -> None:
    from torch.utils._device import _device_constructors

    names = {one.__name__ for one in _device_constructors() if getattr(torch, one.__name__, None) is one}
    assert {name for name in names if not name.startswith(("sparse", "empty_quantized"))} <= FACTORIES
