"""Settings for the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

# What the engine's workers run with.
torch.set_num_threads(1)

try:
    import hypothesis
except ImportError:  # the tests that need it skip themselves
    pass
else:
    quiet = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    common = {"deadline": None, "suppress_health_check": quiet, "print_blob": True}
    hypothesis.settings.register_profile(
        "dev", max_examples=400, derandomize=True, database=None, **common
    )
    hypothesis.settings.register_profile("nightly", max_examples=20_000, **common)
    # --hypothesis-profile, where given, is applied after this.
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(autouse=True, scope="module")
def no_plugin_is_left_behind() -> Iterator[None]:
    """vLLM's functions are its own again after each file: other files compare with them."""
    yield
    plugin = sys.modules.get("mmcollate.integrations.vllm")
    if plugin is not None and plugin.is_active():
        plugin.deactivate()
        pytest.fail("a test of this file has left the plugin active")


def pytest_configure(config: pytest.Config) -> None:
    # The long style prints the arguments of test functions: some are tensors whose memory is
    # gone, and torch crashes when it prints those.
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A skipped test is named with its reason, so that no run looks fuller than it was."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section("skipped, and why")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"{report.nodeid}: {str(reason).removeprefix('Skipped: ')}")
