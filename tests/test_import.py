"""Importing mmcollate does nothing that the process around it could notice."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import json, logging, os, signal, sys, threading, warnings
import torch
import torch.utils._device, torch.overrides

def snapshot():
    with open("/proc/self/maps") as maps:
        libraries = sorted({line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line})
    root = logging.getLogger()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "libraries": libraries,
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "logging": [root.level, logging.root.manager.disable, list(map(repr, root.handlers))],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "torch modes": [
            torch.is_grad_enabled(),
            len(torch.overrides._get_current_function_mode_stack()),
            torch._C._len_torch_dispatch_stack(),
        ],
        "random state": torch.get_rng_state().sum().item(),
        "warnings": list(map(repr, warnings.filters)),
        "signals": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), sys.getswitchinterval()],
        "path": [sys.path, list(map(repr, sys.meta_path))],
        "directory": os.getcwd(),
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    }

before = snapshot()
import mmcollate
import mmcollate.integrations.vllm
after = snapshot()
print(json.dumps([before, after, sorted(sys.stdlib_module_names)]))
"""


@pytest.fixture(scope="module")
def snapshots() -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """A fresh process before and after it imports mmcollate; torch is there in both."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    assert not printed
    assert "mmcollate" not in done.stderr
    before, after, standard = json.loads(last)
    return before, after, set(standard)


def test_nothing_changes_but_what_is_loaded(snapshots):
    before, after, _ = snapshots
    changed = {what for what in before if before[what] != after[what]}
    assert changed == {"libraries", "modules"}
    assert not after["cuda"]


def test_the_only_new_library_is_the_core(snapshots):
    before, after, standard = snapshots
    new = set(after["libraries"]) - set(before["libraries"])
    others = {path for path in new if "/mmcollate/_core" not in path}
    assert len(new - others) == 1
    # Extension modules of the standard library, but nothing of CUDA and no second torch.
    assert {path.rpartition("/")[2].partition(".")[0].lstrip("_") for path in others} <= standard


def test_only_the_standard_library_is_imported_besides(snapshots):
    before, after, standard = snapshots
    assert set(after["modules"]) - set(before["modules"]) - standard == {"mmcollate"}
    assert "vllm" not in after["modules"]
