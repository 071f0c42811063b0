# make demo       train the micro ViT on the bundled images with FSDP2, two processes, into runs/demo
# make test       the tests that run anywhere, in minutes
# make test-slow  those that take longer
# make checks     ruff, pyright and the layers: what a commit must pass
# Each makes .venv and installs requirements.txt if that has not been done, and only then. REQUIREMENTS=requirements.lock
# takes the exact versions that were tested instead of the ranges.
PYTHON ?= python3
REQUIREMENTS ?= requirements.txt
BIN := .venv/bin
OUT := runs/demo

.PHONY: demo test test-slow checks clean

demo: .venv/installed
	rm -rf $(OUT)
	$(BIN)/torchrun --standalone --nproc-per-node \
	  $$($(BIN)/python -c "import torch; print(min(2, torch.cuda.device_count()) or 2)") \
	  train_fsdp2.py output_dir=$(OUT)

test: .venv/installed
	$(BIN)/python -m pytest

test-slow: .venv/installed
	$(BIN)/python -m pytest -m "slow and not gpu and not multi_gpu and not slurm" $(SLOW_OPTIONS)

checks: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tests/test_layers.py

.venv/installed: $(REQUIREMENTS)
	@$(PYTHON) -c "import sys; v = sys.version_info; v >= (3, 10) or sys.exit('error: $(PYTHON) is Python %d.%d, this recipe needs 3.10 or newer: make PYTHON=python3.12 ...' % v[:2])"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	@touch $@

clean:
	rm -rf runs .pytest_cache .ruff_cache
