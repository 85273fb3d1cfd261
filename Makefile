# SPDX-License-Identifier: Apache-2.0

# Everything that is built, downloaded or run goes below CACHE, and a release
# into dist; nothing else on this machine is written to. What the targets do stands in Go programs below
# tests/; this file gives them short names.

CACHE   ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-agent
# The images' names. Push them where your nodes can pull them, or load them onto these.
IMAGE        ?= localhost/gpu-agent:dev
PLACER_IMAGE ?= localhost/gpu-placer:dev
VERSION ?= $(or $(shell git describe --tags --always --dirty --abbrev=12 2>/dev/null),dev)
COMMIT  ?= $(or $(shell git rev-parse --short=12 HEAD 2>/dev/null),unknown)
# Of the commit, so that the same commit gives the same program.
DATE    ?= $(or $(shell git log -1 --format=%cs 2>/dev/null),unknown)
GO      ?= go
comma   := ,

# Without -buildvcs=false a checkout of another user's cannot be built; without -trimpath each
# checkout compiles everything anew.
export GOFLAGS         ?= -buildvcs=false -trimpath
export GPU_TESTS_CACHE := $(CACHE)
# NVIDIA's header marks what is old as deprecated; go-nvml binds all of it.
export CGO_CFLAGS      ?= -O2 -g -Wno-deprecated-declarations

BIN     := $(CACHE)/bin
ARCHIVE := $(CACHE)/images/gpu-agent.tar
PLACER_ARCHIVE := $(CACHE)/images/gpu-placer.tar

.PHONY: help
help:
	@echo 'make demo       a real one-node Kubernetes with 8 emulated GPUs, the agent on it,'
	@echo '                and pods that ask for shares; needs root, takes some 20 minutes at first'
	@echo 'make demo-down  end it; nothing stays but the cache'
	@echo 'make burst      two such nodes, on-prem and a cloud: jobs go on-prem first, then to the cloud, and back'
	@echo 'make burst-down end those'
	@echo 'make test       what every change must pass, pods on a real node included; needs root for these'
	@echo 'make test-all   all that is known, once: before a release'
	@echo 'make soak       the same with the long counts, and ten minutes of each fuzz test'
	@echo 'make unit       the tests that need no node'
	@echo 'make lint       gofmt, go vet, staticcheck, closed sets'
	@echo 'make bench      speed and memory, NVIDIA'"'"'s device plugin beside the agent'
	@echo 'make test-gpu   the conformance tests on this machine'"'"'s NVIDIA GPU;'
	@echo '                with BUDGET=9m, questions to it for so long'
	@echo 'make test-gpu-kit  these questions as a folder, dist/test-gpu, for another machine'
	@echo 'make build      gpu-agent, gpu-agent-mps, gpu-placer and the hook program, into $(BIN)'
	@echo 'make plugin     kubectl-gpu, the plugin for kubectl, into $(BIN); make plugins: for each platform'
	@echo 'make image      the container images, into $(ARCHIVE) and $(PLACER_ARCHIVE)'
	@echo 'make emulator-image  the emulated driver for nodes without GPUs, into $(EMULATOR_ARCHIVE)'
	@echo 'make release    a release, of both architectures, into dist/VERSION: docs/release.md'
	@echo 'make publish    push a release to REGISTRY: both images and the chart, of both architectures'
	@echo 'make lock       renew the versions of the Debian packages that images are made with'
	@echo 'make vuln       known vulnerabilities of what is linked; VULNDB names the database'
	@echo 'make clean      end all test nodes and empty the cache'
	@echo
	@echo 'CACHE=$(CACHE)'
	@echo 'IMAGE=$(IMAGE)'
	@echo 'PLACER_IMAGE=$(PLACER_IMAGE)'

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

.PHONY: test test-all soak unit lint
test:
	@$(GO) run ./tests/stages
test-all:
	@$(GO) run ./tests/stages --all
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
# What a card is asked in the minutes for which one can be had, to be taken to it.
.PHONY: test-gpu-kit
test-gpu-kit:
	$(GO) run ./tests/hardware/kit dist/test-gpu

