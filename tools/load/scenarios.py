"""What the comparison measures: one row for every kind of request, with the ratio that is the target for it."""

import dataclasses
import shutil

SHM = ("--multimodal-tensor-transport", "shm")
INLINE = ("--multimodal-tensor-transport", "inline")
# Quiet and alone: no probes, no polling, no retries while somebody counts CPU.
QUIET = (
    *("--log-level", "warn"),
    "--disable-health-check",
    "--disable-load-monitoring",
    "--disable-retries",
    "--disable-circuit-breaker",
    *("--worker-startup-check-interval", "1"),
    *("--policy", "round_robin"),
)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """`must`, `ambitious`: largest ratio ours / peer of `figure`; None: reported only.

    `figure` is "cpu" (CPU per request), "rps", "p99" or "memory"; for "rps" the targets are least ratios.
    """

    name: str
    mix: str
    flags: tuple[str, ...]
    requests: int
    targets: tuple[tuple[str, float, float], ...] = ()  # figure, must, ambitious
    concurrency: int = 1
    labels: tuple[str, ...] = ()

    @property
    def lacks(self) -> str:
        """What the peer needs for it and this machine has not."""
        needs_programs = "mp4" in self.mix and not (shutil.which("ffmpeg") and shutil.which("ffprobe"))
        return "the peer decodes clips with ffmpeg and ffprobe (Debian: ffmpeg)" if needs_programs else ""

    runtime: str = "vllm"
    bundle: str = ""  # of the tests, instead of the demo's
    is_exact: bool = True  # else the values of tensors may differ in their last bits and are not compared


RAW = ("mm_device_do_normalize=true",)
SCENARIOS = (
    Scenario("jpeg1080-shm", "1x1080p", SHM, 50, (("cpu", 0.45, 0.30),)),
    Scenario("jpeg1080-inline", "1x1080p", INLINE, 50, (("cpu", 0.60, 0.42),)),
    Scenario("jpeg1080-raw-inline", "1x1080p", INLINE, 50, labels=RAW),
    Scenario("jpeg480-inline", "1x480p", INLINE, 200),
    Scenario("jpeg480-shm", "1x480p", SHM, 200, (("cpu", 0.70, 0.45),)),
    Scenario("jpeg12mp-shm", "1x12mp", SHM, 50, (("cpu", 0.45, 0.30),)),
    Scenario("png4mp-shm", "1x4mp:png", SHM, 50, (("cpu", 0.80, 0.60),)),
    Scenario("webp4mp-shm", "1x4mp:webp", SHM, 50, (("cpu", 0.55, 0.40),)),
    Scenario("clip720-shm", "1x720p:mp4", SHM, 20, (("cpu", 0.35, 0.30),)),
    Scenario("clips8-shm", "1x720p:mp4", SHM, 16, (("memory", 0.7, 0.5),), concurrency=8),
    Scenario(
        "tokenspeed-shm", "1x1080p", SHM, 50, (("cpu", 0.40, 0.30),), runtime="tokenspeed"
    ),  # bfloat16, its default
    Scenario("tokenspeed-inline", "1x1080p", INLINE, 50, runtime="tokenspeed"),
    Scenario("sound30-inline", "1x30s:wav", INLINE, 100, runtime="tokenspeed", bundle="qwen3_omni", is_exact=False),
    Scenario("sglang-inline", "1x1080p", INLINE, 50, (("cpu", 0.60, 0.42),), runtime="sglang"),
    Scenario("text", "", INLINE, 1000, (("cpu", 1.5, 1.3),)),
    Scenario(
        "concurrency16-shm",
        "1x1080p",
        SHM,
        96,
        (("rps", 1.4, 1.9), ("p99", 0.75, 0.55), ("memory", 0.7, 0.5)),
        concurrency=16,
    ),
)


@dataclasses.dataclass(frozen=True)
class Growth:
    """Our own figure in two situations: `second` / `first` may be `must` at most."""

    name: str
    figure: str
    first: Scenario
    second: Scenario
    must: float
    per_item: int = 1  # the second request has so many times the work of the first


_ONE = Scenario("one", "1x1080p", SHM, 50)
GROWTHS = (
    Growth(
        "images-1-to-10",
        "cpu",
        _ONE,
        dataclasses.replace(_ONE, mix="10x1080p", requests=10),
        1.15,
        per_item=10,
    ),
    Growth(
        "requests-100-to-1000",
        "memory",
        dataclasses.replace(_ONE, requests=100, concurrency=4),
        dataclasses.replace(_ONE, requests=1000, concurrency=4),
        1.05,
    ),
    Growth(
        "bfloat16-to-float32",
        "cpu",
        dataclasses.replace(_ONE, flags=INLINE),
        dataclasses.replace(_ONE, flags=INLINE, labels=("multimodal_encoder_dtype=bfloat16",)),
        0.85,
    ),
)
