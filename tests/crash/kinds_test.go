// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// kind is what changes are made to at which a process is killed.
type kind string

const (
	journalKind   kind = "the journal of allocations"
	documentKind  kind = "the document of what was known"
	usageKind     kind = "the usage journal"
	pagesKind     kind = "the pages of memory caps"
	librariesKind kind = "the libraries of memory caps"
	hookKind      kind = "the hook program"
	socketKind    kind = "the socket at which commands ask"
	cdiKind       kind = "CDI files"
	slicesKind    kind = "ResourceSlices"
	claimsKind    kind = "claims"
	nodesKind     kind = "the Node"
	gpuNodesKind  kind = "the GPUNode"
	hardwareKind  kind = "the hardware"
	readingKind   kind = "readings of the hardware"
)

// kinds are all of them. at tells by the path of a change that it is of a kind: that of a file
// of the agent's, or of a request to the API server. Calls of the driver have none. by is which
// packages of the product make the changes, whose sources lie there and below.
//
// A package counts for what it writes itself, or decides the bytes or the order of, and not for
// what it has others write. internal/agent has others do everything, so it would count for
// every kind: its files are named one by one, each for what it calls. round.go says what comes
// before what, and is named wherever that matters to a successor.
var kinds = []struct {
	kind kind
	at   *regexp.Regexp
	by   []string
}{
	{slicesKind, regexp.MustCompile(`^/apis/resource\.k8s\.io/[^/]+/resourceslices(/|$)`), []string{
		"internal/dra", "internal/kube/agentkube", "internal/agent/claims.go"}},
	{claimsKind, regexp.MustCompile(`^/apis/resource\.k8s\.io/[^/]+/namespaces/[^/]+/resourceclaims/`), []string{
		"internal/dra", "internal/kube/agentkube", "internal/agent/claims.go"}},
	{nodesKind, regexp.MustCompile(`^/api/v1/nodes/`), []string{
		"internal/kube/agentkube", "internal/label", "internal/cleanup", "internal/agent/report.go", "internal/agent/autoscale.go", "cmd/gpu-agent/cleanup.go"}},
	{gpuNodesKind, regexp.MustCompile(`^/apis/[^/]+/[^/]+/gpunodes(/|$)`), []string{
		"internal/gpunode", "internal/kube/agentkube", "internal/cleanup", "internal/agent/gpunode.go", "internal/agent/gpunode_writer.go", "cmd/gpu-agent/cleanup.go"}},
	{cdiKind, regexp.MustCompile(`/cdi(/[^/]*)?$`), []string{
		"pkg/cdi", "internal/atomicfile", "internal/agent/gates.go", "internal/agent/round.go"}},
	{journalKind, regexp.MustCompile(`/state/\.?allocations\.journal[^/]*$`), []string{
		"internal/state", "internal/atomicfile", "internal/agent/journal.go", "internal/agent/memory.go", "internal/agent/round.go"}},
	{usageKind, regexp.MustCompile(`/state/usage(/|$)`), []string{
		"internal/usage", "internal/meter", "internal/agent/account.go"}},
	{hookKind, regexp.MustCompile(`/state/hooks(/|$)`), []string{
		"pkg/gpu/nvml/hook.go", "internal/atomicfile"}},
	{pagesKind, regexp.MustCompile(`/state/cap/(limits|usage)(/|$)`), []string{
		"pkg/memcap/lib", "internal/atomicfile", "internal/agent/cap.go", "internal/agent/gates.go", "internal/agent/round.go"}},
	{librariesKind, regexp.MustCompile(`/state/cap(/|$)`), []string{
		"pkg/memcap/lib", "internal/agent/cap.go"}},
	{socketKind, regexp.MustCompile(`/state/\.?agent\.sock[^/]*$`), []string{
		"internal/obs/agentobs/door.go", "internal/socket"}},
	{documentKind, regexp.MustCompile(`/state(/[^/]*)?$`), []string{
		"internal/state", "internal/atomicfile", "internal/agent/memory.go", "internal/agent/round.go"}},
	{hardwareKind, nil, []string{
		"pkg/gpu/nvml", "pkg/mig", "internal/plan", "internal/agent/work.go", "internal/agent/round.go"}},
	{readingKind, nil, []string{
		"pkg/gpu/nvml", "internal/agent/look.go", "internal/agent/work.go"}},
}

