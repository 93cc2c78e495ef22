"""Certificates and keys at the start: each thing that can be wrong with a file is told by its flag, and no key is."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.config import ConfigError
from pipeline.flags import parse
from pipeline.tls import listening_context

PEM = Path(__file__).parents[1] / "data"
CERTIFICATE, KEY = str(PEM / "engine_tls" / "localhost.crt"), str(PEM / "engine_tls" / "localhost.key")
OTHER_KEY = str(PEM / "tls" / "key.pem")


def refusal(argv: Sequence[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv, {})
    assert caught.value.exit_code == 1
    return caught.value.message


PAIRS = [("tls-cert-path", "tls-key-path"), ("client-cert-path", "client-key-path")]


@pytest.mark.parametrize(("certificate", "key"), PAIRS)
def test_both_or_none(certificate: str, key: str) -> None:
    assert f"'{certificate.replace('-', '_')}': {CERTIFICATE} - Needs --{key} as well" in refusal(
        [f"--{certificate}", CERTIFICATE]
    )
    assert f"'{key.replace('-', '_')}': {KEY} - Needs --{certificate} as well" in refusal([f"--{key}", KEY])
    config = parse([f"--{certificate}", CERTIFICATE, f"--{key}", KEY], {}).config
    assert config is not None
    assert (listening_context(config.tls) is not None) == (certificate == "tls-cert-path")


def test_what_a_file_may_be_instead(tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("hello")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-in", KEY, "-aes128", "-passout", "pass:secret", "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    for certificate, key, words in (
        ("/nope.pem", KEY, "'tls_cert_path': /nope.pem - does not exist"),
        (str(tmp_path), KEY, "- Is a directory"),
        (str(text), KEY, "text.pem - does not hold a PEM certificate"),
        (KEY, KEY, "- does not hold a PEM certificate"),
        (CERTIFICATE, "/nope.pem", "'tls_key_path': /nope.pem - does not exist"),
        (CERTIFICATE, CERTIFICATE, "- does not hold a PEM private key"),
        (CERTIFICATE, OTHER_KEY, f"'tls_key_path': {OTHER_KEY} - is not the key of {CERTIFICATE}"),
        (CERTIFICATE, str(locked), "locked.pem - has a passphrase, which nobody could be asked for"),
        (str(broken), KEY, f"broken.pem - cannot be used with {KEY}"),
    ):
        assert words in refusal(["--tls-cert-path", certificate, "--tls-key-path", key])
    for path, words in (
        ("/nope.pem", "'ca_cert_paths': /nope.pem - does not exist"),
        (str(text), "does not hold a PEM certificate"),
        (str(broken), "broken.pem - holds a certificate that cannot be read"),
    ):
        assert words in refusal(["--ca-cert-paths", CERTIFICATE, path])


def test_a_key_where_its_path_belongs_is_not_shown() -> None:
    given = Path(KEY).read_text()
    message = refusal(["--tls-cert-path", CERTIFICATE, "--tls-key-path", given])
    assert message.endswith("'tls_key_path': ... - Must be the path of a file, not its content")
    assert given.splitlines()[1] not in message


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(CERTIFICATE, tmp_path / "ca.pem")
    config = parse(["--ca-cert-paths", "~/ca.pem", CERTIFICATE], {}).config
    assert config is not None
    assert config.tls.ca_cert_paths == (str(tmp_path / "ca.pem"), CERTIFICATE)
