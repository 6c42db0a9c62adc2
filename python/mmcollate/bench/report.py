"""The figures as text, JSON and plots."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmcollate.bench import targets

VERSION = 1
"""Of the shape of the JSON."""

Figures = Mapping[str, Any]
Row = Mapping[str, Any]

MAIN = ("vllm", "vllm again", "mmcollate")
TAILED = ("vllm", "mmcollate", "vllm batch", "mmcollate batch")
"""Arms whose calls are also timed one by one."""


def header(figures: Figures) -> str:
    """Where and how it is measured."""
    m = figures["machine"]
    versions = [f"{name} {m[name]}" for name in ("torch", "vllm", "numpy", "mmcollate") if m[name]]
    lines = [
        f"{m['cpu']}, {m['cores']} cores, L2 {m['l2']}, L3 {m['l3']}, huge pages {m['huge_pages']}",
        f"{m['kernel']}, {m['python']}, {', '.join(versions)}, allocator {m['allocator']},"
        f" load {m['load']}",
        "torch at 1 thread; inference mode, hot caches, aligned pageable sources if not said"
        " otherwise; items are ordinary tensors",
        "medians; in brackets the middle half of the rounds' ratios; A/A is vLLM against itself",
        *figures["notes"],
    ]
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    """One row, over as many lines as its arms need."""
    arms, parts = row["arms"], []
    for name in ("vllm", "mmcollate"):
        if name in arms:
            parts.append(f"{name} {duration(arms[name]['us'][1])}")
    speedup = row["ratios"].get(targets.key("vllm", "mmcollate"))
    if speedup:
        parts.append(f"{targets.times(speedup[1])} ({speedup[0]:.2f}-{speedup[2]:.2f})")
        parts.append(f"A/A {row['ratios'][targets.key('vllm', 'vllm again')][1]:.2f}")
    lines = [f"{row['name']:30}" + "  ".join(f"{part:20}" for part in parts).rstrip()]
    others = [
        f"{name} {duration(arm['us'][1])}{_over_base(row, name)}"
        for name, arm in arms.items()
        if name not in MAIN
    ]
    if others:
        lines.append("    " + " | ".join(others))
    tails = [f"{k} {duration(v['p99_us'])}" for k, v in arms.items() if v["p99_us"]]
    if tails:
        lines.append("    p99: " + " | ".join(tails))
    lines += [f"    {verdict(found)}" for found in row["targets"]]
    return "\n".join(lines)


def _over_base(row: Row, arm: str) -> str:
    """How many times as fast as its part of vLLM, of an arm of mmcollate's."""
    base = "vllm batch" if arm.endswith("batch") else "vllm"
    found = row["ratios"].get(targets.key(base, arm)) if arm.startswith("mmcollate") else None
    return f" ({targets.times(found[1])})" if found else ""


def footer(figures: Figures) -> str:
    """What is said of all rows together."""
    lines = [""]
    if figures["fit"]:
        lines.append(fit_line(figures["fit"]))
        lines += [f"    {verdict(found)}" for found in figures["fit"]["targets"]]
    lines += [f"    slices: {verdict(found)}" for found in figures["across"]]
    lines += [f"    memory: {verdict(found)}" for found in targets.of_memory(figures["memory"])]
    found = list(all_targets(figures))
    met = sum(one["met"] for _, one in found)
    if found:
        lines.append(f"{met} of {len(found)} targets met, in {figures['seconds']} s")
    if figures["stolen"] > 0.01:
        lines.append(
            f"{figures['stolen']:.0%} of the cores' time went to other guests of this host"
        )
    lines += [f"refused: {one['name']}: {one['why']}" for one in figures["refused"]]
    return "\n".join(lines)


def fit_line(fit: Mapping[str, Any]) -> str:
    """The steady cost, and how it was found."""
    return (
        f"Kept fields of 4 to 64 items: {fit['leaf_ns']:.0f} ns per item and field"
        f" + {fit['output_ns']:.0f} ns per output tensor + {fit['call_ns']:.0f} ns per call, by"
        f" least squares of the relative errors over {len(fit['points'])} sizes, measured by turns"
        f" (the worst is off by {fit['worst_relative_error']:.0%})"
    )


