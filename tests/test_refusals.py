"""Data are found whole in messages, and the file of wordings is read as it is written."""

import pytest

from .refusals import FILE, RECORDER, VARYING, check_said, lacking, parse, refused, render, warned

MESSAGE = "update.rms.beta: input should be less than 1, got 1.5 (shape (3, 2))"


@pytest.mark.parametrize("datum", ["update", "update.rms.beta", "rms.beta", 1, 1.5, (3, 2), "input should"])
def test_data_of_a_message_are_found(datum: object) -> None:
    assert lacking(MESSAGE, datum) == []


@pytest.mark.parametrize("datum", ["updat", "update.rms", "ms.beta", 5, 1.25, 15, (3,), "Update"])
def test_parts_of_words_numbers_and_paths_are_not_found(datum: object) -> None:
    assert lacking(MESSAGE, datum) == [str(datum)]


def test_another_type_another_message_and_silence_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECORDER, "messages", None)

    def raises(error: Exception, *data: object) -> None:
        with refused(ValueError, *data):
            raise error

    raises(ValueError("lr: -1"), "lr", -1)
    with pytest.raises(AssertionError):
        raises(ValueError("lr: -1"), "lr", -2)
    with pytest.raises(TypeError):
        raises(TypeError("lr: -1"), "lr", -1)
    with pytest.raises(pytest.fail.Exception), refused(ValueError):
        pass
    with pytest.raises(pytest.fail.Exception), warned(UserWarning):
        pass
    with pytest.raises(AssertionError):
        check_said("nothing", "something")


def test_the_file_is_read_as_it_is_written() -> None:
    wordings = {"b.py::two[x: y]": ["ValueError: a\n\n  indented\nend", "TypeError: b"], "a.py::one": ["KeyError: 'k'"]}
    assert parse(render(wordings)) == wordings
    text = FILE.read_text(encoding="utf-8")
    assert render(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("in /x/pytest-of-me/pytest-3/test_a0/run.json, line 2", "in <tmp>/run.json, line 2"),
        ("at 0x7f0011223344", "at <address>"),
        ("test_a.py:12: 0.123456789 in 0.5 s", "test_a.py:<line>: <number> in <time>"),
        ("lr: 0.001, beta 0.95", "lr: 0.001, beta 0.95"),
        ("(the kinds are adam, sgd)", "(the kinds are <list>)"),
        ("torch: 2.13.0+cpu", "torch: <version>"),
    ],
)
def test_parts_that_differ_between_runs_are_replaced(text: str, kept: str) -> None:
    for pattern, word in VARYING:
        text = pattern.sub(word, text)
    assert text == kept
