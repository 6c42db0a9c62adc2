"""The benchmarks publish nothing that was not checked, and say what they measured. No time is
asserted."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mmcollate
import pytest
import torch
from mmcollate import cli
from mmcollate.bench import arms, machine, measure, memory, report, suite, targets, workloads

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ROOT / "tests" / "data" / "field_sets.json"
HAS_VLLM = arms.has_vllm()
ALL = {workload.name: workload for workload in workloads.all_workloads(FAMILIES)}
SMALL = [
    name
    for name, x in ALL.items()
    if x.group not in ("images", "slices", "device", "families", "ragged")
]
OF_FAMILIES = [name for name, x in ALL.items() if x.group == "families" and x.n <= 3]

RIGHT = arms.ARMS["mmcollate"]


def rows_of(name: str, makers: dict[str, arms.Maker] | None = None) -> dict[str, Any]:
    return suite.measured(ALL[name], seconds=0.0, vllm=HAS_VLLM, makers=makers)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Of a few rows, as the command makes them."""
    names = ["metadata/4", "metadata/16", "images/2x256", "images/8x256", "slices/1MB", "text/0"]
    rows = [rows_of(name) for name in names]
    return {
        "version": report.VERSION,
        "machine": machine.describe(),
        "notes": arms.missing(),
        "rows": rows,
        "refused": [],
        "memory": [],
        "fit": targets.fitted(suite.steady(0.0, vllm=HAS_VLLM)),
        "across": targets.of_sizes(rows),
        "seconds": 1,
        "stolen": 0.0,
    }


# What is compared


@pytest.mark.parametrize("name", [*SMALL, "images/1x256", "images/2x256", "slices/1MB", "ragged/8"])
def test_every_arm_of_a_row_has_the_bits_that_it_claims(name):
    row = rows_of(name)
    expected = set(ALL[name].arms)
    if not HAS_VLLM:
        expected -= {"vllm", "vllm again", "vllm batch"}
    if importlib.util.find_spec("tensordict") is None:
        expected -= {"tensordict"}
    assert set(row["arms"]) == expected
    assert row["rounds"] >= 5


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_every_family_is_collated_alike(name):
    assert "mmcollate" in rows_of(name)["arms"]


def test_unaligned_cold_and_pinned_rows_are_what_they_say():
    unaligned = arms.Case(dataclasses.replace(ALL["images/2x256"], shift=2), vllm=False)
    assert {leaf.data_ptr() % 64 for leaf in unaligned.large} == {2}
    usual = arms.Case(ALL["images/2x256"], vllm=False)
    assert {leaf.data_ptr() % 64 for leaf in usual.large} == {0}
    pinned = arms.Case(dataclasses.replace(ALL["images/2x256"], pinned=True), vllm=False)
    assert all(arms._fake().is_pinned(leaf) for leaf in pinned.large)
    assert not any(arms._fake().is_pinned(leaf) for leaf in usual.large)


def wrong(change: Any) -> arms.Maker:
    """mmcollate's arm, with something in its result changed."""

    def make(case: arms.Case) -> arms.Run:
        right = RIGHT(case)
        assert right is not None

        def result() -> Any:
            groups = (right.result or right.call)()
            change(groups[0][1])
            return groups

        return arms.Run(result, right.wanted)

    return make


def other_bit(batch: dict[str, Any]) -> None:
    batch["grid_3"].view(-1)[-1] += 1


def other_dtype(batch: dict[str, Any]) -> None:
    batch["grid_3"] = batch["grid_3"].to(torch.int32)


def other_shape(batch: dict[str, Any]) -> None:
    batch["grid_3"] = batch["grid_3"].T


def other_order(batch: dict[str, Any]) -> None:
    batch["grid_0"] = batch.pop("grid_0")


def a_list(batch: dict[str, Any]) -> None:
    batch["grid_3"] = list(batch["grid_3"])


