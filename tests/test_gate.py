"""The instruction-count gate tells slower code from noise, and from other versions of what runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benches" / "gate.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gate"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


gate: Any = load()

KEY = {
    "rustc": "1.95.0 (5980)",
    "valgrind": "valgrind-3.19.0",
    "machine": "x86_64",
    "python": "3.11.7",
    "torch": "2.13.0",
    "exchange table": "True",
}
BASELINE = gate.Report(
    KEY, {"one": gate.Counts(100_000, 10_000), "two": gate.Counts(400_000, 50_000)}
)


def measured(case: str, counts: tuple[int, int], **key: str) -> Any:
    return gate.Report({**KEY, **key}, {**BASELINE.cases, case: gate.Counts(*counts)})


def said(now: Any) -> tuple[bool, str]:
    passed, lines = gate.compare(BASELINE, now)
    return passed, "\n".join(lines)


def test_the_same_counts_pass() -> None:
    assert said(BASELINE) == (True, "gate: passed: 2 cases within 2%")


def test_less_than_the_limit_passes() -> None:
    passed, text = said(measured("one", (101_900, 10_190)))
    assert passed
    assert "FAILED" not in text and "moved" not in text


def test_more_than_the_limit_fails_with_the_case_and_both_counts() -> None:
    passed, text = said(measured("two", (408_400, 60_000)))
    assert not passed
    assert (
        "gate: FAILED: two: 408,400 instructions in all, baseline 400,000 (+2.1%)"
        in text.splitlines()
    )
    assert "one" not in text and "moved" not in text
    assert "make gate-renew" in text


def test_what_was_won_is_said_and_passes() -> None:
    passed, text = said(measured("one", (97_900, 10_000)))
    assert passed
    assert "moved: one: 97,900 instructions in all, baseline 100,000 (-2.1%)" in text
    assert "make gate-renew" in text


def test_work_that_moved_into_the_core_passes_if_all_in_all_is_not_more() -> None:
    passed, text = said(measured("one", (99_000, 12_000)))
    assert passed
    assert "moved: one: 12,000 instructions of its own, baseline 10,000 (+20.0%)" in text
    assert "make gate-renew" in text


def test_a_case_that_only_one_has_fails() -> None:
    more = measured("three", (100, 10))
    passed, lines = gate.compare(BASELINE, more)
    assert not passed
    assert "gate: FAILED: three: not in the baseline" in lines
    passed, lines = gate.compare(more, BASELINE)
    assert not passed
    assert "gate: FAILED: three: not measured" in lines


@pytest.mark.parametrize("name", ["valgrind", "python", "torch"])
def test_with_another_version_only_the_core_itself_is_compared(name: str) -> None:
    passed, text = said(measured("one", (300_000, 10_190), **{name: "other"}))
    assert passed
    assert f"gate: {name} is other, the baseline's {KEY[name]}" in text
    assert "only instructions in the core's own code are compared" in text
    passed, text = said(measured("one", (100_000, 10_210), **{name: "other"}))
    assert not passed
    assert "FAILED: one: 10,210 instructions of its own, baseline 10,000 (+2.1%)" in text


@pytest.mark.parametrize("name", ["rustc", "machine", "exchange table"])
def test_without_anything_to_compare_it_says_so(name: str) -> None:
    passed, text = said(measured("one", (300_000, 30_000), torch="3", **{name: "other"}))
    assert passed
    assert "gate: torch is 3, the baseline's 2.13.0" in text
    last = text.splitlines()[-1]
    assert last == f"gate: not compared: no baseline for {name} other: make gate-renew"


def test_a_component_that_one_does_not_know_is_a_difference() -> None:
    known = replace(BASELINE, key={**KEY, "libc": "glibc 2.36"})
    for before, after in ((BASELINE, known), (known, BASELINE)):
        _, lines = gate.compare(before, after)
        assert lines[0].startswith("gate: libc is ") and "unknown" in lines[0]
        assert "only instructions in the core's own code" in lines[1]


def test_costs_are_counted_where_they_arise() -> None:
    part = """\
