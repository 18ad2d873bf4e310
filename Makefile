# The newest of these that is there; `make PYTHON=python3.11` takes another.
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(shell $(p) -c "print('$(p)')" 2>/dev/null)) python3)
version = -c "import sys; print('%d.%d' % sys.version_info[:2])"
packages = import sysconfig; print(sysconfig.get_path('purelib'))
ifeq ($(origin PYTHON) $(wildcard .venv/bin/python),command line .venv/bin/python)
ifneq ($(shell $(PYTHON) $(version)),$(shell .venv/bin/python $(version)))
$(error .venv has another Python than PYTHON=$(PYTHON): delete it first)
endif
endif
# What the scripts run on: cpu, or cuda12 on a machine with a GPU.
EXTRA ?= cpu
# What `make train` trains: a small network that learns all levels of starpilot on a laptop. No policy that does not look
# scores there, as one does on coinrun.
TRAIN ?= --env-id starpilot --frame-stack 1 --channels 8,16,16 --center no --pool flatten --num-steps 64 \
	--total-timesteps 400000 --learning-rate 5e-4 --gae-lambda 0.95 --kl-coef 0 --vf-coef 0.5 --vf-clip 0.2 \
	--max-grad-norm 0.5 --adam-eps 1e-5 --normalize-rewards --eval-every 50000 --checkpoint-every 50000
ARGS ?=

.PHONY: train test test-all docs torture gpu-plan gpu-plan-test constraints
train: .venv/with-$(EXTRA)
	.venv/bin/python ppo_procgen.py $(TRAIN) $(ARGS)

# The tests that every change must pass; test-all has the slow ones too.
test: SELECT = -m "not slow"
test test-all: .venv/with-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest -n 2 --dist loadfile --durations 40 --durations-min 5 $(SELECT)

# The docs as a site, in site/.
docs: .venv/with-docs
	.venv/bin/mkdocs build --strict

# Runs that are killed with kill -9 and resumed, for every night: make torture ARGS="--kills 100 --seed 2"
torture: .venv/with-$(EXTRA)
	.venv/bin/python -m benchmarks.torture $(ARGS)

# What XLA would run on a GPU, from a machine without one: make gpu-plan ARGS="ppo.update --gpu h100"
gpu-plan: .venv-gpu-plan/with-gpu-plan
	.venv-gpu-plan/bin/python -m benchmarks.gpu_plan $(ARGS)

# All of them: make gpu-plan-test SELECT=
gpu-plan-test: SELECT = -m "not slow"
gpu-plan-test: .venv-gpu-plan/with-gpu-plan
	JAX_PLATFORMS=cpu .venv-gpu-plan/bin/python -m pytest -n 2 tests/test_gpu_plan.py $(SELECT)

# An environment with an extra of pyproject.toml, its versions those of constraints/, by a pip that takes half as long as
# Python 3.11's. It would compile all on one core, with the packages' own tests and RLlib, which nothing here imports.
PIP = -m pip install --quiet --disable-pip-version-check
INSTALL = $(PIP) --no-compile --constraint constraints/$$($(@D)/bin/python $(version)).txt
.venv/with-%: pyproject.toml $(wildcard constraints/*.txt)
	@test -e $(@D)/bin/python || $(PYTHON) -c "import os, sys; v = '%d.%d' % sys.version_info[:2]; sys.exit(not os.path.exists('constraints/' + v + '.txt') \
		and 'error: PYTHON=$(PYTHON) is ' + v + ', give one of 3.11, 3.12 and 3.13: make PYTHON=python3.12')"
	test -e $(@D)/bin/python || $(PYTHON) -m venv $(@D) || { rm -rf $(@D); exit 1; }
	$(@D)/bin/python $(PIP) pip==26.3
	$(@D)/bin/python $(INSTALL) ".[$*]"
	-$(@D)/bin/python -m compileall -qq -j 0 -x '/(tests|rllib)/' $(@D)/lib
	@touch $@

# Only XLA's compiler is installed here: all else is found in .venv, whichever extra that has, pip too.
.venv-gpu-plan/with-gpu-plan: $(or $(firstword $(wildcard .venv/with-*)),.venv/with-$(EXTRA))
	.venv/bin/python -m venv --without-pip $(@D)
	.venv/bin/python -c "$(packages)" > "$$($(@D)/bin/python -c "$(packages)")/venv.pth"
	$(@D)/bin/python $(INSTALL) ".[gpu-plan]"
	@touch $@

# Writes constraints/, one file for each of these Pythons, CUDA's wheels among them without fetching these: make constraints PYTHONS="python3.11 python3.12 python3.13"
PYTHONS ?= python3.11 python3.12 python3.13
constraints:
	mkdir -p constraints
	for python in $(PYTHONS); do \
		folder=$$(mktemp -d) && $$python -m venv $$folder && \
		$$folder/bin/python $(PIP) ".[dev,docs]" && \
		version=$$($$folder/bin/python -c "import sys; print('%d.%d' % sys.version_info[:2])") && \
		$$folder/bin/python -m pip freeze --exclude jax-rl-scripts > $$folder/pins && \
		$$folder/bin/python $(PIP) --dry-run --report $$folder/gpu ".[cuda12]" && \
		$$folder/bin/python -c "import json, sys; [print(p['metadata']['name'] + '==' + p['metadata']['version']) \
			for p in json.load(open(sys.argv[1]))['install'] if p['metadata']['name'] != 'jax-rl-scripts']" \
			$$folder/gpu >> $$folder/pins && \
		LC_ALL=C sort --ignore-case --field-separator== --key=1,1 $$folder/pins > constraints/$$version.txt && \
		rm -rf $$folder || exit 1; \
	done
