"""Fills the generated tables in the docs: `make docs`.

Each stands between `<!-- NAME -->` and `<!-- end -->`. The shares come from what the engine tests
wrote under .cache/engine, the copies from running vLLM's functions, the figures from what
`make bench` and `make bench-engine` wrote into docs; a table whose source is not there stays as it
is.
"""

import argparse
import importlib.util
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmcollate.bench import report, targets
from mmcollate.explanation import REASONS

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures.json"
ENGINE_FIGURES = ROOT / "docs" / "engine_figures.json"
GATE = ROOT / "benches" / "gate.json"
PAGES = ["README.md", "docs/how-it-works.md", "docs/performance.md", "docs/staging.md"]
WAYS = ["alias", "view", "list", "gather", "reference"]


def reasons() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in REASONS.items()]
    return "\n".join(["| reason | the field has |", "|---|---|", *rows])


def shares() -> str | None:
    """Fields by way, and the reasons of those that took the reference, for each engine run."""
    rows = []
    for path in sorted((ROOT / ".cache" / "engine").glob("*.json")):
        report = json.loads(path.read_text())
        runs = [report["runs"][name]["plugin"]["stats"] for name in ("A on", "B on")]
        counts = [sum(run["fields"][way] for run in runs) for way in WAYS]
        batches = sum(run["batches"] for run in runs)
        share = counts[-1] / sum(counts)
        rows.append(
            f"| {report['case']} | {batches} | {' | '.join(map(str, counts))} | {share:.0%} |"
        )
    if not rows:
        return None
    head = f"| model | batches | {' | '.join(WAYS)} | share of the reference |"
    return "\n".join([head, "|" + "---|" * (len(WAYS) + 3), *rows])


# What `make bench` wrote

Row = Mapping[str, Any]
IN_README = [
    *(f"metadata/{n}" for n in (1, 4, 16, 64, 256)),
    *(f"images/{name}" for name in ("1x1024", "2x256", "8x256", "8x1024", "8x4096")),
    *("slices/77MB", "ragged/8", "ragged/32"),
]


def measured() -> dict[str, Any] | None:
    """The figures; ``None`` if there are none, or none of this shape."""
    if not FIGURES.exists():
        return None
    found: dict[str, Any] = json.loads(FIGURES.read_text())
    return found if "rows" in found else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str | None:
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return (
        "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) if lines else None
    )


def time_of(row: Row, arm: str) -> str:
    return report.duration(row["arms"][arm]["us"][1]) if arm in row["arms"] else ""


def tail_of(row: Row, arm: str) -> str:
    tail = row["arms"].get(arm, {}).get("p99_us")
    return report.duration(tail) if tail else ""


def speedup(row: Row, base: str = "vllm", other: str = "mmcollate") -> str:
    found = row["ratios"].get(targets.key(base, other))
    if not found:
        return ""
    digits = 0 if found[1] >= 100 else 1 if found[1] >= 2 else 2
    return f"{targets.times(found[1])} ({found[0]:.{digits}f}-{found[2]:.{digits}f})"


def noise(row: Row) -> str:
    found = row["ratios"].get(targets.key("vllm", "vllm again"))
    return f"{found[1]:.2f}" if found else ""


def bandwidth(row: Row, arm: str) -> str:
    """GB/s."""
    return f"{row['bytes'] / row['arms'][arm]['us'][1] / 1e3:.1f}" if arm in row["arms"] else ""


def wanted(row: Row) -> str:
    """The row's targets, and whether they are met."""
    cells = []
    for one in row["targets"]:
        met = "met" if one["met"] else "not met"
        what = "" if one["what"] == "vLLM" else f"{one['what']} {one['shown']}, "
        cells.append(f"{what}{one['wanted']}: {met}")
    return "; ".join(cells)


def figures() -> str | None:
    """The rows of the README."""
    found = measured()
    if found is None:
        return None
    rows = {row["name"]: row for row in found["rows"]}
    head = ("items", "vLLM", "mmcollate", "speedup (middle half)", "A/A")
    return table(head, [_main(rows[name])[:-1] for name in IN_README if name in rows])


def _main(row: Row) -> list[str]:
    times = [time_of(row, arm) for arm in ("vllm", "mmcollate")]
    return [row["title"], *times, speedup(row), noise(row), wanted(row)]


def of_group(*groups: str, own: bool = True) -> list[Row]:
    """Rows of these groups, measured in the process itself or not."""
    found = measured() or {"rows": []}
    some = [row for row in found["rows"] if row["group"] in groups]
    return [row for row in some if (row["condition"]["process"] == "own") is own]


