"""Fills the generated tables in the docs: `make docs`.

Each stands between `<!-- NAME -->` and `<!-- end -->`. The shares come from what the engine tests
wrote under .cache/engine, the copies from running vLLM's functions; a table whose source is not
there stays as it is.
"""

import argparse
import importlib.util
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

from mmcollate.explanation import REASONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/how-it-works.md", "docs/staging.md"]
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


def figures() -> str | None:
    """The benchmark's table, as `make bench` wrote it."""
    path = ROOT / "docs" / "figures.json"
    if not path.exists():
        return None
    rows = ["| items | vLLM | mmcollate | speedup (middle half) | A/A |", "|---|---|---|---|---|"]
    for name, found in json.loads(path.read_text())["workloads"].items():
        low, middle, high = found["speedup"]
        rows.append(
            f"| {name} | {found['vllm_us']:.1f} us | {found['mmcollate_us']:.1f} us |"
            f" {middle:.1f}x ({low:.1f}-{high:.1f}) | {found['a_a'][1]:.2f} |"
        )
    return "\n".join(rows)


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


TABLES = {"reasons": reasons, "shares": shares, "figures": figures, "copies": copies}


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
