"""The lines of --version: what a bug report must say about the machine's software, one line each."""

import platform
from importlib import import_module, metadata

_NAME = "mediagate"
VERSION = "0.1.0"


def _of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def versions() -> list[str]:
    """Imports Pillow and PyAV, which takes a moment; nothing else of the gateway needs it."""
    return [
        f"{_NAME} {VERSION}",
        f"Python {platform.python_version()}, uvloop {_of('uvloop')}, aiohttp {_of('aiohttp')}",
        f"pillow-simd {_of('pillow-simd')}: {_codecs()}",
        f"PyAV {_of('av')}: FFmpeg {import_module('av').ffmpeg_version_info}",
        f"protobuf {_of('protobuf')}, grpclib {_of('grpclib')}, h2 {_of('h2')}, smg-grpc-proto {_of('smg-grpc-proto')}",
    ]


def _codecs() -> str:
    features = import_module("PIL.features")
    found = []
    for feature, name in (("libjpeg_turbo", "libjpeg-turbo"), ("webp", "WebP"), ("libtiff", "TIFF")):
        version = features.version(feature) if features.check(feature) else None
        found.append(f"{name} {version or 'missing'}")
    return ", ".join(found)
