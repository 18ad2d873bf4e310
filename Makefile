PYTHON ?= python3
REQUIREMENTS ?= requirements.txt
# What `make train` trains: ten levels and a small network, which learn on a laptop within minutes.
TRAIN ?= --env-id bigfish --gap-stack --num-levels 10 --encoder nature --width 1 --pool flatten --num-steps 64 \
	--total-timesteps 3000000 --learning-rate 0:1e-3,3000000:1e-4 --kl-coef 0 --max-grad-norm 0.5 --adam-eps 1e-5 \
	--normalize-rewards --eval-every 250000 --eval-episodes 64
ARGS ?=

.PHONY: train test torture gpu-plan gpu-plan-test
train: .venv/$(REQUIREMENTS)
	.venv/bin/python ppo_procgen.py $(TRAIN) $(ARGS)

test: .venv/requirements-dev.txt
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest -n 2 --dist loadfile

# Runs that are killed with kill -9 and resumed, for every night: make torture ARGS="--kills 100 --seed 2"
torture: .venv/$(REQUIREMENTS)
	.venv/bin/python -m benchmarks.torture $(ARGS)

# What XLA would run on a GPU, from a machine without one: make gpu-plan ARGS="ppo.update --gpu h100"
gpu-plan: .venv-gpu-plan/requirements-gpu-plan.txt
	.venv-gpu-plan/bin/python -m benchmarks.gpu_plan $(ARGS)

gpu-plan-test: .venv-gpu-plan/requirements-gpu-plan.txt
	JAX_PLATFORMS=cpu .venv-gpu-plan/bin/python -m pytest tests/test_gpu_plan.py

define install
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'error: Python 3.11 or newer is needed; name one: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
endef
.venv/%.txt: %.txt requirements.txt
	$(install)
.venv-gpu-plan/%.txt: %.txt requirements.txt
	$(install)
