"""The built wheel, installed where nothing of this checkout can be imported, runs the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with longreach from its wheel. It shares the packages that longreach needs with this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    built = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    subprocess.run((*pip, *built), check=True)
    (wheel,) = folder.glob("longreach-*.whl")
    made = folder / "env"
    venv.create(made, with_pip=False, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    subprocess.run(
        (*pip, "--python", str(made), "install", "--no-deps", "--no-index", "--no-compile", str(wheel)), check=True
    )
    # a path within such a file is searched, but files like it there are not read: the checkout stays out
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return made


def run(environment: Path, *words: str) -> str:
    """What a program of the environment prints, outside the checkout."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    program = environment / "bin" / words[0]
    done = subprocess.run((program, *words[1:]), cwd=environment, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep
def test_the_demo_runs_from_the_wheel(environment: Path) -> None:
    where = run(environment, "python", "-c", "import longreach; print(longreach.__file__)").strip()
    assert Path(where).is_relative_to(environment)
    told = json.loads(run(environment, "longreach", "demo", "--length", "1024", "--json"))
    found = {row["decode"].split()[0] for row in told["rows"]}
    assert {"dense", "kascade", "loki", "magicpig"} <= found, "shipped plans are in the wheel"
