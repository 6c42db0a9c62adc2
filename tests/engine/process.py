"""Subprocesses that can't outlive or take down the one that started them."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Importing vLLM takes three times as long when bytecode is not kept.
    "PYTHONDONTWRITEBYTECODE": "",
    # Of what would be compiled, nothing runs often enough to make up for that.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Everything in one process, so that the batches are the same every time.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextlib.contextmanager
def start(
    module: str,
    *arguments: str,
    log: Path,
    environment: dict[str, str] | None = None,
    pipes: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m module`, its output in `log`; end its whole process group in any case.

    With `pipes`, the caller talks to it over stdin and stdout, and only stderr goes to `log`.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | (environment or {}),
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else output,
            stderr=output,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - only one system call
        )
    try:
        yield process
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


def end_with_parent() -> None:
    """Linux sends this process SIGTERM when its parent is killed, and can't clean up."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def run(
    module: str,
    *arguments: str,
    log: Path,
    environment: dict[str, str] | None = None,
    timeout: float = 200,
) -> None:
    """As `start`, but wait for its end; an error shows what it wrote last."""
    with start(module, *arguments, log=log, environment=environment) as process:
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
    check(code, f"{module} {' '.join(arguments)}", log)


def check(code: int | None, what: str, log: Path) -> None:
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        end = "took too long" if code is None else f"ended with {code}"
        raise RuntimeError(f"{what} {end}:\n{tail}")


def active_in(log: str) -> set[str]:
    """The vLLM processes of which the log says that mmcollate is active there."""
    return set(re.findall(r"^\((\w+).*\bmmcollate \S+ is active\b", log, re.MULTILINE))
