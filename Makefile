# SPDX-License-Identifier: Apache-2.0

# Everything that is built, downloaded or run goes below CACHE; nothing else on
# this machine is written to. What the targets do stands in Go programs below
# tests/; this file gives them short names.

CACHE   ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-agent
# The image's name. Push it where your nodes can pull it, or load it onto them.
IMAGE   ?= localhost/gpu-agent:dev
VERSION ?= $(or $(shell git describe --tags --always --dirty 2>/dev/null),dev)
COMMIT  ?= $(or $(shell git rev-parse --short=12 HEAD 2>/dev/null),unknown)
# Of the commit, so that the same commit gives the same program.
DATE    ?= $(or $(shell git log -1 --format=%cs 2>/dev/null),unknown)
GO      ?= go
comma   := ,

# Without -buildvcs=false a checkout of another user's cannot be built.
export GOFLAGS         ?= -buildvcs=false
export GPU_AGENT_CACHE := $(CACHE)
# NVIDIA's header marks what is old as deprecated; go-nvml binds all of it.
export CGO_CFLAGS      ?= -O2 -g -Wno-deprecated-declarations

BIN     := $(CACHE)/bin
ARCHIVE := $(CACHE)/images/gpu-agent.tar

.PHONY: help
help:
	@echo 'make demo       a real one-node Kubernetes with 8 emulated GPUs, the agent on it,'
	@echo '                and pods that ask for shares; needs root, takes about 10 minutes at first'
	@echo 'make demo-down  end it; nothing stays but the cache'
	@echo 'make burst      two such nodes, on-prem and a cloud: jobs go on-prem first, then to the cloud, and back'
	@echo 'make burst-down end those'
	@echo 'make test       all tests, those on the real node included; needs root for these'
	@echo 'make soak       the same with the full counts, and two hours of fuzzing'
	@echo 'make unit       the tests that need no node'
	@echo 'make lint       gofmt, go vet, staticcheck'
	@echo 'make bench      speed and memory, NVIDIA'"'"'s device plugin beside the agent'
	@echo 'make test-gpu   the conformance tests on this machine'"'"'s NVIDIA GPU'
	@echo 'make build      gpu-agent and the hook program, into $(BIN)'
	@echo 'make image      the container image, into $(ARCHIVE)'
	@echo 'make clean      end all test nodes and empty the cache'
	@echo
	@echo 'CACHE=$(CACHE)'
	@echo 'IMAGE=$(IMAGE)'

.PHONY: demo demo-down
demo:
	$(GO) run ./tests/demo up
demo-down:
	$(GO) run ./tests/demo down

.PHONY: burst burst-down
burst:
	$(GO) run ./tests/demo burst
burst-down:
	$(GO) run ./tests/demo burst-down

.PHONY: test soak unit lint
test:
	@$(GO) run ./tests/stages
soak:
	@$(GO) run ./tests/stages --soak
unit:
	@$(GO) run ./tests/stages unit deployments
lint:
	@$(GO) run ./tests/stages lint

.PHONY: bench
bench: build
	$(GO) run ./tests/peers/bench

# TEST_GPU_FLAGS=-time-slices sets time slices too, -caps holds programs to memory caps; see
# tests/hardware.
.PHONY: test-gpu
test-gpu:
	$(GO) test -count=1 -v ./tests/hardware -hardware $(TEST_GPU_FLAGS)

# A static program cannot use dlopen, says the linker; no hook in use comes to it.
QUIET_LD := $(if $(findstring --no-warnings,$(shell ld --help 2>/dev/null)),-Wl$(comma)--no-warnings)

.PHONY: build
build:
	@mkdir -p $(BIN)
	@# The libraries that hold containers to their memory; the agent carries them.
	$(GO) run ./pkg/memcap/lib/build
	@# cgo: the driver's library is loaded at run time, by glibc. Without
	@# grpcnotrace, gRPC's debug pages come along, which nobody serves.
	CGO_ENABLED=1 $(GO) build -trimpath -tags netgo,osusergo,grpcnotrace -ldflags '-s -w -X main.release=$(VERSION) -X main.commit=$(COMMIT) -X main.date=$(DATE)' -o $(BIN)/gpu-agent ./cmd/gpu-agent
	@# Static: the container runtime runs it on the host, whatever libc that has.
	CGO_ENABLED=1 $(GO) build -trimpath -tags netgo,osusergo -ldflags '-s -w -linkmode external -extldflags "-static $(QUIET_LD)"' \
		-o $(BIN)/nvidia-cdi-hook github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook

.PHONY: cluster
cluster:
	@mkdir -p $(BIN)
	$(GO) -C tests/cluster build -o $(BIN)/cluster .

# The driver's library, which comes from the host, needs these beside libc.
DRIVER_NEEDS := libdl.so.2 libm.so.6 libpthread.so.0 librt.so.1
LIBRARIES    := /usr/lib/$(shell gcc -print-multiarch)

.PHONY: image
image: build cluster
	@mkdir -p $(CACHE)/images
	@$(BIN)/cluster image --out $(ARCHIVE) --name $(IMAGE) --entrypoint /usr/bin/gpu-agent --with-libs \
		--link usr/bin:/bin --link usr/lib:/lib --link usr/lib64:/lib64 --dir /tmp:1777 \
		--file deployments/image/etc:/etc \
		--file $(BIN)/gpu-agent:/usr/bin/gpu-agent --file $(BIN)/nvidia-cdi-hook:/usr/bin/nvidia-cdi-hook \
		$(foreach lib,$(DRIVER_NEEDS),--file $(shell gcc -print-file-name=$(lib)):$(LIBRARIES)/$(lib))

.PHONY: clean
clean:
	@if [ -x $(BIN)/cluster ]; then $(BIN)/cluster list | cut -f1 | xargs -r -n1 $(BIN)/cluster down --name; fi
	rm -rf $(CACHE)
