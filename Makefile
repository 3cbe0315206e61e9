# make serve   set up and serve the demo model      options: make serve ARGS='--port 8001'
# make test    set up and run every check
# make install set up .venv alone                   TORCH_INDEX=URL: where pip takes torch from

PYTHON ?= python3
ARGS ?=
TORCH_INDEX ?=
PYTEST = .venv/bin/python -m pytest
PIP = .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: install serve test lint types unit format clean

install: .venv/.serve

# torch goes first and alone, so that no other package's range picks another build of it.
.venv/.serve: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") torch
	$(PIP) -e '.[serve,cpu,structured]'
	touch $@

.venv/.dev: .venv/.serve
	$(PIP) -e '.[dev]'
	touch $@

serve: .venv/.serve
	.venv/bin/vexpert serve $(ARGS)

test: lint types unit

lint: .venv/.dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

types: .venv/.dev
	.venv/bin/mypy
	.venv/bin/mypy --config-file tests/mypy.ini

# Two processes of one thread each: threads of two test processes would wait for one another.
# What failed runs again alone, and must pass: a machine that others use can hold a test up for
# longer than it waits. Such a test is named by both runs, and is to be mended all the same.
unit: export OMP_NUM_THREADS = 1
unit: export NUMBA_NUM_THREADS = 2
unit: .venv/.dev
	$(PYTEST) -n 2 --dist loadgroup $(ARGS) || { test $$? = 1 && \
	echo "Once more, alone, what failed:" && $(PYTEST) --last-failed --maxfail 1; }

format: .venv/.dev
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
