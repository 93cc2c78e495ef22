"""Timing a stream's beginning: what is read out of an answer, and a small run of the tool against a real gateway."""

import json
from pathlib import Path

import pytest

from tools import first_byte
from tools.load.passage import Broken, Passage, passage, stamp_of


def frame(content: str | None) -> bytes:
    delta = {} if content is None else {"content": content}
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def test_the_first_bytes_and_the_first_words_are_told_apart() -> None:
    pieces = [
        (123_000_000_000, b"HTTP/1.1 200 OK\r\n\r\n" + frame("")),
        (123_004_000_000, frame("12299")),
        (123_009_000_000, frame("9000000 and so on") + b"data: [DONE]\n\n0\r\n\r\n"),
    ]
    assert passage(pieces) == Passage(first_byte=1.0, first_word=5.0)


def test_an_answer_without_a_stamp_is_no_answer() -> None:
    for text in ("hello", "12 and", ""):
        assert stamp_of(text) is None
        with pytest.raises(Broken, match="no stamp"):
            passage([(1, frame(text))])


def test_every_side_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--clients", "2", "--streams", "6", "--rounds", "2", "--pause-ms", "1", "--json", str(file)]
    assert first_byte.main(arguments) == 0
    told = json.loads(file.read_text())["sides"]
    assert list(told) == ["direct", "ours"]
    assert 0 < told["ours"]["first_byte"]["p50"] <= told["ours"]["first_word"]["p50"]
    assert "ours first_byte" in capsys.readouterr().out
