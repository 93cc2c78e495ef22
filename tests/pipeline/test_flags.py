"""The command line as a user meets it: help, versions, actions, usage errors; and the lines the peer's tools send."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import DECLARED, ConfigError
from pipeline.flags import parse
from pipeline.setting import GROUPS
from pipeline.versions import versions

HELP = parse(["--help"], {}).text


def test_help_names_every_flag_variable_and_exit_code_once() -> None:
    for one in DECLARED:
        for flag in one.setting.flags:
            assert len(re.findall(rf"^  (?:--\S+(?: \S+)?, )?{flag}(?![\w-])", HELP, re.M)) == 1, flag
        for name in (one.setting.variable, one.setting.legacy):
            assert name in HELP
    for code in (
        "0 clean stop",
        "1 a setting is wrong",
        "2 the command line cannot be read",
        "3 an address",
        "4 the pool",
        "5 the frontend",
    ):
        assert code in HELP
    assert HELP.count("\n  python gateway.py") + HELP.count("\n  MEDIAGATE_API_KEY=") == 7


def test_help_is_grouped_in_the_order_of_a_request() -> None:
    places = [HELP.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)


def test_help_tells_each_default_once() -> None:
    entries = [re.sub(r"\s+", " ", entry) for entry in re.split(r"\n  (?=-)|\n\n", HELP)]
    for one in DECLARED:
        if one.flag and not one.setting.inverted:
            (entry,) = [entry for entry in entries if re.match(rf"{one.flag}\b(?!-)", entry)]
            assert entry.count("default ") == 1, one.flag
            assert one.text in entry


def test_groups_fit_a_screen() -> None:
    for part in HELP.split("\n\n"):
        assert len(part.splitlines()) <= 40


@pytest.mark.parametrize("argv", [["-h"], ["--help"], ["--port", "5", "--help"]])
def test_help_needs_no_valid_settings(argv: list[str]) -> None:
    asked = parse(argv, {"SMG_MM_PROCESSING": "bogus"})
    assert (asked.action, asked.config) == ("help", None)


def test_version_lines() -> None:
    asked = parse(["--version"], {})
    assert asked.action == "version"
    lines = asked.text.splitlines()
    assert lines == versions()
    assert re.fullmatch(r"mediagate \d+\.\d+\.\d+", lines[0])
    assert lines[1].startswith("Python 3.") and "uvloop" in lines[1]
    assert re.match(r"pillow-simd \S+\.post0: libjpeg-turbo \d\S*, WebP \d\S*, TIFF \d", lines[2])
    assert re.match(r"PyAV \d\S*: FFmpeg \d", lines[3])
    assert "protobuf " in lines[4] and "grpclib " in lines[4]


def test_the_version_is_the_packages() -> None:
    import configparser

    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    assert versions()[0] == f"mediagate {setup['metadata']['version']}"


def test_actions() -> None:
    assert parse([], {}).action == "run"
    assert parse(["--demo"], {}).once is False
    asked = parse(["--demo", "--once", "--port", "4000"], {})
    assert (asked.action, asked.once, asked.config and asked.config.server.port) == ("demo", True, 4000)
    checked = parse(["--check-config", "--port", "4000"], {})
    assert checked.action == "check_config" and checked.config is not None
    assert "--port = 4000 (flag)\n" in checked.text
    assert len(checked.text.splitlines()) == len(DECLARED)
    warned = parse(["--check-config"], {"SMG_IMAGE_MAX_COUNT": "many"}).text
    assert warned.splitlines()[-1].startswith("warning: SMG_IMAGE_MAX_COUNT='many' is ignored")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["grpc://a:1"], "unrecognized arguments: grpc://a:1"),
        (["--wor", "a:1"], "unrecognized arguments: --wor"),
        (["--port"], "argument --port: expected one argument"),
        (["--port", "x"], "argument --port: expected an integer, at least 1, got 'x'"),
        (["--pool-ring-bytes", "4G"], "argument --pool-ring-bytes: expected an integer, at least 1048576, got '4G'"),
        (["--port", "1_0"], "argument --port: expected an integer"),
        (["--port", "٣"], "argument --port: expected an integer"),
        (["--queue-timeout-secs", "nan"], "argument --queue-timeout-secs: expected a number, got 'nan'"),
        (["--queue-timeout-secs", "1e999"], "argument --queue-timeout-secs: expected a number"),
        (["--queue-timeout-secs", "٣"], "argument --queue-timeout-secs: expected a number"),
        (["--policy", "bogus"], "argument --policy: invalid choice: 'bogus'"),
        (["--log-level", "trace"], "argument --log-level: invalid choice: 'trace'"),
        (["--once"], "argument --once: only with --demo"),
        (["--max-payload-size", "9" * 5000], "argument --max-payload-size: expected an integer"),
    ],
)
def test_usage_errors_have_status_2(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv, {})
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith(f"gateway.py: error: {words}")


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--worker-url grpc://a:1", "--worker-urls"),
        ("--polcy random", "--policy"),
        ("--polcy=random", "--policy"),
        ("--worker_urls a:1", "--worker-urls"),
        ("-port 3", "--port"),
        ("--modle-path m", "--model-path"),
        ("--tls-cert c", "--tls-cert-path"),
    ],
)
def test_the_flag_that_was_meant(line: str, flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line.split(), {})
    assert caught.value.message.splitlines()[0].endswith(f"unrecognized arguments: {line}; did you mean {flag}?")


@pytest.mark.parametrize("argv", [["--bogus"], ["grpc://a:1"], ["-x"], ["--otlp-traces"]])
def test_no_flag_is_guessed(argv: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv, {})
    assert "did you mean" not in caught.value.message


def test_a_list_that_is_given_in_pieces_is_one_list() -> None:
    line = "--worker-urls a:1 b:2 --cors-allowed-origins http://a --worker-urls c:3 --cors-allowed-origins http://b"
    config = parse(line.split(), {}).config
    assert config is not None
    assert config.workers.urls == ("grpc://a:1", "grpc://b:2", "grpc://c:3")
    assert config.server.cors_allowed_origins == ("http://a", "http://b")


def test_choices_are_those_that_work() -> None:
    """Words of later versions are known, so that they are refused with a sentence, but not offered."""
    with pytest.raises(ConfigError) as caught:
        parse(["--policy", "Round-Robin"], {})
    assert caught.value.message.splitlines()[0].endswith("; did you mean 'round_robin'?")
    for one in DECLARED:
        refused = [*one.setting.later, *one.setting.never]
        if refused:
            with pytest.raises(ConfigError) as caught:
                parse([one.flag, "foo"] if one.flag else [], {} if one.flag else {one.setting.variable: "foo"})
            assert not [word for word in refused if f"'{word}'" in caught.value.message], one.title


def test_the_line_of_the_oracle_runner() -> None:
    """What the runner of the recorded messages passes to any gateway (flags it does not find in --help it drops)."""
    line = (
        "--host 127.0.0.1 --port 4711 --prometheus-host 127.0.0.1 --prometheus-port 4712 "
        "--worker-urls grpc://127.0.0.1:5 grpc://127.0.0.1:6 --model-path org/name --log-level warn "
        "--disable-health-check --disable-load-monitoring --disable-retries --disable-circuit-breaker "
        "--worker-startup-check-interval 1 --worker-startup-timeout-secs 60 --policy round_robin "
        "--shutdown-grace-period-secs 1 --mm-allow-private-media-hosts"
    )
    config = parse(line.split(), {}).config
    assert config is not None and config.warnings == ()
    assert config.workers.urls == ("grpc://127.0.0.1:5", "grpc://127.0.0.1:6")
    assert not config.workers.health_enabled and config.workers.retry_attempts == 1
    assert config.media.allow_private_hosts is True
    for flag in re.findall(r"--\S+", line):
        assert flag in HELP


def test_a_python_without_the_packages_is_told_so() -> None:
    """As of a machine's own Python, or before the set-up."""
    bare = [sys.executable, "-S", "-E", "gateway.py", "--version"]  # -S: without site-packages
    done = subprocess.run(bare, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"gateway\.py: No module named '\w+' in \S+: tools/setup makes .*\n", done.stderr)


def test_the_demo_takes_no_setting_it_would_not_use() -> None:
    assert parse(["--demo", "--once", "--port", "1234"], {}).action == "demo"
    with pytest.raises(ConfigError, match="argument --demo") as refused:
        parse(["--demo", "--multimodal-tensor-transport", "shm"], {})
    assert refused.value.exit_code == 2
