"""Writes docs/placement.md from docs/placement.json: `python docs/placement.py`.

With `--renew` docs/placement.json is made first, of the audits that `tests/test_audit_vllm.py` left
under .cache/audit. What vLLM declares for families that are not run here is in
tests/data/field_sets.json.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmcollate.audit import report as forms
from mmcollate.audit.findings import Event, FieldReport, ModelReport, Site

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "docs" / "placement.json"
PAGE = ROOT / "docs" / "placement.md"
AUDITS = ROOT / ".cache" / "audit"
DECLARED = ROOT / "tests" / "data" / "field_sets.json"

RUN_AS = {
    "gemma4": "gemma4",
    "idefics3": "idefics3_smolvlm",
    "internvl": "internvl",
    "llavanext": "llava_next_llava_onevision",
    "mistral3": "mistral3",
    "qwen25vl": "qwen2_5_vl",
    "qwen25vl_embeds": "qwen2_5_vl",
    "qwen3asr": "qwen3_asr",
    "transformers_llavanext": "transformers_backend",
    "ultravox": "ultravox",
}
"""What is run here, and the family under which its fields are declared."""

INTRO = """# The placement contract

Where each field of a model's input lives, what its code does with it, and whether the two fit.
*cpu* is a field that vLLM keeps (`keep_on_cpu`), *device* one that it sends to the accelerator.