def metadata() -> str | None:
    head = ["items", "vLLM", "mmcollate", "speedup (middle half)", "A/A", "p99: vLLM", "mmcollate"]
    head += ["batch alone: vLLM", "mmcollate", "speedup", "torch", "default_collate", "target"]
    return table(
        head,
        [
            [
                *_main(row)[:-1],
                *(tail_of(row, arm) for arm in ("vllm", "mmcollate")),
                *(time_of(row, arm) for arm in ("vllm batch", "mmcollate batch")),
                speedup(row, "vllm batch", "mmcollate batch"),
                *(time_of(row, arm) for arm in ("torch", "default_collate")),
                wanted(row),
            ]
            for row in of_group("metadata")
        ],
    )


def images() -> str | None:
    arms = ("vllm", "torch", "mmcollate", "memcpy", "memcpy huge pages", "memcpy warm")
    head = ["items", "vLLM", "mmcollate", "speedup (middle half)", "A/A"]
    head += [
        "GB/s: vLLM",
        "torch",
        "mmcollate",
        "bare copy",
        "into huge pages",
        "into a warm block",
    ]
    head += ["target"]
    return table(
        head,
        [
            [
                *_main(row)[:-1],
                # One item is not copied.
                *(bandwidth(row, arm) if row["n"] > 1 else "" for arm in arms),
                wanted(row),
            ]
            for row in of_group("images")
        ],
    )


def others() -> str | None:
    """Neighbouring slices, sounds, mixed fields, lists, nothing."""
    groups = ("slices", "audio", "padded-audio", "six-fields", "embeds", "ragged", "text")
    head = ("items", "vLLM", "mmcollate", "speedup (middle half)", "A/A", "target")
    return table(head, map(_main, of_group(*groups)))


def packing() -> str | None:
    arms = ("vllm", "mmcollate packed", "u8 pack", "tensordict", "views", "memcpy")
    head = ("items", "vLLM's list", *arms[1:], "over vLLM's list", "over u8 pack", "target")
    return table(
        head,
        [
            [
                row["title"],
                *(time_of(row, arm) for arm in arms),
                *(speedup(row, base, "mmcollate packed") for base in ("vllm", "u8 pack")),
                wanted(row),
            ]
            for row in of_group("ragged-small", "leaves", "device")
        ],
    )


def allocators() -> str | None:
    """Large batches in processes of their own: another allocator, or with the warm pool."""
    head = ("items", "process", "vLLM", "mmcollate", "speedup (middle half)", "A/A", "target")
    rows = of_group("images", own=False)
    return table(
        head, [[row["title"], row["condition"]["process"], *_main(row)[1:]] for row in rows]
    )


def families() -> str | None:
    head = ("items", "vLLM", "mmcollate", "speedup (middle half)", "A/A")
    return table(head, [_main(row)[:-1] for row in of_group("families")])


def memory() -> str | None:
    found = (measured() or {}).get("memory")
    if not found:
        return None
    rows = []
    for row, one in _with_targets(found):
        scale, unit = (2**10, "KiB") if row["what"] == "growth" else (2**20, "MiB")
        values = [row.get(arm) for arm in ("vllm", "mmcollate")]
        cells = ["" if x is None else f"{x / scale:.1f} {unit}" for x in values]
        verdict = f"{one['wanted']}: {'met' if one['met'] else 'not met'}"
        rows.append([row["title"], *cells, verdict])
    return table(("items", "vLLM", "mmcollate", "target"), rows)


