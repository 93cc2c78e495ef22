"""Kept mappings of borrowed files."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from pool.files import FileViews


class Lender:
    """Opens files of a folder; `asked` tells which, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []

    def __call__(self, name: str) -> int:
        self.asked.append(name)
        return os.open(self.folder / name, os.O_RDWR)

    def make(self, name: str, nbytes: int = 4096) -> None:
        (self.folder / name).write_bytes(b"\0" * nbytes)


@pytest.fixture
def lender(tmp_path: Path) -> Lender:
    return Lender(tmp_path)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_borrowed_and_mapped_once(lender: Lender) -> None:
    lender.make("a", 8192)
    views = FileViews(lender)
    views.view("a", 8192)[:3] = b"abc"
    assert (lender.folder / "a").read_bytes()[:3] == b"abc"
    memory = views.view("a", 4096).obj
    assert views.view("a", 8192).obj is memory and lender.asked == ["a"]
    assert len(views.view("a", 4096)) == 4096 and len(views) == 1 and views.nbytes == 8192


def test_a_file_that_became_shorter_is_served_from_its_mapping(lender: Lender) -> None:
    lender.make("a", 8192)
    views = FileViews(lender)
    views.view("a", 8192)
    os.truncate(lender.folder / "a", 4000)
    views.view("a", 4000)[:] = b"x" * 4000
    assert (lender.folder / "a").read_bytes() == b"x" * 4000 and lender.asked == ["a"]


@pytest.mark.parametrize("trigger", [FileViews.forget_unlinked, lambda views: views.view("b", 1)])
def test_unlinked_files_are_let_go(
    lender: Lender, monkeypatch: pytest.MonkeyPatch, trigger: Callable[[FileViews], object]
) -> None:
    """By an idle process, and at a later use."""
    lender.make("a")
    lender.make("b")
    before = open_descriptors()
    views = FileViews(lender)
    gone = weakref.ref(views.view("a", 4096).obj)
    views.view("b", 4096)[:1] = b"1"
    (lender.folder / "a").unlink()
    monkeypatch.setattr("pool.files.LOOK_S", 0.0)
    trigger(views)
    assert len(views) == 1 and gone() is None, "the memory of an unlinked file is held"
    (lender.folder / "b").unlink()
    views.forget_unlinked()
    assert open_descriptors() == before


@pytest.mark.parametrize("bound", [{"keep_bytes": 2 * 4096}, {"keep_files": 2}])
def test_the_least_recently_used_goes_first(lender: Lender, bound: dict[str, int]) -> None:
    for name in "abc":
        lender.make(name)
    views = FileViews(lender, **bound)
    views.view("a", 1)
    views.view("b", 1)
    views.view("a", 1)
    held = views.view("b", 1)
    views.view("a", 1)
    views.view("c", 1)
    assert views.nbytes == 2 * 4096 and len(views) == 2
    held[:1] = b"x"  # still valid for who holds it
    assert (lender.folder / "b").read_bytes()[:1] == b"x"
    views.view("b", 1)
    assert lender.asked == ["a", "b", "c", "b"]


def test_one_larger_than_all_is_still_served(lender: Lender) -> None:
    lender.make("a", 8192)
    views = FileViews(lender, keep_bytes=4096)
    assert len(views.view("a", 8192)) == 8192


def test_missing_short_and_empty_files(lender: Lender) -> None:
    lender.make("a")
    lender.make("empty", 0)
    views = FileViews(lender)
    before = open_descriptors()
    with pytest.raises(OSError):
        views.view("missing", 1)
    with pytest.raises(ValueError):  # mmap's; the store makes none
        views.view("empty", 1)
    assert len(views) == 0 and open_descriptors() == before
    with pytest.raises(OSError, match="a has 4096 bytes, 4097 are needed"):
        views.view("a", 4097)
    assert len(views.view("a", 4096)) == 4096
