// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"example.com/gpu-agent/tests/emulator/lib"
)

// Kit is the checkout, the cache, and the programs that are built from the one
// into the other.
type Kit struct {
	// Root is the checkout's top directory.
	Root string
	// Cache is where everything lies that is built, fetched or run.
	Cache string
	// Screen takes what programs say while they work; nil is nobody.
	Screen io.Writer
}

// NewKit finds the checkout from the working directory, and the cache as the
// Makefile does: $GPU_TESTS_CACHE, else gpu-agent in the user's cache.
func NewKit(screen io.Writer) (*Kit, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, fmt.Errorf("find the checkout: %w", err)
	}
	for {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.HasPrefix(mod, []byte("module example.com/gpu-agent\n")) {
			break
		}
		up := filepath.Dir(dir)
		if up == dir {
			return nil, errors.New("find the checkout: no go.mod of example.com/gpu-agent at or above the working directory; run this inside the checkout")
		}
		dir = up
	}
	cache, err := lib.Cache()
	if err != nil {
		return nil, err
	}
	if cache, err = filepath.Abs(cache); err != nil {
		return nil, fmt.Errorf("find the cache: %w", err)
	}
	return &Kit{Root: dir, Cache: cache, Screen: screen}, nil
}

// Missing says what this machine lacks to run a node, "" if nothing.
func Missing() string {
	if os.Geteuid() != 0 {
		return fmt.Sprintf("root: a node takes namespaces, mounts and device nodes, and this is user %d", os.Geteuid())
	}
	for _, tool := range []string{"go", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return tool + ": it is not in PATH"
		}
	}
	return ""
}

// Bin is the path of a program in the cache.
func (k *Kit) Bin(program string) string { return filepath.Join(k.Cache, "bin", program) }

// AgentArchive is the agent's image, as make builds it.
func (k *Kit) AgentArchive() string { return filepath.Join(k.Cache, "images", "gpu-agent.tar") }

// PlacerArchive is the placer's image.
func (k *Kit) PlacerArchive() string { return filepath.Join(k.Cache, "images", "gpu-placer.tar") }

// Step is one thing to do, with a name for the screen.
type Step struct {
	Name string
	Run  func(context.Context) error
}

// Steps build or fetch everything that a node, the emulated driver and the
// agent's image are made of, parts of other versions included. Each leaves alone what stands
// already.
func (k *Kit) Steps(parts ...string) []Step {
	build := []string{"build"}
	for _, part := range parts {
		build = append(build, "--with", part)
	}
	return []Step{
		{"the program that runs nodes", func(ctx context.Context) error {
			return k.Run(ctx, "go", "-C", "tests/cluster", "build", "-buildvcs=false", "-o", k.Bin("cluster"), ".")
		}},
		{"Kubernetes, etcd, containerd, test images", func(ctx context.Context) error {
			return k.Run(ctx, k.Bin("cluster"), build...)
		}},
		{"the emulated driver", func(ctx context.Context) error {
			// No libc: it runs inside nodes and, for the demo, inside containers.
			err := k.run(ctx, []string{"CGO_ENABLED=0"}, "go", "build", "-buildvcs=false", "-o", k.Bin("gpu-emulator"), "./tests/emulator/cmd/gpu-emulator")
			if err != nil {
				return err
			}
			// For nvml.h, which building the program did not need.
			if err := k.Run(ctx, "go", "mod", "download", "github.com/NVIDIA/go-nvml"); err != nil {
				return err
			}
			_, err = lib.Cached(ctx)
			return err
		}},
		{"agent, placer and their images", func(ctx context.Context) error {
			return k.Run(ctx, "make", "--no-print-directory", "-s", "image", "CACHE="+k.Cache)
		}},
		{"the probe of GPU memory", func(ctx context.Context) error {
			_, err := ProbeMount(ctx)
			return err
		}},
	}
}

