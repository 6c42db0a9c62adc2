"""What an audit found as text, as JSON, as one HTML page, and as the reason for a run to fail."""

import dataclasses
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mmcollate.audit.findings import Event, EventKind, FieldReport, ModelReport, Site

VERSION = 1
"""Of the shape of the JSON."""

CONDITIONS: dict[str, str] = {
    "mismatch": "a tensor on the CPU meets one on the device in one operation",
    "sync": "the host reads a field that is on the device",
    "could-be-kept": "a field goes to the device, and only the host reads it",
    "restored": "a kept field is copied to the device by the model",
    "blocking": "a field is copied to or from the device, and the host waits for it",
    "unused": "nothing reads a field",
    "error": "a forward ended early",
    "any": "any of these",
}
"""On what :func:`fails` fails."""

_PLURALS: dict[EventKind, tuple[str, str]] = {
    "mismatch": ("mismatch", "mismatches"),
    "sync": ("sync", "syncs"),
    "restored": ("copy", "copies"),
    "host_read": ("host read", "host reads"),
    "device_use": ("device use", "device uses"),
}


# Conditions


def fails(reports: Iterable[ModelReport], conditions: Iterable[str]) -> list[str]:
    """One line for each thing found that one of the conditions names; empty if there is none.

    Raises:
        ValueError: There is no such condition; the message has all of :data:`CONDITIONS`.
    """
    asked = set(conditions)
    for name in sorted(asked - set(CONDITIONS)):
        raise ValueError(f"no condition {name!r}; there are {', '.join(map(repr, CONDITIONS))}")
    found = (pair for report in reports for pair in _failures(report))
    return [line for condition, line in found if asked & {condition, "any"}]


def _failures(report: ModelReport) -> Iterator[tuple[str, str]]:
    """What is found of any condition, with the condition's name."""
    for field in report.fields:
        what = f"{report.model}: {field.modality} {field.field}"
        by_kind = {event.kind: event for event in reversed(field.events)}
        if field.verdict == "wrong" or "mismatch" in by_kind:
            yield "mismatch", f"{what}: mismatch: {field.reason}"
        if "sync" in by_kind:
            yield "sync", f"{what}: sync: {_at(by_kind['sync'])}"
        if field.verdict in ("could be kept", "restored", "unused"):
            condition = field.verdict.replace(" ", "-")
            yield condition, f"{what}: {field.verdict}: {field.reason}"
        for event in [e for e in field.events if e.non_blocking is False][:1]:
            yield "blocking", f"{what}: blocking: {_at(event)}"
    for event in own_mismatches(report):
        yield "mismatch", f"{report.model}: mismatch of no field: {_at(event)}"
    if report.error is not None:
        yield "error", f"{report.model}: error: {report.error}"


def own_mismatches(report: ModelReport) -> list[Event]:
    """Mismatches of tensors that stem from no field: the model's own."""
    return [event for event in report.other_events if event.kind == "mismatch"]


def _at(event: Event) -> str:
    return f"{event.operation} at {_place(event.site)}" if event.site else event.operation


def _place(site: Site) -> str:
    return f"{site.file}:{site.line}"


# JSON


def to_json(reports: Iterable[ModelReport]) -> str:
    """All that is in the reports; :func:`from_json` reads it."""
    content = {"version": VERSION, "reports": [dataclasses.asdict(x) for x in reports]}
    return json.dumps(content, indent=1) + "\n"