.PHONY: test-gpu
ifdef BUDGET
test-gpu: test-gpu-kit
	dist/test-gpu/run -out dist/answers-$$(date +%Y%m%d-%H%M%S) $(BUDGET)
else
test-gpu:
	$(GO) test -count=1 -v ./tests/hardware -hardware $(TEST_GPU_FLAGS)
endif

# A static program cannot use dlopen, says the linker; no hook in use comes to it.
QUIET_LD := $(if $(findstring --no-warnings,$(shell ld --help 2>/dev/null)),-Wl$(comma)--no-warnings)

# The architecture to build for. Another than this machine's takes a CC for it.
ARCH ?= $(shell $(GO) env GOARCH)

# No C library's way to look up names and users; the third program.
TAGS := netgo,osusergo
HOOK := github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook

# Whatever the processor that it is built on: the same for everybody. Without an ID of
# the build the program does not depend on where the compiler lies.
TARGET   = GOARCH=$(ARCH) GOAMD64=v1 GOARM64=v8.0
GO_BUILD = $(TARGET) CGO_ENABLED=1 $(GO) build -trimpath
BUILT_AS = -X main.release=$(VERSION) -X main.commit=$(COMMIT) -X main.date=$(DATE)

.PHONY: build
build:
	@mkdir -p $(BIN)
	@# The libraries that hold containers to their memory; the agent carries them.
	CGO_ENABLED=0 $(GO) run ./pkg/memcap/lib/build
	@# cgo: the driver's library is loaded at run time, by glibc. Without
	@# grpcnotrace, gRPC's debug pages come along, which nobody serves.
	$(GO_BUILD) -tags $(TAGS),grpcnotrace -ldflags '-s -w -buildid= $(BUILT_AS)' -o $(BIN)/gpu-agent ./cmd/gpu-agent
	@# The same for the program of the MPS daemons, which is in the agent's image.
	$(GO_BUILD) -tags $(TAGS) -ldflags '-s -w -buildid= $(BUILT_AS)' -o $(BIN)/gpu-agent-mps ./cmd/gpu-agent-mps
	@# Static and without C: it is alone in its image.
	$(TARGET) CGO_ENABLED=0 $(GO) build -trimpath -tags $(TAGS),grpcnotrace -ldflags '-s -w -buildid= $(BUILT_AS)' -o $(BIN)/gpu-placer ./cmd/gpu-placer
	@# Static: the container runtime runs it on the host, whatever libc that has.
	$(GO_BUILD) -tags $(TAGS) -ldflags '-s -w -buildid= -linkmode external -extldflags "-static $(QUIET_LD)"' \
		-o $(BIN)/nvidia-cdi-hook $(HOOK)

# The plugin for kubectl runs where people work. It is static, and without C: macOS looks names up by
# its own library all the same. 'make plugin' makes that of this machine.
PLUGINS    ?= darwin/amd64 darwin/arm64 linux/amd64 linux/arm64
PLUGIN_DIR ?= $(BIN)/plugins
PLUGIN_LD   = -s -w -buildid= $(BUILT_AS)
.PHONY: plugin plugins
plugin:
	@mkdir -p $(BIN)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(PLUGIN_LD)' -o $(BIN)/kubectl-gpu ./cmd/kubectl-gpu
	@cp cmd/kubectl-gpu/kubectl_complete-gpu $(BIN)/

plugins:
	@set -e; for at in $(PLUGINS); do os=$${at%/*}; arch=$${at#*/}; \
		GOOS=$$os GOARCH=$$arch GOAMD64=v1 GOARM64=v8.0 CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(PLUGIN_LD)' \
			-o $(PLUGIN_DIR)/$$os-$$arch/kubectl-gpu ./cmd/kubectl-gpu; done

# Where Debian's packages are kept, by which images are made: deployments/image.
DEBIAN   := $(CACHE)/images/debian
# What an image is built from is fixed, so that it depends on the commit alone.
FOR_IMAGE = ARCH=$(1) CC="$$cc" CGO_CFLAGS='-O2 -Wno-deprecated-declarations' CGO_CPPFLAGS= CGO_LDFLAGS= VERSION=$(VERSION) COMMIT=$(COMMIT) DATE=$(DATE)
ABOUT     = --cache $(DEBIAN) --version $(VERSION) --revision "$$(git rev-parse HEAD 2>/dev/null)" --created "$$(git log -1 --format=%cI 2>/dev/null)"

