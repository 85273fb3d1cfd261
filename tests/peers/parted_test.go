// SPDX-License-Identifier: Apache-2.0

package peers_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.yaml.in/yaml/v4"
	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/peers"
)

// The tests run in a mount namespace of their own, where the driver's kernel files
// are at their fixed places.
func TestMain(m *testing.M) {
	peers.BecomePeer()
	becomeAgent()
	const inside = "GPU_TESTS_PEERS_INSIDE"
	if os.Geteuid() != 0 || os.Getenv(inside) != "" {
		os.Exit(m.Run())
	}
	runtime.LockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cmd.ProcessState.ExitCode())
}

// node is a machine with an emulated driver, and mig-parted on it.
type node struct {
	t       *testing.T
	world   *emulator.World
	machine install.Machine
	root    string // of the driver
	parted  peers.Parted
	docs    string // the folder of mig-parted's own files
}

type built struct{ libraries, parted, docs string }

// programs makes what the tests run, once.
var programs = sync.OnceValues(func() (b built, err error) {
	ctx := context.Background()
	kit, err := lab.NewKit(nil)
	if err != nil {
		return b, err
	}
	if err := peers.MIGParted.Build(ctx, kit); err != nil {
		return b, err
	}
	b.parted = kit.Bin(peers.MIGParted.Name)
	if b.libraries, err = lib.Cached(ctx); err != nil {
		return b, err
	}
	docs, err := exec.CommandContext(ctx, "go", "-C", filepath.Join(kit.Root, "tests/peers", peers.MIGParted.Name),
		"list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/mig-parted").Output()
	if err != nil {
		return b, fmt.Errorf("find mig-parted's documentation: %w", err)
	}
	b.docs = strings.TrimSpace(string(docs))
	return b, nil
})

func start(t *testing.T, spec emulator.Spec) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts over /proc and /sys need root")
	}
	made, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	w, err := emulator.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	m := install.Machine{Driver: root, Dev: filepath.Join(root, "dev"), Kernel: "/"}
	if err := errors.Join(install.Driver(root, made.libraries, w), m.Save()); err != nil {
		t.Fatal(err)
	}
	if err := install.Mount(w); err != nil {
		t.Fatal(err)
	}
	if err := m.Sync(w); err != nil {
		t.Fatal(err)
	}
	l, err := daemon.Listen(filepath.Join(root, install.Socket))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- (&daemon.Server{World: w, Driver: root}).Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return &node{t, w, m, root, peers.Parted{Program: made.parted, Root: root}, made.docs}
}

// run runs mig-parted on a file of its own documentation, or one of the test's.
func (n *node) run(verb, file, config string) (string, error) {
	n.t.Helper()
	if !filepath.IsAbs(file) {
		file = filepath.Join(n.docs, file)
	}
	return n.parted.Run(n.t.Context(), verb, "-f", file, "-c", config)
}

// write keeps a configuration of the test's own.
func (n *node) write(text string) string {
	n.t.Helper()
	file := filepath.Join(n.t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		n.t.Fatal(err)
	}
	return file
}

// stands is what each GPU has: "off", or its compute instances by profile.
func (n *node) stands() []string {
	var all []string
	for _, g := range n.world.State().GPUs {
		counts := map[string]int{}
		if g.MIG == nil { // the card knows none
			all = append(all, describe(false, counts))
			continue
		}
		for _, gi := range g.MIG.Instances {
			for _, ci := range gi.Compute {
				counts[ci.Profile]++
			}
			if len(gi.Compute) == 0 {
				counts["empty "+gi.Profile]++
			}
		}
		all = append(all, describe(g.MIG.Enabled, counts))
	}
	return all
}

func describe(on bool, counts map[string]int) string {
	if !on {
		return "off"
	}
	words := []string{"on"}
	for _, p := range slices.Sorted(maps.Keys(counts)) {
		words = append(words, fmt.Sprintf("%d x %s", counts[p], p))
	}
	return strings.Join(words, ", ")
}

// spec is a configuration file, as far as the files here go.
type spec struct {
	Version string
	Configs map[string][]struct {
		Filter  any `yaml:"device-filter"`
		Devices any
		Enabled bool           `yaml:"mig-enabled"`
		MIG     map[string]int `yaml:"mig-devices"`
	} `yaml:"mig-configs"`
}

func read(t *testing.T, data []byte) spec {
	t.Helper()
	var s spec
	if err := yaml.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	if s.Version != "v1" || len(s.Configs) == 0 {
		t.Fatalf("version %q with %d configurations", s.Version, len(s.Configs))
	}
	return s
}

// has says whether a filter or a list of devices, in any of its forms, has
// something in it; absent and "all" have everything.
func has(list, what any) bool {
	switch l := list.(type) {
	case nil:
		return true
	case []any:
		return slices.ContainsFunc(l, func(e any) bool { return strings.EqualFold(fmt.Sprint(e), fmt.Sprint(what)) })
	default:
		return l == "all" || strings.EqualFold(fmt.Sprint(l), fmt.Sprint(what))
	}
}