// kindOf is the kind of a change; "" is one that the table does not know.
func kindOf(c change) kind {
	for _, k := range kinds {
		if k.at != nil && k.at.MatchString(c.path) {
			return k.kind
		}
	}
	return ""
}

// kindsOf is kindOf for several.
func kindsOf(changes []change) (out []kind) {
	for _, c := range changes {
		out = append(out, kindOf(c))
	}
	return out
}

// knowsKinds fails a test whose changes the table does not know.
func knowsKinds(t *testing.T, changes []change) {
	t.Helper()
	for _, c := range changes {
		if kindOf(c) == "" {
			t.Errorf("%s is of no kind: it needs a row in the table of kinds_test.go, with the packages that make it", c)
		}
	}
}

func TestEachPathIsOfAKind(t *testing.T) {
	const dir = "/tmp/crash-1"
	for path, want := range map[string]kind{
		dir + "/cdi": cdiKind,
		dir + "/cdi/.example.com-gpu-1f.json.22.tmp": cdiKind,
		dir + "/state":                                 documentKind,
		dir + "/state/lock":                            documentKind,
		dir + "/state/state.json":                      documentKind,
		dir + "/state/.state.json.tmp":                 documentKind,
		dir + "/state/allocations.journal":             journalKind,
		dir + "/state/.allocations.journal.tmp":        journalKind,
		dir + "/state/usage/0000000001.jsonl":          usageKind,
		dir + "/state/hooks/1f/.nvidia-cdi-hook.1.tmp": hookKind,
		dir + "/state/agent.sock":                      socketKind,
		dir + "/state/.agent.sock.tmp":                 socketKind,
		dir + "/state/cap/limits/.new-1f":              pagesKind,
		dir + "/state/cap/usage/1f/GPU-1":              pagesKind,
		dir + "/state/cap":                             librariesKind,
		dir + "/state/cap/.new-1/libcuda.so.1":         librariesKind,
		slicesPath:                                     slicesKind,
		slicesPath + "/a":                              slicesKind,
		claimsPath + "/a/status":                       claimsKind,
		nodesPath + "/a/status":                        nodesKind,
		gpuNodesPath:                                   gpuNodesKind,
		gpuNodesPath + "/a":                            gpuNodesKind,
		dir + "/kubelet/kubelet_internal_checkpoint":   "",
		"/api/v1/namespaces/default/events":            "",
		"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/a":             "",
		"/apis/resource.k8s.io/v1/namespaces/" + namespace + "/resourceclaimtemplates": "",
	} {
		if got := kindOf(change{"write", path}); got != want {
			t.Errorf("%s is of the kind %q, want %q", path, got, want)
		}
	}
}

// What the table names is there: a package that has moved would count for nothing any more.
func TestEachKindHasItsPackages(t *testing.T) {
	seen := map[kind]bool{}
	for _, k := range kinds {
		if seen[k.kind] {
			t.Errorf("%s is there twice", k.kind)
		}
		seen[k.kind] = true
		for _, name := range k.by {
			if _, err := os.Stat(filepath.Join(checkout, name)); err != nil {
				t.Errorf("%s is said to be changed by %s: %v", k.kind, name, err)
			}
		}
		if len(k.by) == 0 {
			t.Errorf("nothing is said to change %s", k.kind)
		}
	}
}

// A doc.go does not count as a change of its package: there is no code in it.
func TestThereIsNoCodeInDocs(t *testing.T) {
	for _, k := range kinds {
		for _, name := range k.by {
			err := filepath.WalkDir(filepath.Join(checkout, name), func(path string, d fs.DirEntry, err error) error {
				if err != nil || d.Name() != "doc.go" {
					return err
				}
				f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
				if err == nil && len(f.Decls) > 0 {
					t.Errorf("there is code in %s", path)
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
		}
	}
}
