# make test   set up a virtual environment and pass all tests
# make demo   set up, and teach the small Stable Diffusion in data/emoji_model eight new things: 4 minutes on two cores
# make lint   ruff and pyright
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := test
.PHONY: test demo lint clean

test: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

demo: $(VENV)/base
	JAX_PLATFORMS=cpu $(BIN)/python train.py configs/emoji.yml run_name=demo output_dir=runs
	@echo 'Look at runs/demo/samples/: before, and after. To draw from it:'
	@echo '  $(BIN)/python generate.py configs/emoji.yml run_name=demo output_dir=runs prompt="a green doughnut"'

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python

$(VENV)/base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "MaxDiff needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

# torch first: its CPU build, where pip is pointed at one, must be chosen before diffusers asks for any.
$(VENV)/installed: $(VENV)/base
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV)
