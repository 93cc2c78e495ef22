"""The page at `/` in a real browser: what is dropped reaches the engine, and what is told beside the answer is so.

Truth is the engine stand-in's journal.  `axe` judges accessibility; the browser's own policy judges the page's code.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.e2e.browser import Visit, chromium, visit
from tests.e2e.hearing_engine import hearing
from tests.e2e.running import CHAT, MODEL, Running, image_part, picture, question, running, text_part, until
from tests.pipeline.sounds import tone, wav_of

KEY = "sk-of-the-operator"
CLIP = Path(__file__).parent.parent / "data" / "clips" / "oracle" / "clip_160x120_25fps_4s.mp4"
EXPLAIN = {"X-Mediagate-Explain": "1"}
SLOW = "[[fault slow=20000]]"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running("--api-key", KEY) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Browser, gateway: Running) -> Iterator[Visit]:
    with visit(browser, gateway.gateway.url) as found:
        yield found
        assert not found.faults
        assert not found.elsewhere


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    file = tmp_path / "photo.png"
    file.write_bytes(picture(200, 300))
    return file


def answered(visiting: Visit) -> str:
    expect(visiting.page.locator("#counts")).to_contain_text("tokens in")
    return visiting.text("#answer")


def last_batches(gateway: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.seen("generate")[-1]["media"]
    return found


def test_a_dropped_picture(page: Visit, gateway: Running, photo: Path) -> None:
    page.drop(photo)
    expect(page.page.locator("#media li")).to_have_count(1)
    page.page.click("#ask")
    assert answered(page).startswith("I received 1 image: pixel_values float32 (280, 1536), image_grid_thw [1, 14, 20]")
    (batch,) = last_batches(gateway)
    ((offset, length),) = batch["ranges"]
    (facts,) = page.facts()
    assert facts["Grid"] == "1 × 14 × 20 patches" and facts["Tensor"] == "280 × 1536"
    assert facts["BLAKE3"] == batch["hashes"][0]
    assert facts["Tokens"] == f"70, at {offset} to {offset + length - 1} of the prompt"
    assert facts["File"] == f"PNG, {photo.stat().st_size / 1000:.3g} kB"
    assert re.findall(r"\d+ × \d+", page.text(".sizes")) == ["300 × 200", "320 × 224"]
    stages = [row.inner_text() for row in page.page.locator("#stages th").all()]
    assert stages == ["admit", "prompt", "fetch", "inspect", "wait", "decode", "preprocess", "send", "engine"]
    assert page.page.locator("#bar i").count() == len(stages)
    # a line between each two cells that are one token: 10 by 7
    assert len(re.findall("M", page.page.locator(".seen path").get_attribute("d") or "")) == 9 + 6


def test_a_clip_and_a_picture_keep_their_order(page: Visit, gateway: Running, photo: Path) -> None:
    page.drop(CLIP, photo)
    page.page.keyboard.press("Control+Enter")
    answered(page)
    hashes = {batch["modality"]: batch["hashes"][0] for batch in last_batches(gateway)}
    clip, still = page.facts()
    assert clip["BLAKE3"] == hashes["video"] and still["BLAKE3"] == hashes["image"]
    assert re.fullmatch(r"\d+ of 100, 25 a second", clip["Frames"])


def test_a_sound(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "tone.wav"
    file.write_bytes(wav_of(tone(16_000, 1.5)))
    with hearing(["qwen3_asr"], tmp_path) as engines, running("--worker-urls", *engines.urls, engines=[]) as gateway:
        until(lambda: gateway.call("GET", "/v1/models").status == 200, what="the model is served")
        with visit(browser, gateway.gateway.url) as visiting:
            expect(visiting.page.locator("#model")).to_contain_text("sounds")
            visiting.drop(file)
            visiting.page.click("#ask")
            answered(visiting)
            assert visiting.text(".sizes").split() == ["1.5", "s", "at", "16,000", "Hz"]
            (facts,) = visiting.facts()
            assert facts["BLAKE3"] == blake3.blake3(file.read_bytes()).hexdigest() and "Grid" not in facts
            assert visiting.page.locator(".item audio").count() == 1
            assert not visiting.faults and not visiting.elsewhere


def test_the_keyboard_is_enough(page: Visit, gateway: Running, photo: Path) -> None:
    """Tab from the top: the link, the file, the words, the model, the button; what was chosen can be left out again."""
    keys, focused = page.page.keyboard, page.page.locator(":focus")
    order = []
    for _ in range(5):
        keys.press("Tab")
        order.append(focused.get_attribute("id") or focused.get_attribute("href"))
    assert order == ["openapi.json", "files", "prompt", "model", "ask"]
    page.page.set_input_files("#files", photo)
    page.page.locator(".remove").press("Enter")
    expect(page.page.locator("#media li")).to_have_count(0)
    page.page.fill("#prompt", "[[say Only words.]]")
    keys.press("Control+Enter")
    assert answered(page) == "Only words."
    assert not page.facts() and "prompt" in page.text("#stages")


def test_escape_stops(page: Visit, gateway: Running) -> None:
    before = len(gateway.seen("generate"))
    page.page.fill("#prompt", SLOW)
    page.page.keyboard.press("Control+Enter")
    expect(page.page.locator("#stop")).to_be_visible()
    until(lambda: len(gateway.seen("generate")) > before, what="the engine was asked")
    page.page.keyboard.press("Escape")
    expect(page.page.locator("#counts")).to_have_text("Stopped.")
    expect(page.page.locator("#ask")).to_be_enabled()
    gateway.given_back()


def test_an_answer_is_text_and_nothing_else(page: Visit) -> None:
    page.page.fill("#prompt", "[[say <img src=x onerror=alert(1)><b>bold</b>]]")
    page.page.click("#ask")
    assert answered(page) == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.page.locator("#answer *").count() == 0


def test_what_is_refused_is_told_with_its_code(page: Visit, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    page.drop(broken)
    page.page.click("#ask")
    trouble = page.page.locator("#trouble")
    expect(trouble).to_contain_text("Refused with 400 multimodal_processing_failed")
    expect(trouble).to_contain_text("media item 0")
    expect(trouble).to_contain_text("Request chatcmpl-")
    page.page.locator(".remove").click()
    page.page.fill("#prompt", "[[fault break=INTERNAL after=2]]")
    page.page.click("#ask")
    expect(trouble).to_contain_text("The answer broke off worker_stream_failed")
    words = tmp_path / "words.txt"
    words.write_text("words")
    page.drop(words)
    expect(trouble).to_contain_text("This is no picture, clip or sound")


def test_a_pasted_url_goes_to_the_gateway_alone(page: Visit) -> None:
    """The browser fetches nothing of it; the gateway's refusal names it."""
    page.page.evaluate(
        """() => {
            const clipboardData = new DataTransfer();
            clipboardData.setData("text", "http://127.0.0.1:9/cat.png");
            document.body.dispatchEvent(new ClipboardEvent("paste", {clipboardData, bubbles: true}));
        }"""
    )
    expect(page.page.locator("#media li")).to_contain_text("http://127.0.0.1:9/cat.png")
    page.page.click("#ask")
    expect(page.page.locator("#trouble")).to_contain_text("multimodal_processing_failed")


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, locked: Running) -> None:
    with visit(browser, locked.gateway.url) as visiting:
        page = visiting.page
        assert not page.locator("#key").is_visible()
        page.fill("#prompt", "[[say In.]]")
        page.click("#ask")
        expect(page.locator("#trouble")).to_contain_text("A key is needed invalid_api_key")
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#trouble")).to_contain_text("Incorrect API key")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        assert answered(visiting) == "In."
        expect(page.locator("#trouble")).to_be_hidden()
        page.reload()
        assert page.input_value("#key") == KEY
        assert not visiting.elsewhere and all(KEY not in url for url in visiting.asked)


