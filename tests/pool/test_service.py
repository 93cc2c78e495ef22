"""The systemd unit: understood by systemd where there is one, and true to what the supervisor does."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool.stage import ROOT

UNIT = ROOT / "tools" / "mediagate.service"


def value(name: str) -> str:
    (found,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_it(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/mediagate/.venv/bin/python", sys.executable)
    (tmp_path / "mediagate.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "mediagate.service")], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if "mediagate.service" in line]
    assert done.returncode == 0 and not complaints, done.stderr


def test_it_fits_the_supervisor() -> None:
    assert value("Type") == "notify" and value("NotifyAccess") == "main"
    assert value("KillMode") == "mixed", "the frontend drains when the supervisor tells it to"
    assert value("ExecReload") == "/bin/kill -HUP $MAINPID"
    assert value("OOMPolicy") == "continue", "a killed pool process is replaced, the service goes on"
    assert int(value("TimeoutStopSec")) > 5 + 180, "default settle time and grace"


def test_a_service_does_not_fetch_from_the_private_network() -> None:
    assert "--no-mm-allow-private-media-hosts" in value("ExecStart").split()