.PHONY: imager
imager:
	@mkdir -p $(BIN)
	@$(GO) -C deployments/image build -o $(BIN)/image .

.PHONY: image
image: imager
	@cc="$$($(BIN)/image cc --newer --arch $(ARCH) --cache $(DEBIAN))" && $(MAKE) --no-print-directory build $(call FOR_IMAGE,$(ARCH))
	@$(BIN)/image build --newer --arch $(ARCH) --of gpu-agent --out $(ARCHIVE) --name $(IMAGE) --bin $(ARCH)=$(BIN) $(ABOUT)
	@$(BIN)/image build --newer --arch $(ARCH) --of gpu-placer --out $(PLACER_ARCHIVE) --name $(PLACER_IMAGE) --bin $(ARCH)=$(BIN) $(ABOUT)

# A tool for tests, apart from the product's image and releases: tests/emulator/README.md.
EMULATOR_IMAGE   ?= localhost/gpu-emulator:dev
EMULATOR_ARCHIVE := $(CACHE)/images/gpu-emulator.tar
EMULATOR_PROGRAM := $(CACHE)/emulator/gpu-emulator
.PHONY: emulator-image
emulator-image:
	@mkdir -p $(BIN) $(dir $(EMULATOR_ARCHIVE))
	@$(GO) -C tests/cluster build -o $(BIN)/cluster .
	@# Static: it is alone in the image, and lays libraries down that it loads none of.
	@CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -buildid=' -o $(EMULATOR_PROGRAM) ./tests/emulator/cmd/gpu-emulator
	@# For nvml.h, which building the program did not need.
	@$(GO) mod download github.com/NVIDIA/go-nvml
	@libraries="$$($(EMULATOR_PROGRAM) build)" && $(BIN)/cluster image --out $(EMULATOR_ARCHIVE) --name $(EMULATOR_IMAGE) \
		--entrypoint /usr/bin/gpu-emulator --file $(EMULATOR_PROGRAM):/usr/bin/gpu-emulator:0755 \
		--file $$libraries:/usr/lib/gpu-emulator --file LICENSE:/licenses/LICENSE:0644

# Built from what the commit has, not from the checkout. REGISTRY is where you publish it, a host with or
# without a path; REPOSITORY and PLACER_REPOSITORY are where the images go there: the manifests and the
# chart name them. AGAIN=1 builds an old version, with the
# packages of its time. KEY is the file of a private key that signs it, BUILDER a URI of who makes it.
DIST       := dist/$(VERSION)
REPOSITORY ?= $(or $(REGISTRY),localhost)/gpu-agent
PLACER_REPOSITORY ?= $(or $(REGISTRY),localhost)/gpu-placer
STAGE      := $(CACHE)/release
.PHONY: release
release: imager
	@$(BIN)/image check $(ABOUT) $(if $(AGAIN),--again)
	@rm -rf $(STAGE) && mkdir -p $(STAGE)/source
	@git archive --output $(STAGE)/source.tar HEAD && tar -xf $(STAGE)/source.tar -C $(STAGE)/source
	@set -e; for arch in amd64 arm64; do cc="$$($(BIN)/image cc --arch $$arch --cache $(DEBIAN))"; \
		$(MAKE) --no-print-directory -C $(STAGE)/source build $(call FOR_IMAGE,$$arch) BIN=$(STAGE)/$$arch GOFLAGS=-buildvcs=false; done
	@$(MAKE) --no-print-directory -C $(STAGE)/source plugins PLUGIN_DIR=$(STAGE)/plugins VERSION=$(VERSION) COMMIT=$(COMMIT) DATE=$(DATE) GOFLAGS=-buildvcs=false
	@$(BIN)/image release --out $(DIST) --checkout $(STAGE)/source --gpu-agent-repository $(REPOSITORY) --gpu-placer-repository $(PLACER_REPOSITORY) \
		--bin amd64=$(STAGE)/amd64 --bin arm64=$(STAGE)/arm64 --plugins $(STAGE)/plugins $(ABOUT) \
		$(if $(REGISTRY),--chart-repository $(CHART_REPOSITORY)) $(if $(BUILDER),--builder $(BUILDER)) $(if $(KEY),--key $(KEY))
	@rm -rf $(STAGE)

