"""docs/models.md, "Add a model", followed to the letter in a copy of the project, with the family it makes up.

Patches of 12, an anchor of its own; one file and one test, both as they stand in the page.  What the reference
processor makes of its pictures was recorded as the page says (`tests/data/guide`, transformers 5.24).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "tests" / "data" / "guide"
PAGE = (ROOT / "docs" / "models.md").read_text().partition("## Add a model")[2]
FAMILY, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with the new family, its bundle, its vectors and its test."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("docs", "engines", "pipeline", "pool", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("gateway.py", "setup.cfg"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(GUIDE / "pebble_vl.json", folder / "tests" / "data" / "reference")
    run(folder, "-m", "tests.pipeline.bundles", str(GUIDE / "pebble_vl"))
    (folder / "pipeline" / "models" / "pebble_vl.py").write_text(FAMILY)
    (folder / "tests" / "models" / "test_pebble_vl.py").write_text(TEST)
    return folder


def run(project: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def test_its_own_test_passes_and_it_is_seen_whole(project: Path) -> None:
    """The page's last steps: its own test; then, with its name in `LIMITS`, `/v1/models` and pictures through a
    gateway.
    """
    families = project / "tests" / "e2e" / "test_families.py"
    families.write_text(re.sub(r"^LIMITS = .*", 'LIMITS = {"pebble_vl": 10}', families.read_text(), flags=re.MULTILINE))
    told = run(
        *(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/models/test_pebble_vl.py", str(families)),
        *("-k", "pebble_vl or test_models_tell_family_and_limits"),
    )
    passed = re.search(r"^(\d+) passed", told, re.MULTILINE)
    assert passed is not None and int(passed[1]) >= 13 + 1 + 2, told


def test_an_error_names_it(project: Path) -> None:
    """A picture for a model without family is refused with the names of those that exist."""
    script = """
from engines.base import Modality
from pipeline.errors import GatewayError
from pipeline.plan import MediaPart, ServedModel, check_items
try:
    check_items(ServedModel(model="m", bundle=None, family=None), [MediaPart(Modality.IMAGE, b"u")], {})
except GatewayError as error:
    print(error.message)
"""
    assert "the families that exist are deepseek_v41, " in (told := run(project, "-c", script))
    assert ", pebble_vl, " in told
