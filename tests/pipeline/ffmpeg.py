"""The ffmpeg program for tests: the build that comes with imageio-ffmpeg, or a script that stands for it."""

from pathlib import Path

import imageio_ffmpeg


def real_ffmpeg(folder: Path) -> Path:
    """A folder for PATH with `ffmpeg` in it."""
    folder.mkdir(exist_ok=True)
    (folder / "ffmpeg").symlink_to(imageio_ffmpeg.get_ffmpeg_exe())
    return folder


def made_ffmpeg(folder: Path, script: str) -> Path:
    """The same, with a shell script."""
    folder.mkdir(exist_ok=True)
    program = folder / "ffmpeg"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder
