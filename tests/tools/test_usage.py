"""Plain mistakes on the command lines of the tools: one line, exit code 2, before anything is started."""

import argparse
import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import usage
from tools.launch import ROOT, free_port, hindrance

NOBODY = f"http://127.0.0.1:{free_port()}"
MISTAKES = [
    ("loadtest", f"--url {NOBODY}", "Connection refused: does a gateway listen there?"),
    ("loadtest", f"--url {NOBODY} --model m --requests 3", "Connection refused: does a gateway listen there?"),
    ("loadtest", "--url nonsense", "argument --url: expected http://HOST:PORT, got 'nonsense'"),
    ("loadtest", "--url http://127.0.0.1:99999", "argument --url: expected http://HOST:PORT"),
    ("loadtest", "--concurrency 0", "argument --concurrency: expected an integer, at least 1, got '0'"),
    ("loadtest", "--rate nan", "argument --rate: expected a number above 0, got 'nan'"),
    ("loadtest", "--sweep 1,b", "argument --sweep: expected a number above 0, got 'b'"),
    ("loadtest", "--images 3x5k", "argument --images: cannot read '3x5k'"),
    ("loadtest", "--repeat-share 2", "argument --repeat-share: expected a number from 0 to 1"),
    ("loadtest", "--json /nowhere/x.json", "argument --json: '/nowhere/x.json' cannot be written"),
    ("loadtest", "--gateway-pid 99999999", "argument --gateway-pid: there is no process 99999999"),
    ("loadtest", "--fail-if foo", "cannot read condition 'foo'"),
    ("plots", "/nowhere.json", "argument JSON: '/nowhere.json' does not exist"),
    ("plots", "setup.cfg --against foo", "argument --against: expected NAME=JSON, got 'foo'"),
    ("compare_peer", "--ours /nowhere", "argument --ours: '/nowhere': there is no such program"),
    ("compare_peer", "--pairs 0", "argument --pairs: expected an integer, at least 1"),
    ("first_byte", "--ours /nowhere", "argument --ours: '/nowhere': there is no such program"),
    ("first_byte", "--clients 0", "argument --clients: expected an integer, at least 1"),
    ("endure", "start --times 0", "argument --times: expected an integer, at least 1"),
    ("endure", "stop", "invalid choice: 'stop'"),
    ("fuzz", "--cases -1", "argument --cases: expected an integer, at least 0"),
    ("fuzz_openapi", "--examples 0", "argument --examples: expected an integer, at least 1"),
    ("first_byte", "--ours 'a", 'argument --ours: "\'a": No closing quotation'),
    ("family_table", "--only foo --no-peer", "argument --only: 'foo' is none of "),
]


@pytest.mark.parametrize(("tool", "line", "why"), MISTAKES)
def test_a_mistake_is_one_line(tool: str, line: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    main: Callable[[list[str]], int] = importlib.import_module(f"tools.{tool}").main
    with pytest.raises(SystemExit) as left:
        main(line.split())
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert why in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("tool", "line", "why"),
    [
        ("fake_engine", "--bundle /nowhere", "argument --bundle: '/nowhere' does not exist"),
        ("record_sidecar", "foo", "argument RECORD: invalid choice: 'foo'"),
        ("vllm_fingerprint", "", "run it with the Python of the worker's environment"),
        ("reference_vectors", "/nowhere /nowhere/x", "argument out: '/nowhere/x' cannot be written"),
    ],
)
def test_a_mistake_is_one_line_of_the_command(tool: str, line: str, why: str) -> None:
    command = [sys.executable, f"tools/{tool}.py", *line.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert why in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (usage.count, "7", 7),
        (usage.count_or_none, "0", 0),
        (usage.amount, "0.5", 0.5),
        (usage.duration, "0", 0.0),
        (usage.share, "1", 1.0),
        (usage.port, "65535", 65535),
        (usage.command, "sh -c 'a b'", ["sh", "-c", "a b"]),
    ],
)
def test_what_is_meant_is_taken(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


def test_files(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    assert usage.file_to_write(str(there)) == there
    there.write_text(json.dumps({}))
    assert usage.file_to_read(str(there)) == usage.file_to_write(str(there)) == there
    assert usage.folder_to_read(str(tmp_path)) == tmp_path
    for read, path in ((usage.file_to_read, tmp_path), (usage.file_to_write, tmp_path), (usage.folder_to_read, there)):
        with pytest.raises(argparse.ArgumentTypeError):
            read(str(path))


def test_why_nothing_can_listen() -> None:
    """192.0.2.0/24 is for documentation: no machine has an address of it."""
    assert hindrance("127.0.0.1", free_port()) is None
    assert "this machine has no such address" in str(hindrance("192.0.2.1", 30000))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "it is taken" in str(hindrance("127.0.0.1", taken.getsockname()[1]))
