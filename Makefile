# `make help` lists the targets. Each one makes .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo reproduce test fuzz gpu-check fuzz-files sanitize lint format docs docs-serve wheel speed results clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(INSTALLED) ## Make .venv and install pairmix into it, with all its extras

$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/pairmix/csrc/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"pairmix needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}. Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[gpu,lab,dev,integrations]'
	touch $@

demo: $(INSTALLED) ## Train a dense and an SPM student, compare them, write a page (under two minutes)
	$(BIN)/pairmix demo

# DATA=DIR reads the data from there instead of downloading it.
TRAIN := $(BIN)/pairmix train
WITH_DATA = $(if $(DATA),--data $(DATA))

COSINE := --decay cosine --clip 1.0
SHAKESPEARE_OWN = $(TRAIN) shakespeare $(WITH_DATA) $(COSINE) --warmup 50 --steps 1000 --out results/shakespeare-own --resume
AGNEWS_OWN = $(TRAIN) agnews $(WITH_DATA) --out results/agnews-own --resume
ELMAN = $(TRAIN) shakespeare $(WITH_DATA) $(COSINE) --warmup 30 --widths 1024 --length 64 --steps 600 --out results/elman --resume
GPT = $(TRAIN) gpt $(WITH_DATA) --seconds 30 --seeds 0,1,2 --out results/gpt --resume
GPT_LONG = $(TRAIN) gpt $(WITH_DATA) --seconds 240 --seeds 0,1,2 --out results/gpt --resume
GPT_NEWS = $(TRAIN) gpt $(WITH_DATA) --text agnews --seconds 960 --seeds 0 --out results/gpt --resume
GPT_AVX512 = $(TRAIN) gpt $(WITH_DATA) --times results/avx512-zen5/steps.json --out results/gpt-avx512 --resume
GPT_LONG_ONCE = $(TRAIN) gpt $(WITH_DATA) --seconds 240 --seeds 0 --out results/gpt --resume
ADAPTERS = $(TRAIN) adapters $(WITH_DATA) --seeds 0,1,2 --out results/adapters --resume
EXTENSIONS = $(TRAIN) gpt $(WITH_DATA) --times results/extensions/steps-gpt.json --seconds 30 --seeds 0,1,2 --widths 512 \
    --lrs 0.00025,0.0005 --out results/extensions --resume
EXTENSIONS_NEWS = $(TRAIN) gpt $(WITH_DATA) --times results/extensions/steps-gpt.json --text agnews --seconds 960 --seeds 0 \
    --out results/extensions --resume
EXTENSIONS_LONG = $(TRAIN) gpt $(WITH_DATA) --times results/extensions/steps-gpt.json --seconds 240 --seeds 0 --widths 256 \
    --lrs 0.001 --out results/extensions --resume