// wanted is what stands after a configuration was applied.
func (s spec) wanted(config string, gpus []emulator.GPUState, before []string) []string {
	after := slices.Clone(before)
	for _, item := range s.Configs[config] {
		for i, g := range gpus {
			id, err := g.PCIDevice.MarshalText()
			if err == nil && has(item.Filter, string(id)) && has(item.Devices, i) {
				after[i] = describe(item.Enabled, item.MIG)
			}
		}
	}
	return after
}

// TestDocumentedConfigurations applies configurations of mig-parted's default file,
// in a row, and looks at what stands, and whether mig-parted takes that for done; the
// others are applied by TestExamplesMeanTheSame. Those of other cards it applies with
// success, to none.
func TestDocumentedConfigurations(t *testing.T) {
	const file = "deployments/systemd/config-default.yaml"
	type lists struct{ fit, misfit []string }
	smallest := map[string]string{"A100-SXM4-80GB": "1g.10gb", "H100-80GB": "1g.10gb", "A30": "1g.6gb"}
	eighty := lists{
		[]string{"all-1g.10gb.me", "all-7g.80gb", "all-balanced"},
		[]string{"all-1g.5gb", "all-7g.141gb"},
	}
	models := map[string]lists{
		"A100-SXM4-80GB": eighty,
		"A30":            {[]string{"all-2g.12gb.me", "all-balanced"}, []string{"all-3g.20gb"}},
	}
	if *long {
		models["H100-80GB"] = eighty
	}
	for model, list := range models {
		t.Run(model, func(t *testing.T) {
			n := start(t, emulator.Spec{Model: model, Count: 2})
			data, err := os.ReadFile(filepath.Join(n.docs, file))
			if err != nil {
				t.Fatal(err)
			}
			s := read(t, data)
			gpus := n.world.State().GPUs
			for _, config := range append(list.fit, "all-disabled", "all-enabled") {
				want := s.wanted(config, gpus, n.stands())
				if want[0] == n.stands()[0] {
					t.Errorf("%s changes nothing: it is not for this card", config)
				}
				if out, err := n.run("apply", file, config); err != nil {
					t.Fatalf("apply %s: %v\n%s", config, err, out)
				}
				if got := n.stands(); !slices.Equal(got, want) {
					t.Errorf("after %s: %q, want %q", config, got, want)
				}
				if out, err := n.run("assert", file, config); err != nil {
					t.Errorf("assert %s: %v\n%s", config, err, out)
				}
			}
			for _, config := range list.misfit {
				if err := n.world.CreateInstance(0, smallest[model], 2, false); err != nil {
					t.Fatal(err)
				}
				if out, err := n.run("apply", file, config); err != nil {
					t.Errorf("apply %s: %v\n%s", config, err, out)
				}
				if got := n.stands(); !slices.Equal(got, []string{"on", "on"}) {
					t.Errorf("after %s of another card: %q", config, got)
				}
				if out, err := n.run("assert", file, config); err == nil {
					t.Errorf("assert %s of another card: succeeds\n%s", config, out)
				}
			}
		})
	}
}

// TestExport reads a node back, splits too, and applies what it said to another.
func TestExport(t *testing.T) {
	n := start(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 3})
	file := n.write(`version: v1
mig-configs:
  parts:
  - {devices: [0], mig-enabled: true, mig-devices: {1c.3g.40gb: 3, 2c.4g.40gb: 2}}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.10gb: 2, 2g.20gb: 1, 3g.40gb: 1}}
  - {devices: [2], mig-enabled: false}
`)
	if out, err := n.run("apply", file, "parts"); err != nil {
		t.Fatalf("apply: %v\n%s", err, out)
	}
	want := []string{"on, 3 x 1c.3g.40gb, 2 x 2c.4g.40gb", "on, 2 x 1g.10gb, 1 x 2g.20gb, 1 x 3g.40gb", "off"}
	if got := n.stands(); !slices.Equal(got, want) {
		t.Fatalf("stands %q, want %q", got, want)
	}
	out, err := n.parted.Run(t.Context(), "export")
	if err != nil {
		t.Fatalf("export: %v\n%s", err, out)
	}
	s := read(t, []byte(out))
	if len(s.Configs) != 1 || len(s.wanted("current", n.world.State().GPUs, make([]string, 3))) != 3 ||
		!slices.Equal(s.wanted("current", n.world.State().GPUs, make([]string, 3)), want) {
		t.Fatalf("exported:\n%s\nwant %q", out, want)
	}
	file = n.write(out)
	if out, err := n.run("assert", file, "current"); err != nil {
		t.Errorf("assert what was exported: %v\n%s", err, out)
	}
	again := start(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 3, Seed: "another"})
	if out, err := again.run("apply", file, "current"); err != nil {
		t.Errorf("apply what was exported: %v\n%s", err, out)
	}
	if got := again.stands(); !slices.Equal(got, want) {
		t.Errorf("the other stands %q, want %q", got, want)
	}
}