def _with_targets(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    both = [(row, targets.of_memory([row])) for row in rows]
    return [(row, found[0]) for row, found in both if found]


def verdicts() -> str | None:
    """Every target beside what was found, and what the bare minimum reaches."""
    found = measured()
    if found is None:
        return None
    head = ("items", "what", "found", "target", "met", "the limit here")
    return table(
        head,
        [
            [
                title,
                one["what"],
                one["shown"],
                one["wanted"],
                "yes" if one["met"] else "no",
                one["limit"],
            ]
            for title, one in report.all_targets(found)
        ],
    )


def steady() -> str | None:
    """The fitted cost of metadata."""
    fit = (measured() or {}).get("fit")
    return None if not fit else report.fit_line(fit)


def engine() -> str | None:
    """Parts of real requests with mmcollate on and off, as `make bench-engine` wrote them."""
    if not ENGINE_FIGURES.exists():
        return None
    rows = []
    for case, found in json.loads(ENGINE_FIGURES.read_text())["cases"].items():
        for part, one in found["parts"].items():
            low, middle, high = one["speedup"]
            collation = [one["collation"][arm] for arm in ("vllm", "mmcollate")]
            shares = [f"{x['ms'][1]:.2f} ms ({x['share'][1]:.1%})" for x in collation if x["calls"]]
            rows.append(
                [
                    case,
                    part,
                    *(f"{one['ms'][arm][1]:.1f} ms" for arm in ("vllm", "mmcollate")),
                    f"{middle:.2f}x ({low:.2f}-{high:.2f})",
                    f"{one['a_a'][1]:.2f}",
                    " / ".join(shares) or "none",
                ]
            )
    head = ["requests", "part", "vLLM", "mmcollate", "speedup (middle half)", "A/A"]
    return table([*head, "collation in it: vLLM / mmcollate"], rows)


def instructions() -> str:
    """Of the gate's cases: whose instructions a call takes, and how many torch alone takes."""
    baseline = json.loads(GATE.read_text())
    rows = []
    for name, counts in baseline["cases"].items():
        if name.startswith("collate: "):
            continue
        parts = [counts[part] for part in ("own", "torch", "python")]
        floor = baseline["floors"].get(name)
        cells = [counts["all"], *parts, counts["all"] - sum(parts)]
        alone = [f"{floor['all']:,}" if floor else ""]
        rows.append([name, *(f"{count:,}" for count in cells), *alone])
    head = ("batch", "in all", "the core", "torch", "Python", "C library", "torch alone")
    return table(head, rows) or ""


def machine() -> str | None:
    found = (measured() or {}).get("machine")
    rows = [[name.replace("_", " "), str(value)] for name, value in (found or {}).items() if value]
    return table(("where", ""), rows)


OF_FIGURES: dict[str, Callable[[], str | None]] = {
    "figures": figures,
    "metadata": metadata,
    "steady": steady,
    "images": images,
    "others": others,
    "packing": packing,
    "allocators": allocators,
    "families": families,
    "memory": memory,
    "targets": verdicts,
    "machine": machine,
    "engine": engine,
    "instructions": instructions,
}


def copies_of(family: str, name: str, n: int) -> tuple[int, int]:
    """Copies to the device for a batch of ``n`` items of one of the tests' families: vLLM's, and
    those that a fake device counts."""
    import torch
    from families import fields_of, items_of_set
    from mmcollate.integrations import vllm as plugin
    from mmcollate.reference import iter_leaves
    from mmcollate.testing import FakeDevice
    from vllm_items import from_plain

    items = from_plain(items_of_set(family, name, n), fields_of(family))
    device = FakeDevice()
    for _ in plugin.group_and_batch_mm_items(items, device=device, pin_memory=True):
        device.synchronize()
    theirs = 0
    for _, batch in plugin.originals().group_and_batch_mm_items(items):
        # Each tensor that the engine has reduced on the host is pinned and copied by itself.
        bound = [value for k, value in batch.items() if not items[0][k].field.keep_on_cpu]
        theirs += sum(isinstance(x, torch.Tensor) and x.nbytes > 0 for x in iter_leaves(bound))
    return theirs, device.copies


def copies() -> str | None:
    """Copies to the device per batch: vLLM's, and staging's."""
    if importlib.util.find_spec("vllm") is None:
        return None
    sys.path.append(str(ROOT / "tests"))
    from families import SETS

    rows, same = [], defaultdict(int)
    for family, name in SETS:
        (one, our_one), (eight, our_eight) = (copies_of(family, name, n) for n in (1, 8))
        counts = f"{one} / {our_one} | {eight} / {our_eight}"
        if (one, eight) != (our_one, our_eight):
            rows.append(f"| {family} | {name} | {counts} |")
        else:
            same[counts] += 1
    more = sorted(same.items(), key=lambda x: -x[1])
    rows += [f"| {count} other sets | | {counts} |" for counts, count in more]
    head = "| family | set of fields | 1 item: vLLM / staged | 8 items: vLLM / staged |"
    return "\n".join([head, "|---|---|---|---|", *rows])


TABLES = {"reasons": reasons, "shares": shares, **OF_FIGURES, "copies": copies}


def filled(text: str) -> str:
    """The page with its tables as their sources have them now."""

    def fill(match: re.Match[str]) -> str:
        table = TABLES[match["name"]]()
        return match[0] if table is None else f"<!-- {match['name']} -->\n\n{table}\n\n<!-- end -->"

    names = "|".join(TABLES)
    return re.sub(rf"<!-- (?P<name>{names}) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page would change")
    options = parser.parse_args()
    stale = []
    for name in PAGES:
        page = ROOT / name
        if not page.exists():
            continue
        text = page.read_text()
        if filled(text) != text:
            stale.append(name)
            if not options.check:
                page.write_text(filled(text))
    if options.check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
