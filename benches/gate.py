"""Count the instructions of fixed batches and compare them with a baseline: `make gate`.

callgrind counts what `gate_loop.py` runs. Two counts of a case decide: all instructions of a call,
Python and torch included, and those in the core's own code. From run to run the first moved by up
to 0.6 %, the second by none, so that a case which takes over 2 % more is slower by its code and not
by noise. Kept beside them is where the others are, and what torch alone takes for the same work.

The first count depends on the versions of all that runs, the second on the compiler alone. The
baseline names what it was measured with; where that differs, the gate says in what, and compares
the counts that can still be compared. `make gate-renew` makes a new baseline.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "gate.json"
LIMIT = 0.02
FLOOR = "torch alone: "
"""Starts the labels of what `gate_loop.py` runs for comparison."""
OWN_KEY = ("rustc", "machine", "exchange table")
"""What the instructions of the core's own code depend on."""

REQUESTS = """
#include <valgrind/callgrind.h>
int running(void) { return RUNNING_ON_VALGRIND; }
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(void) { CALLGRIND_STOP_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *label) { CALLGRIND_DUMP_STATS_AT(label); }
"""
"""What the loop asks of callgrind while it runs; its headers come with valgrind."""


@dataclass(frozen=True)
class Counts:
    """Instructions a call."""

    all: int
    own: int
    """In the core's code."""
    torch: int = 0
    python: int = 0


@dataclass(frozen=True)
class Report:
    key: dict[str, str]
    """What the counts depend on."""
    cases: dict[str, Counts]
    floors: dict[str, Counts] = field(default_factory=dict)
    """By case: the same results by torch alone, written by hand. Not compared."""


def read(text: str) -> Report:
    report = json.loads(text)
    cases, floors = (
        {name: Counts(**counts) for name, counts in report.get(part, {}).items()}
        for part in ("cases", "floors")
    )
    return Report(report["key"], cases, floors)


def compare(baseline: Report, now: Report) -> tuple[bool, list[str]]:
    """Whether no case takes more instructions than it may, and what to say about it."""
    other = [name for name in {**baseline.key, **now.key} if differs(name, baseline, now)]
    lines = [
        f"gate: {name} is {now.key.get(name, 'unknown')},"
        f" the baseline's {baseline.key.get(name, 'unknown')}"
        for name in other
    ]
    for name in OWN_KEY:
        if name in other:
            what = f"{name} {now.key.get(name, 'unknown')}"
            return True, [*lines, f"gate: not compared: no baseline for {what}: make gate-renew"]
    if other:
        lines.append("gate: so only instructions in the core's own code are compared")

    failed, moved = [], []
    for name in {**baseline.cases, **now.cases}:
        before, after = baseline.cases.get(name), now.cases.get(name)
        if before is None or after is None:
            where = "in the baseline" if before is None else "measured"
            failed.append(f"gate: FAILED: {name}: not {where}")
            continue
        all_of_it = [] if other else [("in all", before.all, after.all)]
        # The first decides; code of the core that replaces more of others' is no failure.
        for at, (which, old, new) in enumerate([*all_of_it, ("of its own", before.own, after.own)]):
            said = f"{name}: {new:,} instructions {which}, baseline {old:,} ({new / old - 1:+.1%})"
            if at == 0 and new > old * (1 + LIMIT):
                failed.append(f"gate: FAILED: {said}")
                break
            if abs(new - old) > old * LIMIT:
                moved.append(f"gate: moved: {said}")
    lines += moved + failed
    if failed:
        lines.append("gate: if it is worth it: make gate-renew, and say why in the commit")
    elif moved:
        lines.append("gate: passed; make gate-renew keeps what was won, and what moved")
    else:
        lines.append(f"gate: passed: {len(now.cases)} cases within {LIMIT:.0%}")
    return not failed, lines


def differs(name: str, baseline: Report, now: Report) -> bool:
    return baseline.key.get(name) != now.key.get(name)


def table(report: Report) -> str:
    heads = ("in all", "of its own", "torch's", "Python's", "torch alone")
    lines = [f"{'instructions a call':40}" + "".join(f"{head:>13}" for head in heads)]
    for name, case in report.cases.items():
        counts = [case.all, case.own, case.torch, case.python]
        counts += [report.floors[name].all] if name in report.floors else []
        lines.append(f"{name:40}" + "".join(f"{count:13,}" for count in counts))
    return "\n".join(lines)


