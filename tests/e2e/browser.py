"""A headless Chromium, Debian's, for tests of the page: what it asked for, what it complained about."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

WAIT_MS = 20_000  # for what a busy machine takes its time over


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    assert program is not None, "`tools/setup tests` installs chromium-headless-shell"
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One look at the page of a gateway.  `faults`: what the browser's console tells, refusals of HTTP not counted."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "Failed to load resource" not in text:
            self.faults.append(text)

    @property
    def elsewhere(self) -> list[str]:
        """Requests to anybody but the gateway."""
        origin = urlsplit(self.url).netloc
        return [
            url for url in self.asked if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).netloc != origin
        ]

    def drop(self, *files: Path) -> None:
        """As dragged from a file manager."""
        given = [{"name": file.name, "type": _TYPES[file.suffix], "bytes": list(file.read_bytes())} for file in files]
        carried = self.page.evaluate_handle(
            """given => {
                const carried = new DataTransfer();
                for (const {name, type, bytes} of given)
                    carried.items.add(new File([new Uint8Array(bytes)], name, {type}));
                return carried;
            }""",
            given,
        )
        for event in ("dragenter", "dragover", "drop"):
            self.page.locator("#drop").dispatch_event(event, {"dataTransfer": carried})

    def text(self, place: str) -> str:
        return self.page.locator(place).inner_text()

    def facts(self) -> list[dict[str, str]]:
        """What stands beside the answer, by medium."""
        return [
            {
                name.inner_text(): value.inner_text()
                for name, value in zip(item.locator("dt").all(), item.locator("dd").all(), strict=True)
            }
            for item in self.page.locator(".item").all()
        ]


_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".mp4": "video/mp4", ".wav": "audio/wav", ".txt": "text/plain"}


@contextlib.contextmanager
def visit(browser: Browser, url: str, **settings: Any) -> Iterator[Visit]:
    """The page, in a context of its own; models are listed."""
    context = browser.new_context(**settings)
    try:
        visiting = Visit(context.new_page(), url)
        visiting.page.goto(f"{url}/")
        yield visiting
    finally:
        context.close()
