"""Refusals: a test pins an error's type, path and values; its words stand in `wordings.txt`, for all tests.

    with refused(RecipeError, "update.rms.beta", 1.5):
        load_recipe({"update": {"kind": "rms", "beta": 1.5}})

checks the type, and that the path and the number stand in the message. The message itself is compared with
`tests/wordings.txt`: a message that changed fails a run in one process, not the test, with one diff to read, which runs
in several processes print. `make wordings`, or
`pytest --accept-wordings` with any selection of tests, writes the file again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("wordings.txt")
ROOT = str(FILE.parents[1])

Wordings = dict[str, list[str]]
"""Messages by test: path in `tests`, `::`, name."""

VARYING = (
    (re.compile(r"(?:\s*[╭╮╰╯│─]+\s*)+"), " "),
    (re.compile(r"[^\s'\"`(\[]*/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?[^/\s'\"`:,;)\]]+"), "<tmp>"),
    (re.compile(re.escape(ROOT)), "<root>"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "<address>"),
    (re.compile(r"(?<![.\d])\b(?:[0-9a-f]{40,64}|[0-9a-f]{16})\b"), "<hash>"),
    (re.compile(r"\b\d+\.\d+\.\d+(?:\+\w+)?\b"), "<version>"),
    (re.compile(r"\.py:\d+"), ".py:<line>"),
    (re.compile(r"\b\d+(?:\.\d+)? (?:s|ms|seconds)\b"), "<time>"),
    (re.compile(r"\d+\.\d{5,}(?:e[-+]?\d+)?|\d+\.\d{2,}e[-+]?\d+"), "<number>"),
    (re.compile(r"(?:\b\w+, ){5,}\w+"), "<list>"),
    (re.compile(r"\b(kinds(?: are)?) \w+(?:, \w+)+"), r"\1 <list>"),
    (re.compile(r"(that accepts it) \([^)]*\)"), r"\1 (<list>)"),
    (re.compile(r"(unknown \w+ kind '[^']*')(?:, did you mean [^?]*\?| \(the kinds are [^)]*\))"), r"\1"),
)
"""Parts of messages that differ between runs or machines, and their replacements: frames, folders, addresses, hashes,
versions, lines, times, measured numbers, and lists of kinds and the nearest kind, to which tests add their own."""


class _Recorder:
    """Messages of the test that runs at present."""

    def __init__(self) -> None:
        self.messages: list[str] | None = None

    def add(self, kind: str, text: str) -> None:
        for pattern, word in VARYING:
            text = pattern.sub(word, text)
        message = "\n".join(line.rstrip() for line in f"{kind}: {text}".strip().splitlines())
        if self.messages is not None and message not in self.messages:
            self.messages.append(message)


RECORDER = _Recorder()


def lacking(text: str, *data: object) -> list[str]:
    """Return the data that do not stand in a message. Words and numbers must stand there whole, and paths with their
    end: neither `1` nor `update.rms` is found in `update.rms.beta: 1.5`; `update` and `rms.beta` are."""
    found = []
    for datum in map(str, data):
        before = r"(?<!\w)" if re.match(r"\w", datum) else ""
        before += r"(?<!\d\.)" if re.match(r"\d", datum) else ""
        after = r"(?!\w)" if re.search(r"\w\Z", datum) else ""
        after += r"(?!\.\w)" if re.search(r"\.\w+\Z|\d\Z", datum) else ""
        if not re.search(before + re.escape(datum) + after, text):
            found.append(datum)
    return found


def check_said(text: str, *data: object, kind: str = "printed") -> None:
    """Check that data stand in a text for the user, and record the text."""
    RECORDER.add(kind, text)
    assert lacking(text, *data) == [], text


@contextmanager
def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], *data: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Check that the body raises an error of a type with data in its message, and record the message."""
    with pytest.raises(error) as caught:
        yield caught
    check_said(str(caught.value), *data, kind=caught.type.__name__)


@contextmanager
def warned(category: type[Warning], *data: object) -> Iterator[pytest.WarningsRecorder]:
    """Check that the body warns with data in one message of a category, and record that message."""
    with pytest.warns(category) as caught:
        yield caught
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, category)]
    fitting = [text for text in texts if not lacking(text, *data)]
    assert fitting, f"{[str(datum) for datum in data]} stand in none of {texts}"
    RECORDER.add(category.__name__, fitting[0])


class WordingsPlugin:
    """Collects the messages of tests that passed, and compares them with the file, or writes it, at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.kept = parse(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        self.seen: Wordings = {}
        self.gone: set[str] = set()
        self.report: list[str] = []

    @property
    def complete(self) -> bool:
        """True if the run was started without a selection of tests."""
        chosen = any(self.config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "ignore", "lf"))
        return self.config.args_source is not pytest.Config.ArgsSource.ARGS and not chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.complete:
            found = {key(item) for item in items}
            files = {_file(test) for test in found}
            absent = self.kept.keys() - found  # some of them in files that are skipped as a whole here
            self.gone = {test for test in absent if _file(test) in files or not (FILE.parent / _file(test)).exists()}

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        RECORDER.messages = messages = []
        try:
            result = yield
        finally:
            RECORDER.messages = None
        self.seen[key(pyfuncitem)] = messages
        return result  # type: ignore[return-value]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive the messages of a worker of pytest-xdist."""
        output: Mapping[str, Any] = getattr(node, "workeroutput", {})
        self.seen |= output.get("wordings", {})
        self.gone |= set(output.get("gone", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        differing = {test: found for test, found in self.seen.items() if found != self.kept.get(test, [])}
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput.update(wordings=differing, gone=sorted(self.gone))
            return
        found = {test: messages for test, messages in {**self.kept, **differing}.items() if messages}
        found = {test: messages for test, messages in found.items() if test not in self.gone}
        before, after = render(self.kept), render(found)
        if before == after:
            return
        if self.config.getoption("accept_wordings"):
            FILE.write_text(after, encoding="utf-8")
            self.report = [f"{FILE.name}: written"]
            return
        texts = before.splitlines(), after.splitlines()
        diff = difflib.unified_diff(*texts, "wordings.txt", "this run", n=2, lineterm="")
        self.report = [*diff, "Messages changed. If they read well: make wordings (ARGS='tests/...' for some tests)"]
        # a message may name kinds that other files of a worker define, and which files share one depends on the load
        if not self.config.pluginmanager.hasplugin("dsession"):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.report:
            terminalreporter.section("wordings of errors")
            for line in self.report:
                terminalreporter.write_line(line, red=line.startswith("-"), green=line.startswith("+"))


def key(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/")


def _file(test: str) -> str:
    return test.partition("::")[0]


def render(wordings: Wordings) -> str:
    """Return the text of the file: a line for each test, and its messages, indented."""
    lines = []
    for test in sorted(wordings):
        lines.append(test)
        for message in wordings[test]:
            first, *rest = message.split("\n")
            lines += [f"  - {first}", *(f"    {line}".rstrip() for line in rest)]
    return "".join(f"{line}\n" for line in lines)


def parse(text: str) -> Wordings:
    found: Wordings = {}
    messages: list[str] = []
    for line in text.splitlines():
        if line.startswith("  - "):
            messages.append(line[4:])
        elif line.startswith("    ") or not line:
            messages[-1] += "\n" + line[4:]
        else:
            messages = found.setdefault(line, [])
    return found
