"""How much memory a batch takes at its peak, and whether anything grows: ``in_child``.

Each arm runs in a fork of its own, made before any batch, so that neither has what the other left.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmcollate.bench import machine

MANY = 10_000
"""Batches after which nothing has grown."""

PEAK_ROWS = ("metadata/64", "images/8x256", "images/8x4096", "padded-audio/8")
GROWTH_ROWS = ("metadata/4", "images/2x256")

SPARE = 256 << 10
"""Bytes that the heap may grow by when it is laid out anew, in either arm."""


def in_child() -> list[dict[str, Any]]:
    """Peak and growth of each row's arms, measured in a fresh process.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mmcollate.bench.memory"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def status(name: str) -> int:
    """A line of this process' status, in bytes: ``VmRSS``, or ``VmHWM`` for its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def peak_of(call: Callable[[], Any], times: int = 3) -> int:
    """Bytes of resident memory that calls need at most, above what was there before."""
    machine.give_back()  # free memory that is resident already would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = status("VmRSS")
    for _ in range(times):
        call()
    return status("VmHWM") - before


def growth_of(call: Callable[[], Any], times: int = MANY) -> int:
    """Bytes of resident memory that are there more after so many calls, the first tenth aside."""
    for _ in range(times // 10):
        call()
    before = status("VmRSS")
    for _ in range(times):
        call()
    return status("VmRSS") - before


def _forked(function: Callable[[], int]) -> int:
    """Its result, from a fork of this process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(function()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return int(text)


def main() -> None:
    """Prints the rows as JSON."""
    import torch

    torch.set_num_threads(1)
    from mmcollate.bench import arms
    from mmcollate.bench.workloads import all_workloads

    vllm = arms.has_vllm()
    if vllm:
        arms.prepare_vllm()
    workloads = {workload.name: workload for workload in all_workloads()}
    rows = []
    # Whatever is imported or made once is not a batch's.
    with torch.inference_mode():
        tiny = arms.Case(workloads["metadata/1"], vllm=vllm)
        for _, ready in arms.runs_of(tiny):
            ready.call()
    for what, names, measure in (
        ("peak", PEAK_ROWS, peak_of),
        ("growth", GROWTH_ROWS, growth_of),
    ):
        for name in names:
            case = arms.Case(workloads[name], vllm=vllm)
            found: dict[str, Any] = {}
            with torch.inference_mode():
                for arm in ("vllm", "mmcollate"):
                    run = arms.ARMS[arm](case)
                    if run is not None:
                        found[arm] = _forked(lambda: measure(run.call))  # noqa: B023
            title = workloads[name].title
            if what == "growth":
                title += f": growth over {MANY:,} batches"
            rows.append({"what": what, "name": name, "title": title, "spare": SPARE, **found})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