// TestExampleOfEightCards is the example of mig-parted's README.
func TestExampleOfEightCards(t *testing.T) {
	n := start(t, emulator.Spec{Model: "A100-SXM4-40GB", Count: 8})
	const file, config = "examples/config.yaml", "custom-config"
	if out, err := n.run("apply", file, config); err != nil {
		t.Fatalf("apply: %v\n%s", err, out)
	}
	want := []string{"off", "off", "off", "off", "on, 7 x 1g.5gb", "on, 3 x 2g.10gb", "on, 2 x 3g.20gb", "on, 2 x 1g.5gb, 1 x 2g.10gb, 1 x 3g.20gb"}
	if got := n.stands(); !slices.Equal(got, want) {
		t.Errorf("stands %q, want %q", got, want)
	}
	if out, err := n.run("assert", file, "all-balanced"); err == nil {
		t.Errorf("assert another configuration: succeeds\n%s", out)
	}
}

// The rest is what operators find out: each fails here as it does on hardware.

// A busy instance fails a change after its idle neighbours are gone, and nothing
// is put back.
func TestBusyInstanceFailsAChangeHalfway(t *testing.T) {
	n := start(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 1})
	file := n.write(`version: v1
mig-configs:
  before: [{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 2, 2g.20gb: 1, 3g.40gb: 1}}]
  after: [{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 3, 3g.40gb: 1}}]
`)
	if out, err := n.run("apply", file, "before"); err != nil {
		t.Fatalf("apply: %v\n%s", err, out)
	}
	for _, gi := range n.world.State().GPUs[0].MIG.Instances {
		if gi.Profile != "3g.40gb" {
			continue
		}
		err := n.world.AddProcess(emulator.Process{PID: os.Getpid(), GPU: 0, GI: gi.ID, CI: gi.Compute[0].ID, Kind: emulator.Compute, MiB: 1})
		if err != nil {
			t.Fatal(err)
		}
	}
	out, err := n.run("apply", file, "after")
	if err == nil || !strings.Contains(out, "ERROR_IN_USE") {
		t.Errorf("a change that could have left the busy instance alone: %v\n%s", err, out)
	}
	if got := n.stands(); got[0] != "on, 1 x 3g.40gb" {
		t.Errorf("after the failure: %q, want the busy instance alone", got)
	}
}

// One GPU's change of mode resets all of them, so a process on any is in its way.
func TestModeChangeNeedsAllGPUsIdle(t *testing.T) {
	n := start(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2})
	if err := n.world.AddProcess(emulator.Process{PID: os.Getpid(), GPU: 1, Kind: emulator.Compute, MiB: 1}); err != nil {
		t.Fatal(err)
	}
	file := n.write("version: v1\nmig-configs: {one: [{devices: [0], mig-enabled: true, mig-devices: {}}]}\n")
	out, err := n.run("apply", file, "one")
	if err == nil || !strings.Contains(out, "exit status 255") || !strings.Contains(out, n.world.State().GPUs[1].PCI+": In use by another client") {
		t.Errorf("apply: %v\n%s", err, out)
	}
}

// A GPU instance without a compute instance is invisible to it, and in its way.
func TestOrphanIsInvisible(t *testing.T) {
	n := start(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	if err := errors.Join(n.world.SetMIG(0, true), n.world.CreateInstance(0, "4g.40gb", 0, true)); err != nil {
		t.Fatal(err)
	}
	out, err := n.parted.Run(t.Context(), "export")
	if err != nil || !slices.Equal(read(t, []byte(out)).wanted("current", n.world.State().GPUs, []string{""}), []string{"on"}) {
		t.Errorf("export: %v\n%s", err, out)
	}
	file := n.write("version: v1\nmig-configs: {two: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]}\n")
	if out, err := n.run("apply", file, "two"); err == nil {
		t.Errorf("apply over an orphan succeeds\n%s", out)
	}
}

// What it calls valid is not what a card can have: one change fails, the other
// succeeds without an instance of what was asked for, and both empty the card.
func TestValidConfigurationsThatNoCardHas(t *testing.T) {
	n := start(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	file := n.write(`version: v1
mig-configs:
  many: [{devices: all, mig-enabled: true, mig-devices: {7g.80gb: 2}}]
  wild: [{devices: [0, 0, 99, -3], mig-enabled: true, mig-devices: {9g.999gb: 3}}]
`)
	for config, fails := range map[string]bool{"many": true, "wild": false} {
		if out, err := n.parted.Run(t.Context(), "assert", "--valid-config", "-f", file, "-c", config); err != nil {
			t.Errorf("assert --valid-config %s: %v\n%s", config, err, out)
		}
		if err := errors.Join(n.world.SetMIG(0, true), n.world.CreateInstance(0, "1g.10gb", 3, false)); err != nil {
			t.Fatal(err)
		}
		if out, err := n.run("apply", file, config); (err != nil) != fails {
			t.Errorf("apply %s: %v\n%s", config, err, out)
		}
		if got := n.stands(); got[0] != "on" {
			t.Errorf("after %s: %q, want an empty card", config, got)
		}
	}
}
