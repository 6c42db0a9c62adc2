"""The audit's reports as text, JSON and HTML, and the conditions on which a run fails."""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mmcollate.audit import command, report
from mmcollate.audit.findings import Event, FieldReport, ModelReport, Site

INNER = Site("vllm/models/x.py", 12, "_split", "sizes = grid.tolist()  # <b>&\"'")
OUTER = Site("vllm/models/x.py", 90, "embed_multimodal", "return self._split(grid)")


def event(kind="sync", **changes):
    made = Event(kind, "Tensor.tolist", ("grid",), (INNER, OUTER), "int64 (2, 3) on cuda:0", 4)
    return dataclasses.replace(made, **changes)


def field(name, verdict, *events, keep=False, modality="image", kind="batched"):
    why = f"why {name} is <so>"
    return FieldReport(modality, name, kind, keep, 1_048_576, events, verdict, why)


def model(*fields, **changes):
    made = ModelReport("TinyModel", fields, (), 3, {"torch": "2.13.0", "vllm": "0.32.0"})
    return dataclasses.replace(made, **changes)


COPY = event("restored", operation="Tensor.to", count=2, num_bytes=4096, non_blocking=True)
BLOCKING = dataclasses.replace(COPY, non_blocking=False)
MISMATCH = event("mismatch", operation="aten.add.Tensor", count=1)
USE = event("device_use", operation="aten.mm.default", count=7)

FULL = model(
    field("pixels", "right", USE, kind="flat"),
    field("grid", "could be kept", event()),
    field("mask", "restored", COPY, BLOCKING, keep=True),
    field("sizes", "wrong", MISMATCH, keep=True),
    field("ids", "unused", modality="audio", kind="shared"),
    field("lens", "right", event("host_read"), keep=True, modality="audio"),
    other_events=(event("mismatch", fields=(), operation="aten.mul.Tensor"),),
    error="RuntimeError: <stopped> here",
)


# JSON


def test_json_gives_the_same_reports_back():
    reports = [FULL, model(), model(field("x", "unused"))]
    assert report.from_json(report.to_json(reports)) == reports


def test_json_is_the_same_for_the_same_reports():
    assert report.to_json([FULL]) == report.to_json(report.from_json(report.to_json([FULL])))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "reports": [{"model": "x"}]}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="not the JSON of an audit"):
        report.from_json(text)


def test_json_of_another_version_is_refused():
    changed = json.loads(report.to_json([])) | {"version": 99}
    with pytest.raises(ValueError, match=r"version 99.*reads version 1"):
        report.from_json(json.dumps(changed))


# Text


def row_of(text, name):
    """The cells of a field's row, one blank between."""
    line = next(line for line in text.splitlines() if re.match(rf"\w+ +{name} ", line))
    return re.sub(" +", " ", line)


def test_text_says_what_was_run():
    first = report.text([FULL]).splitlines()[0]
    assert first == "TinyModel: 3 forwards, torch 2.13.0, vllm 0.32.0"
    assert report.text([model(num_forwards=1)]).startswith("TinyModel: 1 forward,")


def test_text_has_a_row_for_each_field():
    text = report.text([FULL])
    assert row_of(text, "pixels") == "image pixels flat device 7 device uses right"
    assert row_of(text, "grid") == "image grid batched device 4 syncs could be kept"
    assert row_of(text, "sizes") == "image sizes batched cpu 1 mismatch wrong"
    assert row_of(text, "ids") == "audio ids shared device nothing unused"
    assert "cpu 4 copies (8,192 bytes, 2 of them blocking) restored" in row_of(text, "mask")
    assert row_of(text, "lens") == "audio lens batched cpu 4 host reads right"


def test_a_copy_that_does_not_block_is_not_called_blocking():
    text = report.text([model(field("mask", "restored", COPY, keep=True))])
    assert "2 copies (4,096 bytes)" in text


def test_columns_are_aligned():
    head, *rows = report.text([FULL]).split("\n\n")[2].splitlines()
    starts = [head.index(word) for word in ("field", "kind", "flag", "seen", "verdict")]
    assert len(rows) == 6
    for row in rows:
        assert all(row[start - 1] == " " != row[start] for start in starts)


def test_text_gives_the_evidence_of_findings():
    text = report.text([FULL])
    assert "grid (image): could be kept\n  why grid is <so>\n" in text
    assert (
        "  sync x4  Tensor.tolist  int64 (2, 3) on cuda:0\n"
        f"    vllm/models/x.py:12 in _split: {INNER.source}\n"
        f"    vllm/models/x.py:90 in embed_multimodal: {OUTER.source}\n"
    ) in text
    assert "  restored x2  Tensor.to  int64 (2, 3) on cuda:0, 4,096 bytes, non-blocking\n" in text
    assert "  restored x2  Tensor.to  int64 (2, 3) on cuda:0, 4,096 bytes, blocking\n" in text
    assert "ids (audio): unused\n  why ids is <so>" in text


