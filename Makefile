# One command per question. Everything lives in .venv, .models, .tools and demo-results of this checkout.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
MODEL := .models/SmolLM2-135M-Instruct

.DEFAULT_GOAL := help
.PHONY: help setup setup-ui model demo test test-ui soak bench check docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## build .venv: vLLM for the CPU, this package, its tools (no compiler)
	@$(PYTHON) scripts/setup.py

model: setup ## convert the model of the demo into .models
	@$(BIN)/python scripts/convert_model.py $(MODEL)

demo: model ## serve a real model, replay a history with and without tiers, write demo-results
	@$(BIN)/kvtiers demo --model $(MODEL) --output demo-results $(DEMO_ARGS)

test: model ## the whole test suite
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

setup-ui: setup ## a Chromium and a Prometheus for test-ui (Debian's; Chromium takes root)
	@$(BIN)/python -m scripts.setup_ui

test-ui: setup-ui ## the page in a real browser, the dashboard in a real Prometheus
	@$(BIN)/python -m pytest tests/ui $(PYTEST_ARGS)

soak: setup ## storage under eviction, kills, damage and a bad disk for SOAK_S seconds (default 600)
	@$(BIN)/python -m scripts.soak $(or $(SOAK_S),600)

bench: model ## measure beside vLLM and the machine, write bench-results.json (10 minutes)
	@$(BIN)/python -m bench --json bench-results.json $(BENCH_ARGS)

check: setup ## lint, format, types, import rules
	@$(BIN)/ruff check --no-cache src tests scripts bench
	@$(BIN)/ruff format --check src tests scripts bench
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: setup ## write the generated tables of docs/, and the dashboard, anew
	@$(BIN)/python scripts/docs.py
	@$(BIN)/python -m scripts.dashboard

clean: ## remove results and caches (.venv, .models and .tools stay)
	@rm -rf demo-results bench-results.json build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis \
		.import_linter_cache
	@find src tests scripts bench -name __pycache__ -type d -prune -exec rm -rf {} +
