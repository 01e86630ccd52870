# make demo    install into .venv, fetch the demo model, answer a question
# make test    run the whole CPU test suite
# make ray     run the tests that need Ray, which it installs
# make clients  try the clients that users have against a server (minutes; needs Node)
# make lint    formatting, linting, types and import contracts
# make check   lint and test
# make clean   remove .venv and caches (the demo model stays in the user's cache)

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test ray clients lint check clean

PROMPT ?= What is the capital of France?
PYTEST_ARGS ?=

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c tools/constraints.txt
REQUIREMENTS := pyproject.toml tools/constraints.txt

export PROMPT
demo: .venv/.installed
	$(BIN)/jaxserve generate --model smollm2-135m --chat --temperature 0 \
		--max-num-batched-tokens 32 --prompt "$$PROMPT"

test: .venv/.installed-test
	$(BIN)/python -m pytest -m "not gpu and not ray and not clients" $(PYTEST_ARGS)

ray: .venv/.installed-test
	$(INSTALL) -e ".[ray]"
	$(BIN)/python -m pytest -m ray $(PYTEST_ARGS)

clients: .venv/.installed-test .venv-clients/.installed tests/clients/node_modules/.package-lock.json
	status=0; $(BIN)/python -m pytest -m clients tests/clients $(PYTEST_ARGS) || status=$$?; \
		$(BIN)/python tools/docs_tables.py; exit $$status

lint: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

clean:
	rm -rf .venv .venv-clients tests/clients/node_modules .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache

# A stamp is written when its step is complete, so that a step that was stopped is done again.
.venv/.made:
	python=$$(tools/find_python.sh) && "$$python" -m venv --clear .venv
	touch $@

.venv/.installed: .venv/.made $(REQUIREMENTS)
	$(INSTALL) -e .
	touch $@

.venv/.installed-test: .venv/.made $(REQUIREMENTS)
	$(INSTALL) -e ".[test]"
	touch $@ .venv/.installed

.venv/.installed-dev: .venv/.made $(REQUIREMENTS)
	$(INSTALL) -e ".[test,dev]"
	touch $@ .venv/.installed-test .venv/.installed

.venv-clients/.installed: tests/clients/requirements.txt
	python=$$(tools/find_python.sh) && "$$python" -m venv --clear .venv-clients
	.venv-clients/bin/python -m pip install --disable-pip-version-check -r $<
	touch $@

tests/clients/node_modules/.package-lock.json: tests/clients/package-lock.json
	cd tests/clients && npm ci --no-audit --no-fund
