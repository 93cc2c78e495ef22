"""The command lines of the tools: a plain mistake is one line on standard error and exit code 2.

`Usage` is the parser; the functions below are for `type=` and tell what they expect.
"""

import argparse
import math
import os
import shlex
import shutil
from pathlib import Path
from typing import Any, NoReturn


class Usage(argparse.ArgumentParser):
    """`about`: the tool's docstring, as --help shows it."""

    def __init__(self, about: str | None = None, **more: Any) -> None:
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help tells more)\n")


def count(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def count_or_none(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer, at least {least}, got {text!r}")
    return value


def amount(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def duration(text: str) -> float:
    """A number of at least 0."""
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number, at least 0, got {text!r}")
    return value


def share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def _number(text: str) -> float:
    """No number is not a number: it fails every comparison."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def port(text: str) -> int:
    value = _integer(text, 0)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"expected a port, 0 to 65535, got {text!r}")
    return value


def file_to_read(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} {'is no file' if path.exists() else 'does not exist'}")
    return path


def folder_to_read(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} {'is no folder' if path.exists() else 'does not exist'}")
    return path


def file_to_write(text: str) -> Path:
    """Told before an hour of measuring, not after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def command(text: str) -> list[str]:
    """A command with its arguments, as a shell would split it; its program is there."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such program")
    return words
