# The two that a newcomer needs: `make demo` and `make test`. A bare `make` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# vLLM has wheels for Python 3.11 to 3.13; with another one, the tests of the engine are skipped.
PYTHON ?= $(shell for want in 11,13 10,14; do \
	for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	$$p -c "import sys; v = sys.version_info; raise SystemExit(not (v[0] == 3 and int('$$want'.split(',')[0]) <= v[1] <= int('$$want'.split(',')[1])))" \
	2>/dev/null && echo $$p && exit; done; done)
RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml rust/Cargo.toml $(shell find rust/src -name '*.rs')
CARGO_TEST := $(shell cargo nextest --version >/dev/null 2>&1 \
	&& echo "nextest run --cargo-quiet --status-level fail" || echo "test --quiet")
# Engines load in a third of the time from compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE
WORKERS ?= 2
say = @printf '\n== %s\n' "$(1)"

.PHONY: help demo test nightly lint rust-test python-test gate gate-renew wheel bench bench-engine bench-core docs placement requirements clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(BIN)/.built  ## run the real vLLM engine on a tiny model, with mmcollate on and off
	@$(BIN)/python -m demo

test: lint rust-test python-test gate  ## everything: formatting, lints, types, Rust and Python tests, instruction counts

lint: $(BIN)/.built  ## rustfmt, clippy, ruff, mypy, stubtest
	$(call say,Rust: formatting)
	@cargo fmt --all --check
	$(call say,Rust: lints)
	@PYO3_PYTHON="$(CURDIR)/$(BIN)/python" cargo clippy --quiet --all-targets -- -D warnings
	@cargo clippy --quiet --all-targets --no-default-features -- -D warnings
	$(call say,Python: formatting and lints)
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/ruff check --quiet .
	$(call say,Python: types)
	@$(BIN)/mypy
	@$(BIN)/python -m mypy.stubtest mmcollate._core

rust-test:  ## the core without Python
	$(call say,Rust: tests of the core)
	@cargo $(CARGO_TEST) -p mmcollate-core --no-default-features
	$(call say,Rust: every order in which threads can move the arena's slots)
	@RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
		cargo test --quiet -p mmcollate-core --no-default-features --lib arena

python-test: $(BIN)/.built  ## pytest, with the real vLLM
	$(call say,Python: tests)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

gate: $(BIN)/.built  ## compare instruction counts with their baseline, under valgrind
	$(call say,Instructions: against benches/gate.json)
	@$(BIN)/python benches/gate.py

gate-renew: $(BIN)/.built  ## make the counts of this state the baseline
	@$(BIN)/python benches/gate.py --renew

nightly: $(BIN)/.built  ## the differential tests with 20,000 examples and more
	@$(BIN)/python -m pytest tests/test_differential.py --hypothesis-profile=nightly

wheel: $(BIN)/.installed  ## build the wheel into dist/
	@RUSTFLAGS="--remap-path-prefix=$(HOME)=~ --remap-path-prefix=$(CURDIR)=." \
		$(BIN)/maturin build --quiet --release --out dist
	@ls -l dist

bench: $(BIN)/.built  ## time mmcollate against vLLM and others, and draw it (under 8 minutes)
	@$(BIN)/python -m mmcollate bench --families tests/data/field_sets.json \
		--json docs/figures.json --plots docs/plots

bench-core:  ## time the core without Python, against bare copies (about a minute)
	@cargo bench --quiet -p mmcollate-core --no-default-features --bench core

bench-engine: $(BIN)/.built  ## time the real engine with mmcollate on and off (under 5 minutes)
	@$(BIN)/python -m benches.engine --json docs/engine_figures.json

docs: $(BIN)/.built  ## fill the tables in README and docs, and run every example there
	@$(BIN)/python docs/tables.py
	@$(BIN)/python docs/placement.py
	@$(BIN)/python -m pytest tests/test_docs.py

placement: $(BIN)/.built  ## audit the tiny models, and write docs/placement.md
	@$(BIN)/python -m pytest tests/test_audit_vllm.py
	@$(BIN)/python docs/placement.py --renew

requirements:  ## resolve requirements/test.in into test.txt
	@$(BIN)/uv pip compile --universal --python-version 3.10 --no-emit-index-url --no-annotate \
		--no-header --override requirements/overrides.txt requirements/test.in -o requirements/test.txt

clean:  ## remove all that was built, installed or cached here
	rm -rf $(VENV) target dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f python/mmcollate/*.so

$(BIN)/.installed: requirements/uv.txt requirements/test.txt
	@test -n "$(PYTHON)" || { echo "needs Python 3.10 or newer on PATH, or PYTHON=/path/to/it"; exit 1; }
	$(call say,$(VENV): $(PYTHON) with the pinned packages (about 6 GB, once))
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/uv.txt
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --no-deps -r requirements/test.txt
	@touch $@

$(BIN)/.built: $(BIN)/.installed $(RUST_SOURCES)
	$(call say,building the extension)
	@VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/maturin develop --quiet --uv --profile dev-release
	@touch $@
