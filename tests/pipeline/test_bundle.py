"""Bundles from folders, the hub (a server on loopback) and workers' archives; what is refused, and how it is said."""

import functools
import hashlib
import http.server
import io
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from pipeline.archive import ArchiveReceiver, BundleError
from pipeline.bundle import load_bundle, locate
from pipeline.errors import GatewayError
from tests.pipeline.bundles import NAMES, bundle, unpack_bundle

ROOT = Path(__file__).parent.parent.parent
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    """The smallest bundle that loads."""
    LibraryTokenizer(models.WordLevel({"a": 0, "</s>": 1, "[UNK]": 2}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    write(tmp_path, "config.json", {"model_type": "m"})
    return tmp_path


def write(folder, name, data):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))


# ---- reading a folder


@pytest.mark.parametrize("name", NAMES)
def test_every_bundle_loads(name):
    loaded = bundle(name)
    assert loaded.config.config["model_type"]
    assert loaded.eos_ids
    assert "hi" in loaded.template.render(USER)


@pytest.mark.parametrize(
    ("name", "eos", "context"),
    [
        ("qwen3_vl", {151645, 151643}, 262144),  # generation_config.json: two ids; window in text_config
        ("qwen3_5", {248046}, 262144),  # config.json: one
        ("glm53_flash", {154820, 154827, 154829}, None),
        ("phi35_v", {2, 32007}, None),  # config.json and the tokenizer's eos_token differ: both end an answer
        ("llava15", {2}, None),  # only tokenizer_config.json tells
    ],
)
def test_end_tokens_and_window(name, eos, context):
    loaded = bundle(name)
    assert (loaded.eos_ids, loaded.max_context) == (eos, context)


def test_configuration_files(folder):
    loaded = load_bundle(folder)
    assert loaded.config.preprocessor == loaded.config.video == loaded.config.generation == {}
    write(folder, "preprocessor_config.json", {"patch_size": 14})
    assert load_bundle(folder).config.video == {"patch_size": 14}
    write(
        folder, "processor_config.json", {"image_processor": {"patch_size": 1}, "video_processor": {"patch_size": 15}}
    )
    config = load_bundle(folder).config
    assert (config.preprocessor, config.video) == ({"patch_size": 14}, {"patch_size": 15})
    write(folder, "video_preprocessor_config.json", {"patch_size": 16})
    assert load_bundle(folder).config.video == {"patch_size": 16}


def test_transformers_5_layout(folder):
    sound = {"feature_size": 128, "do_normalize": False}
    write(folder, "processor_config.json", {"feature_extractor": sound, "image_processor": {"do_normalize": True}})
    config = load_bundle(folder).config
    assert config.preprocessor == {"feature_size": 128, "do_normalize": True}
    assert config.video == config.preprocessor


def test_the_window_of_a_composite_model(folder):
    write(folder, "config.json", {"thinker_config": {"text_config": {"max_position_embeddings": 9}}, "seq_length": 0})
    assert load_bundle(folder).max_context == 9


def test_configuration_with_infinity(folder):
    write(folder, "config.json", '{"time_step_limit": [0.0, Infinity], "eos_token_id": [1, true, "x"]}')
    assert load_bundle(folder).eos_ids == {1}


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_missing_file_is_named(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(BundleError, match=f"lacks {missing}$"):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "holds no JSON object"),
        ("config.json", "[" * 100000, "is not JSON"),
        ("tokenizer.json", '{"model": 1}', "cannot be read as a tokenizer"),
        ("chat_template.jinja", "{% if %}", "chat template of .* is broken"),
    ],
)
def test_a_broken_file_is_one_sentence(folder, name, text, said):
    write(folder, name, text)
    with pytest.raises(BundleError, match=said) as refused:
        load_bundle(folder)
    assert "\n" not in str(refused.value)


def test_tokens_only_the_configuration_knows(folder, caplog):
    flags = {"special": True, "normalized": False}
    added = {"3": {"content": "<late>", **flags}, "9": {"content": "<gap>", **flags}, "1": {"content": "</s>", **flags}}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": added, "eos_token": {"content": "</s>"}})
    loaded = load_bundle(folder)
    assert loaded.tokenizer.id_of("<late>") == 3
    assert 3 in loaded.tokenizer.special_ids
    assert loaded.tokenizer.encode_now("a<late>") == [0, 3]
    assert "'<gap>' is 9 in tokenizer_config.json but became 4" in caplog.text
    assert loaded.eos_ids == {1}