The first part is **observed**, with {versions}: the real engine ran
each model on made-up items (one, two of one size, two of different sizes) and on the requests of
the test suite, and `mmcollate audit` ran the model's own code on the same batches with
[virtual devices](#how-it-is-observed). The second part is only **declared**: what the field
configurations of vLLM's sources say.

Generated from `docs/placement.json` by `docs/placement.py`; a test holds the two together.
"""

HOW = """## How it is observed

Tensors hold their real data on the CPU and say that they are on `cuda:0`: all weights, and the
batches of fields that are not kept. Whatever a GPU would have refused (**mismatch**), waited for
(**sync**) or copied (**copy**) is recorded with the line of the model's code, and every result
remembers the fields from which it stems. A verdict is

| verdict | the field is |
|---|---|
| right | where its readers are; the host may still wait for what comes of it |
| restored | kept, and copied to the device by the model itself |
| could be kept | on the device, and only the host reads it |
| wrong | kept, and a device tensor meets it; or not kept, and the host needs it |
| unused | read by nothing |

What is seen is what these inputs made the code do, on the CPU's branches of vLLM's own layers. To
see a model of your own:

```console
MODEL=… python -m mmcollate audit $MODEL --html audit.html
```
"""


FINDINGS = """## What is left to do in stock vLLM

No kept field meets a device tensor in any of these runs. What remains:

1. **Transformers backend, LLaVA-NeXT: `image_sizes` could be kept.** Its field is not flagged, as
   only counts and grids are (`_get_mm_fields_config` in `transformers/multimodal.py`), and
   nothing but `tolist()` reads it, two or three times an image. The flag alone is not enough:
   `_get_features` copies every kept tensor to the device again, and the host then waits as before.
   It would have to leave out what the model reads on the host.
2. **Qwen3-ASR: `audio_feature_lengths` is kept, and copied to the device to be read back.**
   `qwen3_asr.py:519` restores it; the audio tower then reads what it computes from it in five
   places, and `qwen3_asr.py:531` in a sixth. All of them could be computed on the host from the
   kept lengths, before the copy. The lines are marked `gpu_sync_allowed`: known, and still waits.
3. **Qwen3-ASR: `feature_attention_mask` is not used by the encoder.** The processor needs it;
   `embed_multimodal` takes it, checks its shape and drops it. It need not be sent to the worker.
4. **Ultravox: `audio_token_len` is needed on both sides.** A mask is made of it on the device
   (`ultravox.py:865`), and `ultravox.py:873` reads it, one wait for each audio. Kept, with one copy
   for the mask, the reads would be free.
5. **Pixtral's vision tower, as in Mistral3: a copy that blocks.** `pixtral.py:1596` copies position
   ids, made on the CPU, with `.to(self.device)`; no `gpu_sync_allowed` is around it.
6. **Gemma4, Idefics3, Ultravox: rows selected by a mask on the device.** The host waits for their
   number. The flags are right; only a number known beforehand would spare the wait. Gemma4's
   `masking_utils.py:335` asks a mask for `all()` besides. All are marked `gpu_sync_allowed`.

Each of them, line by line. In the last column the fields from which the tensors stem; what the
model made by itself stems from none, and is listed only where the host waits for it.
"""


def renew() -> None:
    """Makes the source of the audits under .cache."""
    found = {}
    for path in sorted(AUDITS.glob("*.json")):
        audits = json.loads(path.read_text())
        [report] = forms.from_json(json.dumps(audits["stock"]))
        flips = {}
        for name, flip in sorted(audits["flips"].items()):
            [flipped] = forms.from_json(json.dumps(flip))
            field = next(x for x in flipped.fields if f"{x.modality}/{x.field}" == name)
            flips[name] = {"verdict": field.verdict, "reason": field.reason}
        # In which order vLLM has a batch's fields differs from run to run.
        fields = tuple(sorted(report.fields, key=lambda x: (x.modality, x.field)))
        report = dataclasses.replace(report, fields=fields)
        [kept] = json.loads(forms.to_json([report]))["reports"]
        found[path.stem] = {"flips": flips, "report": kept}
    if not found:
        raise SystemExit("no audits; run tests/test_audit_vllm.py first")
    SOURCE.write_text(json.dumps(found, indent=1) + "\n")


def page(source: Mapping[str, Any], declared: Mapping[str, Any]) -> str:
    """The page.

    Args:
        source: What :func:`renew` wrote.
        declared: The families of tests/data/field_sets.json.
    """
    reports = {name: _report(x["report"]) for name, x in source.items()}
    versions = next(iter(reports.values())).versions
    named = ", ".join(f"{x} {versions[x].split('+')[0]}" for x in ("vllm", "transformers", "torch"))
    parts = [INTRO.format(versions=named.replace("vllm", "vLLM", 1)), "## Observed\n"]
    for name, report in reports.items():
        parts.append(_family(name, report, source[name]["flips"]))
    parts += [HOW, _findings(reports)]
    parts.append("## Declared, not observed\n\n" + _declared(declared, reports))
    return "\n".join(parts)


def _report(found: Any) -> ModelReport:
    [made] = forms.from_json(json.dumps({"version": forms.VERSION, "reports": [found]}))
    return made


def _family(name: str, report: ModelReport, flips: Mapping[str, Any]) -> str:
    rows = [
        (
            field.modality,
            f"`{field.field}`",
            field.kind,
            forms.flag(field),
            _seen(field),
            f"**{field.verdict}**",
            _other_way(field, flips),
        )
        for field in sorted(report.fields, key=lambda x: (x.modality, x.field))
    ]
    head = ("modality", "field", "kind", "flag", "seen", "verdict", "the other way round")
    return f"### {name}\n\n`{report.model}`\n\n{_table(head, rows)}\n"


def _seen(field: FieldReport) -> str:
    """The kinds of events, and the line that decided."""
    kinds = ", ".join(f"{name}" for name in _kinds(field.events))
    return f"{kinds}: {_code(field.reason)}" if kinds else _code(field.reason)


def _kinds(events: Sequence[Event]) -> Iterator[str]:
    words = {
        "mismatch": "mismatch",
        "sync": "sync",
        "restored": "copy",
        "host_read": "host read",
        "device_use": "device use",
    }
    present = {event.kind for event in events}
    yield from (word for kind, word in words.items() if kind in present)


def _other_way(field: FieldReport, flips: Mapping[str, Any]) -> str:
    flip = flips.get(f"{field.modality}/{field.field}")
    return "" if flip is None else f"{flip['verdict']}: {_code(flip['reason'])}"


def _code(text: str) -> str:
    return text.replace("|", "\\|").replace("_", "\\_")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


# Findings


def _findings(reports: Mapping[str, ModelReport]) -> str:
    """Every line that waits for the device, or copies a field there."""
    seen: dict[tuple[str, str, str, str], list[str]] = {}
    for name, report in reports.items():
        found = [
            (event, field.field) for field in report.fields for event in forms.finding_events(field)
        ]
        found += [(e, "none") for e in report.other_events if e.non_blocking is False]
        for event, field in found:
            where = seen.setdefault((_what(event), event.operation, *_line(event)), [])
            if f"{name}: {field}" not in where:
                where.append(f"{name}: {field}")
    rows = [
        (what, f"`{operation}`", _code(place), line, _code(", ".join(sorted(where))))
        for (what, operation, place, line), where in sorted(seen.items())
    ]
    head = ("what", "operation", "where", "line", "fields")
    return "\n".join([FINDINGS, _table(head, rows), ""])


def _what(event: Event) -> str:
    if event.kind == "restored":
        return "copy, blocking" if event.non_blocking is False else "copy, non-blocking"
    return event.kind


def _line(event: Event) -> tuple[str, str]:
    """Where it is, and what stands there: of a helper of vLLM's, where that is called; of another
    library, with vLLM's line that calls it."""
    sites = [site for site in event.stack if not site.file.startswith("vllm/utils/")]
    if not sites:
        return "", ""
    place, source = f"{sites[0].file}:{sites[0].line}", f"`{sites[0].source}`".replace("|", "\\|")
    caller: Site | None = next((x for x in sites if x.file.startswith("vllm/")), None)
    if caller is not None and caller is not sites[0]:
        place += f", from {caller.file}:{caller.line}"
    return place, source


# What is declared


def _declared(families: Mapping[str, Any], reports: Mapping[str, ModelReport]) -> str:
    """All fields of all families but those that are observed."""
    observed = {
        (RUN_AS[name], field.modality, field.field)
        for name, report in reports.items()
        for field in report.fields
    }
    rows = []
    for family, x in families.items():
        for name, field in x["fields"].items():
            if (family, field["modality"], name) not in observed:
                flag = "cpu" if field.get("keep_on_cpu") else "device"
                rows.append((family, field["modality"], f"`{name}`", field["kind"], flag))
    return _table(("family", "modality", "field", "kind", "flag"), rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renew", action="store_true", help="read the audits under .cache first")
    parser.add_argument("--check", action="store_true", help="fail if the page would change")
    options = parser.parse_args()
    if options.renew:
        renew()
    made = page(json.loads(SOURCE.read_text()), json.loads(DECLARED.read_text())["families"])
    if options.check:
        if not PAGE.exists() or PAGE.read_text() != made:
            print("docs/placement.md is out of date; run docs/placement.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
