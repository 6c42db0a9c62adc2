"""The demo from beginning to end."""

import importlib
import time
from collections.abc import Callable

from rich.console import Console

from demo import checks, terminal
from demo.engine import Engine, Run
from demo.media import make_requests

INTRODUCTION = (
    "A tiny Qwen2.5-VL with random weights, made here, gets three requests: a photograph, two"
    " photographs, and a short video. Its answers are nonsense; what counts is that they are the"
    " same with mmcollate as with vLLM's own code."
)
NEXT = [
    ("the vLLM plugin", "vLLM loads it wherever mmcollate is installed; how to switch it off"),
    ("collate()", "batches of your own items, without vLLM"),
    ("explain()", "the tables above for any items, with the reason for each way"),
    ("mmcollate doctor", "whether it is active on your machine, and why not"),
]


def tell(console: Console, start_engine: Callable[[], Engine]) -> int:
    """Returns the exit code: 0 if all that was checked holds."""
    start = time.monotonic()
    console.print("[bold]mmcollate in the real vLLM engine, on a CPU[/bold]")
    console.print(INTRODUCTION + "\n")
    with terminal.Steps(console, total=6) as steps:
        with steps.step("import vLLM"):
            importlib.import_module("vllm.entrypoints.llm")
        with steps.step("make the model and start the engine"):
            engine = start_engine()
        with steps.step("run the requests with mmcollate off"):
            off = engine.run(make_requests(), mmcollate_on=False)
        with steps.step("run them with mmcollate on"):
            on = engine.run(make_requests(), mmcollate_on=True)
        with steps.step("run them with one photograph mirrored"):
            mirrored = engine.run(make_requests(mirror_the_cat=True), mmcollate_on=True)
        with steps.step("compare and time"):
            results = check(off, on, mirrored)
            times = [checks.microseconds(batch) for batch in on.batches]

    ways: set[str] = set()
    for number, (batch, taken) in enumerate(zip(on.batches, times, strict=True), 1):
        ways |= terminal.show_batch(console, number, batch, taken)
    devices = {str(batch.options.get("device")) for batch in on.batches}
    terminal.show_legend(console, ways, ", ".join(devices), checks.REPEATS)

    verdicts = [("FAILED" if problems else "yes", what) for what, problems in results]
    terminal.show_pairs(console, "Checked in this run, not just claimed", verdicts)
    problems = [("-", problem) for _, found in results for problem in found]
    if problems:
        terminal.show_pairs(console, "What is wrong", problems)
        return 1
    terminal.show_pairs(console, "Where to go next: README.md has a section on each of", NEXT)
    console.print(f"\nAll of this took {time.monotonic() - start:.0f} seconds.")
    return 0


def check(off: Run, on: Run, mirrored: Run) -> list[tuple[str, list[str]]]:
    """What is claimed, each with the problems found; none if it holds."""
    fields = sum(len(fields) for batch in on.batches for _, fields in batch.groups)
    return [
        (
            f"The {len(on.batches)} batches that the engine got from mmcollate, {fields} fields,"
            " are bit-identical to what vLLM's own code makes of the same items.",
            checks.batches_equal(on.batches),
        ),
        (
            f"The {len(on.encoder_outputs)} outputs of the vision encoder and the log-probabilities"
            f" of the first tokens of {len(on.logprobs)} answers are bit-identical with mmcollate"
            f" on, when it made {on.made_by_mmcollate} batches, and off, when it made"
            f" {off.made_by_mmcollate}.",
            checks.runs_equal(on, off),
        ),
        (
            "The input matters: with one photograph mirrored, its output of the encoder changed,"
            " all the others did not, and the log-probabilities changed.",
            checks.one_changed(on, mirrored),
        ),
    ]
