"""Audits of a real engine's models: as they are, and with each field's flag the other way round.

All run in forks of one process that has imported vLLM; see `tests/engine/audited.py`.
"""

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mmcollate.audit import report as forms
from mmcollate.audit.findings import FieldReport, ModelReport
from mmcollate.audit.vllm import field_of
from mmcollate.fields import Batched, Flat, Shared

from tests.engine.cases import CASES
from tests.engine.forks import Engines
from tests.engine.process import start
from tests.tiny_models import CACHE, build
from tests.tiny_models.files import TEXT, write_json, write_tokenizer

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM, which has no wheel for this Python"
    ),
    pytest.mark.timeout(400),
]

# By case, and modality and field: the verdict with vLLM's flag, and with the other one.
KNOWN: dict[str, dict[str, tuple[str, str]]] = {
    "gemma4": {
        "audio/input_features_mask": ("right", "restored"),
        "audio/input_features_padded": ("right", "wrong"),
        "image/pixel_position_ids": ("right", "wrong"),
        "image/pixel_values": ("right", "wrong"),
        "video/pixel_position_ids_videos": ("right", "wrong"),
        "video/pixel_values_videos": ("right", "wrong"),
        "video/video_frame_counts": ("right", "could be kept"),
        # Python's numbers: there is nothing to place.
        "video/video_num_soft_tokens": ("right", "right"),
        "video/video_timestamps": ("right", "right"),
    },
    "idefics3": {
        "image/num_patches": ("right", "could be kept"),
        "image/pixel_attention_mask": ("right", "wrong"),
        "image/pixel_values": ("right", "wrong"),
    },
    "internvl": {
        "image/image_num_patches": ("right", "could be kept"),
        "image/image_token_id": ("right", "could be kept"),
        "image/pixel_values": ("right", "wrong"),
    },
    "llavanext": {
        "image/image_sizes": ("right", "could be kept"),
        "image/pixel_values": ("right", "wrong"),
    },
    "mistral3": {"image/pixel_values": ("right", "restored")},
    # M-RoPE positions need the grids kept.
    "qwen25vl": {
        "image/image_grid_thw": ("right", "wrong"),
        "image/pixel_values": ("right", "restored"),
        "video/pixel_values_videos": ("right", "restored"),
        "video/second_per_grid_ts": ("right", "wrong"),
        "video/video_grid_thw": ("right", "wrong"),
    },
    "qwen25vl_embeds": {
        "image/image_embeds": ("right", "wrong"),
        "image/image_grid_thw": ("right", "wrong"),
        "image/pixel_values": ("right", "restored"),
    },
    "qwen3asr": {
        "audio/audio_feature_lengths": ("restored", "wrong"),
        "audio/feature_attention_mask": ("unused", "unused"),
        "audio/input_audio_features": ("right", "wrong"),
    },
    "transformers_llavanext": {
        "image/image_sizes": ("could be kept", "restored"),
        "image/num_image_patches": ("right", "could be kept"),
        "image/pixel_values": ("right", "wrong"),
    },
    "ultravox": {
        "audio/audio_features": ("right", "wrong"),
        # The host makes sequence lengths of it, which then go to the device.
        "audio/audio_lens": ("restored", "could be kept"),
        "audio/audio_num_chunks": ("right", "could be kept"),
        "audio/audio_token_len": ("right", "wrong"),
    },
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    log = tmp_path_factory.mktemp("audits") / "log"
    with start("tests.engine.audited", log=log, pipes=True) as process:
        yield Engines(process, log)


class Audited:
    """What `tests.engine.audited` found of one case."""

    def __init__(self, name: str, found: dict[str, Any]) -> None:
        self.name = name
        self.stock = read(found["stock"])
        self.before = read(found["before"])
        self.again = read(found["again"])
        self.flips = {flip: read(x) for flip, x in found["flips"].items()}

    def flipped(self, field: FieldReport) -> FieldReport:
        """The same field with its flag the other way round."""
        return by_name(self.flips[name_of(field)])[name_of(field)]


def read(found: Any) -> ModelReport:
    [report] = forms.from_json(json.dumps(found))
    return report


def name_of(field: FieldReport) -> str:
    return f"{field.modality}/{field.field}"


def by_name(report: ModelReport) -> dict[str, FieldReport]:
    return {name_of(field): field for field in report.fields}


def kinds(field: FieldReport) -> set[str]:
    return {event.kind for event in field.events}


@pytest.fixture(scope="module", params=sorted(CASES))
def case(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Audited:
    out = CACHE / "audit" / f"{request.param}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    log = tmp_path_factory.mktemp(request.param) / "log"
    engines.run("case", request.param, str(out), log=log)
    return Audited(request.param, json.loads(out.read_text()))


def test_the_models_of_vllm_have_no_false_mismatch(case: Audited) -> None:
    assert case.stock.error is None
    for field in case.stock.fields:
        assert field.verdict != "wrong", field.reason
        assert "mismatch" not in kinds(field)


def test_each_field_has_the_verdict_that_it_must_have_both_ways(case: Audited) -> None:
    found = {
        name_of(field): (field.verdict, case.flipped(field).verdict) for field in case.stock.fields
    }
    assert found == KNOWN[case.name]


def test_a_flag_is_judged_by_what_the_code_then_does(case: Audited) -> None:
    """Not only the verdict changes: what is seen does."""
    for field in case.stock.fields:
        flipped = case.flipped(field)
        assert flipped.keep_on_cpu is not field.keep_on_cpu
        if field.keep_on_cpu and "host_read" in kinds(field):
            positions = [e for e in field.events if of_positions(e)]
            assert "sync" in kinds(flipped) or len(positions) == len(field.events)
            assert not any(of_positions(e) for e in flipped.events) or flipped.verdict == "wrong"
        if not field.keep_on_cpu and "device_use" in kinds(field):
            assert kinds(flipped) & {"mismatch", "restored"}


def of_positions(event: Any) -> bool:
    return any("get_mrope_input_positions" in site.function for site in event.stack)


def test_only_the_flipped_flag_differs(case: Audited) -> None:
    flags = {name_of(field): field.keep_on_cpu for field in case.stock.fields}
    for name, report in case.flips.items():
        for field in report.fields:
            same = field.keep_on_cpu == flags[name_of(field)]
            assert same is (field.field != name.split("/")[1])


def test_the_model_is_as_before_after_all_flips(case: Audited) -> None:
    assert case.again == case.before
    assert case.before.fields


def test_the_evidence_is_in_the_models_own_code(case: Audited) -> None:
    """Files and lines exist, and say what the report shows."""
    packages = {name: Path(find_spec(name).origin).parents[1] for name in ("vllm", "transformers")}
    sites = {
        site
        for report in (case.stock, *case.flips.values())
        for field in report.fields
        for event in field.events
        for site in event.stack
    }
    assert sites
    for site in sites:
        package = site.file.split("/")[0]
        lines = (packages[package] / site.file).read_text().splitlines()
        assert lines[site.line - 1].strip() == site.source


def test_every_modality_is_run_with_one_item_and_more(case: Audited) -> None:
    assert {field.modality for field in case.stock.fields} == {
        name.split("/")[0] for name in KNOWN[case.name]
    }
    assert case.stock.num_forwards >= 4 * len({field.modality for field in case.stock.fields})
    assert {"vllm", "transformers", "torch"} <= set(case.stock.versions)


@pytest.mark.parametrize("case", ["gemma4"], indirect=True)
def test_fields_meet_weights_on_any_cpu(case: Audited) -> None:
    """vLLM packs weights where a CPU has kernels of its own for them."""
    [first, *_] = by_name(case.stock)["image/pixel_values"].events
    assert first.kind == "device_use"
    assert first.site.file == "vllm/model_executor/layers/utils.py"


@pytest.mark.parametrize("case", ["qwen25vl"], indirect=True)
def test_positions_read_the_grids_on_the_host(case: Audited) -> None:
    stock = by_name(case.stock)
    for name in ("image/image_grid_thw", "video/video_grid_thw", "video/second_per_grid_ts"):
        read_there = [event for event in stock[name].events if of_positions(event)]
        assert read_there and {event.kind for event in read_there} == {"host_read"}
        assert stock[name].field in read_there[0].fields
        assert "prefix-cache hit" in case.flipped(stock[name]).reason
    assert not any(of_positions(event) for event in stock["image/pixel_values"].events)


# The command


def command(engines: Engines, folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "out.json"
    engines.run("command", str(out), "audit", *arguments, log=folder / "log")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_command_audits_a_folder(engines: Engines, tmp_path: Path) -> None:
    ran = command(
        engines,
        tmp_path,
        str(build("llavanext")),
        *("--engine-arg", "load_format=dummy", "--engine-arg", "dtype=bfloat16"),
        *("--move", "image_sizes", "--fail-on", "could-be-kept"),
        *("--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")),
    )
    assert ran["code"] == 1, ran
    assert ran["stdout"].startswith("LlavaNextForConditionalGeneration: 3 forwards, ")
    assert re.search(
        r"image +image_sizes +batched +device +\d+ syncs +could be kept", ran["stdout"]
    )
    assert "fails: LlavaNextForConditionalGeneration: image image_sizes: could" in ran["stdout"]
    assert "loading" in ran["stderr"] and "loading" not in ran["stdout"]
    [report] = forms.from_json((tmp_path / "a.json").read_text())
    assert forms.text([report]) in ran["stdout"]
    assert (tmp_path / "a.html").read_text() == forms.to_html([report])


def test_the_command_says_that_a_model_takes_text_only(engines: Engines, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder, ["<eos>"], eos="<eos>", pad="<eos>")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    write_json(folder, "config.json", TEXT | config | {"torch_dtype": "bfloat16"})
    ran = command(engines, tmp_path, str(folder), "--engine-arg", "load_format=dummy")
    assert ran["code"] == 2
    assert ran["stdout"] == ""
    assert "LlamaForCausalLM takes text only: it has no fields" in ran["stderr"]


def test_the_command_says_that_it_can_not_load_a_model(engines: Engines, tmp_path: Path) -> None:
    ran = command(engines, tmp_path, str(tmp_path / "nothing"))
    assert (ran["code"], ran["stdout"]) == (2, "")
    assert "mmcollate audit: " in ran["stderr"] and "nothing" in ran["stderr"]


# Fields


def test_fields_are_told_apart_by_what_they_are() -> None:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFlatField,
        MultiModalSharedField,
    )

    class Special(MultiModalFlatField):
        pass

    assert field_of(MultiModalBatchedField(keep_on_cpu=True)) == Batched(keep_on_cpu=True)
    assert field_of(MultiModalFlatField(slices=[], dim=1)) == Flat(dim=1)
    assert field_of(Special(slices=[])) == Flat()
    assert field_of(MultiModalSharedField(batch_size=2)) == Shared()
