# The newest of these that is there; `make PYTHON=python3.11` takes another.
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11,$(shell $(p) -c "print('$(p)')" 2>/dev/null)) python3.11)
# What the scripts run on: cpu, or on a machine with a GPU cuda13 or cuda12 (docs/gpu.md).
EXTRA ?= cpu
# What `make train` trains: a small network that learns all levels of starpilot on a laptop. There, unlike on coinrun,
# no constant-action policy beats random play.
TRAIN ?= --env-id starpilot --frame-stack 1 --channels 8,16,16 --center no --pool flatten --num-steps 64 \
	--total-timesteps 400000 --learning-rate 5e-4 --gae-lambda 0.95 --kl-coef 0 --vf-coef 0.5 --vf-clip 0.2 \
	--max-grad-norm 0.5 --adam-eps 1e-5 --normalize-rewards --eval-every 25000 --eval-episodes 64 --checkpoint-every 50000
ARGS ?=

.PHONY: train test test-slow docs torture
train: .venv/with-$(EXTRA)
	.venv/bin/python ppo_procgen.py $(TRAIN) $(ARGS)

# The tests that every change must pass, and the slow ones beside them.
test: SELECT = -m "not slow"
test-slow: SELECT = -m slow
test test-slow: .venv/with-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest -n 2 --dist loadfile --durations 40 --durations-min 5 $(SELECT)

# The docs as a site, in site/.
docs: .venv/with-docs
	.venv/bin/mkdocs build --strict

# Kills runs with SIGKILL, resumes and compares them; for a whole night: make torture ARGS="--kills 100 --seed 2"
torture: .venv/with-$(EXTRA)
	.venv/bin/python -m benchmarks.torture $(ARGS)

# JAX as it was measured on GPUs, in place of the one in requirements.txt, for Python 3.12 and newer.
.venv/with-cuda13: requirements.txt
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	grep -v '^jax' requirements.txt > .venv/requirements.txt
	.venv/bin/pip install --quiet --disable-pip-version-check -r .venv/requirements.txt "jax[cuda13]==0.11.2"
	@touch $@

# .venv with an extra of pyproject.toml, such as .venv/with-dev. As this installs requirements.txt's JAX, with-cuda13 is
# made again if it is there. To change Python, or from cuda13 to cuda12, delete .venv first.
.venv/with-%: pyproject.toml requirements.txt
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check ".[$*]"
	test $* = cuda12 -o ! -e .venv/with-cuda13 || $(MAKE) --always-make .venv/with-cuda13
	@touch $@
