"""The wheel: one for every Python, built from the sdist, and working where only torch is.

The environments are kept in ``.cache/wheel`` and made anew when their pins change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import mmcollate
import pytest

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "wheel"
REQUIREMENTS = ROOT / "requirements"
PROBE = """
import sys, sysconfig
assert "%d.%d" % sys.version_info[:2] == sys.argv[1]
assert not sysconfig.get_config_var("Py_GIL_DISABLED")
"""

# The first run downloads torch.
pytestmark = pytest.mark.timeout(900)


def run(*command: object, cwd: Path | None = None) -> str:
    """Runs a command of this environment and returns its output."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("MMCOLLATE_", "VIRTUAL_ENV"))}
    ours["CARGO_TARGET_DIR"] = str(ROOT / "target")
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env=ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}"
    return done.stdout


def find_python(version: str) -> Path | None:
    """An interpreter of this version: on PATH, of pyenv, or of uv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates = [shutil.which(f"python{version}"), sys.executable]
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    managed = [sys.executable, "-m", "uv", "python", "find", "--managed-python", version]
    candidates += subprocess.run(
        managed, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    for candidate in candidates:
        # What is on PATH may be a shim that finds no interpreter behind it.
        probe = [candidate, "-I", "-c", PROBE, version]
        if candidate and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return Path(candidate)
    return None


def environment(name: str, version: str, pins: Path) -> Path:
    """The interpreter of a virtual environment that holds exactly what is pinned."""
    found = find_python(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    home = CACHE / name
    python, stamp = home / "bin" / "python", home / "pins.txt"
    text = pins.read_text() + (REQUIREMENTS / "test.txt").read_text()
    if not (python.exists() and stamp.exists() and stamp.read_text() == text):
        uv = [sys.executable, "-m", "uv"]
        run(*uv, "venv", "--quiet", "--clear", "--python", found, home)
        run(*uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "-r", pins)
        stamp.write_text(text)
    return python


def smoke(python: Path, wheel: Path, exchange_table: str, cwd: Path) -> str:
    """Installs the wheel and runs wheel_smoke.py there."""
    install = ["pip", "install", "--quiet", "--no-deps", "--reinstall", "--python", python, wheel]
    run(sys.executable, "-m", "uv", *install)
    script = Path(__file__).with_name("wheel_smoke.py")
    return run(python, "-I", "-W", "ignore", script, exchange_table, cwd=cwd)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "maturin", "sdist", "--out", out, cwd=ROOT)
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what the sdist holds, in cargo's usual folder: dependencies are there already."""
    source = CACHE / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        # The archive's times are older than the last build, which cargo would take as current.
        archive.extractall(source, filter=lambda member, _: member.replace(mtime=None))
    [root] = source.iterdir()
    out = tmp_path_factory.mktemp("wheel")
    build = ["build", "--quiet", "--locked", "--profile", "dev-release", "--out", out]
    run(sys.executable, "-m", "maturin", *build, "--interpreter", sys.executable, cwd=root)
    [built] = out.iterdir()
    return built


def test_the_sdist_holds_all_sources_and_nothing_built(sdist: Path):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        str(path.relative_to(ROOT))
        for pattern in ("python/mmcollate/**/*.py", "python/mmcollate/*.pyi", "rust/src/**/*.rs")
        for path in ROOT.glob(pattern)
    }
    top = {"Cargo.toml", "Cargo.lock", "rust/Cargo.toml", "pyproject.toml", "README.md", "LICENSE"}
    assert sources | top | {"python/mmcollate/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_one_abi3_wheel_serves_every_python(wheel: Path):
    version = re.escape(mmcollate.__version__)
    assert re.fullmatch(rf"mmcollate-{version}-cp310-abi3-\w*linux\w*\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"mmcollate-{mmcollate.__version__}.dist-info/METADATA").decode()
    assert {"mmcollate/_core.abi3.so", "mmcollate/_core.pyi", "mmcollate/py.typed"} <= set(names)
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"mmcollate"}
    assert not [name for name in names if "/sboms/" in name]
    required = re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)
    assert required == ["torch>=2.6"]


def test_the_pins_are_those_of_the_tests():
    names = re.findall(r"^[a-z][\w-]+$", (REQUIREMENTS / "wheel.txt").read_text(), re.MULTILINE)
    pinned = re.findall(r"^([\w-]+)==", (REQUIREMENTS / "test.txt").read_text(), re.MULTILINE)
    assert "torch" in names
    assert set(names) <= set(pinned)
    assert "torch==2.6.0\n" in (REQUIREMENTS / "wheel-oldest.txt").read_text()


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_works_with_nothing_but_torch(version: str, wheel: Path, tmp_path: Path):
    python = environment(version, version, REQUIREMENTS / "wheel.txt")
    assert f"with Python {version}." in smoke(python, wheel, "yes", tmp_path)


def test_works_with_the_oldest_torch_which_has_no_exchange_table(wheel: Path, tmp_path: Path):
    python = environment("3.10-oldest-torch", "3.10", REQUIREMENTS / "wheel-oldest.txt")
    assert "torch 2.6.0" in smoke(python, wheel, "no", tmp_path)
