"""Time mmcollate against vLLM's own batcher: `make bench`.

Both arms run in one process on the same items, in random order, torch at one thread, inference
mode, results destroyed inside the timing. "A/A" is vLLM against itself: how far a ratio strays by
noise alone. Medians of the rounds; the spread is the middle half of the rounds' ratios.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

set_num_threads = torch.set_num_threads  # vLLM replaces it in its workers

from mmcollate.integrations import vllm as plugin  # noqa: E402
from mmcollate.integrations import vllm_source  # noqa: E402
from vllm.multimodal import inputs  # noqa: E402

Items = list[Any]


def items_of(count: int, make: Callable[[int], dict[str, tuple[torch.Tensor, Any]]]) -> Items:
    return [
        inputs.MultiModalKwargsItem(
            {
                name: inputs.MultiModalFieldElem(data=data, field=field)
                for name, (data, field) in make(i).items()
            }
        )
        for i in range(count)
    ]


def workloads() -> dict[str, Items]:
    """Items by name; the first number is the count of items."""
    kept = inputs.MultiModalBatchedField(keep_on_cpu=True)
    batched = inputs.MultiModalBatchedField()
    flat = inputs.MultiModalFlatField(slices=[])
    torch.manual_seed(0)

    def metadata(_: int) -> dict[str, Any]:
        return {f"grid_{k}": (torch.randint(0, 99, (3,)), kept) for k in range(12)}

    def image(patches: int) -> Callable[[int], dict[str, Any]]:
        return lambda _: {
            "pixel_values": (torch.randn(patches, 1176).bfloat16(), flat),
            "image_grid_thw": (torch.randint(0, 99, (3,)), kept),
        }

    def ragged(i: int) -> dict[str, Any]:
        return {
            "pixel_values": (torch.randn(3, 224 + 14 * (i % 5), 224).bfloat16(), batched),
            "image_sizes": (torch.randint(0, 999, (2,)), kept),
        }

    table = {f"{n} x 12 kept fields": items_of(n, metadata) for n in (1, 4, 16, 64, 256)}
    for n, patches in ((1, 1024), (2, 256), (8, 256), (2, 1024), (8, 1024)):
        nbytes = n * patches * 1176 * 2 / 1e6
        table[f"{n} images, {nbytes:.1f} MB"] = items_of(n, image(patches))
    for n in (8, 32):
        table[f"{n} images of different shapes"] = items_of(n, ragged)
    return table


def arms() -> dict[str, Callable[[Items], Any]]:
    originals = plugin.originals()
    return {
        "vllm": lambda items: list(originals.group_and_batch_mm_items(items, device="cpu")),
        "again": lambda items: list(originals.group_and_batch_mm_items(items, device="cpu")),
        "mmcollate": lambda items: list(plugin.group_and_batch_mm_items(items, device="cpu")),
    }


def measure(items: Items, rounds: int, seconds: float) -> dict[str, Any]:
    """Microseconds a call by arm, and ratios to vLLM's of the same round."""
    functions = arms()
    start = time.perf_counter()
    functions["vllm"](items)
    once = time.perf_counter() - start
    repeats = max(1, int(seconds / rounds / 3 / max(once, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in random.sample(list(functions), len(functions)):
            function = functions[name]
            function(items)
            start = time.perf_counter()
            for _ in range(repeats):
                function(items)
            times[name].append((time.perf_counter() - start) / repeats * 1e6)

    def ratio(name: str) -> list[float]:
        ratios = [a / b for a, b in zip(times["vllm"], times[name], strict=True)]
        return statistics.quantiles(ratios, n=4)

    return {
        "vllm_us": statistics.median(times["vllm"]),
        "mmcollate_us": statistics.median(times["mmcollate"]),
        "speedup": ratio("mmcollate"),
        "a_a": ratio("again"),
        "rounds": rounds,
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6, help="per workload")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    set_num_threads(1)
    assert torch.get_num_threads() == 1
    machine = (
        f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}"
    )
    print(f"torch {torch.__version__}, vLLM {vllm_source.version()}, {machine}, 1 thread")
    print("group_and_batch_mm_items, device='cpu', inference mode, hot caches\n")
    print("| workload | vLLM, us | mmcollate, us | speedup (middle half) | A/A |")
    print("|---|---|---|---|---|")
    figures = {}
    with torch.inference_mode():
        for name, items in workloads().items():
            figures[name] = found = measure(items, options.rounds, options.seconds)
            low, middle, high = found["speedup"]
            print(
                f"| {name} | {found['vllm_us']:.1f} | {found['mmcollate_us']:.1f} |"
                f" {middle:.1f} ({low:.1f}-{high:.1f}) | {found['a_a'][1]:.2f} |",
                flush=True,
            )
    if options.json:
        header = {"torch": torch.__version__, "vllm": vllm_source.version(), "machine": machine}
        options.json.write_text(json.dumps({**header, "workloads": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
