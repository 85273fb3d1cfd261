// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const h100 = "../../tests/testdata/inventories/h100-80gb.json"

// command runs a command line.
func command(t *testing.T, args ...string) (out, err string, failure error) {
	t.Helper()
	return commandWith(t, "", args...)
}

// commandWith runs one that finds text at its standard input.
func commandWith(t *testing.T, text string, args ...string) (out, err string, failure error) {
	t.Helper()
	in := strings.NewReader(text)
	var o, e bytes.Buffer
	failure = dispatch(t.Context(), console{in, &o, &e}, args)
	return o.String(), e.String(), failure
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestCheck(t *testing.T) {
	good := write(t, "good.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n  fleet:\n    - devices: {model: \"NVIDIA H100*\"}\n      mode: whole\n")
	bad := write(t, "bad.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n  absent:\n    - devices: [99]\n      mode: whole\n")
	many := write(t, "many.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n      replicas: 10000\n  units:\n    - devices: all\n      mode: shared\n")
	broken := write(t, "broken.yaml", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n      replicas: 0\n")
	for _, tt := range []struct {
		args []string
		ok   bool
		out  string
		err  string // in what goes to standard error, the final error included
	}{
		{[]string{"check", good, "--inventory", h100}, true, "partition default fits", ""},
		{[]string{"check", "--inventory", h100, good}, true, "partition fleet fits", ""},
		{[]string{"check", bad, "--inventory", h100}, false, "partition default fits", bad + ":7: "},
		{[]string{"check", bad, "--inventory", h100, "--partition", "default"}, true, "partition default fits", ""},
		{[]string{"check", bad, "--inventory", h100, "--partition", "none"}, false, "", "none"},
		{[]string{"check", broken, "--inventory", h100}, false, "", broken + ":6: "},
		{[]string{"check", many, "--inventory", h100}, false, "partition units fits", many + `:4: partition "default" makes 80000 devices`},
		{[]string{"check", many, "--inventory", h100, "--partition", "units", "--memory-unit", "16MiB"}, false, "", "set --memory-unit to 32 MiB or more"},
		{[]string{"check", many, "--inventory", h100, "--api", "dra"}, true, "partition default fits (8 of 8 GPUs through dra)", ""},
		{[]string{"plan", "--config", many, "--inventory", h100}, false, "", "makes 80000 devices"},
		{[]string{"check", good, "--inventory", good}, false, "", good},
		{[]string{"check", filepath.Join(t.TempDir(), "nowhere")}, false, "", "nowhere"},
	} {
		out, e, err := command(t, tt.args...)
		if err != nil {
			e += err.Error()
		}
		if (err == nil) != tt.ok || !strings.Contains(out, tt.out) || !strings.Contains(e, tt.err) {
			t.Errorf("%q: %v\nout: %s\nerr: %s\nwant ok %v, %q and %q", tt.args, err, out, e, tt.ok, tt.out, tt.err)
		}
	}
}

func TestWrongUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"fly"}, {"check"}, {"run", "--no-such-flag"}, {"status", "-o", "xml"}, {"placer", "--doors", "extender,barn"}} {
		if _, e, err := command(t, args...); !errors.Is(err, errUsage) || e == "" {
			t.Errorf("%q: %v, and %q on standard error", args, err, e)
		}
	}
	for want, args := range map[string][]string{
		"no partitions":  {"run"},
		"one place":      {"run", "--config", "a", "--configmap", "b/c"},
		"--node-name":    {"run", "--configmap", "b/c"},
		"--api dra":      {"run", "--config", "a", "--api", "dra"},
		"NAMESPACE/NAME": {"run", "--configmap", "b", "--node-name", "n"},
		"--domain":       {"run", "--config", "a", "--domain", "Example_com"},
		"NVIDIA's own":   {"run", "--config", "a", "--domain", "nvidia.com"},
		"--lease":        {"placer", "--lease", "x"},
		"go together":    {"placer", "--tls-cert-file", "x"},
		"shows a cert":   {"placer", "--client-ca-file", "x"},
		"certificates":   {"placer", "--tls-cert-file", "x", "--tls-key-file", "x"},
		"insecure-door":  {"placer"},
		"unexpected":     {"run", "--config", "a", "extra"},
		"GPU_AGENT_":     {"inventory"},
	} {
		if want == "GPU_AGENT_" {
			t.Setenv("GPU_AGENT_O", "xml")
		}
		if _, _, err := command(t, args...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", args, err, want)
		}
		if want == "GPU_AGENT_" {
			if err := os.Unsetenv("GPU_AGENT_O"); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Every flag has a twin in the environment; the command line wins.
func TestEnvironment(t *testing.T) {
	var f runFlags
	fs := newFlags(console{nil, &bytes.Buffer{}, &bytes.Buffer{}}, "run", "", "")
	f.register(fs)
	t.Setenv("GPU_AGENT_NODE_NAME", "from-env")
	t.Setenv("GPU_AGENT_MEMORY_UNIT", "256MiB")
	t.Setenv("GPU_AGENT_DOMAIN", "env.example")
	rest, err := parse(fs, []string{"--domain", "flag.example", "x", "--config", "p", "y"})
	if err != nil {
		t.Fatal(err)
	}
	if f.nodeName != "from-env" || f.unit != 256 || f.domain != "flag.example" || f.config != "p" || strings.Join(rest, " ") != "x y" {
		t.Errorf("%+v, rest %q", f, rest)
	}
	if err := f.complete(); err != nil || f.resourceDomain != "flag.example" {
		t.Errorf("%v, resource domain %q", err, f.resourceDomain)
	}
	fs.VisitAll(func(fl *flag.Flag) {
		if fl.Usage == "" {
			t.Errorf("flag %s has no help", fl.Name)
		}
	})
}

func TestMemoryFlag(t *testing.T) {
	for in, want := range map[string]memoryFlag{"1GiB": 1024, "2Gi": 2048, "512MiB": 512, "256Mi": 256, "100": 100} {
		var m memoryFlag
		if err := m.Set(in); err != nil || m != want {
			t.Errorf("%s: %d MiB, %v; want %d", in, m, err, want)
		}
		again := memoryFlag(0)
		if err := again.Set(m.String()); err != nil || again != m {
			t.Errorf("%s: printed as %s, which reads as %d, %v", in, m.String(), again, err)
		}
	}
	for _, in := range []string{"", "0", "-1GiB", "1TB", "GiB", "1.5GiB", "99999999999999"} {
		var m memoryFlag
		if err := m.Set(in); err == nil {
			t.Errorf("%q was read as %d", in, m)
		}
	}
}
