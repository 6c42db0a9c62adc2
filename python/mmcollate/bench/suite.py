"""Runs the rows, in this process and in children with another allocator or setting."""

import argparse
import contextlib
import fnmatch
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmcollate.bench import arms, machine, measure, memory, report, targets
from mmcollate.bench.workloads import Workload, all_workloads, metadata

_set_num_threads = torch.set_num_threads  # vLLM replaces it in its workers

SECONDS = 1.5
QUICK_SECONDS = 0.7

FLUSH_BYTES = 48 << 20
"""More than the caches of one core and its share of the last level hold."""

SHIFTED = (256 << 10, 20 << 20)
"""Batches of so many bytes, and less than so many, lie elsewhere in the heap in each round: one
place can be twice as slow as another, for its caches and pages. Larger rows have mappings."""

PRELOADED_ROWS = ("images/32x256", "images/8x4096")
WARM_ROWS = ("images/8x4096", "images/32x4096")
WARM_MAX_MB = 1024
THREAD_ROWS = ("images/8x1024", "images/8x4096")
"""Holds the largest batch of these rows."""


class Refused(Exception):
    """An arm's result is not what it claims to be: nothing of its row is published."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``mmcollate bench``."""
    parser.add_argument("--quick", action="store_true", help="a few rows, about 30 s")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="rows by name, as a shell would; repeat"
    )
    parser.add_argument("--seconds", type=float, help=f"for each row; {SECONDS:g} if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw them there, PNG and SVG")
    parser.add_argument(
        "--families", type=Path, metavar="FILE", help="fields of model families, as JSON"
    )
    parser.add_argument("--list", action="store_true", help="name the rows and do nothing")
    parser.add_argument("--process", default="own", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Runs what was asked for. Returns 1 if a row was refused, else 0."""
    chosen = list(selected(options))
    if options.list:
        for workload in chosen:
            print(f"{workload.name:32}{workload.title}")
        return 0
    if not chosen:
        print("no row has such a name; --list names them", file=sys.stderr)
        return 2
    _set_num_threads(1)
    vllm = arms.has_vllm()
    if vllm:
        arms.prepare_vllm()
    assert torch.get_num_threads() == 1
    machine.settle()
    ticks, stolen = machine.cpu_times()
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    start = time.perf_counter()
    figures: dict[str, Any] = {
        "version": report.VERSION,
        "machine": machine.describe(),
        "notes": arms.missing(),
        "rows": [],
        "refused": [],
        "memory": [],
    }
    print(report.header(figures), flush=True)
    for workload in sorted(chosen, key=lambda workload: -workload.rank):
        try:
            row = measured(workload, seconds=seconds, vllm=vllm, process=options.process)
        except Refused as refusal:
            figures["refused"].append({"name": workload.name, "why": str(refusal)})
            print(f"REFUSED {workload.name}: {refusal}", flush=True)
            continue
        figures["rows"].append(row)
        print(report.line(row), flush=True)
    order = [workload.name for workload in chosen]
    figures["rows"].sort(key=lambda row: order.index(row["name"].partition("@")[0]))
    if options.process == "own" and not options.quick:
        _run_children(figures, order, seconds)
    figures["fit"] = None
    if options.process == "own" and any(w.group == "metadata" for w in chosen):
        figures["fit"] = targets.fitted(steady(seconds, vllm=vllm))
    figures["across"] = targets.of_sizes(figures["rows"])
    figures["seconds"] = round(time.perf_counter() - start)
    since = machine.cpu_times()
    figures["stolen"] = (since[1] - stolen) / max(since[0] - ticks, 1)
    print(report.footer(figures), flush=True)
    if options.json:
        report.write_json(figures, options.json)
    if options.plots:
        report.draw(figures, options.plots)
    return 1 if figures["refused"] else 0


def selected(options: argparse.Namespace) -> Iterator[Workload]:
    """The rows that were asked for."""
    for workload in all_workloads(options.families):
        if options.quick and not workload.quick:
            continue
        patterns = options.only or ["*"]
        if any(fnmatch.fnmatchcase(workload.name, pattern) for pattern in patterns):
            yield workload


def measured(
    workload: Workload,
    *,
    seconds: float,
    vllm: bool,
    process: str = "own",
    makers: Mapping[str, arms.Maker] | None = None,
) -> dict[str, Any]:
    """One row.

    Raises:
        Refused: An arm's result differs from what it claims to be, or it fails.
    """
    machine.give_back()
    case = arms.Case(workload, vllm=vllm)
    mode = torch.enable_grad() if workload.grad else torch.inference_mode()
    with mode:
        runs = dict(arms.runs_of(case, makers))
        for name, run in runs.items():
            try:
                difference = run.difference()
            except Exception as error:
                raise Refused(f"{name}: {type(error).__name__}: {error}") from error
            if difference is not None:
                raise Refused(f"{name}: {difference}")
        row = _described(case, process)
        if workload.group == "slices":
            groups = (runs["mmcollate"].result or runs["mmcollate"].call)()
            row["is_view"] = arms.shares_memory(case, groups)
            del groups
        del case.groups  # the results that were compared
        calls = {name: run.call for name, run in runs.items()}
        with _quiet_collector():
            row |= _timed(calls, workload, case.nbytes, seconds * workload.weight)
    row["targets"] = targets.of_row(row)
    return row


def steady(seconds: float, *, vllm: bool) -> list[dict[str, Any]]:
    """Times of mmcollate's for many sizes of metadata, measured by turns: a machine that slows down
    slows all of them."""
    cases = {
        (n, count): arms.Case(metadata(n, count), vllm=vllm)
        for n, count in itertools.product((4, 16, 64), (2, 6, 12, 24))
    }
    with torch.inference_mode(), _quiet_collector():
        made = {
            f"{n} x {count}": arms.ARMS["mmcollate"](case) for (n, count), case in cases.items()
        }
        calls = {name: run.call for name, run in made.items() if run is not None}
        # Few long turns: in short ones, what the other sizes left in the caches would count.
        order = random.Random(0)
        samples = measure.interleaved(calls, seconds=3 * seconds, rounds=15, order=order)
    return [
        {"n": n, "fields": count, "us": [x * 1e6 for x in measure.quartiles(times)]}
        for (n, count), times in zip(cases, samples.seconds.values(), strict=True)
    ]


def _described(case: arms.Case, process: str) -> dict[str, Any]:
    workload = case.workload
    return {
        "name": workload.name if process == "own" else f"{workload.name}@{process}",
        "title": workload.title,
        "group": workload.group,
        "n": workload.n,
        "fields": len(case.plain[0]) if case.plain else 0,
        "outputs": case.outputs,
        "bytes": case.nbytes,
        "condition": {**workload.condition(), "process": process},
    }


def _timed(
    calls: Mapping[str, Callable[[], Any]], workload: Workload, nbytes: int, seconds: float
) -> dict[str, Any]:
    order = random.Random(workload.name)
    flush = _flush() if workload.cold else None
    shift = _shift(nbytes, order) if SHIFTED[0] <= nbytes < SHIFTED[1] else None
    samples = measure.interleaved(
        calls, seconds=seconds, before=flush, each_round=shift, order=order
    )
    tails: dict[str, list[float]] = {}
    medians = {name: measure.quartiles(times)[1] for name, times in samples.seconds.items()}
    few = workload.cold or workload.group == "families"
    tailed = {} if few else {name: calls[name] for name in report.TAILED if name in calls}
    if tailed and sum(medians[x] for x in tailed) * measure.LEAST_FOR_P99 < seconds / 2:
        tails = measure.single_calls(tailed, seconds=seconds / 2, order=order)
    told: dict[str, Any] = {}
    for name, times in samples.seconds.items():
        tail = measure.p99(tails.get(name, []))
        told[name] = {
            "us": [x * 1e6 for x in measure.quartiles(times)],
            "p99_us": None if tail is None else tail * 1e6,
            "calls_a_round": samples.repeats[name],
        }
    ratios = {
        targets.key(base, other): list(measure.ratio(samples.seconds[base], samples.seconds[other]))
        for base, other in targets.ratios_of(list(calls))
    }
    return {"rounds": samples.rounds, "arms": told, "ratios": ratios}


def _shift(nbytes: int, order: random.Random) -> Callable[[], None]:
    """Gives the arms other places in the heap than in the round before."""
    kept: list[torch.Tensor] = []

    def shift() -> None:
        kept.clear()
        # Nobody touches it.
        kept.append(torch.empty(order.randrange(1, 2 * nbytes), dtype=torch.uint8))

    return shift


def _flush() -> Callable[[], None]:
    """Overwrites what the caches hold."""
    memory = torch.zeros(FLUSH_BYTES, dtype=torch.uint8)

    def flush() -> None:
        memory.add_(1)

    return flush


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """What is there already is not searched again and again by the collector of garbage; what the
    arms leave is."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run_children(figures: dict[str, Any], names: Sequence[str], seconds: float) -> None:
    """Adds what needs a process of its own."""
    if large := [name for name in PRELOADED_ROWS if name in names]:
        for allocator in targets.PRELOADED:
            library = machine.library_of(allocator)
            if library is None:
                package = machine.ALLOCATORS[allocator][1]
                note = f"{allocator} is not installed: apt-get install {package}"
                figures["notes"].append(note)
                print(note, flush=True)
            else:
                _add(figures, allocator, large, seconds, {"LD_PRELOAD": str(library)})
    if large := [name for name in WARM_ROWS if name in names]:
        warm = {"MMCOLLATE_WARM_MAX_MB": str(WARM_MAX_MB)}
        _add(figures, targets.WARM, large, seconds, warm)
    if large := [name for name in THREAD_ROWS if name in names]:
        _add(figures, targets.THREADS, large, seconds, {"MMCOLLATE_THREADS": "2"})
    if any(name.startswith(("images/", "metadata/")) for name in names):
        try:
            figures["memory"] = memory.in_child()
        except subprocess.CalledProcessError as error:
            figures["notes"].append(f"memory was not measured: {_last_line(error.stderr)}")
            print(figures["notes"][-1], flush=True)


def _add(
    figures: dict[str, Any],
    process: str,
    names: Sequence[str],
    seconds: float,
    variables: Mapping[str, str],
) -> None:
    """The rows again, in a child with these environment variables."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        only = [word for name in names for word in ("--only", name)]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "mmcollate", "bench", *only),
                *("--process", process, "--seconds", str(seconds), "--json", str(file)),
            ],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if not file.exists():
            note = f"{process}: the child failed: {_last_line(done.stderr)}"
            figures["notes"].append(note)
            print(note, flush=True)
            return
        theirs = json.loads(file.read_text())
    if process in targets.PRELOADED and theirs["machine"]["allocator"] != process:
        figures["notes"].append(f"{process} was preloaded, but is not there")
        return
    figures["refused"] += theirs["refused"]
    for row in theirs["rows"]:
        figures["rows"].append(row)
        print(report.line(row), flush=True)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]
