"""Checks that .venv can do the work: codecs present, no stock pillow beside pillow-simd, every import in place.

Run by tools/setup; prints one line per fault and exits 1 when there is any.
"""

import importlib
import importlib.metadata
import platform
import sys

CODECS = ("jpg", "libjpeg_turbo", "zlib", "webp", "libtiff", "jpg_2000", "littlecms2")
IMPORTS = (
    "aiohttp",
    "av",
    "blake3",
    "grpclib",
    "h2",
    "jinja2",
    "msgspec",
    "multiprocess",
    "numpy",
    "prometheus_client",
    "pybase64",
    "smg_grpc_proto.generated.vllm_engine_pb2",
    "tokenizers",
    "uvloop",
)


def faults() -> list[str]:
    found = []
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"import {name}: {error}")
    try:
        import PIL
        from PIL import features
    except ImportError as error:
        return [*found, f"import PIL: {error}"]
    found += [f"pillow-simd was built without {codec}" for codec in CODECS if not features.check(codec)]
    if platform.machine() == "x86_64":
        if not PIL.__version__.endswith(".post0"):
            found.append(f"PIL is {PIL.__version__}, not pillow-simd")
        names = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
        if "pillow" in names:
            found.append("stock pillow is installed beside pillow-simd: remove both, then run tools/setup again")
    return found


if __name__ == "__main__":
    problems = faults()
    for problem in problems:
        print(f"setup: {problem}", file=sys.stderr)
    sys.exit(bool(problems))
