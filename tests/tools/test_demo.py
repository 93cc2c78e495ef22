"""The demo's reference against values of the real gateway, and the whole demo as a command."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.demo.ask import Reply, stages_of, streamed_text
from tools.demo.flow import differences, questions
from tools.demo.picture import encoded, picture
from tools.demo.reference import picture_prompt, pixel_values, smart_resize, text_prompt
from tools.fake_engine import BUNDLE
from tools.launch import ROOT, free_port

# What SMG 1.13.0 sent for the demo's picture: SHA-256 of pixel_values, the placeholder range, prompt tokens.
PEER_PIXELS = "6c7fe5ad90f461851a2083f858d41b58bb32b02d4bc57d1a6cd61c1809da7b13"
PEER_RANGE, PEER_PROMPT_TOKENS = [7, 300], 345


def test_reference_equals_what_the_peer_sent() -> None:
    image = picture()
    expected = picture_prompt(image, encoded(image), "What is in this picture?")
    assert (expected.grid, expected.pixel_shape) == ([1, 30, 40], [1200, 1536])
    assert (expected.pixel_sha256, expected.ranges) == (PEER_PIXELS, [PEER_RANGE])
    assert len(expected.input_ids) == PEER_PROMPT_TOKENS


@pytest.mark.parametrize(
    ("size", "resized"),
    # sizes and grids of SMG 1.13.0's records for Qwen3-VL: within bounds, below the least number of pixels, thin
    [((200, 300), (224, 320)), ((16, 16), (256, 256)), ((251, 333), (256, 320)), ((40, 1200), (64, 1408))],
)
def test_resize_rule_of_the_reference(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert smart_resize(*size) == resized


def test_reference_patches_come_in_groups_of_two_by_two() -> None:
    image = picture().resize((640, 480))
    pixels, grid = pixel_values(image)
    assert grid == [1, 30, 40]
    plane = (np.asarray(image, np.float32) - np.float32(127.5)) / np.float32(127.5)
    for patch, (row, column) in {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 2), 80: (2, 0)}.items():
        block = plane[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16].transpose(2, 0, 1)
        assert np.array_equal(pixels[patch].reshape(3, 2, 16, 16), np.stack([block, block], axis=1))


def test_the_bundle_counts_bytes_as_the_reference_does() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLE / "tokenizer.json"))
    question = "Grüße, 你好 \U0001f600\n\t<|im_end|>"
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    assert ids == text_prompt(question).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_a_difference_is_found_and_named() -> None:
    question = questions()[2]
    want = question.expected
    tensors = {
        "pixel_values": {"dtype": "float32", "shape": want.pixel_shape, "sha256": want.pixel_sha256},
        "image_grid_thw": {"dtype": "int64", "shape": [1, 3], "values": want.grid},
    }
    batch = {"modality": "image", "tensors": tensors, "ranges": want.ranges, "hashes": [want.content_hash]}
    record = {"input_ids": [[token, 1] for token in want.input_ids], "media": [batch]}
    reply = Reply(200, f"I received 1 image: image_grid_thw {want.grid}", {})
    assert differences(want, record, reply) == []
    tensors["pixel_values"]["sha256"] = "0" * 64
    batch["ranges"] = [[8, 300]]
    found = differences(want, record, reply)
    assert [text.partition(":")[0] for text in found] == ["ranges", "SHA-256 of pixel_values"]


def test_replies_are_read_as_a_client_reads_them() -> None:
    assert stages_of("admit;dur=0.1, decode;dur=4.5, total;dur=15.4") == {"admit": 0.1, "decode": 4.5, "total": 15.4}
    assert stages_of(None) == {}
    events = [{"choices": [{"index": i, "delta": {"content": text}}]} for i, text in [(0, "a"), (1, "x"), (0, "b")]]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    assert streamed_text(stream + "data: [DONE]\n\n") == "ab"
    with pytest.raises(OSError, match=r"did not end with \[DONE\]"):
        streamed_text(stream)


def test_the_whole_demo_succeeds_and_leaves_nothing() -> None:
    command = [sys.executable, "gateway.py", "--demo", "--once", "--port", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n< I received ") == 4
    assert "image_grid_thw [1, 30, 40], 300 image tokens at 7..306" in done.stdout
    assert re.search(r"^metrics: http://127\.0\.0\.1:\d+/metrics   log: /\S+/gateway\.log ", done.stdout, re.M)


def test_an_address_of_another_machine_is_not_called_taken() -> None:
    command = [sys.executable, "gateway.py", "--demo", "--once", "--host", "192.0.2.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr.startswith("demo: cannot listen on 192.0.2.1 port 30000: this machine has no such address")


def test_a_gateway_that_does_not_start_fails_the_demo() -> None:
    script = (
        "import sys; from tools.demo import run_demo; from tools.launch import free_port;"
        "sys.exit(run_demo(port=free_port(), once=True, command=[sys.executable, '-c', 'raise SystemExit(3)']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "exit code 3" in done.stderr


def test_an_interrupted_demo_stops_its_children() -> None:
    script = (
        "import sys; from tools.demo import run_demo; from tools.launch import free_port;"
        "sys.exit(run_demo(port=free_port(), once=True, command=[sys.executable, '-c', "
        "'import time; print(1); time.sleep(60)']))"
    )
    child = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        for _ in range(100):
            if len(_children_of(child.pid)) == 2:
                break
            try:
                child.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        started = _children_of(child.pid)
        assert len(started) == 2
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 130
        assert not [pid for pid in started if os.path.exists(f"/proc/{pid}")]
    finally:
        child.kill()
        child.communicate()


def _children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(word) for word in children.read().split()]