reproduce: $(INSTALLED) ## Run those of the paper's experiments that results/ lacks (most of a day from nothing)
	$(TRAIN) teacher --layers dense,spm,lowrank,identity --out results/teacher --resume
	$(TRAIN) teacher --widths 256 --layers dense,spm,lowrank --angle-stds 0.03,0.1,0.3,1.0,uniform \
	    --blocks general,rotation --pairings same,other --out results/teacher --resume
	$(TRAIN) teacher --widths 2048 --layers dense,spm --angle-stds 0.03,0.1 --blocks general,rotation \
	    --out results/teacher --resume
	for lr in 0.0003 0.001 0.003 0.01 0.03; do \
	    $(TRAIN) teacher --widths 256 --layers dense,spm,lowrank,identity --lr $$lr --out results/teacher-lr/$$lr --resume && \
	    $(TRAIN) agnews $(WITH_DATA) --widths 2048 --seeds 0 --lr $$lr --out results/agnews-lr/$$lr --resume || exit; \
	done
	$(TRAIN) teacher --widths 256 --layers dense,spm,lowrank --inits near_identity --blocks general,rotation \
	    --angle-stds 0.1,uniform --rows 300,1000,3000,10000,30000,100000 --lrs 0.001,0.003,0.01 --out results/teacher-rows --resume
	$(TRAIN) teacher --widths 256 --layers dense,spm --inits near_identity --blocks general,rotation --angle-stds 0.1,uniform \
	    --norms --out results/teacher-norms --resume
	$(TRAIN) teacher --layers dense,spm,lowrank --inits near_identity --widths 256,1024 --angle-stds 0.1,uniform \
	    --lrs 0.001,0.003,0.01 --out results/teacher-own --resume
	$(TRAIN) teacher --layers monarch --widths 256,1024 --angle-stds 0.1,uniform --lrs 0.001,0.003,0.01 --out results/teacher-own --resume
	$(TRAIN) teacher --layers spm --inits near_identity --widths 1024 --angle-stds 0.1 --lr 0.003 --layer-rate 0.9 --out results/teacher-head --resume
	$(TRAIN) teacher --layers dense,spm --inits near_identity --widths 4096 --angle-stds 0.1 --steps 400 --seeds 0 \
	    --lrs 0.0003,0.001,0.003 --out results/teacher-wide --resume
	$(TRAIN) agnews $(WITH_DATA) --out results/agnews --resume
	$(TRAIN) agnews $(WITH_DATA) --layers spm,lowrank,softmax --widths 8192 --out results/agnews --resume
	$(TRAIN) agnews $(WITH_DATA) --layers spm,softmax --widths 16384,32768,65536 --seeds 0 --out results/agnews --resume
	$(TRAIN) shakespeare $(WITH_DATA) --layers spm --out results/shakespeare --resume
	$(TRAIN) shakespeare $(WITH_DATA) --layers lowrank,dense --steps 800 --out results/shakespeare --resume
	$(AGNEWS_OWN) --widths 4096 --layers spm --inits own,near_identity --lrs 0.0003,0.001,0.003,0.01
	$(AGNEWS_OWN) --widths 4096 --layers spm --stages 24 --lrs 0.003,0.01
	$(AGNEWS_OWN) --widths 4096 --layers companion --lrs 0.003,0.01
	$(AGNEWS_OWN) --widths 4096 --layers lowrank,softmax --lrs 0.003,0.01,0.03
	$(AGNEWS_OWN) --widths 4096 --layers dense,monarch --lrs 0.003,0.01
	$(AGNEWS_OWN) --widths 4096 --dropout 0.3 --layers spm --inits own,near_identity --lrs 0.001,0.003,0.01
	$(AGNEWS_OWN) --widths 4096 --dropout 0.3 --layers spm --inits own,near_identity --stages 24 --lrs 0.001,0.003,0.01
	$(AGNEWS_OWN) --widths 4096 --dropout 0.3 --layers lowrank --lrs 0.003,0.01,0.03
	$(AGNEWS_OWN) --widths 4096 --dropout 0.3 --layers softmax --lrs 0.01,0.03,0.1
	$(AGNEWS_OWN) --widths 4096 --dropout 0.3 --layers dense,monarch --lrs 0.003,0.01
	$(AGNEWS_OWN) --widths 8192,16384 --layers softmax --lrs 0.003,0.01,0.03
	$(AGNEWS_OWN) --widths 8192,16384 --layers spm --inits near_identity --lrs 0.0003,0.001,0.003
	$(AGNEWS_OWN) --widths 8192,16384 --layers spm --lrs 0.003,0.01,0.03
	$(AGNEWS_OWN) --widths 32768 --layers softmax --lrs 0.01,0.03
	$(AGNEWS_OWN) --widths 32768 --layers spm --inits near_identity --lrs 0.0003,0.001
	$(AGNEWS_OWN) --widths 32768 --layers spm --lrs 0.003,0.01
	$(SHAKESPEARE_OWN) --layers spm --seeds 0,1,2 --lrs 0.0003
	$(SHAKESPEARE_OWN) --layers lowrank --seeds 0,1,2 --lrs 0.0003,0.001
	$(SHAKESPEARE_OWN) --layers monarch,companion --lrs 0.0003
	$(SHAKESPEARE_OWN) --layers spm --stages 24 --seeds 0,1,2 --lrs 0.0003
	$(SHAKESPEARE_OWN) --layers spm --stages 48 --lrs 0.0003
	$(TRAIN) shakespeare $(WITH_DATA) $(COSINE) --warmup 20 --widths 4096 --length 32 --batch 8 --steps 200 --layers spm,dense \
	    --lrs 0.00025,0.0005,0.001 --out results/elman-wide --resume
	$(ELMAN) --layers spm --stages 10 --seeds 0,1,2 --lrs 0.001,0.002,0.004,0.008,0.016
	$(ELMAN) --layers spm --stages 10 --blocks rotation --seeds 0,1,2 --lrs 0.001,0.002,0.004,0.008,0.016
	$(ELMAN) --layers lowrank --stages 10 --seeds 0,1,2 --lrs 0.001,0.002,0.004,0.008,0.016
	$(ELMAN) --layers lowrank --stages 10 --embedding-rate 40 --seeds 0,1,2 --lrs 0.001,0.002,0.004,0.008,0.016
	$(ELMAN) --layers monarch --embedding-rate 40 --seeds 0,1,2 --lrs 0.002,0.004,0.008
	$(ELMAN) --layers lowrank --stages 40 --embedding-rate 40 --seeds 0,1,2 --lrs 0.002,0.004,0.008
	$(ELMAN) --layers spm --stages 40 --seeds 0,1,2 --lrs 0.001,0.002,0.004,0.008,0.016
	$(ELMAN) --layers dense --lrs 0.001,0.002,0.004,0.008
	$(ELMAN) --layers dense --embedding-rate 40 --seeds 0,1,2 --lrs 0.001,0.002,0.004,0.008
	test -e results/steps-gpt.json || $(BIN)/pairmix bench steps --experiment gpt $(WITH_DATA) --keep-memory --seconds 15
	$(GPT) --widths 128 --layers dense --lrs 0.001,0.002,0.004
	$(GPT) --widths 128 --layers spm --lrs 0.001,0.002,0.004
	$(GPT) --widths 256 --layers dense --lrs 0.0005,0.001,0.002,0.004
	$(GPT) --widths 256 --layers lowrank --lrs 0.001,0.002,0.004,0.008
	$(GPT) --widths 256 --layers spm --lrs 0.0005,0.001,0.002
	$(GPT) --widths 512 --layers spm,dense,lowrank --lrs 0.00025,0.0005,0.001
	$(GPT) --widths 512 --layers lowrank --embedding-rate 20 --lrs 0.0005,0.001,0.002
	$(TRAIN) gpt $(WITH_DATA) --seconds 30 --widths 512 --layers dense --embedding-rate 20 --lrs 0.0005 --out results/gpt --resume
	$(GPT) --widths 1024 --layers spm --lrs 0.000125,0.00025,0.0005
	$(GPT) --widths 1024 --layers lowrank --lrs 0.00025,0.0005,0.001
	$(GPT) --widths 256 --layers companion --lrs 0.0005,0.001,0.002
	$(GPT) --widths 512 --layers companion --lrs 0.00025,0.0005,0.001
	$(GPT) --widths 1024 --layers companion --lrs 0.000125,0.00025,0.0005
	$(GPT) --widths 256 --layers monarch --lrs 0.002,0.004,0.008
	$(GPT) --widths 512 --layers monarch --lrs 0.0005,0.001,0.002
	$(GPT) --widths 1024 --layers monarch --lrs 0.00025,0.0005,0.001
	$(TRAIN) gpt $(WITH_DATA) --seconds 30 --widths 1024 --layers dense --lrs 0.000125,0.00025,0.0005 --out results/gpt --resume
	$(GPT_LONG) --widths 256 --layers dense --lrs 0.0005,0.001,0.002
	$(GPT_LONG) --widths 256 --layers spm --lrs 0.001
	$(GPT_LONG) --widths 128 --layers dense --lrs 0.002
	$(GPT_LONG_ONCE) --widths 128 --layers spm --lrs 0.002
	$(GPT_LONG) --widths 1024 --layers spm --lrs 0.00025
	$(GPT_LONG) --widths 512 --layers dense --lrs 0.00025,0.0005
	$(GPT_LONG) --widths 256 --layers lowrank,monarch --lrs 0.004
	$(GPT_LONG_ONCE) --widths 256 --layers companion --lrs 0.001
	$(GPT_LONG) --widths 512 --layers lowrank,monarch --lrs 0.001
	$(GPT_LONG_ONCE) --widths 512 --layers companion --lrs 0.0005
	$(GPT_LONG) --widths 1024 --layers lowrank,monarch --lrs 0.0005
	$(GPT_LONG) --widths 1024 --layers dense --lrs 0.00025
	$(GPT_LONG) --widths 512 --layers spm --lrs 0.0005
	$(GPT_NEWS) --widths 128 --layers dense --lrs 0.002
	$(GPT_NEWS) --widths 256 --layers spm,dense --lrs 0.001
	$(GPT_NEWS) --widths 512 --layers spm,dense --lrs 0.0005
	$(GPT_NEWS) --widths 1024 --layers spm,dense --lrs 0.00025
	$(GPT_AVX512) --seconds 240 --seeds 0,1,2 --widths 128 --layers dense --lrs 0.002
	$(GPT_AVX512) --seconds 240 --seeds 0,1,2 --widths 256 --layers spm --lrs 0.001
	$(GPT_AVX512) --seconds 240 --seeds 0 --widths 256 --layers dense --lrs 0.001
	$(GPT_AVX512) --seconds 240 --seeds 0 --widths 512 --layers spm,dense --lrs 0.0005
	$(GPT_AVX512) --seconds 240 --seeds 0 --widths 1024 --layers spm --lrs 0.00025
	$(GPT_AVX512) --text agnews --seconds 960 --seeds 0 --widths 128 --layers dense --lrs 0.002
	$(GPT_AVX512) --text agnews --seconds 960 --seeds 0 --widths 512 --layers spm --lrs 0.0005
	$(GPT_AVX512) --text agnews --seconds 2400 --seeds 0 --widths 512 --layers spm,dense --lrs 0.0005
	test -e results/extensions/steps-gpt.json || $(BIN)/pairmix bench steps --experiment gpt --widths 256,512 \
	    --layers spm,companion,deeper,mixture $(WITH_DATA) --keep-memory --seconds 15 --out results/extensions
	$(EXTENSIONS) --layers spm,companion,deeper,mixture
	$(EXTENSIONS) --layers spm --dense-maps qkv,out
	$(EXTENSIONS) --layers spm --dense-maps up,down
	$(EXTENSIONS_NEWS) --widths 256 --lrs 0.001 --layers deeper
	$(EXTENSIONS_NEWS) --widths 512 --lrs 0.0005 --layers deeper
	$(EXTENSIONS_NEWS) --widths 256 --lrs 0.001 --layers spm --dense-maps qkv,out
	$(EXTENSIONS_LONG) --layers deeper
	$(EXTENSIONS_LONG) --layers spm --dense-maps qkv,out
	test -e results/steps.json || $(BIN)/pairmix bench steps $(WITH_DATA) --keep-memory
	$(ADAPTERS) --layers rotations --lrs 0.01,0.03,0.1,0.3
	$(ADAPTERS) --layers lora --lrs 0.003,0.01,0.03
	$(ADAPTERS) --layers oft,boft --stages own --lrs 0.01,0.03,0.1
	$(ADAPTERS) --layers full --stages own --lrs 0.0003,0.001,0.003
	$(BIN)/pairmix report results/teacher results/teacher-rows results/teacher-norms results/agnews results/shakespeare results/gpt \
	    results/steps.json results/steps-gpt.json -o results/report.html --pictures results/pictures
	$(BIN)/python docs/fill_tables.py

