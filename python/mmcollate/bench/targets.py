"""What is wanted of each row, and whether it was found."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmcollate.bench import measure

Row = Mapping[str, Any]

FULL = {1: 8.0, 4: 10.0, 16: 10.0, 64: 10.0, 256: 10.0}
"""Metadata, grouped and batched: times as fast as vLLM, by number of items."""

BATCH = {1: 8.0, 4: 9.0, 16: 6.0, 64: 5.0, 256: 4.5}
"""Metadata, batched alone. What is left is mostly the walk, which no way of copying shortens."""

PER_LEAF_NS, PER_OUTPUT_NS = 110.0, 400.0

PRELOADED = ("tcmalloc", "jemalloc")
WARM = "warm pool"
THREADS = "2 threads"

MEGA = 1_000_000


def target(
    what: str, wanted: str, found: float | None, *, met: bool, shown: str = "", limit: str = ""
) -> Row:
    """One figure beside its target, and beside the same figure of what does the bare minimum."""
    return {
        "what": what,
        "wanted": wanted,
        "found": found,
        "shown": shown,
        "met": met,
        "limit": limit,
    }


def key(base: str, other: str) -> str:
    """The name of a ratio: how many times as fast as ``base`` the ``other`` is."""
    return f"{other} over {base}"


def ratios_of(arms: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The pairs of arms whose ratio is told."""
    pairs = [
        ("vllm", "vllm again"),
        ("vllm", "mmcollate"),
        ("vllm batch", "mmcollate batch"),
        ("torch", "mmcollate"),
        ("default_collate", "mmcollate"),
        ("memcpy", "mmcollate"),
        ("memcpy huge pages", "mmcollate"),
        ("memcpy warm", "mmcollate"),
        ("memcpy", "vllm"),
        *((base, arm) for base in ("vllm", "vllm batch") for arm in LIMITS),
        ("vllm", "mmcollate packed"),
        ("u8 pack", "mmcollate packed"),
        ("tensordict", "mmcollate packed"),
        ("memcpy", "mmcollate packed"),
        ("u8 pack", "views"),
    ]
    return (pair for pair in pairs if pair[0] in arms and pair[1] in arms)


LIMITS = {
    "torch": "plain torch",
    "memcpy huge pages": "bare copy into huge pages",
    "memcpy warm": "bare copy into a warm block",
    "views": "torch's tensors alone",
}
"""Arms that do what no collator can leave out, and nothing else."""


def of_row(row: Row) -> list[Row]:
    """The targets of one row, as far as its arms were there."""
    return [found for rule in _RULES for found in rule(row)]


def _at_least(
    row: Row, base: str, other: str, wanted: float, what: str, limit: str = ""
) -> Iterator[Row]:
    found = row["ratios"].get(key(base, other))
    bare = row["ratios"].get(key(base, limit))
    if found is not None:
        middle = found[1]
        yield target(
            what,
            f">= {wanted:g}x",
            middle,
            met=middle >= wanted,
            shown=times(middle),
            limit=f"{LIMITS[limit]}: {times(bare[1])}" if bare else "",
        )


def _no_slower(row: Row) -> Iterator[Row]:
    """At least equal, as far as noise can tell: the lower quartile of A/A."""
    found = row["ratios"].get(key("vllm", "mmcollate"))
    noise = row["ratios"].get(key("vllm", "vllm again"))
    if found is not None and noise is not None:
        least = min(noise[0], 1.0)
        wanted = f">= {least:.2f}x (1 within A/A)"
        yield target("vLLM", wanted, found[1], met=found[1] >= least, shown=times(found[1]))


def is_plain(row: Row) -> bool:
    """Whether a row was measured in inference mode, hot, aligned and pageable."""
    usual = {
        "mode": "inference mode",
        "caches": "hot caches",
        "alignment": "aligned",
        "memory": "pageable",
    }
    return bool(row["condition"] == {**usual, "process": row["condition"]["process"]})


def _metadata(row: Row) -> Iterator[Row]:
    if row["group"] == "metadata" and is_plain(row) and row["n"] in FULL:
        yield from _at_least(row, "vllm", "mmcollate", FULL[row["n"]], "vLLM", "torch")
        yield from _at_least(
            row, "vllm batch", "mmcollate batch", BATCH[row["n"]], "vLLM, batch alone", "torch"
        )


