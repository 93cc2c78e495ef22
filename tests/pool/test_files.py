"""Kept mappings of segment files."""

import os
import weakref
from pathlib import Path

import pytest

from pool.files import FileViews


def make(folder: Path, name: str, nbytes: int) -> None:
    (folder / name).write_bytes(b"\0" * nbytes)


def test_a_file_is_mapped_once(tmp_path: Path) -> None:
    make(tmp_path, "a", 8192)
    views = FileViews(str(tmp_path))
    views.view("a", 8192)[:3] = b"abc"
    assert (tmp_path / "a").read_bytes()[:3] == b"abc"
    memory = views.view("a", 4096).obj
    assert views.view("a", 8192).obj is memory
    assert len(views.view("a", 4096)) == 4096 and len(views) == 1 and views.nbytes == 8192


def test_a_grown_file_is_mapped_again(tmp_path: Path) -> None:
    make(tmp_path, "a", 4096)
    views = FileViews(str(tmp_path))
    views.view("a", 4096)
    os.truncate(tmp_path / "a", 8192)
    assert len(views.view("a", 8192)) == 8192 and len(views) == 1


def test_unlinked_and_replaced_files_are_forgotten(tmp_path: Path) -> None:
    make(tmp_path, "a", 4096)
    make(tmp_path, "b", 4096)
    views = FileViews(str(tmp_path))
    gone = weakref.ref(views.view("a", 4096).obj)
    views.view("b", 4096)[:1] = b"1"
    (tmp_path / "a").unlink()
    make(tmp_path, "new", 4096)
    (tmp_path / "new").rename(tmp_path / "b")
    views.forget_unlinked()
    assert len(views) == 0 and gone() is None, "the memory of an unlinked file is held"
    views.view("b", 4096)[:1] = b"2"
    assert (tmp_path / "b").read_bytes()[:1] == b"2"


def test_a_replaced_file_is_never_served_from_its_old_mapping(tmp_path: Path) -> None:
    """Also between two looks at all of them."""
    make(tmp_path, "a", 4096)
    views = FileViews(str(tmp_path))
    views.view("a", 4096)
    make(tmp_path, "new", 4096)
    (tmp_path / "new").rename(tmp_path / "a")
    views.view("a", 4096)[:1] = b"2"
    assert (tmp_path / "a").read_bytes()[:1] == b"2"


def test_the_memory_of_unlinked_files_is_let_go_at_a_later_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a", 4096)
    make(tmp_path, "b", 4096)
    views = FileViews(str(tmp_path))
    gone = weakref.ref(views.view("a", 4096).obj)
    (tmp_path / "a").unlink()
    monkeypatch.setattr("pool.files.LOOK_S", 0.0)
    views.view("b", 1)
    assert gone() is None and len(views) == 1


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    for name in "abc":
        make(tmp_path, name, 4096)
    views = FileViews(str(tmp_path), keep_bytes=2 * 4096)
    views.view("a", 1)
    views.view("b", 1)
    views.view("a", 1)
    held = views.view("b", 1)
    views.view("a", 1)
    views.view("c", 1)
    assert views.nbytes == 2 * 4096
    held[:1] = b"x"  # still valid for who holds it
    assert (tmp_path / "b").read_bytes()[:1] == b"x"


def test_one_larger_than_all_is_still_served(tmp_path: Path) -> None:
    make(tmp_path, "a", 8192)
    views = FileViews(str(tmp_path), keep_bytes=4096)
    assert len(views.view("a", 8192)) == 8192


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/etc/passwd", "a/b"])
def test_bare_names_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError):
        FileViews(str(tmp_path)).view(name, 1)


def test_missing_and_short_files(tmp_path: Path) -> None:
    make(tmp_path, "a", 4096)
    os.symlink(tmp_path / "a", tmp_path / "link")
    views = FileViews(str(tmp_path))
    for name, nbytes in (("missing", 1), ("a", 4097), ("link", 1)):
        with pytest.raises(OSError):
            views.view(name, nbytes)
    assert len(views) == 0
