# make demo    sets everything up and trains a small GPT on the text that ships with Python
# make quick   sets everything up, then runs the quicker tests, in about a minute on two cores: those marked neither
#              slow (more than half a second, the zoo, the benchmarks) nor process (starts a Python process)
# make test    sets everything up, then checks format, lint and types while it runs the suite, in about ten minutes on
#              two cores
# make recipes trains every recipe that states a score, in about ten minutes on two cores, and fails if one does not reach it
# make others  the tests of MLflow, Trackio, keras and other people's loaders, which are installed apart: they bring along
#              a hundred packages
# make docs    sets up what the documentation needs and builds it into site/; fails at a link that leads nowhere
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
SITE := import site; print(*site.getsitepackages())

unexport PYTHONDONTWRITEBYTECODE # packages are compiled when they are first imported, not when they are installed

.PHONY: demo quick test static suite check recipes others docs clean

demo: .venv/core
	$(BIN)/trainwright demo $(ARGS)

quick: .venv/dev
	scripts/test --quick

test: .venv/dev
	+$(MAKE) --no-print-directory --jobs 2 static suite

static:
	scripts/check --static

suite:
	scripts/test

check: .venv/dev
	scripts/check

recipes: .venv/dev
	$(BIN)/python scripts/recipes

others: .venv/others/done
	.venv/others/bin/python -m pytest -n 0 tests/monitoring/test_sinks.py tests/test_migrate.py -k "mlflow or trackio or keras"
	.venv/others/bin/python -m pytest -n 0 tests/training/test_library_kinds.py tests/watching/test_foreign_optimizers.py

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/others/done: .venv/dev
	$(PYTHON) -m venv .venv/others
	$(BIN)/python -c "$(SITE)" > $$(.venv/others/bin/python -c "$(SITE)")/dev.pth
	.venv/others/bin/pip install --quiet --no-compile --disable-pip-version-check mlflow trackio keras torchdata webdataset grain
	@touch $@

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	@touch $@

.venv/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e ".[dev]"
	@touch .venv/core $@

.venv/docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e ".[docs]"
	@touch .venv/core $@

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache
