PYTHON ?= python3
# TORCH=cpu: on Linux, the build of torch without 6 GB of CUDA libraries
TORCH ?=
BIN := .venv/bin
READY := .venv/.ready
CPU_TORCH := https://download.pytorch.org/whl/cpu
NEWEST := .venv-newest
NEWEST_TESTS := tests/batches tests/model/test_attention.py tests/model/test_loss.py tests/tokens/test_encode.py \
    tests/training/test_trainer.py tests/training/test_resume.py tests/proof/test_merge.py

.PHONY: demo export run quick test newest soak real peers profile lab docs bench measure tiny

demo: $(READY)          ## a small model learns to solve word problems: about a minute of 4-bit QLoRA
	$(BIN)/sft_nb train --config demo

test: $(READY)          ## ruff is clean, generated code equals notebooks, notebooks run, tests pass
	$(BIN)/ruff check
	$(BIN)/python scripts/check_generated.py
	OMP_NUM_THREADS=1 $(BIN)/python scripts/test_notebooks.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -q -n 2 --dist worksteal

export: $(READY)        ## clean notebooks; from them sft_nb/*.py, and the stubs by which editors know its names
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	$(BIN)/python scripts/stubs.py

run: $(READY)           ## a notebook from top to bottom, with its outputs: make run NB=nbs/01_config/04_load.ipynb
	$(BIN)/python scripts/run_notebook.py $(NB)

quick: $(READY)         ## before a commit: style, layers, and the tests and notebooks of what changed
	$(BIN)/ruff check
	$(BIN)/python scripts/check_generated.py
	$(BIN)/python scripts/quick.py

newest:                 ## the newest releases of what is required: a plain installation is used, then a few tests
	$(PYTHON) -m venv --clear $(NEWEST)
ifeq ($(TORCH),cpu)
	$(NEWEST)/bin/python -m pip install -q torch --index-url $(CPU_TORCH)
endif
	$(PYTHON) scripts/plain_install.py --newest --environment $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q pytest hypothesis
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -q $(NEWEST_TESTS)
	$(NEWEST)/bin/sft_nb train --config demo
	$(NEWEST)/bin/python -m pip freeze --exclude sft_nb

soak: $(READY)          ## what takes hours: every page executed, 200 kills, every two values of 21 settings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -q -m soak
	$(BIN)/python scripts/soak.py --kills 200
	$(BIN)/python scripts/soak.py --kills 60 --moments training
	$(BIN)/python scripts/pairs.py

real: $(READY)          ## a pretrained model and real rows: all of tests/real, and the jobs of benchmarks/real.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real -q -m "real or soak" -rs
	$(BIN)/python benchmarks/real.py

peers: $(READY)         ## the same real job with sft_nb, TRL and the plain Trainer: hours on a CPU
	$(BIN)/python benchmarks/peers.py expert nli --seeds 1 2 3
	$(BIN)/python benchmarks/peers.py defaults units nli legal tools gsm8k

profile: $(READY)       ## CPU seconds of every test and notebook, child processes included
	$(BIN)/python scripts/profile_tests.py

lab: $(READY)           ## the notebooks, beginning with the quickstart
	$(BIN)/jupyter lab nbs --LabApp.default_url=/lab/tree/recipes/01_quickstart.ipynb

docs: $(READY)          ## the site in _docs
	$(BIN)/python scripts/build_site.py

bench: $(READY)         ## figures of this machine into benchmarks/results
	$(BIN)/python benchmarks/demo.py
	$(BIN)/python benchmarks/prepare.py --growth
	$(BIN)/python benchmarks/collate.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/reports.py
	$(BIN)/python benchmarks/long_rows.py
	$(BIN)/python benchmarks/row_losses.py
	$(BIN)/python benchmarks/roofline.py

measure: $(READY)       ## how the code reads, in figures
	$(BIN)/python scripts/measure.py

tiny: $(READY)          ## remake the base that ships as model="tiny"
	$(BIN)/python scripts/make_tiny.py

$(READY): constraints.txt settings.ini setup.py
	$(PYTHON) -m venv .venv
ifeq ($(TORCH),cpu)
	$(BIN)/python -m pip install -q -c constraints.txt torch --index-url $(CPU_TORCH)
endif
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,docs]'
	touch $@
