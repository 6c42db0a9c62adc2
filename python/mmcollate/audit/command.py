"""``mmcollate audit``: a model of vLLM's, from its folder to the report."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmcollate.audit import report, vllm
from mmcollate.audit.findings import ModelReport
from mmcollate.errors import MMCollateError

OK, FAILED, CANNOT = 0, 1, 2
"""Exit codes: nothing that was asked for is found; something is; the audit did not run, or not to
its end."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``mmcollate audit``."""
    parser.add_argument("model", help="a folder or a name, as vLLM takes it")
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        type=_engine_arg,
        metavar="NAME=VALUE",
        help="of vllm.LLM; the value as JSON, or else as text: load_format=dummy; repeat",
    )
    for name, what in (("keep", "on the CPU"), ("move", "on the device")):
        parser.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="FIELD",
            help=f"what if this field were {what}; repeat",
        )
    for name, what in (("json", "the reports"), ("html", "a page with all evidence")):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what} there")
    parser.add_argument("--all", action="store_true", help="print the evidence of all fields")
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        choices=report.CONDITIONS,
        metavar="CONDITION",
        help="exit with 1 if "
        + "; ".join(f"{name}: {meaning}" for name, meaning in report.CONDITIONS.items())
        + "; repeat",
    )


def main(options: argparse.Namespace) -> int:
    """Loads the model into a real engine, audits it on made-up items, prints what was found."""
    both = sorted(set(options.keep) & set(options.move))
    if both:
        return _cannot(f"{', '.join(both)}: either kept or moved, not both")
    flags = dict.fromkeys(options.keep, True) | dict.fromkeys(options.move, False)
    try:
        with _stdout_for_the_report():
            _say(f"loading {options.model} into vLLM")
            llm = vllm.load(options.model, **dict(options.engine_arg))
            _say("running it on made-up items, and again with virtual devices")
            found = vllm.audit_engine(llm, keep_on_cpu=flags)
    except (vllm.CannotAudit, MMCollateError) as error:
        return _cannot(str(error))
    except Exception as error:  # whatever vLLM raises for a model that it can't load or run
        return _cannot(f"{type(error).__name__}: {error}")
    return finish([found], options)


def finish(reports: Sequence[ModelReport], options: argparse.Namespace) -> int:
    """Prints and writes reports, and returns the exit code."""
    print(report.text(reports, everything=options.all), end="")
    try:
        if options.json is not None:
            options.json.write_text(report.to_json(reports), encoding="utf-8")
        if options.html is not None:
            page = report.to_html(reports)
            # A line of the model's that is no text is shown with its bytes spelt out.
            options.html.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return _cannot(str(error))
    failures = report.fails(reports, options.fail_on)
    for line in failures:
        print(f"fails: {line}")
    if failures:
        return FAILED
    return CANNOT if any(one.error is not None for one in reports) else OK


def _engine_arg(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@contextlib.contextmanager
def _stdout_for_the_report() -> Iterator[None]:
    """What libraries print, from C++ too, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _cannot(why: str) -> int:
    _say(f"mmcollate audit: {why}")
    return CANNOT
