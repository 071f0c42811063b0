# make demo   train the micro ViT on the bundled images with FSDP2, two processes, into runs/demo
# make test   the tests that run anywhere
# Both make .venv and install requirements.txt if that has not been done, and only then.
PYTHON ?= python3
BIN := .venv/bin
OUT := runs/demo

.PHONY: demo test lint clean

demo: .venv/installed
	rm -rf $(OUT)
	$(BIN)/torchrun --standalone --nproc-per-node \
	  $$($(BIN)/python -c "import torch; print(min(2, torch.cuda.device_count()) or 2)") \
	  train_fsdp2.py output_dir=$(OUT)

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

.venv/installed: requirements.txt
	@$(PYTHON) -c "import sys; v = sys.version_info; v >= (3, 10) or sys.exit('error: $(PYTHON) is Python %d.%d, this recipe needs 3.10 or newer: make PYTHON=python3.12 ...' % v[:2])"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf runs .pytest_cache .ruff_cache
