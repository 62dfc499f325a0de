# Thin: each target is a command that the README shows.
BASE := $(shell for each in python3.11 python3.12 python3.13 python3; do \
	$$each -c pass >/dev/null 2>&1 && echo $$each && break; done)
PYTHON := .venv/bin/python
READY := .venv/.ready

.PHONY: demo eval-demo test lint paper reference clean

demo: $(READY)  ## the main job on the reference model and the shipped scenes
	$(PYTHON) -m vismmoe_training.demo $(ARGS)

eval-demo: $(READY)  ## four scene benchmarks with all, 70 % and 50 % of the visual tokens
	$(PYTHON) -m vismmoe_training.eval_demo $(ARGS)

test: lint  ## lint, types, import contract, tests
	$(PYTHON) -m pytest -q $(ARGS)

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy vismmoe training/vismmoe_training deploy/vismmoe_deploy
	.venv/bin/lint-imports --no-cache

paper: $(READY)  ## the published tables beside ours, three seeds
	$(PYTHON) -m vismmoe_training.paper $(ARGS)

reference: $(READY)  ## train the reference model anew: hours on two cores, resumable
	$(PYTHON) -m vismmoe_training.reference $(ARGS)

$(READY): pyproject.toml constraints.txt
	@$(BASE) -c 'import sys; sys.exit("Python 3.11 or newer is needed." if sys.version_info < (3, 11) else 0)'
	@test -x $(PYTHON) || $(BASE) -m venv .venv
	@echo 'Installing into .venv (once, a few minutes)'
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	@touch $(READY)

clean:  ## everything that the commands above made, except .venv and the reference model
	rm -rf runs dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .grimp_cache .hypothesis mlflow.db mlruns tune.db
