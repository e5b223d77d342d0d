# Every target sets up .venv by itself; nothing but Python 3.11+, make and a network is needed.
# Another interpreter: make PYTHON=python3.12 ...   Another build of torch: make TORCH=path/to/torch.whl ...
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
LEAN := $(VENV)/.lean
READY := $(VENV)/.ready
PARITY := .parityvenv

.DEFAULT_GOAL := help
.PHONY: help demo test check attack bench parity docs clean

help:
	@echo "make demo    train the calculator agent and write a report (resumes if it was interrupted)"
	@echo "make test    all tests, the slow ones too"
	@echo "make check   formatting, lint, types, and which package may import which"
	@echo "make attack  every attack of the sandbox's table"
	@echo "make bench   speed against the floor of this machine and against a peer"
	@echo "make parity  the same numbers through the functions of TRL and verl; sets up $(PARITY)"
	@echo "make docs    write the tables of docs/algorithms.md; check that documents and code agree"
	@echo "make clean   remove .venv and caches (runs/ stays)"

# What training needs. torch goes first and alone, so that a build that is already there, or given by TORCH,
# is kept.
$(LEAN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Surefoot needs Python 3.11 or newer")'
	@echo "Setting up $(VENV); the first time takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[train,query]"
	@touch $(LEAN)

$(READY): $(LEAN)
	$(PIP) -e ".[train,lora,query,verify,judge,search,mcp,remote,dev]"
	@touch $(READY)

# An interrupted demo goes on; after a finished one the next begins in a fresh folder. The run ends by
# printing the path of its report.
demo: $(LEAN)
	@out=runs/demo; n=1; resume=; \
	while [ -e "$$out/verdict.json" ] && [ -e "$$out/report.html" ]; do n=$$((n + 1)); out=runs/demo-$$n; done; \
	if [ -e "$$out/manifest.json" ]; then resume=--resume; fi; \
	$(BIN)/surefoot run calculator --out "$$out" $$resume

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

attack: $(READY)
	$(BIN)/python -m pytest tests/sandbox -m attack

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/sandbox.py
	$(BIN)/python benchmarks/credit.py
	$(BIN)/python benchmarks/credit_cost.py
	$(BIN)/python benchmarks/step_vs_trl.py

# verl (Python 3.11 or 3.12) asks for an older transformers and much else; its formulas import with these few.
$(PARITY)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(PARITY); the first time takes some minutes"
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet -c constraints.txt "$(TORCH)"
	$(PARITY)/bin/python -m pip install --quiet -c constraints.txt -e ".[train]" pytest hypothesis \
		"trl==1.16.0" "ray==2.60.0" "tensordict==0.8.3" "omegaconf==2.4.0" "codetiming==1.4.0"
	$(PARITY)/bin/python -m pip install --quiet --no-deps "verl==0.9.1"
	@touch $(PARITY)/.ready

parity: $(PARITY)/.ready
	$(PARITY)/bin/python -m pytest tests/parity

docs: $(READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m pytest tests/docs

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
