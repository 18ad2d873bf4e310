PYTHON ?= python3
REQUIREMENTS ?= requirements.txt
# What `make train` trains: small enough to learn on a laptop within minutes.
TRAIN ?= --env-id bigfish --gap-stack --encoder nature
ARGS ?=

.PHONY: train test
train: .venv/$(REQUIREMENTS)
	.venv/bin/python ppo_procgen.py $(TRAIN) $(ARGS)

test: .venv/requirements-dev.txt
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest -n 2

.venv/%.txt: %.txt requirements.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'error: Python 3.11 or newer is needed; name one: make PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