@pytest.mark.parametrize("change", [other_bit, other_dtype, other_shape, other_order, a_list])
def test_a_wrong_arm_is_refused(change):
    with pytest.raises(suite.Refused, match=r"^mmcollate: result\[0\]\[1\]"):
        rows_of("metadata/4", {**arms.ARMS, "mmcollate": wrong(change)})


def test_an_arm_that_fails_is_refused():
    def fails(_: dict[str, Any]) -> None:
        raise MemoryError("none left")

    with pytest.raises(suite.Refused, match=r"^mmcollate: MemoryError: none left"):
        rows_of("metadata/4", {**arms.ARMS, "mmcollate": wrong(fails)})


def test_a_refused_row_is_not_published_and_the_command_fails(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(suite, "_set_num_threads", lambda _: None)
    monkeypatch.setitem(arms.ARMS, "mmcollate", wrong(other_bit))
    file = tmp_path / "figures.json"
    only = ["--only", "metadata/4", "--seconds", "0.01", "--process", "test"]
    assert cli.main(["bench", *only, "--json", str(file)]) == 1
    written = json.loads(file.read_text())
    assert written["rows"] == []
    assert [one["name"] for one in written["refused"]] == ["metadata/4"]
    assert "REFUSED metadata/4: mmcollate: result[0][1]['grid_3']" in capsys.readouterr().out


@pytest.mark.parametrize("arm", ["mmcollate packed", "u8 pack", "tensordict"])
def test_packed_leaves_are_compared_one_by_one(arm):
    case = arms.Case(ALL["ragged-small/64"], vllm=HAS_VLLM)
    with torch.inference_mode():
        run = arms.ARMS[arm](case)
        if run is None:
            pytest.skip(f"{arm} does not apply here")
        assert run.difference() is None
        # What a leaf holds is what comes out: a bit that was turned since is seen.
        before = copy.deepcopy(run.wanted())
        case.packed[30].view(torch.uint8)[-1] ^= 1
        found = dataclasses.replace(run, wanted=lambda: before).difference()
    assert found is not None and "[30]: other bits" in found


@pytest.mark.parametrize("arm", ["memcpy", "memcpy warm", "memcpy huge pages"])
def test_the_bare_copies_copy(arm):
    case = arms.Case(ALL["images/8x256"], vllm=HAS_VLLM)
    run = arms.ARMS[arm](case)
    assert run is not None and run.difference() is None
    before = run.wanted()
    case.large[3].view(torch.uint8)[-1, -1] ^= 1
    assert dataclasses.replace(run, wanted=lambda: before).difference() == "result: other bits"


# Statistics


def test_quartiles_of_known_numbers():
    assert measure.quartiles([5, 1, 3, 2, 4]) == (2, 3, 4)
    assert measure.quartiles([1, 2]) == (1.25, 1.5, 1.75)
    assert measure.quantile([7], 0.99) == 7
    with pytest.raises(ValueError, match="no values"):
        measure.quantile([], 0.5)


def test_a_ratio_is_that_of_the_same_round():
    # The machine became four times slower midway; the ratio of medians would be 2.5 / 1.25.
    assert measure.ratio([2, 2, 8, 8], [1, 1, 4, 4]) == (2, 2, 2)
    assert measure.ratio([3, 1], [1, 1]) == (1.5, 2, 2.5)
    with pytest.raises(ValueError, match="zip"):
        measure.ratio([1, 2], [1])


def test_the_99th_percentile_needs_calls():
    calls = [float(i) for i in range(1001)]
    assert measure.p99(calls) == 990
    assert measure.p99(calls[: measure.LEAST_FOR_P99 - 1]) is None


def test_the_fit_finds_the_costs_it_was_made_of():
    rows = [((n * f, f, 1), 90 * n * f + 400 * f + 2000) for n in (4, 16, 64) for f in (2, 12, 24)]
    assert measure.fit(rows) == pytest.approx([90, 400, 2000])


class Ticks:
    """A clock that functions move on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def function(self, name: str, took: float) -> Any:
        def call() -> None:
            self.calls.append(name)
            self.now += took

        return call

    def __call__(self) -> float:
        return self.now


def test_turns_are_interleaved_and_each_takes_its_own_number_of_calls():
    ticks = Ticks()
    functions = {"slow": ticks.function("slow", 0.5), "fast": ticks.function("fast", 0.25)}
    found = measure.interleaved(
        functions, seconds=80, rounds=40, clock=ticks, order=random.Random(1)
    )
    assert found.seconds["slow"] == [0.5] * found.rounds
    assert found.seconds["fast"] == [0.25] * found.rounds
    assert found.repeats == {"slow": 2, "fast": 4}
    # Two calls first, to warm it and to see how long it takes; then both orders occur.
    turns = "".join(name[0] for name in ticks.calls[4:]).replace("ss", "S").replace("ffff", "F")
    assert {turns[i : i + 2] for i in range(0, len(turns), 2)} == {"SF", "FS"}
    assert len(turns) == 2 * found.rounds


def test_rounds_end_with_the_time_but_not_before_the_least():
    ticks = Ticks()
    functions = {"a": ticks.function("a", 1.0)}
    assert measure.interleaved(functions, seconds=0, clock=ticks).rounds == 5
    assert measure.interleaved(functions, seconds=8, rounds=40, clock=ticks).rounds == 9


def test_what_comes_before_a_call_is_not_timed():
    ticks = Ticks()
    before = ticks.function("before", 100.0)
    functions = {"a": ticks.function("a", 1.0)}
    found = measure.interleaved(functions, seconds=1e6, rounds=6, before=before, clock=ticks)
    assert found.seconds["a"] == [1.0] * 6
    assert found.repeats == {"a": 1}
    assert ticks.calls == ["a", "a", *["before", "a"] * 6]


def test_what_comes_before_a_round_is_not_timed():
    ticks = Ticks()
    shift = ticks.function("shift", 100.0)
    functions = {"a": ticks.function("a", 1.0)}
    found = measure.interleaved(functions, seconds=12, rounds=4, each_round=shift, clock=ticks)
    assert found.seconds["a"] == [1.0] * 4
    assert ticks.calls == ["a", "a", *["shift", "a", "a", "a"] * 4]


# Targets


def row(**changes: Any) -> dict[str, Any]:
    usual = {
        "name": "metadata/16",
        "title": "16 x 12 kept fields",
        "group": "metadata",
        "n": 16,
        "fields": 12,
        "outputs": 12,
        "bytes": 4608,
        "condition": {**ALL["metadata/16"].condition(), "process": "own"},
        "arms": {},
        "ratios": {},
    }
    return {**usual, **changes}


def test_a_target_is_met_by_the_median():
    for middle, met in ((9.99, False), (10.0, True)):
        ratios = {"mmcollate over vllm": [1.0, middle, 99.0]}
        [found] = targets.of_row(row(ratios=ratios))
        assert (found["wanted"], found["found"], found["met"]) == (">= 10x", middle, met)


def test_targets_are_of_the_usual_condition_alone():
    ratios = {"mmcollate over vllm": [1.0, 20.0, 99.0]}
    for changed in ({"grad": True}, {"cold": True}):
        under = ALL["metadata/16"].under(**changed)
        condition = {**under.condition(), "process": "own"}
        assert not targets.of_row(row(ratios=ratios, condition=condition))


@pytest.mark.parametrize(
    ("nbytes", "n", "process", "wanted"),
    [
        (19_300_000, 8, "own", [">= 0.9x"]),
        (77_000_000, 8, "own", [">= 4x"]),
        (77_000_000, 8, "warm pool", [">= 6x"]),
        (77_000_000, 8, "tcmalloc", [">= 0.95x (1 within A/A)"]),
        (77_000_000, 1, "own", [">= 5x"]),
        (600_000, 2, "own", []),
    ],
)
def test_what_is_wanted_of_a_large_batch(nbytes, n, process, wanted):
    ratios = {
        "mmcollate over vllm": [1.0, 5.0, 9.0],
        "vllm again over vllm": [0.95, 1.0, 1.1],
        "mmcollate over memcpy": [0.8, 0.91, 1.0],
    }
    condition = {**ALL["images/8x256"].condition(), "process": process}
    found = targets.of_row(
        row(group="images", n=n, bytes=nbytes, ratios=ratios, condition=condition)
    )
    assert [one["wanted"] for one in found] == wanted


def test_slices_are_views_or_the_target_is_missed():
    for is_view in (True, False):
        [found] = targets.of_row(row(group="slices", is_view=is_view))
        assert found["met"] is is_view


def test_memory_is_held_against_that_of_vllm():
    rows = [
        {"what": "peak", "title": "a", "spare": 10, "vllm": 100, "mmcollate": 110},
        {"what": "peak", "title": "b", "spare": 10, "vllm": 100, "mmcollate": 111},
        {"what": "growth", "title": "c", "spare": 10, "vllm": -5, "mmcollate": 11},
        {"what": "growth", "title": "d", "spare": 10, "mmcollate": 0},
        {"what": "peak", "title": "e", "spare": 10, "mmcollate": 0},
    ]
    assert [(x["what"], x["met"]) for x in targets.of_memory(rows)] == [
        ("a", True),
        ("b", False),
        ("c", False),
        ("d", True),
    ]


MEMORY_PROBE = """
from mmcollate.bench import memory
kept = []
def peak():
    x = bytearray(64 << 20)
    del x
def grows():
    kept.append(bytearray(b"x" * 4096))
def does_not():
    bytearray(b"x" * 4096)
print(memory._forked(lambda: memory.peak_of(peak)))
print(memory._forked(lambda: memory.growth_of(grows, 5000)))
print(memory._forked(lambda: memory.growth_of(does_not, 5000)))
"""


def test_memory_at_the_peak_and_growth_are_seen():
    command = [sys.executable, "-c", MEMORY_PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, grows, does_not = map(int, done.stdout.split())
    # The kernel counts pages by batches, and not all at once.
    assert 63 << 20 <= peak < 66 << 20
    assert grows >= 5000 * 4096
    assert does_not <= memory.SPARE


# The report


def test_the_command_writes_figures_and_plots(tmp_path):
    file, plots = tmp_path / "figures.json", tmp_path / "plots"
    options = ["--quick", "--only", "metadata*", "--seconds", "0.1"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mmcollate", "bench", *options),
            *("--json", file, "--plots", plots),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["version"] == report.VERSION
    expected = [x.name for x in ALL.values() if x.group == "metadata" and x.quick]
    assert [row["name"] for row in figures["rows"]] == expected
    assert all(row["name"] in done.stdout for row in figures["rows"])
    assert figures["machine"]["cpu"] in done.stdout
    assert len(figures["fit"]["points"]) == 12
    assert {one["what"] for one in figures["fit"]["targets"]} == {
        "per item and field",
        "per output tensor",
    }
    pytest.importorskip("matplotlib")
    assert (plots / "metadata.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (plots / "metadata.svg").read_bytes()


def test_the_same_figures_make_the_same_plots(figures, tmp_path):
    pytest.importorskip("matplotlib")
    once, again = (report.draw(figures, tmp_path / name) for name in ("once", "again"))
    assert {file.name for file in once} == {
        f"{name}.{kind}" for name in ("metadata", "images") for kind in ("png", "svg")
    }
    for a, b in zip(once, again, strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_without_matplotlib_it_says_so(figures, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.draw(figures, tmp_path) == []
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_without_vllm_its_arms_are_left_out_by_name(monkeypatch):
    monkeypatch.setattr(arms, "has_vllm", lambda: False)
    assert "vLLM is not installed" in arms.missing()[0]
    without = suite.measured(ALL["metadata/4"], seconds=0.0, vllm=False)
    assert set(without["arms"]) == {"mmcollate", "mmcollate batch", "torch", "default_collate"}
    assert "mmcollate over torch" in without["ratios"]
    assert without["targets"] == []
    assert "mmcollate" in report.line(without)


@pytest.mark.parametrize("name", ["ragged-small/8", "padded-audio/2", "six-fields/8", "embeds/8"])
def test_the_reference_is_what_is_wanted_without_vllm(name):
    found = suite.measured(ALL[name], seconds=0.0, vllm=False)
    assert "mmcollate" in found["arms"] and "vllm" not in found["arms"]


def test_an_allocator_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr(machine, "LIBRARIES", ())
    assert machine.library_of("jemalloc") is None
    notes: dict[str, Any] = {"notes": [], "rows": [], "refused": []}
    monkeypatch.setattr(suite, "_add", lambda *_: None)
    monkeypatch.setattr(memory, "in_child", list)
    suite._run_children(notes, ["images/8x4096"], 0.0)
    assert "jemalloc is not installed: apt-get install libjemalloc2" in notes["notes"]
    assert "libtcmalloc-minimal4" in capsys.readouterr().out


def test_the_header_tells_the_machine():
    found = machine.describe()
    assert found["torch"] == torch.__version__.partition("+")[0]
    assert found["mmcollate"] == mmcollate.__version__
    assert found["cores"] >= 1 and found["cpu"] and found["kernel"]
    assert "glibc" in found["allocator"] or found["allocator"] in targets.PRELOADED


def test_list_names_the_rows(capsys):
    assert cli.main(["bench", "--list", "--only", "text/*"]) == 0
    assert capsys.readouterr().out == f"{'text/0':32}no items: a text-only step\n"
    assert cli.main(["bench", "--only", "nothing-like-it"]) == 2


def test_names_are_unique_and_every_arm_is_known():
    names = [workload.name for workload in workloads.all_workloads(FAMILIES)]
    assert len(names) == len(set(names)) == len(ALL)
    assert {arm for workload in ALL.values() for arm in workload.arms} == set(arms.ARMS)
    assert set(arms.MEANINGS) == set(arms.ARMS)
    assert {x.n for x in ALL.values() if x.group == "metadata"} == {1, 4, 16, 64, 256}
    families = json.loads(FAMILIES.read_text())["families"]
    assert sum(x.group == "families" for x in ALL.values()) == 2 * len(families) == 84


def test_quick_and_only_choose():
    options = argparse.Namespace(quick=True, only=["metadata*", "text*"], families=None)
    chosen = {workload.name for workload in suite.selected(options)}
    assert {"metadata/16", "text/0"} <= chosen
    assert "metadata/4" not in chosen and "images/8x1024" not in chosen


# Tables


def tables() -> ModuleType:
    path = ROOT / "docs" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_made_of_the_figures_alone(figures, tmp_path, monkeypatch):
    module = tables()
    file = tmp_path / "figures.json"
    report.write_json(figures, file)
    monkeypatch.setattr(module, "FIGURES", file)
    for name in module.OF_FIGURES:
        made = module.TABLES[name]()
        assert made == module.TABLES[name](), name
    table = module.TABLES["metadata"]()
    for one in figures["rows"]:
        assert (f"| {one['title']} |" in table) == (one["group"] == "metadata")


def test_a_table_shows_the_target_beside_the_figure(tmp_path, monkeypatch):
    module = tables()
    arms_of = {name: {"us": [90.0, 100.0, 110.0], "p99_us": None} for name in ("vllm", "mmcollate")}
    ratios = {"mmcollate over vllm": [9.0, 9.5, 10.5], "vllm again over vllm": [0.9, 1.0, 1.1]}
    one = row(arms=arms_of, ratios=ratios)
    one["targets"] = targets.of_row(one)
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"rows": [one], "fit": None, "across": [], "memory": []}))
    monkeypatch.setattr(module, "FIGURES", file)
    times = "| 16 x 12 kept fields | 100 us | 100 us | 9.5x (9.0-10.5) | 1.00 |"
    assert times in module.TABLES["figures"]()
    [line] = [x for x in module.TABLES["metadata"]().splitlines() if x.startswith(times)]
    assert line.endswith("| >= 10x: not met |")
