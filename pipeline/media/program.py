"""The ffmpeg program as a child process: it reads from one pipe, writes to another, and knows no other file.

It is a child of the pool process and a member of its group, so it has the same limits of memory and files, and is
killed with it; one that is no longer needed is killed and reaped here.  One thread decodes, as everywhere.
"""

import os
import select
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from pipeline.models.base import MediaError

PROGRAM = "ffmpeg"
_LOOK_MS = 50  # at the clock, while the program is busy


class Program:
    """Both pipes of the program in turn: it is fed while it is read, so that neither side waits for the other."""

    def __init__(self, process: "subprocess.Popen[bytes]", chunks: Iterator[bytes], check: Callable[[], None]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._chunks, self._check = chunks, check
        self._pending = memoryview(b"")
        self._poll = select.poll()
        self._poll.register(self._stdin, select.POLLOUT)
        self._poll.register(self._stdout, select.POLLIN)
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)

    def fill(self, into: memoryview) -> int:
        """Read until `into` is full or the program has no more; the number of bytes."""
        at = 0
        while at < len(into):
            self._check()
            for fd, _ in self._poll.poll(_LOOK_MS):
                if fd == self._stdout.fileno():
                    got = self._stdout.readinto(into[at:])  # type: ignore[attr-defined]
                    if got == 0:
                        return at
                    at += got or 0
                else:
                    self._feed()
        return at

    def _feed(self) -> None:
        try:
            while True:
                if not self._pending:
                    self._pending = memoryview(next(self._chunks))
                wrote = self._stdin.write(self._pending)
                if wrote is None:
                    return
                self._pending = self._pending[wrote:]
        except (StopIteration, BrokenPipeError):  # all fed, or it has all it wants
            self._poll.unregister(self._stdin)
            self._stdin.close()

    def exit_code(self) -> int:
        """After its last byte."""
        while True:
            self._check()
            try:
                return self._process.wait(_LOOK_MS / 1000)
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def running(arguments: Sequence[str], chunks: Iterator[bytes], check: Callable[[], None]) -> Iterator[Program]:
    """The program, fed with `chunks`.  `check` is called while it works and may raise.  Raises MediaError: it is not
    there, or cannot be started.
    """
    path = shutil.which(PROGRAM)
    if path is None:
        raise MediaError("ffmpeg executable not found")
    try:
        process = subprocess.Popen(
            [path, "-hide_banner", "-nostdin", "-v", "quiet", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={},
        )
    except OSError as error:
        raise MediaError(f"ffmpeg cannot be started: {error.strerror}") from None
    try:
        yield Program(process, chunks, check)
    finally:
        process.kill()
        _close(process.stdin)
        _close(process.stdout)
        process.wait()


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()


def reads(form: str) -> tuple[str, ...]:
    """Arguments: the input is of this format, and nothing else is opened."""
    allowed = ("-protocol_whitelist", "pipe", "-format_whitelist", form)
    return (*allowed, "-f", form, "-threads", "1", "-copyts", "-i", "pipe:0")


def writes(form: str) -> tuple[str, ...]:
    """Arguments: the output is of this format."""
    return ("-f", form, "-protocol_whitelist", "pipe", "pipe:1")


class Written:
    """A file that is only written to, like a pipe: what is fed is made in it."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def taken(self) -> bytes:
        """What was written since the last time."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data
