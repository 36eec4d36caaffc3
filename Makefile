# make demo    what torch.compile does with 19 batch sizes: without a policy, with a constant, with a policy
# make test    ruff, mypy --strict and the tests, on the pinned torch
# make matrix  the tests on every torch release that is supported; TORCH="2.6.0 2.11.0" for some, KEEP=1 to keep them
# make bench   the benchmarks
# make docs    the pages of the documentation that are made from the code
# All of them share .venv, made with $(PYTHON): 3.10 or later, with venv and pip.

PYTHON ?= python3
BIN := .venv/bin
# A stamp, so that a second make installs nothing.
INSTALLED := .venv/.installed
# The tensors here are tiny: more threads would only spin, and slow the compilers that run beside them.
export OMP_NUM_THREADS := 1

.PHONY: demo test matrix bench docs format clean

demo: $(INSTALLED)
	$(BIN)/python docs/examples/serve.py

test: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -rs --junitxml=.nox/reports/pinned.xml

matrix: $(INSTALLED)
	TORCH="$(TORCH)" KEEP="$(KEEP)" $(BIN)/nox --session tests skips

bench: $(INSTALLED)
	$(BIN)/pytest tests/bench --benchmark-only

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench,clients,lint,matrix,test]'
	touch $@

clean:
	rm -rf .venv .nox .hypothesis .mypy_cache .pytest_cache .ruff_cache
