"""What every test may rely on: one thread, fixed seeds, no trace of the test before."""

import gc
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

# Read when torch and BLAS load, here and in every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONSAFEPATH"] = "1"

import pytest
from _pytest.runner import runtestprotocol

from .refusals import WordingsPlugin

ALL_SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow", flags=re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-wordings", action="store_true", help="write the messages of errors to wordings.txt")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(WordingsPlugin(config), "wordings")
    if config.getoption("numprocesses", None):
        return  # this process hands out tests to others: it need not import torch
    gc.disable()  # what is imported and collected stays: to look through it again and again takes a fifth of the time
    import torch
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None, database=None, max_examples=50)
    settings.load_profile("fixed")
    torch.set_num_threads(1)
    # a shell's background job ignores SIGINT, and so would the processes that tests start to interrupt them
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, a file that has no others is not even imported."""
    if "not slow" not in config.getoption("markexpr") or collection_path.suffix != ".py":
        return None
    return True if ALL_SLOW.search(collection_path.read_text()) else None


@pytest.fixture
def registry() -> Iterator[None]:
    """Members defined in a test are gone after it."""
    from eigengraft.component import families

    before = {family: dict(family.members) for family in families().values()}
    yield
    for family, members in before.items():
        family.members.clear()
        family.members.update(members)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def pytest_collection_finish() -> None:
    gc.freeze()  # ten thousand tests stay to the end: collections need not look through them
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker of pytest-xdist says once how a test ended, where it would send five messages: to write and to read
    them takes longer than a short test. What went wrong, or took long, before or after the test is said as ever."""
    if not hasattr(item.config, "workerinput") or item.config.getoption("xmlpath"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.duration > 0.05:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    # without an accelerator `torch.manual_seed` would format a stack for it at every call
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
