# The gates by name. BIN is where the tools are: `make BIN=/path/to/venv/bin lint`.

BIN  ?= .venv/bin
CODE := controlplane agent shared fleetsim tests

.PHONY: help format lint types layers sql schema test docs changelog check

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

format: ## rewrite the code in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --quiet .

lint: ## format, ruff's rules, and the trio rules that only flake8-async knows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	find $(CODE) -name '*.py' -print0 | xargs -0 -P 2 -n 60 $(BIN)/flake8-async --enable=ASYNC \
		--disable=ASYNC106,ASYNC114,ASYNC122,ASYNC124,ASYNC910,ASYNC911

types: ## basedpyright: strict for the packages, standard for the tests
	$(BIN)/basedpyright --pythonpath $(BIN)/python

layers: ## who may import whom
	$(BIN)/lint-imports

sql: ## migrations that would lock a busy table
	$(BIN)/squawk migrations/[0-9]*.sql

schema: ## write migrations/schema.sql, the sum of the migrations
	$(BIN)/python -m tests.support.schema_dump

test: ## the whole suite, as the README runs it
	$(BIN)/pytest -n 2

docs: ## build the documentation; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

changelog: ## show what the fragments in docs/changelog.d will say
	$(BIN)/towncrier build --draft --version next

check: lint types layers sql test docs ## everything, in the environment at hand