desc: Timerange: Basic block 0 - 9
desc: Trigger: Client Request: 2 images
positions: line
events: Ir
ob=(1) /lib/libpython.so
fl=(1) ???
fn=(1) call
0 70
cob=(2) /here/_core.so
cfn=(2) ours
calls=3 0
0 5000
+4 7
ob=(2)
fn=(2)
0 400
* 30
cob=(1)
cfn=(1)
calls=1 0
* 9000
- 3
totals: 510
"""
    label, costs = gate.self_costs(part)
    assert label == "2 images"
    assert costs == {"/lib/libpython.so": 77, "/here/_core.so": 433}


def test_costs_are_told_apart_by_whose_they_are() -> None:
    costs = gate.Counter(
        {
            "/here/_core.so": 4_000,
            "/there/_core.so": 1,
            "/torch/lib/libtorch_cpu.so": 3_000,
            "/torch/lib/libtorch_python.so": 500,
            "/torch/lib/libc10.so": 100,
            "/lib/libpython3.11.so.1.0": 2_000,
            "/bin/python3.11": 90,
            "/lib/libc.so.6": 700,
            "???": 9,
        }
    )
    counts = gate.by_library(costs, "/here/_core.so", 10)
    assert counts == gate.Counts(all=1_040, own=400, torch=360, python=209)


def test_what_torch_alone_takes_is_shown_and_not_compared() -> None:
    floors = {"one": gate.Counts(90_000, 0)}
    with_floor = replace(BASELINE, floors=floors)
    assert gate.read(json.dumps(gate.asdict(with_floor))) == with_floor
    one, two = gate.table(with_floor).splitlines()[1:]
    assert one.split()[-1] == "90,000" and "90,000" not in two
    more = replace(BASELINE, floors={"one": gate.Counts(99_000, 0)})
    assert gate.compare(with_floor, more)[0] and gate.compare(with_floor, BASELINE)[0]


def test_the_compiler_is_read_from_the_library(tmp_path: Path) -> None:
    library = tmp_path / "core.so"
    library.write_bytes(b"\x7fELF\0rustc version 1.95.0 (5980 2026-04-14)\0GCC: 12\0")
    assert gate.rustc_of(library) == "1.95.0 (5980 2026-04-14)"
    library.write_bytes(b"\x7fELF\0GCC: 12\0")
    assert gate.rustc_of(library) == "unknown"


def test_without_valgrind_it_says_that_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate.shutil, "which", lambda name: None if name == "valgrind" else name)
    monkeypatch.setattr(sys, "argv", ["gate.py"])
    assert gate.main() == 0
    skipped = "gate: skipped: valgrind is not installed (apt-get install valgrind)\n"
    assert capsys.readouterr().out == skipped
    monkeypatch.setattr(sys, "argv", ["gate.py", "--renew"])
    assert gate.main() == 1


@pytest.mark.parametrize(("now", "code"), [((101_000, 10_000), 0), ((103_000, 10_000), 1)])
def test_the_exit_code_follows_the_comparison(
    now: tuple[int, int],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(gate, "why_not", lambda: "")
    monkeypatch.setattr(gate, "measure", lambda: measured("one", now))
    monkeypatch.setattr(gate, "BASELINE", tmp_path / "gate.json")
    gate.BASELINE.write_text(json.dumps(gate.asdict(BASELINE)))
    monkeypatch.setattr(sys, "argv", ["gate.py"])
    assert gate.main() == code
    monkeypatch.setattr(sys, "argv", ["gate.py", "--renew"])
    assert gate.main() == 0
    monkeypatch.setattr(sys, "argv", ["gate.py"])
    assert gate.main() == 0


def test_the_stored_baseline_can_be_read() -> None:
    baseline = gate.read(SCRIPT.with_name("gate.json").read_text())
    assert set(gate.OWN_KEY) <= baseline.key.keys()
    for case in baseline.cases.values():
        assert min(case.own, case.torch, case.python) > 0
        assert case.all > case.own + case.torch + case.python
    assert baseline.floors.keys() <= baseline.cases.keys()
    assert all(floor.own == 0 < floor.torch for floor in baseline.floors.values())
