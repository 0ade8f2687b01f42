# make sim, make test: everything from a fresh machine with Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
SCALE ?= quick
SECONDS ?= 60
# Mutants: their number, the seed of the draw, and parts of the package with commas between them.
N ?= 300
SEED ?= 0
PARTS ?= readers,stores,masks,round,statistics
EXTRAS ?= dev
# What pip installs of torch, with its options, as --index-url of a CPU build.
TORCH ?= torch
PAPER ?= fedfac
# The commit whose runs the working tree must repeat to the bit.
BASE ?= 6685365ab2308053bcf7d3acb27c7140298634b5
DATA_DIR ?= $(FEDSTAT_DATA)
# Figs. 1 and 2: MNIST where its folder is named, else the digits that come with scikit-learn.
MOTIVATION := $(if $(DATA_DIR),mnist,digits)
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(EXTRAS)
# What shows that old versions of the dependencies suffice.
QUICK := tests/results tests/labelled tests/store tests/plot tests/data tests/stats tests/sim tests/ntk/test_gram.py tests/motivation/test_statistics.py tests/fl/test_training.py tests/study/test_grid.py
READY_FOR_DOCS := $(VENV)/.ready-docs
READY_FOR_MUTANTS := $(VENV)/.ready-mutants
READY_FOR_BROWSER := $(VENV)/.ready-browser
# Tests of convolutions and other networks: kernels of oneDNN depend on the processor.
OF_NETWORKS := tests/fl tests/labelled/test_other_programs.py -k "nets or module or conv or cnn or resnet or image or other_programs"
SCRIPTS := $(sort $(patsubst %/,%,$(dir $(wildcard analysis/*.py analysis/*/*.py))))

# The study on real data needs them.
NEEDS_DATA = $(if $(DATA_DIR),,$(error give DATA_DIR=FOLDER (or set FEDSTAT_DATA), the folder of MNIST, CIFAR-10 and Shakespeare))

# Set in many containers: then every command would compile all libraries anew, which takes four times as long as to import them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: sim test test-avx2 test-slow test-browser test-minimum torture fuzz mutants frozen check lint docs wheel-test chromium bench figures figures-motivation figures-real tables tables-fedfac personal leaderboard flower clean
.PRECIOUS: runs/%.zarr

$(sort $(READY) $(READY_FOR_DOCS) $(READY_FOR_MUTANTS) $(READY_FOR_BROWSER)): $(VENV)/.ready-%: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedstat needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + ". Try make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

sim: $(READY)   ## the main job: model (8) at paper size
	$(BIN)/python -m fedstat.sim --p 0.5 --alpha 0.4 --out runs/sim.zarr --resume

test: $(READY)  ## the tests, doctests among them, on all cores; options of pytest in OPTIONS
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --max-worker-restart=0 --benchmark-disable $(OPTIONS)

test-avx2:  ## the tests of networks with the kernels of processors without AVX-512
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(MAKE) test OPTIONS='$(OF_NETWORKS) $(OPTIONS)'

test-slow: $(READY)  ## tests of minutes; those of torture and of the browser have targets of their own
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --max-worker-restart=0 --benchmark-disable -m 'slow and not gpu' --ignore tests/torture --ignore tests/browser

test-browser: $(READY) $(READY_FOR_BROWSER) | chromium  ## the site that `make docs` built, and the notebooks in JupyterLab, in Chromium
	FEDSTAT_BROWSER=require OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser -n auto --dist loadfile --max-worker-restart=0 -m slow --benchmark-disable

chromium:  ## Debian's Chromium, where there is no browser of this family and the user may install it
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	{ export DEBIAN_FRONTEND=noninteractive; apt-get update -q && apt-get install -q -y --no-install-recommends chromium; }

test-minimum: $(READY)  ## statistics, stores and runs under the oldest versions that pyproject.toml allows; torch is that of .venv
	$(PYTHON) -m venv $(VENV)-minimum
	$(VENV)-minimum/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-minimum.txt
	here='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$here" > "$$($(VENV)-minimum/bin/python -c "$$here")/zz-others.pth"
	PYTHONPATH=. OMP_NUM_THREADS=1 $(VENV)-minimum/bin/python -m pytest $(QUICK) --benchmark-disable -p no:cacheprovider -W ignore::DeprecationWarning

wheel-test: $(READY)  ## sdist and wheel, installed in an environment of their own and tried
	.ci/wheel-test $(BIN)/python

torture: $(READY)  ## kills, power cuts, damage, full disks, hostile files, wrong command lines: minutes
	$(BIN)/python -m pytest tests/torture -m 'slow or not slow'

fuzz: $(READY)  ## sound files, changed at random, for every parser, for SECONDS
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture/fuzz.py $(SECONDS)

mutants: $(READY_FOR_MUTANTS)  ## changes of the package at N random places that no test notices; below 95 % noticed is an error
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/mutants.py --n $(N) --seed $(SEED) --parts $(PARTS)