def _large(row: Row) -> Iterator[Row]:
    if row["group"] != "images" or not is_plain(row):
        return
    process, nbytes = row["condition"]["process"], row["bytes"]
    if process in PRELOADED:
        yield from _no_slower(row)
    elif row["n"] == 1:
        yield from _at_least(row, "vllm", "mmcollate", 5.0, "vLLM", "torch")
    elif nbytes > 32 * MEGA:
        wanted, limit = (6.0, "memcpy warm") if process == WARM else (4.0, "memcpy huge pages")
        yield from _at_least(row, "vllm", "mmcollate", wanted, "vLLM", limit)
    elif MEGA <= nbytes <= 20 * MEGA:
        yield from _at_least(row, "memcpy", "mmcollate", 0.9, "the bare copy")


def _lists(row: Row) -> Iterator[Row]:
    if row["group"] == "ragged" and row["n"] >= 32 and "mmcollate" in row["arms"]:
        per_leaf = row["arms"]["mmcollate"]["us"][1] * 1e3 / (row["n"] * row["fields"])
        yield target(
            "per item and field",
            f"<= {PER_LEAF_NS:g} ns",
            per_leaf,
            met=per_leaf <= PER_LEAF_NS,
            shown=f"{per_leaf:.0f} ns",
        )
    if row["group"] == "ragged-small":
        yield from _at_least(row, "vllm", "mmcollate packed", 2.5, "vLLM's list", "views")
    if row["group"] == "leaves":
        yield from _at_least(row, "u8 pack", "mmcollate packed", 7.0, "packing as bytes", "views")


def _nothing(row: Row) -> Iterator[Row]:
    if row["group"] == "text":
        yield from _no_slower(row)


def _slices(row: Row) -> Iterator[Row]:
    if row["group"] == "slices":
        is_view = row["is_view"]
        yield target("a view", "yes", float(is_view), met=is_view, shown="yes" if is_view else "no")


_RULES: list[Callable[[Row], Iterator[Row]]] = [_metadata, _large, _lists, _nothing, _slices]


def fitted(steady: Sequence[Row]) -> Row:
    """The steady cost: ``time = leaf * items * fields + output * outputs + call``, over metadata of
    several items, by least squares of the relative errors."""
    points = [((one["n"] * one["fields"], one["fields"], 1), one["us"][1] * 1e3) for one in steady]
    leaf, output, call = measure.fit(points)
    worst = max(
        abs(sum(c * x for c, x in zip((leaf, output, call), xs, strict=True)) / y - 1)
        for xs, y in points
    )
    return {
        "leaf_ns": leaf,
        "output_ns": output,
        "call_ns": call,
        "points": [dict(one) for one in steady],
        "worst_relative_error": worst,
        "targets": [
            target(
                "per item and field",
                f"<= {PER_LEAF_NS:g} ns",
                leaf,
                met=leaf <= PER_LEAF_NS,
                shown=f"{leaf:.0f} ns",
            ),
            target(
                "per output tensor",
                f"<= {PER_OUTPUT_NS:g} ns",
                output,
                met=output <= PER_OUTPUT_NS,
                shown=f"{output:.0f} ns",
            ),
        ],
    }


def of_sizes(rows: Sequence[Row]) -> list[Row]:
    """Whether neighbouring slices take the same time at every size: within a quarter, for other
    grids and other caches are left after larger items were made."""
    slices = [row for row in rows if row["group"] == "slices" and "mmcollate" in row["arms"]]
    if len(slices) < 2:
        return []
    small, large = (f(slices, key=lambda row: row["bytes"]) for f in (min, max))
    factor = large["arms"]["mmcollate"]["us"][1] / small["arms"]["mmcollate"]["us"][1]
    what = f"time of {large['bytes'] / MEGA:.0f} MB over {small['bytes'] / MEGA:.0f} MB"
    return [target(what, "<= 1.25x", factor, met=factor <= 1.25, shown=times(factor))]


def of_memory(rows: Sequence[Row]) -> list[Row]:
    """Whether a batch takes no more memory at its peak than vLLM's, and leaves nothing behind."""
    found: list[Row] = []
    for row in rows:
        ours, theirs, spare = row["mmcollate"], row.get("vllm"), row["spare"]
        if row["what"] == "growth":
            scale, unit = 2**10, "KiB"
            limit = max(spare, theirs or 0)
        elif theirs is None:
            continue
        else:
            scale, unit = 2**20, "MiB"
            limit = theirs + spare
        wanted, shown = (f"{x / scale:.1f} {unit}" for x in (limit, ours))
        found.append(target(row["title"], f"<= {wanted}", ours, met=ours <= limit, shown=shown))
    return found


def times(value: float) -> str:
    """A ratio as text."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 2 else 2}f}x"