# Pushes the release in DIST, and makes it first where there is none. Credentials are those of
# `docker login`. FORCE=1 moves a version's tag that names something else.
CHART_REPOSITORY ?= $(REGISTRY)/charts/gpu-agent
.PHONY: publish
publish: imager
	@if [ -z "$(REGISTRY)" ]; then echo 'publish: REGISTRY is missing: a host and a path, such as registry.example.com/team' >&2; exit 1; fi
	@if [ ! -e $(DIST) ]; then $(MAKE) --no-print-directory release; fi
	@$(BIN)/image publish --from $(DIST) --version $(VERSION) --gpu-agent-repository $(REPOSITORY) --gpu-placer-repository $(PLACER_REPOSITORY) \
		--chart-repository $(CHART_REPOSITORY) $(if $(FORCE),--force)

.PHONY: lock
lock: imager
	@$(BIN)/image lock --cache $(DEBIAN)

# VULNDB is the database: empty for Go's own, its URL, the .tar.gz of a snapshot, whose name and newest file
# tell the date, or "module" for the newest that the Go module proxy has of it (golang.org/x/vulndb).
VULNDB    ?=
SNAPSHOT  := $(filter module %.tar.gz,$(VULNDB))
VULNCHECK  = $(BIN)/govulncheck $(if $(VULNDB),-db $(if $(SNAPSHOT),file://$(CACHE)/vulndb,$(VULNDB)))
.PHONY: vuln
vuln:
	@mkdir -p $(BIN)
	@$(GO) -C deployments/image build -o $(BIN)/govulncheck golang.org/x/vuln/cmd/govulncheck
ifneq ($(SNAPSHOT),)
	@rm -rf $(CACHE)/vulndb && mkdir $(CACHE)/vulndb
ifeq ($(VULNDB),module)
	@# The proxy gives files no date, and the version has it: v0.0.0-20261105234957-….
	@set -e; found=$$(cd / && $(GO) mod download -json golang.org/x/vulndb@latest); \
		dir=$$(echo "$$found" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'); day=$$(echo "$$found" | sed -n 's/.*"Version": "[^-]*-\([0-9]\{8\}\).*/\1/p'); \
		cp $$dir/data/osv/*.json $(CACHE)/vulndb/; touch -d $$day $(CACHE)/vulndb/*
else
	@tar -xf $(SNAPSHOT) -C $(CACHE)/vulndb
endif
	@echo "database: $(notdir $(SNAPSHOT)), $$(ls $(CACHE)/vulndb | wc -l) entries as of $$(date -u +%F -r "$(CACHE)/vulndb/$$(ls -t $(CACHE)/vulndb | head -1)")"
	@days=$$(( ($$(date +%s) - $$(date +%s -r "$(CACHE)/vulndb/$$(ls -t $(CACHE)/vulndb | head -1)")) / 86400 )); \
	if [ $$days -gt 30 ]; then echo "WARNING: this database is $$days days old, and knows of nothing since: name a newer one in VULNDB" >&2; fi
endif
	$(VULNCHECK) -show version -tags $(TAGS),grpcnotrace ./cmd/gpu-agent
	$(VULNCHECK) -tags $(TAGS) ./cmd/gpu-agent-mps
	$(VULNCHECK) -tags $(TAGS),grpcnotrace ./cmd/gpu-placer
	$(VULNCHECK) ./cmd/kubectl-gpu
	$(VULNCHECK) -tags $(TAGS) $(HOOK)
	$(VULNCHECK) -C deployments/image .

.PHONY: clean
clean:
	@if [ -x $(BIN)/cluster ]; then $(BIN)/cluster list | cut -f1 | xargs -r -n1 $(BIN)/cluster down --name; fi
	rm -rf $(CACHE)
