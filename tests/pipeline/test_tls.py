"""Certificates and keys at the start: each thing that can be wrong with a file is told by its flag, and no key is."""

import shutil
import ssl
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline import tls
from pipeline.certificate import validity
from pipeline.config import ConfigError
from pipeline.flags import parse
from pipeline.tls import expiries, listening_context

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


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of twenty days and its key."""
    folder = tmp_path_factory.mktemp("pem")
    made, key = str(folder / "short.pem"), str(folder / "short.key")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=short"]
    command = ["openssl", "req", "-x509", *kind, "-days", "20", "-keyout", key, "-out", made]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


def dates(path: str) -> tuple[datetime, datetime]:
    """As the openssl program tells them."""
    said = subprocess.run(
        ["openssl", "x509", "-in", path, "-noout", "-dates"], check=True, capture_output=True, text=True
    ).stdout
    since, until = (ssl.cert_time_to_seconds(line.partition("=")[2]) for line in said.splitlines())
    return datetime.fromtimestamp(since, UTC), datetime.fromtimestamp(until, UTC)


def test_when_a_certificate_holds(short: tuple[str, str]) -> None:
    """Both forms of a date (a year beyond 2049 has the second one), and a file of several: as long as all hold."""
    for path in (CERTIFICATE, str(PEM / "tls" / "certificate.pem"), short[0]):
        assert validity(Path(path).read_text()) == dates(path)
    (since, _), (_, until) = dates(short[0]), dates(short[0])
    assert validity(Path(CERTIFICATE).read_text() + Path(short[0]).read_text()) == (since, until)
    with pytest.raises(ValueError, match="no certificate"):
        validity("")


@pytest.mark.parametrize(("certificate", "key"), PAIRS)
@pytest.mark.parametrize(
    ("days", "words"),
    [
        (-1, "the certificate does not hold before "),
        (5, None),
        (7, "UTC, in 13.0 days"),
        (19.9, "UTC, in 0.1 days"),
        (21, "the certificate expired on "),
    ],
)
def test_a_certificate_that_ends_is_told(
    short: tuple[str, str],
    certificate: str,
    key: str,
    days: float,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    since, until = dates(short[0])
    monkeypatch.setattr(tls, "_now", lambda: since + timedelta(days=days))
    config = parse([f"--{certificate}", short[0], f"--{key}", short[1]], {}).config
    assert config is not None
    assert expiries(config.tls) == {"server" if certificate.startswith("tls") else "client": until.timestamp()}
    if words is None:
        assert not config.warnings
        return
    (warning,) = config.warnings
    assert warning.startswith(f"--{certificate} {short[0]}: ") and words in warning