frozen: $(READY)  ## small runs of all methods at BASE=COMMIT and in the working tree, equal to the bit
	$(BIN)/python tests/frozen/compare_revisions.py --base $(BASE)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for scripts in $(SCRIPTS); do MYPYPATH=analysis $(BIN)/mypy $$scripts/*.py || exit 1; done  # each folder alone: scripts import their siblings
	$(BIN)/lint-imports
	$(BIN)/python tests/language.py  # counts of what the rules of language ask for

check: lint test  ## what CI runs

docs: $(READY_FOR_DOCS)  ## the documentation site, in docs/_build/html; needs no network and ends at the first warning
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto -b html docs docs/_build/html
	touch docs/_build/html/searchindex.js  # newer than every page, as tests/browser requires

bench: $(READY) ## speed ratios against named peers, one process
	$(BIN)/python -m pytest tests/benchmarks -o python_files='bench_*.py' -m 'not gpu' --benchmark-only --benchmark-columns=min,median,rounds -s

flower: $(READY)  ## four separate parties on digits: Flower's simulation runtime, SecAgg+; options in OPTIONS
	$(BIN)/python simulations/flower/simulate.py --out runs/flower.zarr $(OPTIONS)

figures: figures-motivation $(if $(DATA_DIR),figures-real) runs/vary_p-$(SCALE).zarr runs/vary_alpha-$(SCALE).zarr  ## paper figures at SCALE=quick (minutes) or SCALE=paper (long), MNIST from DATA_DIR
	$(BIN)/python paper_figs/fig06.py --scale $(SCALE)
	$(BIN)/python paper_figs/fig07.py --scale $(SCALE)
	$(BIN)/python paper_figs/theory_convergence.py --scale $(SCALE)
	$(BIN)/python paper_figs/theory_generalization.py --scale $(SCALE)

tables: tables-$(PAPER)  ## tables of PAPER=fedfac, factorized_fl, feddecomp or fedcp, on real data from DATA_DIR, at SCALE=quick, cpu or paper

tables-%: runs/%-$(SCALE)
	for name in $$($(BIN)/python analysis/tables.py $* --names); do $(BIN)/python analysis/tables.py $* $$name --runs $< --out runs/tables-$(SCALE)/$*-$$name || exit 1; done

tables-fedfac: runs/fedfac-$(SCALE) runs/tune-$(SCALE) runs/split-$(SCALE)
	for n in 2 3 7 8; do $(BIN)/python analysis/tables.py fedfac table$$n --runs runs/fedfac-$(SCALE) --out runs/tables-$(SCALE)/table$$n || exit 1; done
	for n in 4 5 6; do $(BIN)/python analysis/tables.py fedfac table$$n --runs runs/tune-$(SCALE) --out runs/tables-$(SCALE)/table$$n || exit 1; done
	$(BIN)/python analysis/tables.py fedfac table8 --runs runs/split-$(SCALE) --out runs/tables-$(SCALE)/table8-split
	$(BIN)/python analysis/fedfac/decomposition.py --runs runs/split-$(SCALE) --out runs/tables-$(SCALE)/decomposition

personal: runs/personal-$(SCALE)  ## the study of personalisation (simulations/personal.md) on real data from DATA_DIR at SCALE=quick or cpu
	$(BIN)/python analysis/personal.py --runs $< --out runs/tables-$(SCALE)/personal $(if $(NOISE),--noise '$(NOISE)')
	$(BIN)/python paper_figs/personal.py --runs $<

# A process for each core, of one thread each.
leaderboard: $(READY)  ## all methods side by side, tuned alike: tables and figures, on real data from DATA_DIR at SCALE=quick, cpu or paper
	$(NEEDS_DATA)$(BIN)/python -m fedstat leaderboard --config simulations/all.toml --scale $(SCALE) --study $(SCALE) --jobs $(shell getconf _NPROCESSORS_ONLN) --data-dir '$(DATA_DIR)' --out runs/all-$(SCALE) --tables runs/tables-$(SCALE)/leaderboard
	$(BIN)/python paper_figs/leaderboard.py --runs runs/all-$(SCALE) --out runs/tables-$(SCALE)/leaderboard

figures-real: runs/fedfac-$(SCALE) runs/split-$(SCALE)  ## Figs. 8 to 10 alone
	$(BIN)/python paper_figs/fig08.py --runs runs/fedfac-$(SCALE)
	$(BIN)/python paper_figs/fig09.py --runs runs/fedfac-$(SCALE)
	$(BIN)/python paper_figs/fig10.py --runs runs/split-$(SCALE) --data-dir '$(DATA_DIR)'

# Grids: what is there is not run again.
runs/tune-$(SCALE): GRID_OPTIONS = --tune
GRIDS = fedfac tune split personal factorized_fl feddecomp fedcp
$(GRIDS:%=runs/%-$(SCALE)): runs/%-$(SCALE): $(READY) FORCE
	$(NEEDS_DATA)$(BIN)/python -m fedstat.fl --config simulations/$*.toml --scale $(SCALE) --data-dir '$(DATA_DIR)' --out $@ $(GRID_OPTIONS)

figures-motivation: runs/motivation-$(MOTIVATION).zarr  ## Figs. 1 and 2 alone
	@$(if $(DATA_DIR),:,echo "DATA_DIR is not given: Figs. 1 and 2 are of the small digits, not of MNIST")
	$(BIN)/python paper_figs/fig01.py --data $(MOTIVATION)
	$(BIN)/python paper_figs/fig02.py --data $(MOTIVATION)

runs/motivation-$(MOTIVATION).zarr: $(READY) FORCE
	$(BIN)/python -m fedstat.motivation --data $(MOTIVATION) $(if $(DATA_DIR),--data-dir '$(DATA_DIR)') --out $@ --resume

runs/%-$(SCALE).zarr: $(READY) FORCE  # resumed if unfinished, read if finished
	$(BIN)/python -m fedstat.sim --config simulations/$*.toml --scale $(SCALE) --out $@ --resume

FORCE:

clean:
	rm -rf docs/_build docs/inference docs/methods docs/reference $(VENV) $(VENV)-minimum dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks .import_linter_cache