// BuildNext builds an agent that an upgrade could bring: of another release, and
// the cap's library that it carries has another content, though it does the same.
// Its programs are in next/bin of the cache. The agent must have been built already.
func (k *Kit) BuildNext(ctx context.Context) error {
	dir := filepath.Join(k.Cache, "next")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("build the next agent: %w", err)
	}
	built := filepath.Join(k.Root, "pkg", "memcap", "lib", "built", "libcuda.so.1")
	library, err := os.ReadFile(built)
	if err != nil {
		return fmt.Errorf("build the next agent: %w", err)
	}
	// The loader does not look at what is behind the last section.
	changed, overlay := filepath.Join(dir, "libcuda.so.1"), filepath.Join(dir, "overlay.json")
	replace, err := json.Marshal(object{"Replace": object{built: changed}})
	err = errors.Join(err, os.WriteFile(changed, append(library, "next"...), 0o644), os.WriteFile(overlay, replace, 0o644))
	if err != nil {
		return fmt.Errorf("build the next agent: %w", err)
	}
	err = k.Run(ctx, "make", "--no-print-directory", "-s", "image", "CACHE="+k.Cache, "BIN="+filepath.Join(dir, "bin"),
		"ARCHIVE="+filepath.Join(dir, "gpu-agent.tar"), "PLACER_ARCHIVE="+filepath.Join(dir, "gpu-placer.tar"), "IMAGE=localhost/gpu-agent:next", "VERSION=next", "GOFLAGS=-buildvcs=false -overlay="+overlay)
	if err != nil {
		return fmt.Errorf("build the next agent: %w", err)
	}
	return nil
}

// Plugin is the plugin for kubectl, as BuildPlugin builds it.
const Plugin = "kubectl-gpu"

// BuildPlugin builds the plugin for kubectl, and what its completion takes, as `make plugin` does.
func (k *Kit) BuildPlugin(ctx context.Context) error {
	return k.Run(ctx, "make", "--no-print-directory", "-s", "plugin", "CACHE="+k.Cache)
}

// BuildPeer builds NVIDIA's device plugin, unmodified, and returns where it is.
// The version stands in its module's go.mod below tests/peers.
func (k *Kit) BuildPeer(ctx context.Context) (string, error) {
	const name = "nvidia-device-plugin"
	err := k.run(ctx, []string{"CGO_ENABLED=1"}, "go", "-C", "tests/peers/"+name, "build", "-buildvcs=false", "-trimpath", "-ldflags=-s -w",
		"-o", k.Bin(name), "github.com/NVIDIA/k8s-device-plugin/cmd/"+name)
	if err != nil {
		return "", fmt.Errorf("build NVIDIA's device plugin: %w", err)
	}
	return k.Bin(name), nil
}

// Run runs a program in the checkout, its output on the kit's screen. An error
// carries the end of the output where nobody saw it.
func (k *Kit) Run(ctx context.Context, program string, args ...string) error {
	return k.run(ctx, nil, program, args...)
}

func (k *Kit) run(ctx context.Context, env []string, program string, args ...string) error {
	var out bytes.Buffer
	cmd := k.command(ctx, env, program, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if k.Screen != nil {
		cmd.Stdout, cmd.Stderr = k.Screen, k.Screen
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w%s", commandLine(program, args), err, lastLines(out.Bytes()))
	}
	return nil
}

// output runs a program and returns what it writes to its standard output.
func (k *Kit) output(ctx context.Context, stdin io.Reader, program string, args ...string) ([]byte, error) {
	var out, errs bytes.Buffer
	cmd := k.command(ctx, nil, program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	if err := cmd.Run(); err != nil {
		return out.Bytes(), fmt.Errorf("%s: %w%s", commandLine(program, args), err, lastLines(errs.Bytes()))
	}
	return out.Bytes(), nil
}

func (k *Kit) command(ctx context.Context, env []string, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = k.Root
	cmd.Env = append(append(os.Environ(), "GPU_TESTS_CACHE="+k.Cache), env...)
	// Builds and nodes clean up after themselves when they are asked to end.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	return cmd
}

// commandLine names a command in an error, without its endless arguments.
func commandLine(program string, args []string) string {
	line := filepath.Base(program) + " " + strings.Join(args, " ")
	if line, _, cut := strings.Cut(line, "\n"); cut || len(line) > 160 {
		return line[:min(len(line), 160)] + "…"
	}
	return line
}

// lastLines is the end of a program's output on lines of its own.
func lastLines(out []byte) string {
	const size = 2000
	out = bytes.TrimSpace(out)
	if len(out) == 0 {
		return ""
	}
	if len(out) > size {
		out = append([]byte("…"), out[len(out)-size:]...)
	}
	return "\n" + string(out)
}