@pytest.mark.parametrize("scheme, paper", [("light", "rgb(251, 250, 246)"), ("dark", "rgb(20, 21, 19)")])
def test_light_and_dark_are_accessible(
    browser: Browser, gateway: Running, photo: Path, scheme: str, paper: str
) -> None:
    with visit(browser, gateway.gateway.url, color_scheme=scheme) as visiting:
        assert visiting.page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
        _accessible(visiting)
        visiting.drop(photo)
        visiting.page.click("#ask")
        answered(visiting)
        _accessible(visiting)
        visiting.page.fill("#prompt", "[[fault refuse=INVALID_ARGUMENT]]")
        visiting.page.click("#ask")
        expect(visiting.page.locator("#trouble")).to_contain_text("start_generation_failed")
        _accessible(visiting)


def _accessible(visiting: Visit) -> None:
    found = Axe().run(visiting.page, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("width", [320, 1280])
def test_no_width_needs_scrolling_sideways(browser: Browser, gateway: Running, photo: Path, width: int) -> None:
    with visit(browser, gateway.gateway.url, viewport={"width": width, "height": 700}) as visiting:
        visiting.drop(photo)
        visiting.page.click("#ask")
        answered(visiting)
        assert visiting.page.evaluate("document.documentElement.scrollWidth") <= width


# -- what the gateway tells, from outside


def explained(body: bytes) -> Any:
    comment = next((line for line in body.decode().splitlines() if line.startswith(": mediagate ")), None)
    return None if comment is None else json.loads(comment.removeprefix(": mediagate "))


def test_only_who_asks_is_told(gateway: Running) -> None:
    body = question([image_part(picture()), text_part("?")], stream=True)
    plain, told = gateway.call("POST", CHAT, body), gateway.call("POST", CHAT, body, EXPLAIN)
    assert explained(plain.body) is None and plain.streamed_text == told.streamed_text
    (item,) = explained(told.body)["media"]
    assert item["values"]["image_grid_thw"] == [1, 14, 20] and item["resized"] == [224, 320]
    assert told.body.startswith(b": mediagate "), "it comes before the first event"
    assert explained(gateway.call("POST", CHAT, body, {"X-Mediagate-Explain": "0"}).body) is None


WORDS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/completions": {"prompt": "hi"},
}