INTERPRETED = $(shell $(BIN)/python -c 'import torch; torch.cuda.is_available() or print("TRITON_INTERPRET=1")')

test: $(INSTALLED) ## Run all tests, and every example in README, docs and docstrings
	$(BIN)/pytest $(if $(DATA),--data=$(DATA))

fuzz: $(INSTALLED) ## Compare 20,000 random layers and feed-forward blocks with the definition; SEED= and COUNT= choose others
	$(BIN)/python tests/fuzz.py --seed $(or $(SEED),0) --count $(or $(COUNT),20000)

gpu-check: $(INSTALLED) ## Test the GPU kernels: on a GPU, or without one in Triton's interpreter, which takes hours
	$(INTERPRETED) $(BIN)/pytest tests/ops/test_triton_kernels.py tests/ops/test_parity.py --impl triton
	$(INTERPRETED) $(BIN)/python tests/fuzz.py --impl triton --seed $(or $(SEED),0) --count $(or $(COUNT),2000)

fuzz-files: $(INSTALLED) ## Read 10,000 damaged checkpoints and report 1,000 malformed results
	$(BIN)/python tests/lab/training/fuzz_checkpoints.py --count $(or $(COUNT),10000) --seed $(or $(SEED),0)
	$(BIN)/python tests/lab/report/fuzz_results.py --count $(or $(COUNT),1000) --seed $(or $(SEED),0)

