// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// What up can be told can be built, and it says how where it was not.
func TestOtherVersions(t *testing.T) {
	l := Layout{cache: t.TempDir()}
	node := l.parts("", "")
	for _, p := range node {
		for _, o := range p.outputs {
			if err := os.MkdirAll(filepath.Dir(l.path(o)), 0o755); err != nil {
				t.Fatal(err)
			}
			writeTestFile(t, l.path(o), "", 0o755)
		}
	}
	if err := checkBuilt(l); err != nil {
		t.Fatal(err)
	}
	stamps := map[string]string{}
	for _, p := range node {
		stamps[l.stampFile(p)] = p.name
	}
	for _, kubernetes := range append([]string{""}, otherKubernetes...) {
		for _, runtime := range append([]string{""}, otherRuntimes...) {
			var s Spec
			if err := s.choose(kubernetes, runtime); err != nil {
				t.Fatal(err)
			}
			if err := checkBuilt(l, s.others()...); (err == nil) != (kubernetes+runtime == "") || err != nil && !strings.Contains(err.Error(), "cluster build --with "+s.others()[0]) {
				t.Errorf("Kubernetes %q, runtime %q, neither built: %v", kubernetes, runtime, err)
			}
			for _, name := range s.others() {
				p := l.optional("", "")[name]
				if other := stamps[l.stampFile(p)]; other != "" && other != p.name {
					t.Errorf("%s and %s have one stamp", p.name, other)
				}
				stamps[l.stampFile(p)] = p.name
			}
			for file, text := range s.runtime().config(l, true) {
				if strings.HasSuffix(file, ".toml") && !strings.Contains(text, "enable_cdi = true") {
					t.Errorf("runtime %q: %s leaves CDI off", runtime, file)
				}
			}
		}
	}
}

func TestImagesOfAnArchiveForCRIO(t *testing.T) {
	file := filepath.Join(t.TempDir(), "images.tar")
	var one, two Image
	one.Name, two.Name = "localhost/one:test", "localhost/two:test"
	one.Mkdir("/one", 0)
	two.Mkdir("/two", 0)
	if _, err := writeImages(file, one, two); err != nil {
		t.Fatal(err)
	}
	commands, err := crioLoad(file)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, c := range commands {
		got[c[2]] = c[len(c)-1]
	}
	want := map[string]string{one.Name: "docker-archive:/dev/stdin:" + one.Name, two.Name: "docker-archive:/dev/stdin:" + two.Name}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestModestConfiguration(t *testing.T) {
	got, err := modest([]byte(`{"process":{"oomScoreAdj":-997,"cwd":"/","capabilities":{"bounding":["CAP_KILL","CAP_SYS_RESOURCE"]}},` +
		`"linux":{"resources":{"hugepageLimits":[{}],"cpu":{"shares":18446744073709551615}}}}`))
	want := `{"linux":{"resources":{"cpu":{"shares":18446744073709551615}}},"process":{"capabilities":{"bounding":["CAP_KILL"]},"cwd":"/"}}`
	if err != nil || string(got) != want {
		t.Errorf("got %s (%v), want %s", got, err, want)
	}
}