def all_targets(figures: Figures) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every target with the title of its row."""
    for row in figures["rows"]:
        process = row["condition"]["process"]
        title = row["title"] if process == "own" else f"{row['title']}, {process}"
        for found in row["targets"]:
            yield title, found
    for found in (figures["fit"] or {}).get("targets", []):
        yield "metadata, steady cost", found
    for found in figures["across"]:
        yield "neighbouring slices", found
    for found in targets.of_memory(figures["memory"]):
        yield "memory", found


def verdict(found: Mapping[str, Any]) -> str:
    """A target as text."""
    limit = f" ({found['limit']})" if found["limit"] else ""
    return f"{found['what']}: {found['shown']}, wanted {found['wanted']}: {met(found)}{limit}"


def met(found: Mapping[str, Any]) -> str:
    """Whether a target is met."""
    return "met" if found["met"] else "NOT MET"


def duration(us: float) -> str:
    """Microseconds as text of three digits or so."""
    if us >= 10_000:
        return f"{us / 1e3:.1f} ms"
    return f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def write_json(figures: Figures, file: Path) -> None:
    """The figures, rounded to what they can tell; each row on a line of its own."""
    parts = []
    for name, value in _rounded(figures).items():
        rows = isinstance(value, list) and value
        text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if rows else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


# Plots

COLOURS = {
    "vllm": "#c44e52",
    "vllm batch": "#dd8452",
    "mmcollate": "#1f77b4",
    "mmcollate batch": "#64b5cd",
    "torch": "#8c8c8c",
    "default_collate": "#937860",
    "memcpy": "#222222",
    "memcpy warm": "#222222",
    "memcpy huge pages": "#222222",
}

LABELS = {
    "vllm": "vLLM",
    "vllm batch": "vLLM, batch alone",
    "mmcollate batch": "mmcollate, batch alone",
    "torch": "torch by hand",
    "memcpy": "bare copy, memory of malloc",
    "memcpy huge pages": "bare copy, fresh huge pages",
    "memcpy warm": "bare copy, warm block",
}


def draw(figures: Figures, folder: Path) -> list[Path]:
    """Draws what the rows allow; returns the files. Without matplotlib it says so and draws
    nothing."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed; pip install 'mmcollate[bench]'")
        return []
    matplotlib.use("Agg")
    # The same figures make the same files.
    matplotlib.rcParams["svg.hashsalt"] = "mmcollate"
    folder.mkdir(parents=True, exist_ok=True)
    usual = [row for row in figures["rows"] if is_usual(row)]
    files: list[Path] = []
    metadata = [row for row in usual if row["group"] == "metadata"]
    if len(metadata) > 1:
        files += _draw_metadata(metadata, folder)
    images = [row for row in usual if row["group"] == "images" and row["n"] > 1]
    warm = [row for row in figures["rows"] if row["condition"]["process"] == targets.WARM]
    if len({row["bytes"] for row in images}) > 1:
        files += _draw_images(images, warm, folder)
    return files


def is_usual(row: Row) -> bool:
    """Whether a row was measured in inference mode, hot, aligned and pageable, in the process
    itself."""
    return bool(targets.is_plain(row) and row["condition"]["process"] == "own")


def _draw_metadata(rows: Sequence[Row], folder: Path) -> list[Path]:
    figure, axes = _axes("Collating 12 small fields kept on the CPU", "items", "microseconds")
    arms = ("vllm", "vllm batch", "default_collate", "torch", "mmcollate", "mmcollate batch")
    for arm in arms:
        points = sorted((row["n"], row["arms"][arm]["us"]) for row in rows if arm in row["arms"])
        if points:
            _line(axes, arm, points)
    axes.set_xticks([row["n"] for row in rows], [str(row["n"]) for row in rows])
    return _save(figure, axes, folder / "metadata")


def _draw_images(rows: Sequence[Row], warm: Sequence[Row], folder: Path) -> list[Path]:
    figure, axes = _axes("Joining images into one batch", "megabytes", "GB/s")
    lines = [("vllm", "vllm", rows), ("torch", "torch", rows), ("mmcollate", "mmcollate", rows)]
    lines.append(("mmcollate batch", "mmcollate", warm))
    names = {"mmcollate batch": "mmcollate, warm pool"}
    styles = {"memcpy": "--", "memcpy huge pages": "-.", "memcpy warm": ":"}
    lines += [(arm, arm, rows) for arm in styles]
    for colour, arm, some in lines:
        points = sorted(_bandwidths(some, arm).items())
        if points:
            style = styles.get(arm, "-")
            _line(axes, colour, points, names.get(colour, ""), style)
    return _save(figure, axes, folder / "images")


def _bandwidths(rows: Sequence[Row], arm: str) -> dict[float, list[float]]:
    """Quartiles of GB/s by megabytes; of the rows of one size that with the median speed."""
    found: dict[float, list[list[float]]] = {}
    for row in rows:
        if arm in row["arms"]:
            speeds = [row["bytes"] / us / 1e3 for us in reversed(row["arms"][arm]["us"])]
            found.setdefault(round(row["bytes"] / 1e6, 1), []).append(speeds)
    return {
        size: sorted(some, key=lambda speeds: speeds[1])[len(some) // 2]
        for size, some in found.items()
    }


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="major", alpha=0.3)
    return figure, axes


def _line(axes: Any, colour: str, points: Any, name: str = "", style: str = "-") -> None:
    """A line through the medians, in a band of the quartiles."""
    xs = [x for x, _ in points]
    marker = "o" if style == "-" else ""
    kwargs = {"color": COLOURS[colour], "linestyle": style, "marker": marker, "markersize": 4}
    axes.plot(xs, [ys[1] for _, ys in points], label=name or LABELS.get(colour, colour), **kwargs)
    band = [[ys[0] for _, ys in points], [ys[2] for _, ys in points]]
    axes.fill_between(xs, *band, color=COLOURS[colour], alpha=0.15, linewidth=0)


def _save(figure: Any, axes: Any, path: Path) -> list[Path]:
    axes.legend(fontsize="small")
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        metadata = {"Date": None} if file.suffix == ".svg" else {"Software": None}
        figure.savefig(file, dpi=120, metadata=metadata)
    return files
