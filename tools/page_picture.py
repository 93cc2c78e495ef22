"""The picture of the page in the README: `docs/page.webp`, as a browser shows it after a picture was dropped.

    .venv/bin/python tools/page_picture.py            (with the font Inter it looks as it does there)
    .venv/bin/python tools/page_picture.py --dark --to page.png

The gateway runs with its default settings in front of the engine stand-in; the dropped picture is made here.
"""

import io
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from playwright.sync_api import Page, expect

    from tests.e2e.browser import chromium, visit
    from tools.launch import ROOT, Gateway, fake_engine
    from tools.usage import Usage, file_to_write
except ModuleNotFoundError as _error:
    sys.exit(f"page_picture.py: {_error}: tools/setup tests installs what this needs")


WIDTH, HEIGHT = 1180, 1120
SKY = np.array([(38, 60, 104), (150, 110, 120), (232, 150, 112), (250, 210, 155)], float)
HILLS = (
    (0.60, 0.030, (150, 114, 128)),
    (0.68, 0.040, (106, 90, 113)),
    (0.77, 0.050, (64, 67, 88)),
    (0.88, 0.055, (32, 42, 56)),
)


def evening(width: int = 1620, height: int = 1080, seed: int = 3) -> Image.Image:
    """Hills one behind the other under a low sun."""
    rng = np.random.default_rng(seed)
    down, across = np.mgrid[0:height, 0:width] / np.array([height, width]).reshape(2, 1, 1)
    stops = np.linspace(0, 0.62, len(SKY))
    pixels = np.stack([np.interp(down, stops, SKY[:, channel]) for channel in range(3)], axis=-1)
    away = np.hypot((across - 0.68) * width / height, down - 0.47)
    pixels += (np.exp(-((away / 0.09) ** 2)) * 90 + np.exp(-away * 4) * 45)[..., None] * (1, 0.85, 0.55)
    pixels = _over(pixels, (255, 244, 214), (0.055 - away) * height / 2)
    for base, amplitude, colour in HILLS:
        waves = [
            np.sin(across[0] * 6.3 * k * 1.7 + rng.uniform(0, 7)) * rng.uniform(0.4, 1) / k**1.25 for k in range(1, 9)
        ]
        pixels = _over(pixels, colour, (down - base - amplitude * np.sum(waves, axis=0)) * height / 2)
    pixels += rng.normal(0, 3, (height, width, 1))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _over(pixels: np.ndarray, colour: tuple[int, int, int], cover: np.ndarray) -> np.ndarray:
    share = np.clip(cover, 0, 1)[..., None]
    return pixels * (1 - share) + np.array(colour) * share


def taken(url: str, *, dark: bool) -> bytes:
    """The page as PNG."""
    settings = {"color_scheme": "dark" if dark else "light", "viewport": {"width": WIDTH, "height": HEIGHT}}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser, visit(browser, url, **settings) as visiting:
        file = Path(folder) / "evening.jpg"
        evening().save(file, quality=92)
        visiting.drop(file)
        visiting.page.fill("#prompt", "What is in this picture?")
        for _ in range(2):  # the first answer pays for what is loaded once
            _ask(visiting.page)
        visiting.page.locator("#ask").blur()
        return visiting.page.screenshot()


def _ask(page: Page) -> None:
    page.click("#ask")
    expect(page.locator("#ask")).to_be_disabled()
    expect(page.locator("#counts")).to_contain_text("tokens in", timeout=20_000)


def main() -> int:
    parser = Usage(__doc__)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--to", type=file_to_write, default=ROOT / "docs" / "page.webp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fake_engine("--token-ms", "4", "--latency-ms", "20") as port:
        command = [sys.executable, str(ROOT / "gateway.py")]
        gateway = Gateway(command, ["--worker-urls", f"grpc://127.0.0.1:{port}"], log=Path(folder) / "log")
        try:
            gateway.wait_until()
            png = taken(gateway.url, dark=options.dark)
        finally:
            gateway.stop()
    Image.open(io.BytesIO(png)).convert("RGB").save(options.to, quality=82, method=6)
    print(f"{options.to}: {options.to.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
