// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// plugins is a folder with the plugin for each platform, as `make plugins` builds it. The tests of a
// process share it.
var plugins = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "plugins-")
	if err != nil {
		return "", err
	}
	cmd := exec.Command("make", "--silent", "plugins", "PLUGIN_DIR="+dir, "VERSION=v1.2.3-rc.4", "COMMIT=abc", "DATE=2026-11-27")
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		return dir, errors.New(err.Error() + "\n" + string(out))
	}
	return dir, nil
})

// TestMain removes what the tests share.
func TestMain(m *testing.M) {
	code := m.Run()
	if made {
		dir, _ := plugins()
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

var made bool

func builtPlugins(t *testing.T) string {
	t.Helper()
	made = true
	dir, err := plugins()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Each file is a static program of its platform, and of no other one.
func TestPluginsAreOfTheirPlatforms(t *testing.T) {
	dir := builtPlugins(t)
	for _, p := range platforms {
		for _, other := range platforms {
			err := p.check(filepath.Join(dir, other.String(), pluginName))
			if (err == nil) != (p == other) {
				t.Errorf("the program for %s as one for %s: %v", other, p, err)
			}
		}
	}
	// What is no program is none of any platform.
	program := filepath.Join(t.TempDir(), pluginName)
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := platforms[0].check(program); err == nil || !strings.Contains(err.Error(), "`make plugins` builds it") {
		t.Errorf("a script: %v", err)
	}
	out, err := exec.Command(filepath.Join(dir, "linux-"+runtime.GOARCH, pluginName), "version").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "v1.2.3-rc.4 (commit abc of 2026-11-27") {
		t.Errorf("it says %s: %v", out, err)
	}
}

// kubectl finds the program by its name, and completes it by the script beside it.
func TestPluginCompletes(t *testing.T) {
	dir := builtPlugins(t)
	cmd := exec.Command("../../cmd/kubectl-gpu/"+pluginCompletes, "wh")
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "linux-"+runtime.GOARCH)+":"+os.Getenv("PATH"))
	if out, err := cmd.Output(); err != nil || !strings.HasPrefix(string(out), "why\t") {
		t.Errorf("it is completed with %q: %v", out, err)
	}
}

// An archive has the program, the script, and the licences of all that is linked.
func TestPluginArchives(t *testing.T) {
	r := &release{source: source{checkout: "../..", about: about{version: "v1.2.3-rc.4", created: time.Date(2026, 11, 27, 1, 2, 3, 0, time.UTC)}}, plugins: builtPlugins(t)}
	dir := t.TempDir()
	if err := r.addPlugins(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	for _, p := range platforms {
		name := filepath.Join(dir, "kubectl-gpu-v1.2.3-rc.4-"+p.String())
		data, err := os.ReadFile(name + ".tar.gz")
		if err != nil {
			t.Fatal(err)
		}
		z, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		files := map[string]string{}
		for from := tar.NewReader(z); ; {
			h, err := from.Next()
			if errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(from)
			if err != nil {
				t.Fatal(err)
			}
			files[h.Name] = string(text)
			if want := strings.HasPrefix(h.Name, "kubectl"); (h.Mode == 0o755) != want {
				t.Errorf("%s: %s has mode %o", p, h.Name, h.Mode)
			}
		}
		if len(files) != 4 || files[pluginName] == "" || files[pluginCompletes] == "" || !strings.Contains(files["LICENSE"], "Apache License") ||
			!strings.Contains(files["THIRD_PARTY_NOTICES"], "k8s.io/client-go") {
			t.Errorf("%s has %d files", p, len(files))
		}
		var bom struct {
			Metadata   struct{ Component struct{ Name, Purl string } }
			Components []struct{ Name string }
		}
		text, err := os.ReadFile(name + ".cdx.json")
		if err != nil || json.Unmarshal(text, &bom) != nil || bom.Metadata.Component.Name != pluginName || len(bom.Components) < 20 ||
			!strings.Contains(bom.Metadata.Component.Purl, "os="+p.os+"&arch="+p.arch) {
			t.Errorf("%s is made of %+v: %v", p, bom, err)
		}
	}
}