sanitize: $(INSTALLED) ## Test the kernels for memory errors, undefined behaviour and races
	tests/sanitize.sh

lint: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Put the code into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site is made from text, so it has an environment of its own: nothing is compiled, and torch is not needed.
DOCS := $(VENV)/docs
EXTRA_DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")

$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c '$(EXTRA_DOCS)' > $(DOCS)/requirements.txt
	$(DOCS)/bin/pip install --disable-pip-version-check -q -c constraints.txt -r $(DOCS)/requirements.txt
	touch $@

docs: $(DOCS)/.installed ## Build the documentation site into site/; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

docs-serve: $(DOCS)/.installed ## Show the site at http://127.0.0.1:8000, rebuilt when a page changes
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve --watch src/pairmix --watch README.md

wheel: $(INSTALLED) ## Build a wheel for this machine into dist/
	$(BIN)/pip wheel --disable-pip-version-check -q --no-deps -w dist .

# RESULTS=results/avx512 measures a machine whose instruction set is not that of the other results; INSTRUCTION_SET=avx2 the kernels
# for one that is not the machine's best.
RESULTS ?= results
BENCH := $(BIN)/pairmix bench
MEASURED = $(if $(INSTRUCTION_SET),--instruction-set $(INSTRUCTION_SET)) --out $(RESULTS)

speed: $(INSTALLED) ## Measure the speed again, and put it into README and docs
	$(BENCH) kernels $(MEASURED)
	$(BENCH) operator $(MEASURED)
	$(BENCH) operator --grid $(MEASURED)
	$(BENCH) operator --conditions $(MEASURED)
	$(BENCH) operator --latency $(MEASURED)
	$(BENCH) operator --scaling $(MEASURED)
	$(BENCH) operator --variants $(MEASURED)
	$(BENCH) modules $(MEASURED)
	$(BENCH) steps $(WITH_DATA) --keep-memory $(MEASURED)
	$(BIN)/python docs/fill_tables.py

results: speed ## Measure again what stands in results/, and put it into README and docs
	$(BENCH) init $(WITH_DATA) --jobs 2 --resume --out results
	$(BENCH) fit --out results
	$(BENCH) onnx --out results
	$(BENCH) steps --experiment gpt $(WITH_DATA) --keep-memory --seconds 15 --out results
	$(BENCH) steps --experiment adapters $(WITH_DATA) --keep-memory --seconds 30 --out results
	$(BIN)/python docs/fill_tables.py

clean: ## Remove .venv and everything that tools leave behind
	rm -rf $(VENV) build dist runs site .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