def why_not() -> str:
    """Why nothing can be counted here, if so."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed (apt-get install valgrind)"
    if shutil.which("cc") is None:
        return "there is no C compiler (apt-get install gcc)"
    return ""


def measure() -> Report:
    with tempfile.TemporaryDirectory() as folder:
        requests, described = Path(folder, "requests.so"), Path(folder, "described.json")
        compiler: list[str | Path] = [
            "cc",
            "-shared",
            "-fPIC",
            "-O1",
            "-x",
            "c",
            "-",
            "-o",
            requests,
        ]
        subprocess.run(compiler, input=REQUESTS, text=True, check=True)
        ours = {k: v for k, v in os.environ.items() if not k.startswith("MMCOLLATE_")}
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--vgdb=no"]
        output = f"--callgrind-out-file={folder}/out"
        loop: list[str | Path] = [sys.executable, HERE / "gate_loop.py", requests, described]
        done = subprocess.run(
            [*valgrind, output, *loop],
            env={**ours, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout}\ngate: FAILED: the loop ended with {done.returncode}")
        loop_said = json.loads(described.read_text())
        cases, floors = {}, {}
        for part in sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:])):
            label, by_object = self_costs(part.read_text())
            counts = by_library(by_object, loop_said["core"], loop_said["calls"])
            if label in loop_said["cases"]:
                cases[label] = counts
            elif label in loop_said["floors"]:
                floors[label.removeprefix(FLOOR)] = counts
    assert list(cases) == loop_said["cases"], "callgrind wrote other parts than were asked for"
    assert len(floors) == len(loop_said["floors"]), "callgrind left floors out"
    assert all(case.own for case in cases.values()), "nothing was counted in the core's own code"
    version = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True)
    key = {"rustc": rustc_of(Path(loop_said["core"])), "valgrind": version.stdout.strip()}
    return Report(key | loop_said["key"], cases, floors)


def by_library(by_object: Counter[str], core: str, calls: int) -> Counts:
    """Instructions a call, from those by file."""
    found: Counter[str] = Counter()
    for path, count in by_object.items():
        name = Path(path).name
        if path == core:
            found["own"] += count
        elif name.startswith(("libtorch", "libc10")):
            found["torch"] += count
        elif name.startswith(("libpython", "python")):
            found["python"] += count
        found["all"] += count
    return Counts(
        **{name: round(found[name] / calls) for name in ("all", "own", "torch", "python")}
    )


def self_costs(part: str) -> tuple[str, Counter[str]]:
    """The label of one part of callgrind's output, and instructions by the file they are in."""
    names: dict[str, str] = {}
    costs: Counter[str] = Counter()
    label, current, callee_follows = "", "", False
    for line in part.splitlines():
        # A name is spelt out once, and from then on a number: for callers and callees alike.
        if named := re.match(r"(c?)ob=\((\d+)\) ?(.*)", line):
            callee, number, name = named.groups()
            if name:
                names[number] = name
            if not callee:
                current = names[number]
        elif line.startswith("desc: Trigger: Client Request: "):
            label = line.removeprefix("desc: Trigger: Client Request: ")
        elif line.startswith("calls="):
            callee_follows = True
        elif re.match(r"[\d+*-]", line):
            # The line after "calls=" is what the callee took, which is counted there.
            if not callee_follows:
                costs[current] += int(line.split()[1])
            callee_follows = False
    return label, costs


def rustc_of(library: Path) -> str:
    """The compiler that a library names in its ELF comment; stripping keeps it."""
    found = re.search(rb"rustc version ([^\0]+)", library.read_bytes())
    return found[1].decode() if found else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", action="store_true", help="make the counts the new baseline")
    options = parser.parse_args()
    if reason := why_not():
        print(f"gate: skipped: {reason}")
        return int(options.renew)
    now = measure()
    print(table(now))
    if options.renew:
        BASELINE.write_text(json.dumps(asdict(now), indent=1) + "\n")
        print(f"gate: wrote benches/{BASELINE.name}")
        return 0
    passed, lines = compare(read(BASELINE.read_text()), now)
    print("\n".join(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