@pytest.mark.parametrize("path", WORDS)
def test_every_api_tells(gateway: Running, path: str) -> None:
    body = {"model": MODEL, "stream": True, "max_tokens": 9, **WORDS[path]}
    told = explained(gateway.call("POST", path, body, EXPLAIN).body)
    assert told["media"] == [] and told["prompt_tokens"] > 0 and "engine" in told["stages_ms"]


def test_nothing_of_workers_or_other_requests_is_told(gateway: Running) -> None:
    body = question([image_part(picture(seed=9))], stream=True)
    text = json.dumps(explained(gateway.call("POST", CHAT, body, EXPLAIN).body))
    assert "grpc" not in text and str(gateway.engine.port) not in text and "/dev/shm" not in text


def test_the_page_can_be_left_out() -> None:
    with running("--no-page") as gateway:
        assert gateway.call("GET", "/").error == (404, "unknown_url")
        assert "/" not in gateway.call("GET", "/openapi.json").json["paths"]
        answer = gateway.call("POST", CHAT, question("hi", stream=True), EXPLAIN)
        assert answer.status == 200 and explained(answer.body) is None


def test_the_page_is_open_and_its_policy_strict(locked: Running) -> None:
    answer = locked.call("GET", "/")
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    sources = re.findall(r'(?:src|href)="([^"]*)"', answer.body.decode())
    assert all(source == "openapi.json" or source.startswith("data:") for source in sources)
