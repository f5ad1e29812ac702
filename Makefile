# Needs only python3 (>= 3.11) and make. Every target sets up the environment it uses.
PYTHON ?= python3
DEMO := .venv
TEST := .venv-test
RAY := .venv-ray
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What pyproject.toml requires, but for xgrammar, with the extras that are named.
REQUIRED := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  lists = [project["dependencies"], *(project["optional-dependencies"][name] for name in sys.argv[1:])]; \
  print(*(each for one in lists for each in one if not each.startswith("xgrammar")), "setuptools>=77", sep="\n")
# Processes that share the tests: one a core, up to four.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')
PYTEST = $(TEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-full test-browser test-ray lint clean

# The runtime without torch: xgrammar is used through its compiled core alone, so its own requirements stay out.
$(DEMO)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python $(PIP) numpy numba attrs tokenizers safetensors jinja2 tqdm shtab setuptools
	$(DEMO)/bin/python $(PIP) --no-deps xgrammar apache-tvm-ffi
	$(DEMO)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(TEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TEST)
	$(PYTHON) -c '$(REQUIRED)' test dev >$(TEST)/requirements.txt
	$(TEST)/bin/python $(PIP) --no-compile -r $(TEST)/requirements.txt
	$(TEST)/bin/python $(PIP) --no-compile --no-deps xgrammar apache-tvm-ffi
	$(TEST)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	touch $@

demo: $(DEMO)/.ready
	$(DEMO)/bin/python examples/quickstart.py

test: $(TEST)/.ready
	$(PYTEST) -m "not full and not browser and not ray"

test-full: $(TEST)/.ready
	NINFER_HYPOTHESIS_PROFILE=full $(PYTEST) -m "not browser and not ray" --timeout 3600

# Chromium comes from the system's packages, where they can be installed.
test-browser: $(TEST)/.ready
	$(TEST)/bin/python $(PIP) playwright
	command -v chromium || apt-get install -y chromium || { apt-get update && apt-get install -y chromium; }
	$(TEST)/bin/python -m pytest -m browser

$(RAY)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python $(PIP) numpy numba attrs tokenizers safetensors jinja2 tqdm shtab setuptools
	$(RAY)/bin/python $(PIP) "ray[serve]" starlette uvicorn prometheus-client pytest pytest-timeout hypothesis
	$(RAY)/bin/python $(PIP) --no-deps xgrammar apache-tvm-ffi
	$(RAY)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	touch $@

test-ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest -m ray tests/examples/test_ray_serve.py

lint: $(TEST)/.ready
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy

clean:
	rm -rf $(DEMO) $(TEST) $(RAY) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
