"""Time the real vLLM engine with mmcollate on and off: `make bench-engine`.

One process for each engine, in it vLLM's own code and mmcollate by turns in random order, torch at
one thread; "A/A" is vLLM against itself. Medians; the spread is the middle half of the rounds'
ratios. Every round has new images, the same for all arms, and vLLM's caches, which are on, are
emptied before each turn. It fails if a token differs.

- "preprocessing, server": from a prompt with images to the engine's input, in the thread in which
  vLLM's server does it.
- "preprocessing, offline": the same in the main thread, where `LLM.generate` does it. There the C
  library may have warm memory for a large batch; another thread's it takes fresh from the kernel.
- "engine steps": scheduling, vision encoder, language model. On a CPU, and with tiny models; so
  what matters is the time that collation takes in it, not its share.
- "whole run": `LLM.generate`, with each request copied as between processes.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import mmcollate
import torch
from mmcollate.bench import machine
from mmcollate.integrations import vllm_source

from benches.engine_cases import CASES
from tests.engine import process

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
QUICK_CASE, QUICK_ROUNDS = "Qwen2.5-VL, 1 small image", 2


def run_engine(engine: str, names: list[str], rounds: int | None) -> dict[str, Any]:
    arguments = [engine, *(f"--case={name}" for name in names)]
    arguments += [] if rounds is None else [f"--rounds={rounds}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        process.run(
            "benches.engine_run",
            *[*arguments, f"--folder={folder}/{engine}", f"--json={out}"],
            log=Path(folder, "log"),
            environment=ENVIRONMENT,
            timeout=600,
        )
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def header() -> dict[str, Any]:
    return {
        "mmcollate": mmcollate.__version__,
        "torch": torch.__version__,
        "vllm": vllm_source.version(),
        "machine": f"{platform.machine()}, {platform.python_implementation()}"
        f" {platform.python_version()}",
        "cpu": machine.cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": 1,
        "no_alias": os.environ.get("MMCOLLATE_NO_ALIAS", ""),
    }


def rows(name: str, found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for part, figures in found["parts"].items():
        low, middle, high = figures["speedup"]
        theirs, ours = (figures["collation"][arm] for arm in ("vllm", "mmcollate"))
        cells = [
            name if not lines else "",
            part,
            *(f"{figures['ms'][arm][1]:.1f}" for arm in ("vllm", "mmcollate")),
            f"{middle:.2f}x ({low:.2f}-{high:.2f})",
            f"{figures['a_a'][1]:.2f}",
            *(f"{c['ms'][1]:.2f} ({c['share'][1]:.1%})" for c in (theirs, ours)),
            " / ".join(f"{c['copied_bytes'] / 1e6:.1f}" for c in (theirs, ours)),
            str(figures["rounds"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


HEAD = [
    "| case | part | vLLM, ms | mmcollate, ms | speedup (middle half) | A/A"
    " | collation: vLLM, ms (share) | mmcollate | MB copied | rounds |",
    "|" + "---|" * 10,
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, help="default: as many as fit the case's time")
    parser.add_argument("--quick", action="store_true", help="one case, two rounds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    names = options.case or ([QUICK_CASE] if options.quick else list(CASES))
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else None)
    if rounds == 1:
        parser.error("--rounds: at least 2, for a spread")
    described = header()
    print(", ".join(f"{key} {value}" for key, value in described.items()))
    print(*HEAD, sep="\n", flush=True)
    found: dict[str, Any] = {}
    for engine in dict.fromkeys(CASES[name].engine for name in names):
        wanted = [name for name in names if CASES[name].engine == engine]
        for name, figures in run_engine(engine, wanted, rounds).items():
            found[name] = figures
            print(*rows(name, figures), sep="\n", flush=True)
    compared = sum(figures["tokens_compared"] for figures in found.values())
    print(f"\n{compared} tokens of each arm were compared and are the same.")
    if options.json:
        options.json.write_text(json.dumps({**described, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
