// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"fmt"
	"strings"
	"testing"
)

// Names that one part has in a field are hidden in another one's sentences, and what a report is
// about stays.
func TestRedact(t *testing.T) {
	parts := []part{
		{"status.json", []byte(`{"node":"node-1","mode":"shared","gpus":[{"uuid":"GPU-1","blocked":"until these end: acme/train-7 and 2 more",
			"holders":[{"namespace":"acme","pod":"train-7","container":"shared","resource":"example.com/gpu-mem","beside":["globex/side-1"]}]}],
			"conditions":[{"type":"Waiting","message":"previous holder still ending: initech/late.pod-0"}]}`)},
		{"journal.jsonl", []byte(`{"event":"held","namespace":"umbrella","pod":"old-3","container":"main","labels":{"team":"Blue Team"}}` + "\n" +
			`{"event":"released","grant":3}` + "\n")},
		{"log.txt", []byte("level=WARN msg=\"a container offends\" what=\"container loader of pod wayne/batman-1 uses 3 GiB of GPU 0\" pod=wayne/batman-1 name=loader\n" +
			"time=2026-01-01 msg=x namespace=stark pod=solo-9 example.com/gpu-mem registry.local/acme/image:1 /var/lib/kubelet/pods Blue Team old-3, (train-7).\n" +
			"partition mig of node-1 gpu-agent/gpu-agent-x applied shared\n")},
		{"missing.txt", []byte("log: pods acme/train-7 not found\n")},
	}
	if err := newRedactor("node-1", "gpu-agent", "gpu-agent-x", "example.com").redact(parts); err != nil {
		t.Fatal(err)
	}
	all := ""
	for _, p := range parts {
		all += p.name + "\n" + string(p.data) + "\n"
	}
	for _, name := range []string{"acme", "train-7", "globex", "side-1", "initech", "late.pod-0", "umbrella", "old-3", "Blue Team", "wayne", "batman", "loader", "stark", "solo-9"} {
		if strings.Contains(all, name) {
			t.Errorf("%s is still there:\n%s", name, all)
		}
	}
	for _, word := range []string{"node-1", `"mode": "shared"`, "GPU-1", "example.com/gpu-mem", "gpu-agent/gpu-agent-x", "previous holder still ending: ", "/var/lib/kubelet/pods",
		"uses 3 GiB of GPU 0", `"grant":3`, "partition mig of"} {
		if !strings.Contains(all, word) {
			t.Errorf("%s is hidden:\n%s", word, all)
		}
	}
	// The same name has the same alias everywhere.
	holder := between(all, `"namespace": "`, `"`)
	if !strings.Contains(all, "until these end: "+holder+"/") || !strings.Contains(all, "log: pods "+holder+"/") {
		t.Errorf("acme is %s in one place and something else in others:\n%s", holder, all)
	}
}

func between(s, from, to string) string {
	_, s, _ = strings.Cut(s, from)
	s, _, _ = strings.Cut(s, to)
	return s
}

// What is no JSON although its name says so is not written as it is.
func TestRedactFailsClosed(t *testing.T) {
	if err := newRedactor().redact([]part{{"status.json", []byte(`{"pod":"secret"`)}}); err == nil || !strings.Contains(err.Error(), "status.json") {
		t.Error(err)
	}
}

// Whatever a tenant calls a pod, its name is hidden where the agent writes it.
func FuzzRedact(f *testing.F) {
	for _, seed := range [][2]string{{"acme", "train-7"}, {"a", "b"}, {"gpu", "mem"}, {"x", "0.y"}, {"pod", "namespace"}, {"container", "of"}} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, namespace, pod string) {
		if !label(namespace) || !label(pod) || len(namespace) < 3 || len(pod) < 3 {
			t.Skip("no such names")
		}
		parts := []part{
			{"status.json", fmt.Appendf(nil, `{"containers":[{"namespace":%q,"pod":%q}],"said":"it waits for the end of %s/%s"}`, namespace, pod, namespace, pod)},
			{"log.txt", fmt.Appendf(nil, "msg=x pod=%s/%s: %s. (%s) %s\n", namespace, pod, pod, namespace, pod)},
		}
		if err := newRedactor().redact(parts); err != nil {
			t.Fatal(err)
		}
		for _, p := range parts {
			for _, name := range []string{namespace, pod} {
				for _, w := range strings.FieldsFunc(string(p.data), func(r rune) bool { return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789-.", r) }) {
					w = strings.TrimRight(w, ".")
					if w == name && !strings.Contains(" msg x pod said it waits for the end of containers namespace ", " "+name+" ") {
						t.Errorf("%s has %q: %s", p.name, name, p.data)
					}
				}
			}
		}
	})
}

// label reports whether the API server takes a text as a name.
func label(s string) bool {
	return s != "" && len(s) <= 63 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && !strings.HasPrefix(s, "-") && !strings.HasSuffix(s, "-")
}
