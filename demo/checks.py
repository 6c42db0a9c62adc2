"""What must hold, and what is measured. Every check returns the problems it found."""

import statistics
import time
from itertools import zip_longest
from typing import Any

import torch
from mmcollate.bits import first_difference

from demo.engine import Batch, Run

REPEATS = 200
# vLLM replaces it by a function that does nothing.
_set_num_threads = torch.set_num_threads


def batches_equal(batches: list[Batch]) -> list[str]:
    """Each batch that the engine got, against vLLM's own code on the same items."""
    from mmcollate.integrations import vllm as plugin

    if not batches:
        return ["the engine asked for no batch"]
    problems = []
    for number, batch in enumerate(batches, 1):
        # The engine makes its batches in this mode, and tensors remember it.
        with torch.inference_mode():
            own = list(plugin.originals().group_and_batch_mm_items(batch.items, **batch.options))
        found = first_difference(batch.groups, own, f"batch {number}")
        problems += [found] if found else []
    return problems


def runs_equal(on: Run, off: Run) -> list[str]:
    """The same requests with mmcollate on and off, and that it was on and off."""
    problems = []
    if len(on.batches) != len(off.batches):
        problems.append(f"batches: {len(on.batches)} with mmcollate on, {len(off.batches)} off")
    if on.made_by_mmcollate != len(on.batches):
        problems.append(f"on: mmcollate made {on.made_by_mmcollate} of {len(on.batches)} batches")
    if off.made_by_mmcollate:
        problems.append(f"off: mmcollate made {off.made_by_mmcollate} batches")
    found = first_difference(on.encoder_outputs, off.encoder_outputs, "encoder outputs")
    problems += [found] if found else []
    if on.logprobs != off.logprobs:
        problems.append("the log-probabilities of the first tokens differ")
    return problems


def one_changed(before: Run, after: Run) -> list[str]:
    """One photograph was replaced: its own encoder output must change, and no other."""
    inputs = changed(before.encoder_inputs, after.encoder_inputs)
    outputs = changed(before.encoder_outputs, after.encoder_outputs)
    problems = []
    if len(inputs) != 1 or outputs != inputs:
        problems.append(f"the encoder's inputs {inputs} changed, its outputs {outputs}")
    if before.logprobs == after.logprobs:
        problems.append("one changed photograph changed no log-probability of a first token")
    return problems


def changed(before: list[Any], after: list[Any]) -> list[int]:
    """The places where two lists differ."""
    pairs = enumerate(zip_longest(before, after))
    return [place for place, (a, b) in pairs if first_difference(a, b) is not None]


def microseconds(batch: Batch, repeats: int = REPEATS) -> tuple[float, float]:
    """The median times that mmcollate and vLLM's own code take for this batch on one thread,
    taking turns. Destroying the batch counts."""
    from mmcollate.integrations import vllm as plugin

    _set_num_threads(1)
    assert torch.get_num_threads() == 1
    collators = (plugin.group_and_batch_mm_items, plugin.originals().group_and_batch_mm_items)
    times: tuple[list[int], list[int]] = ([], [])
    with torch.inference_mode():
        for repeat in range(repeats):
            for which in (0, 1) if repeat % 2 else (1, 0):
                start = time.perf_counter_ns()
                list(collators[which](batch.items, **batch.options))
                times[which].append(time.perf_counter_ns() - start)
    ours, theirs = (statistics.median(taken) / 1000 for taken in times)
    return ours, theirs
