# make demo   sets everything up and trains a small GPT on the text that ships with Python
# make test   sets everything up, then checks format, lint, types, structure, and runs the whole suite
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check clean

demo: .venv/core
	$(BIN)/trainwright demo $(ARGS)

test: .venv/dev
	scripts/check
	scripts/test

check: .venv/dev
	scripts/check

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