def test_where_the_template_comes_from(folder):
    given = folder / "given"
    with pytest.raises(GatewayError, match="no chat template"):
        load_bundle(folder).template.render(USER)
    write(folder, "tokenizer_config.json", {"chat_template": "tokenizer_config"})
    assert load_bundle(folder).template.render(USER) == "tokenizer_config"
    write(folder, "chat_template.json", {"chat_template": "chat_template.json"})
    assert load_bundle(folder).template.render(USER) == "chat_template.json"
    write(folder, "chat_template.jinja", "chat_template.jinja")
    assert load_bundle(folder).template.render(USER) == "chat_template.jinja"
    write(folder, "given/t.jinja", "given")
    assert load_bundle(folder, chat_template=given / "t.jinja").template.render(USER) == "given"
    write(folder, "given/t.json", {"chat_template": "given JSON"})
    assert load_bundle(folder, chat_template=given / "t.json").template.render(USER) == "given JSON"
    write(folder, "given/t.json", {})
    with pytest.raises(BundleError, match="has no key chat_template"):
        load_bundle(folder, chat_template=given / "t.json")
    with pytest.raises(BundleError, match="cannot be read"):
        load_bundle(folder, chat_template=given / "none.jinja")


def test_named_templates(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    template = load_bundle(folder).template
    assert (template.render(USER), template.render(USER, tools=[{}])) == ("plain", "tools")
    write(folder, "additional_chat_templates/tool_use.jinja", "file")
    assert load_bundle(folder).template.render(USER, tools=[{}]) == "file"


def test_special_tokens_reach_the_template(folder):
    write(folder, "chat_template.jinja", "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ unk_token }}")
    write(folder, "special_tokens_map.json", {"bos_token": "<old>", "unk_token": {"content": "[UNK]"}})
    write(folder, "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None})
    assert load_bundle(folder).template.render(USER) == "<s></s>False[UNK]"


# ---- where it is


def test_a_folder_is_itself(folder, monkeypatch):
    assert locate(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert locate(folder.name) == Path(folder.name)  # a folder wins over a hub id of the same spelling


@pytest.mark.parametrize("source", ["/no/such/folder", "./here", "~/nothing/here/at/all", "a/b/c", "", "x/../y", "a b"])
def test_what_can_be_no_hub_id_is_not_asked_there(source, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(BundleError, match="is no folder on this host$"):
        locate(source)


def ask_hub(source, tmp_path, **variables):
    """`locate` in a Python of its own: the hub's client reads its variables when it is imported."""
    script = (
        "import sys; from pipeline.bundle import *\ntry: print(locate(sys.argv[1]))\nexcept BundleError as e: print(e)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "127.0.0.1", **variables}
    ran = subprocess.run(
        [sys.executable, "-c", script, source], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_offline_is_one_sentence(tmp_path):
    said = ask_hub("nobody/nothing", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("model bundle 'nobody/nothing' is no folder on this host and cannot be had from the ")
    assert "\n" not in said


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as one snapshot needs."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"
    files: dict[str, bytes] = {}
    asked: list[str] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/some/model/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in self.files.items()]
            return self.answer(json.dumps(tree).encode())
        if path.startswith("/api/models/some/model"):
            names = [{"rfilename": name} for name in self.files]
            return self.answer(json.dumps({"id": "some/model", "sha": self.COMMIT, "siblings": names}).encode())
        name = path.removeprefix(f"/some/model/resolve/{self.COMMIT}/")
        if name not in self.files:
            return self.answer(b'{"error":"Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})
        self.asked.append(name)
        return self.answer(self.files[name], 200, {"ETag": f'"{hashlib.sha1(self.files[name]).hexdigest()}"'})

    def answer(self, body, status=200, headers=None):
        self.send_response(status)
        sent = {"Content-Length": str(len(body)), "X-Repo-Commit": self.COMMIT, **(headers or {})}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(folder):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    handler = type("_", (Hub,), {"files": {**files, "model.safetensors": b"weights"}, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.05))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_by_hub_id_without_the_weights(hub, tmp_path):
    address, handler = hub
    found = Path(ask_hub("some/model", tmp_path, HF_ENDPOINT=address))
    assert load_bundle(found).config.config == {"model_type": "m"}
    assert set(handler.asked) == {"config.json", "tokenizer.json"}
    again = ask_hub("some/model", tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert Path(again) == found


def test_an_unknown_hub_id_is_one_sentence(hub, tmp_path):
    said = ask_hub("nobody/nothing", tmp_path, HF_ENDPOINT=hub[0])
    assert said.startswith("model bundle 'nobody/nothing' is no folder on this host and cannot be had from the ")
    assert "\n" not in said


# ---- a worker's archive


def packed(files, **how):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            archive.writestr(name, data, **how)
    return buffer.getvalue()


def received(data, step=64 << 10, digest=None):
    """Chunks as the servicer sends them: the digest on the last."""
    receiver = ArchiveReceiver()
    for start in range(0, len(data), step):
        last = start + step >= len(data)
        receiver.feed(data[start : start + step], (digest or hashlib.sha256(data).hexdigest()) if last else "")
    return receiver


def test_an_archive_becomes_a_bundle(tmp_path):
    whole = unpack_bundle("qwen3_vl", tmp_path)
    data = packed({path.name: path.read_bytes() for path in whole.iterdir()})
    target = tmp_path / "out"
    target.mkdir()
    received(data, digest=hashlib.sha256(data).hexdigest().upper()).extract(target)
    assert {path.name for path in target.iterdir()} == {path.name for path in whole.iterdir()}
    assert load_bundle(target).tokenizer.encode_now("hi") == [6023]


def test_folders_in_an_archive(tmp_path):
    received(packed([("sub/", b""), ("sub/a.jinja", b"x"), ("b", b"y")])).extract(tmp_path)
    assert (tmp_path / "sub" / "a.jinja").read_bytes() == b"x"


def link_entry():
    entry = zipfile.ZipInfo("link")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return [(entry, "/etc/passwd")]


def lying(data, size):
    """The archive with every declared uncompressed size replaced."""
    out = bytearray(data)
    for signature, field in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
        place = out.find(signature)
        while place >= 0:
            out[place + field : place + field + 4] = struct.pack("<I", size)
            place = out.find(signature, place + 4)
    return bytes(out)


def encrypted(data):
    """The archive with every entry's encryption bit set."""
    out = bytearray(data)
    for signature, field in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        out[out.find(signature) + field] |= 1
    return bytes(out)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (packed({"/etc/x": b""}), "names a path outside it: '/etc/x'"),
        (packed({"../x": b""}), "names a path outside it"),
        (packed({"a/../../x": b""}), "names a path outside it"),
        (packed({"..": b""}), "names a path outside it"),
        (packed({"a\\..\\..\\x": b""}), "names a path outside it"),
        (packed({"\\\\host\\share\\x": b""}), "names a path outside it"),
        (packed({"C:\\x": b""}), "names a path outside it"),
        (packed({"C:x": b""}), "names a path outside it"),
        (packed(link_entry()), "no plain file: 'link'"),
        (packed({f"{place}": b"" for place in range(51)}), "has 51 entries, more than 50"),
        (encrypted(packed({"a": b"x"})), "cannot be read: .*encrypted"),
        (lying(packed({"a": b"x" * 1000}), 10), "cannot be read: Bad CRC"),
        (packed({"a": b"x"})[:-5], "cannot be read"),
        (b"no archive at all", "cannot be read"),
        (packed({"a": b"x", "a/b": b"y"}), "cannot be unpacked"),
    ],
)
def test_archives_that_are_refused(data, said, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(BundleError, match=said) as refused:
        received(data).extract(inside)
    assert "\n" not in str(refused.value)
    assert {path.name for path in tmp_path.iterdir()} == {"inside"}
    assert not any(path.is_symlink() for path in inside.iterdir())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_given_twice(tmp_path):
    with pytest.raises(BundleError, match="cannot be unpacked: File exists"):
        received(packed([("a", b"x"), ("a", b"y")])).extract(tmp_path)


def test_limits_are_counted_not_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(ArchiveReceiver, "MOST_UNPACKED", 1000)
    for name in ("just", "over", "lying"):
        (tmp_path / name).mkdir()
    received(packed({"a": b"x" * 600, "b": b"x" * 400})).extract(tmp_path / "just")
    with pytest.raises(BundleError, match="unpacks to 1001 bytes, more than 1000"):
        received(packed({"a": b"x" * 600, "b": b"x" * 401})).extract(tmp_path / "over")
    # a reader that trusts no declared size would see a bomb like this
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *_: b"x" * 100)
    with pytest.raises(BundleError, match="unpacks to more than 1000 bytes"):
        received(packed({"a": b""})).extract(tmp_path / "lying")


def test_limits_of_the_stream(monkeypatch):
    assert (ArchiveReceiver.MOST_BYTES, ArchiveReceiver.MOST_UNPACKED) == (200 << 20, 500 << 20)
    monkeypatch.setattr(ArchiveReceiver, "MOST_BYTES", 100)
    receiver = ArchiveReceiver()
    receiver.feed(b"x" * 100)
    with pytest.raises(BundleError, match="larger than 100 bytes"):
        receiver.feed(b"x")


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([], "has no chunk"),
        ([(packed({}), "")], "the last chunk carries no SHA-256"),
        ([(packed({}), hashlib.sha256(packed({})).hexdigest()), (b"", "")], "the last chunk carries no SHA-256"),
        ([(packed({}), "0" * 64)], "does not match its SHA-256"),
        ([(packed({}), "é")], "does not match its SHA-256"),
    ],
)
def test_the_digest_is_required(chunks, said, tmp_path):
    receiver = ArchiveReceiver()
    for data, digest in chunks:
        receiver.feed(data, digest)
    with pytest.raises(BundleError, match=said):
        receiver.extract(tmp_path)