def from_json(text: str) -> list[ModelReport]:
    """The reports of which :func:`to_json` made this.

    Raises:
        ValueError: This is something else, or of another version.
    """
    try:
        content = json.loads(text)
        version = content["version"]
        if version == VERSION:
            return [_report(x) for x in content["reports"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not the JSON of an audit: {type(error).__name__}: {error}") from error
    raise ValueError(f"JSON of version {version}; this mmcollate reads version {VERSION}")


def _report(x: Mapping[str, Any]) -> ModelReport:
    fields = tuple(_field(field) for field in x["fields"])
    return ModelReport(**{**x, "fields": fields, "other_events": _events(x["other_events"])})


def _field(x: Mapping[str, Any]) -> FieldReport:
    return FieldReport(**{**x, "events": _events(x["events"])})


def _events(events: Iterable[Mapping[str, Any]]) -> tuple[Event, ...]:
    def event(x: Mapping[str, Any]) -> Event:
        stack = tuple(Site(**site) for site in x["stack"])
        return Event(**{**x, "fields": tuple(x["fields"]), "stack": stack})

    return tuple(event(x) for x in events)


# What all forms say


def ran(report: ModelReport) -> str:
    """How often the model ran, and on what: ``3 forwards, torch 2.13.0``."""
    forwards = f"{report.num_forwards} forward{'' if report.num_forwards == 1 else 's'}"
    return ", ".join([forwards, *(f"{name} {x}" for name, x in report.versions.items())])


def flag(field: FieldReport) -> str:
    """Where the field's flag puts it: ``cpu`` or ``device``."""
    return "cpu" if field.keep_on_cpu else "device"


def seen(events: Sequence[Event]) -> str:
    """What was seen, counted: ``2 syncs, 1 copy (48 bytes, 1 of them blocking)``."""
    parts = []
    for kind, names in _PLURALS.items():
        of_kind = [event for event in events if event.kind == kind]
        count = sum(event.count for event in of_kind)
        if count:
            parts.append(f"{count} {names[count > 1]}{_moved(of_kind)}")
    return ", ".join(parts) or "nothing"


def _moved(events: Sequence[Event]) -> str:
    moved = sum(event.num_bytes for event in events)
    blocking = sum(event.count for event in events if event.non_blocking is False)
    said = [f"{moved:,} bytes"] if moved else []
    said += [f"{blocking} of them blocking"] if blocking else []
    return f" ({', '.join(said)})" if said else ""


def finding_events(field: FieldReport) -> list[Event]:
    """The events that someone may want to do something about."""
    return [event for event in field.events if event.kind in ("mismatch", "sync", "restored")]


def is_finding(field: FieldReport) -> bool:
    """Whether there is something to say of the field: its flag does not fit, or it costs time."""
    return field.verdict != "right" or bool(finding_events(field))


def _headline(event: Event) -> str:
    said = [event.detail] if event.detail else []
    said += [f"{event.num_bytes:,} bytes"] if event.num_bytes else []
    if event.non_blocking is not None:
        said.append("non-blocking" if event.non_blocking else "blocking")
    kind = event.kind.replace("_", " ")
    return f"{kind} x{event.count}  {event.operation}  {', '.join(said)}".rstrip()


_NO_LINE = "no line of the model's own code"
_HEAD = ("modality", "field", "kind", "flag", "seen", "verdict")


def _cells(field: FieldReport) -> tuple[str, ...]:
    head = (field.modality, field.field, field.kind, flag(field))
    return (*head, seen(field.events), field.verdict)


# Text


def text(reports: Iterable[ModelReport], *, everything: bool = False) -> str:
    """A table for each model, and under it what its findings are made of.

    Args:
        everything: Whether to show the events of fields that are right, and those of tensors that
            stem from no field and are no mismatch, too.
    """
    return "\n".join(_text(report, everything) for report in reports)


def _text(report: ModelReport, everything: bool) -> str:
    parts = [f"{report.model}: {ran(report)}"]
    if report.error is not None:
        parts.append(f"ended early: {report.error}")
    parts.append(_table([_HEAD, *map(_cells, report.fields)]))
    for field in report.fields:
        if everything or is_finding(field):
            events = field.events if everything else finding_events(field)
            head = f"{field.field} ({field.modality}): {field.verdict}\n  {field.reason}"
            parts.append("\n".join([head, *map(_event_text, events)]))
    others = report.other_events if everything else own_mismatches(report)
    if others:
        parts.append("\n".join(["of no field", *map(_event_text, others)]))
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _event_text(event: Event) -> str:
    sites = [f"    {_place(site)} in {site.function}: {site.source}" for site in event.stack]
    return "\n".join([f"  {_headline(event)}", *(sites or [f"    {_NO_LINE}"])])


# HTML

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left;
  vertical-align: top; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--soft); margin: .2rem 0 .6rem; overflow-x: auto; padding: .4rem .6rem; }
details { margin: .4rem 0; } summary { cursor: pointer; }
.verdict { border-radius: .3rem; padding: .05rem .4rem; white-space: nowrap; }
.right { background: #2a82; } .wrong { background: #d335; } .error { color: #c22; }
.could-be-kept, .unused { background: #d904; } .restored { background: #48c4; }
"""


def to_html(reports: Iterable[ModelReport]) -> str:
    """One page that needs no other file: the tables, and the events folded under each field."""
    body = "\n".join(_section(report) for report in reports)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>Placement audit</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>Placement audit</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(report: ModelReport) -> str:
    parts = [f"<h2>{html.escape(report.model)}</h2>", f"<p>{html.escape(ran(report))}</p>"]
    if report.error is not None:
        parts.append(f'<p class="error">Ended early: {html.escape(report.error)}</p>')
    head = "".join(f"<th>{cell}</th>" for cell in _HEAD)
    rows = "\n".join(_row(field) for field in report.fields)
    parts.append(f"<table>\n<tr>{head}</tr>\n{rows}\n</table>")
    parts += [_details(field) for field in report.fields]
    if report.other_events:
        events = "\n".join(map(_event_html, report.other_events))
        opened = " open" if own_mismatches(report) else ""
        parts.append(f"<details{opened}><summary>of no field</summary>\n{events}\n</details>")
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _row(field: FieldReport) -> str:
    *cells, _ = (f"<td>{html.escape(cell)}</td>" for cell in _cells(field))
    return f"<tr>{''.join(cells)}<td>{_badge(field)}</td></tr>"


def _badge(field: FieldReport) -> str:
    name = html.escape(field.verdict)
    return f'<span class="verdict {name.replace(" ", "-")}">{name}</span>'


def _details(field: FieldReport) -> str:
    opened = " open" if is_finding(field) else ""
    name = f"<code>{html.escape(field.field)}</code> ({html.escape(field.modality)})"
    events = "\n".join(map(_event_html, field.events))
    return (
        f"<details{opened}><summary>{name} {_badge(field)} {html.escape(field.reason)}</summary>\n"
        f"{events}\n</details>"
    )


def _event_html(event: Event) -> str:
    sites = [f"{_place(site)} in {site.function}\n    {site.source}" for site in event.stack]
    lines = html.escape("\n".join(sites or [_NO_LINE]))
    return f"<div>{html.escape(_headline(event))}</div>\n<pre>{lines}</pre>"
