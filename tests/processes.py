"""Children, scripts, and how much memory a process uses."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def in_child(check: Callable[[], Any]) -> int:
    """Runs ``check`` in a forked child, which is killed if it hangs, and returns how that ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_script(script: str, **environment: str) -> tuple[int, str, str]:
    """Runs a script in a fresh interpreter: its exit code, and what it wrote to both streams."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def addresses_and_memory() -> tuple[int, int]:
    """Bytes of addresses that this process has, and of memory.

    Whatever is free goes back first: else memory that an earlier test left free takes a later
    one's tensors, and the process does not grow at all.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    size, memory = Path("/proc/self/statm").read_text().split()[:2]
    return int(size) * resource.getpagesize(), int(memory) * resource.getpagesize()


def resident() -> int:
    """Bytes of this process's memory that are in use."""
    return addresses_and_memory()[1]