def test_text_leaves_out_the_evidence_of_what_is_right_unless_asked():
    short, whole = report.text([FULL]), report.text([FULL], everything=True)
    for text, shown in ((short, False), (whole, True)):
        assert ("aten.mm.default" in text) is shown
        assert ("lens (audio): right" in text) is shown
        assert "aten.mul.Tensor" in text  # the model's own mismatch


def test_a_right_field_that_is_read_by_the_host_is_a_finding():
    text = report.text([model(field("grid", "right", USE, event()))])
    assert "grid (image): right\n" in text
    assert "Tensor.tolist" in text
    assert "aten.mm.default" not in text


def test_text_says_what_ended_the_forward():
    assert "ended early: RuntimeError: <stopped> here" in report.text([FULL])
    assert "ended early" not in report.text([model()])


def test_an_event_without_a_line_of_the_model_says_so():
    text = report.text([model(field("grid", "could be kept", event(stack=())))])
    assert "no line of the model's own code" in text


# HTML


class Page(HTMLParser):
    """The tags and the text of a page; fails on a tag that is not closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_html_is_one_page_that_needs_nothing_else():
    page = report.to_html([FULL, model()])
    parsed = Page(page)
    assert page.startswith("<!doctype html>")
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {name for name, _ in parsed.attributes} & {"src", "href", "srcset", "action"}
    assert "url(" not in page and "@import" not in page and "//" not in page.replace("://", "")


def test_html_escapes_what_it_shows():
    parsed = Page(report.to_html([FULL]))
    assert "b" not in parsed.tags and "so" not in parsed.tags and "stopped" not in parsed.tags
    text = "".join(parsed.words)
    for shown in (INNER.source, "why grid is <so>", FULL.error, "x.py:12", "embed_multimodal"):
        assert shown in text


def test_html_escapes_the_names_of_models_fields_and_versions():
    odd = '<i onclick="x">'
    report_of_odd = model(
        field(odd, "right", event(operation=odd, detail=odd), modality=odd),
        model=odd,
        versions={odd: odd},
    )
    page = report.to_html([report_of_odd])
    parsed = Page(page)
    assert "i" not in parsed.tags and "onclick" not in dict(parsed.attributes)
    assert page.count(html.escape(odd)) >= 6


def test_html_folds_the_evidence_of_each_field_and_opens_the_findings():
    parsed = Page(report.to_html([FULL]))
    # each field, and what stems from no field
    assert parsed.tags.count("details") == len(FULL.fields) + 1
    assert [name for name, _ in parsed.attributes].count("open") == 5


def test_html_of_several_models_names_each():
    text = "".join(Page(report.to_html([FULL, model(model="Other")])).words)
    assert "TinyModel" in text and "Other" in text


# Conditions

REASONS = {
    "mismatch": [
        "TinyModel: image sizes: mismatch: why sizes is <so>",
        "TinyModel: mismatch of no field: aten.mul.Tensor at vllm/models/x.py:12",
    ],
    "sync": ["TinyModel: image grid: sync: Tensor.tolist at vllm/models/x.py:12"],
    "could-be-kept": ["TinyModel: image grid: could be kept: why grid is <so>"],
    "restored": ["TinyModel: image mask: restored: why mask is <so>"],
    "blocking": ["TinyModel: image mask: blocking: Tensor.to at vllm/models/x.py:12"],
    "unused": ["TinyModel: audio ids: unused: why ids is <so>"],
    "error": ["TinyModel: error: RuntimeError: <stopped> here"],
}


@pytest.mark.parametrize("condition", REASONS)
def test_each_condition_finds_its_own(condition):
    assert report.fails([model(), FULL], [condition]) == REASONS[condition]
    assert report.fails([model(field("x", "right", USE))], [condition]) == []


def test_any_is_all_of_them_once():
    found = report.fails([FULL], ["sync", "any"])
    assert sorted(found) == sorted(line for lines in REASONS.values() for line in lines)


def test_nothing_fails_without_a_condition():
    assert report.fails([FULL], []) == []


def test_every_condition_is_explained():
    assert set(report.CONDITIONS) == {*REASONS, "any"}


def test_an_unknown_condition_is_refused():
    with pytest.raises(ValueError, match=r"'mismatches'.*'could-be-kept'"):
        report.fails([], ["mismatches"])


def test_a_mismatch_of_a_field_that_is_restored_elsewhere_fails():
    mended = model(field("mask", "restored", COPY, MISMATCH, keep=True))
    assert len(report.fails([mended], ["mismatch"])) == 1


def test_what_stems_from_no_field_fails_nothing():
    assert report.fails([model(other_events=(event(),))], ["any"]) == []


# The command


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(["model", *map(str, arguments)])


def test_engine_arguments_are_json_or_text():
    options = parsed(
        *("--engine-arg", "load_format=dummy", "--engine-arg", 'limit_mm_per_prompt={"image": 2}'),
        *("--engine-arg", "max_model_len=4096", "--engine-arg", "note=a=b"),
    )
    assert dict(options.engine_arg) == {
        "load_format": "dummy",
        "limit_mm_per_prompt": {"image": 2},
        "max_model_len": 4096,
        "note": "a=b",
    }


@pytest.mark.parametrize("arguments", [["--engine-arg", "dtype"], ["--fail-on", "everything"]])
def test_arguments_that_mean_nothing_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(*arguments)
    assert arguments[1] in capsys.readouterr().err


def test_help_explains_every_condition(capsys):
    with pytest.raises(SystemExit, match="0"):
        parsed("--help")
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name, meaning in report.CONDITIONS.items():
        assert f"{name}: {meaning}" in shown


def test_it_prints_and_writes_what_was_found(tmp_path, capsys):
    options = parsed("--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    found = [model(field("grid", "could be kept", event()))]
    assert command.finish(found, options) == command.OK
    assert capsys.readouterr().out == report.text(found)
    assert report.from_json((tmp_path / "a.json").read_text()) == found
    assert (tmp_path / "a.html").read_text() == report.to_html(found)


def test_all_evidence_on_demand(capsys):
    command.finish([model(field("x", "right", USE))], parsed("--all"))
    assert "aten.mm.default" in capsys.readouterr().out


def test_a_condition_that_holds_is_said_and_is_the_exit_code(capsys):
    found = [model(field("grid", "could be kept", event()))]
    assert command.finish(found, parsed("--fail-on", "could-be-kept")) == command.FAILED
    assert "fails: TinyModel: image grid: could be kept: why" in capsys.readouterr().out
    assert command.finish(found, parsed("--fail-on", "mismatch")) == command.OK
    assert "fails" not in capsys.readouterr().out


def test_an_audit_that_did_not_come_to_its_end_is_never_fine():
    found = [model(error="RuntimeError: stopped")]
    assert command.finish(found, parsed()) == command.CANNOT
    assert command.finish(found, parsed("--fail-on", "error")) == command.FAILED


def test_a_file_that_can_not_be_written_is_said(tmp_path, capsys):
    options = parsed("--json", tmp_path / "none" / "a.json")
    assert command.finish([model()], options) == command.CANNOT
    assert "a.json" in capsys.readouterr().err


def test_a_field_can_not_be_both_kept_and_moved(capsys):
    options = parsed("--keep", "grid", "--move", "grid")
    assert command.main(options) == command.CANNOT
    assert "grid: either kept or moved, not both" in capsys.readouterr().err


# The page of the placement contract

PLACEMENT = Path(__file__).parents[1] / "docs" / "placement.py"


def test_the_placement_page_is_what_its_generator_makes():
    done = subprocess.run(
        [sys.executable, str(PLACEMENT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_placement_page_has_every_field_of_its_source():
    text = PLACEMENT.with_suffix(".md").read_text()
    for name, found in json.loads(PLACEMENT.with_suffix(".json").read_text()).items():
        section = text.split(f"\n### {name}\n")[1].split("\n## ")[0].split("\n### ")[0]
        for each in found["report"]["fields"]:
            assert f"| {each['modality']} | `{each['field']}` | {each['kind']} |" in section
            assert f"**{each['verdict']}**" in section


def test_the_placement_page_has_every_declared_field():
    text = PLACEMENT.with_suffix(".md").read_text()
    declared = json.loads((Path(__file__).parent / "data" / "field_sets.json").read_text())
    for family in declared["families"].values():
        for name, each in family["fields"].items():
            assert f"| {each['modality']} | `{name}` | {each['kind']} |" in text


@pytest.mark.parametrize("condition", ["mismatch", "any"])
def test_a_mismatch_of_no_field_fails_too_and_is_always_shown(condition):
    own = event("mismatch", fields=(), operation="aten.add.Tensor")
    found = model(other_events=(own, event()))
    assert report.fails([found], [condition]) == [
        "TinyModel: mismatch of no field: aten.add.Tensor at vllm/models/x.py:12"
    ]
    assert report.text([found]).count("of no field") == 1
    assert "aten.add.Tensor" in report.text([found])
    assert "<details open><summary>of no field" in report.to_html([found])
