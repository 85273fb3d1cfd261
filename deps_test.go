// SPDX-License-Identifier: Apache-2.0

// Package floors holds the shape of the program: which packages there are, which floor
// each is on, and which may import which. A rule that is broken is reported
// with its reason; whoever means to change a rule changes it here, in the open.
package floors

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
)

const (
	module = "example.com/gpu-agent"
	spdx   = "// SPDX-License-Identifier: Apache-2.0"
	spdxC  = "/* SPDX-License-Identifier: Apache-2.0 */"
	// shortestDoc is where a package comment stops being a label.
	shortestDoc = 200
	// outside is the floor of what is not part of the product: tests and
	// manifests. It may import every package and no package may import it.
	outside = -1
)

// half says in which program a package is: the agent, which believes its driver, its kubelet and its
// own records, or the placer, which believes nobody. The plugin for kubectl is beside these two
// halves.
type half string

const (
	agent  half = "agent"
	placer half = "placer"
	// plugin is the kubectl plugin, which runs where people work. It has packages of its own, and of
	// the others only those of both halves, and what it is lent.
	plugin half = "plugin"
	// both is for the few packages that the two programs share: the arithmetic of pieces, the
	// GPUNode, and how an API server and an HTTP server are spoken to.
	both half = "both"
	// neither is not part of a program.
	neither half = ""
)

// entry is a package, or with a path that ends in /... all packages below it.
type entry struct {
	path  string
	floor int
	half  half
	what  string
}

// packages is the program. A package without an entry here is a mistake.
var packages = []entry{
	{"cmd/gpu-agent", 5, agent, "flags, options, wiring; decides nothing"},
	{"cmd/gpu-agent-mps", 5, agent, "the same for the MPS daemons, in a program that stays small"},
	{"cmd/gpu-placer", 5, placer, "the same for the placer"},
	{"cmd/kubectl-gpu", 5, plugin, "the same for the plugin for kubectl"},
	{"internal/agent", 4, agent, "the loop"},
	{"internal/advise", 4, agent, "which partition would have served a node's past demand best"},
	{"internal/cleanup", 4, agent, "takes away what agents have left on a node"},
	{"internal/fleet", 4, placer, "the placer's process: a cluster in the books, and the doors to them"},
	{"internal/kubectlgpu", 3, plugin, "what the plugin's commands do: table, pages of agents, bundles, examples"},
	{"internal/deviceplugin", 3, agent, "the front-end for the kubelet's device-plugin API"},
	{"internal/dra", 3, agent, "the front-end for dynamic resource allocation"},
	{"internal/guard", 3, agent, "the watchdog over containers' GPU memory"},
	{"internal/meter", 3, agent, "the account of what is granted and used"},
	{"pkg/gpu/nvml", 2, agent, "the driver"},
	{"pkg/gpu/nvml/internal/ctxlock", 2, agent, "locks for a library whose calls can hang"},
	{"pkg/plugin", 2, agent, "the kubelet's device-plugin API"},
	{"pkg/dra", 2, agent, "the kubelet's API for drivers of dynamic resource allocation"},
	{"pkg/cdi/dir", 2, agent, "a directory of CDI files"},
	{"pkg/memcap/...", 2, agent, "the in-process cap's files, the watchdog's reader and hand"},
	{"internal/mps", 2, agent, "MPS control daemons, one for each GPU"},
	{"internal/mps/cuinit", 2, agent, "begins CUDA in a process of its own"},
	{"internal/park", 2, agent, "containers' processes taken off their GPUs, by the driver's checkpoints"},
	{"internal/node", 2, agent, "PodResources, the container runtime, /proc and cgroups"},
	{"internal/command", 2, both, "a program's command line: flags, environment, help, exit codes"},
	{"internal/kube", 2, both, "the API server: connection, watches, lists"},
	{"internal/kube/agentkube", 2, agent, "what an agent reads and writes at the API server"},
	{"internal/kube/pluginkube", 2, plugin, "what the plugin reads at the API server, and ports of the agents' pods"},
	{"internal/kube/placerkube", 2, placer, "what a placer reads and writes at the API server"},
	{"internal/extender", 2, placer, "kube-scheduler's HTTP extender protocol"},
	{"internal/kueue", 2, placer, "Kueue's admission checks: whether a workload has room for all of its pods"},
	{"internal/liqo", 2, placer, "Liqo's ResourceSlices: what other clusters are granted"},
	{"internal/nfd", 2, agent, "the features file that Node Feature Discovery reads"},
	{"internal/obs", 2, both, "an HTTP server of metrics and probes"},
	{"internal/obs/agentobs", 2, agent, "the agent's metrics, its status over HTTP, and the door for questions"},
	{"internal/obs/placerobs", 2, placer, "the placer's metrics"},
	{"internal/state", 2, agent, "the agent's own files, which outlive a process"},
	{"internal/usage/segments", 2, agent, "the usage journal's files"},
	{"internal/atomicfile", 2, agent, "files that are put in their place whole"},
	{"internal/socket", 2, agent, "Unix sockets in a directory of the kubelet's"},
	{"pkg/mig", 1, both, "profiles, placements, geometries"},
	{"pkg/mig/internal/fill", 1, both, "the best way to fill a row with parts"},
	{"pkg/timeslice", 1, both, "sharing a GPU"},
	{"pkg/compute", 1, both, "shares of a GPU's SMs, and whether they are held"},
	{"pkg/memcap", 1, both, "caps and verdicts"},
	{"pkg/topology", 1, both, "how near GPUs are"},
	{"pkg/cdi", 1, agent, "an allocation's CDI spec as a value"},
	{"internal/config", 1, agent, "partition files"},
	{"internal/piece", 1, both, "what somebody can have of a GPU: the kinds of pieces"},
	{"internal/ledger", 1, agent, "allocations: what is given out, and how far it is"},
	{"internal/plan", 1, agent, "layouts, steps, and who is in the way"},
	{"internal/usage", 1, agent, "the usage journal's records, the book and the reports that follow from them"},
	{"internal/status", 1, both, "what people and programs are told: values, text and page"},
	{"internal/placer", 1, placer, "the books of a fleet: whether pods fit, and on which node"},
	{"internal/diagnosis", 1, plugin, "why a pod, a Job or a node has no GPU: from objects to one cause"},
	{"internal/gpunode", 1, both, "the GPUNode object: what a node tells the cluster of its GPUs"},
	{"internal/export", 1, agent, "what other schedulers and autoscalers are told of a cluster's GPUs, as YAML"},
	{"internal/label", 1, agent, "the node's labels, from inventory, links and partition"},
	{"internal/health", 1, agent, "which GPUs are healthy, from events and readings"},
	{"internal/found", 1, agent, "what earlier owners have left on a node's GPUs"},
	{"pkg/gpu", 0, both, "the words for hardware"},
	{"internal/workload", 0, both, "the words for pods"},
	{"internal/amount", 0, both, "quantities that somebody outside has written"},
	{"internal/brief", 0, both, "bounds on what is said: texts, lists of names, lines in the log"},
	{"pkg/memcap/lib/build", outside, neither, "compiles the libraries that the agent carries"},
	{"internal/command/commandtest", outside, neither, "holds the reference to what the programs say"},
	{"internal/kube/kubetest", outside, neither, "an API server for the tests of internal/kube and its halves"},
	{"internal/mps/mpstest", outside, neither, "emulates MPS's programs for tests"},
	{"deployments/...", outside, neither, "manifests and their tests"},
	{"deployments", outside, neither, "manifests and their tests"},
	{"tests/...", outside, neither, "the emulated driver, the test node, tests on it"},
}

// shared says of each package of both halves why the placer, too, has it. TestSharedIsShared
// holds that it has.
var shared = map[string]string{
	"internal/command":      "flags, variables, help and exit codes are of one kind",
	"internal/kube":         "the API server is connected to and watched in one way",
	"internal/obs":          "an HTTP server that every pod can reach is bounded in one way",
	"pkg/mig":               "where MIG instances have room",
	"pkg/mig/internal/fill": "pkg/mig's search",
	"pkg/compute":           "how strongly a share of the SMs is held: values alone",
	"pkg/timeslice":         "where units and replicas have room",
	"pkg/memcap":            "the cap that a piece has: values alone",
	"pkg/topology":          "how near GPUs are; internal/status shows it, too",
	"internal/piece":        "the kinds of pieces",
	"internal/status":       "the reasons in the conditions of a GPUNode",
	"internal/gpunode":      "what nodes tell, and what of it can be",
	"pkg/gpu":               "the words for hardware",
	"internal/workload":     "the words for pods and the kubelet's APIs",
	"internal/amount":       "quantities in Nodes, and in what other clusters ask for",
	"internal/brief":        "what others have written is bounded before it is told on",
}

// lent are packages of the agent's half that the plugin, too, has, with the reason. They are pure.
var lent = map[string]string{
	"internal/config": "a partition file is found in a manifest, and read, in one way",
	"internal/usage":  "the lines of an account are summed up over nodes as each node has written them",
}

// tools are packages of floor 2 that their siblings may import: they know the kernel
// alone, which every package of that floor does, or the clock alone.
var tools = []string{"internal/atomicfile", "internal/socket", "pkg/gpu/nvml/internal/ctxlock"}

// mains are the programs of the product.
var mains = []string{"cmd/gpu-agent", "cmd/gpu-agent-mps", "cmd/gpu-placer", "cmd/kubectl-gpu", "pkg/memcap/lib/hide"}

// doors are outside systems that one package alone knows, by the prefix of their import
// path. What has no owner is known by no package.
var doors = []struct{ prefix, owner, reason string }{
	{"github.com/NVIDIA/go-nvml", "pkg/gpu/nvml", "one package owns the driver, so that every call of it can be found, counted and bounded in time"},
	{"github.com/NVIDIA/go-nvlib", "pkg/gpu/nvml", "it speaks to the driver"},
	{"github.com/NVIDIA/nvidia-container-toolkit", "pkg/gpu/nvml", "nvcdi speaks to the driver"},
	{"k8s.io/kubelet/pkg/apis/deviceplugin", "pkg/plugin", "the kubelet's types stop at the package that speaks its dialect"},
	{"k8s.io/kubelet/pkg/apis/dra", "pkg/dra", "the kubelet's types stop at the package that speaks its dialect"},
	{"k8s.io/kubelet/pkg/apis/pluginregistration", "pkg/dra", "the kubelet's types stop at the package that speaks its dialect"},
	{"k8s.io/kubelet/pkg/apis/podresources", "internal/node", "who holds what is asked in one place"},
	{"k8s.io/cri-api", "internal/node", "who holds what is asked in one place"},
	{"github.com/containerd", "internal/node", "who holds what is asked in one place"},
	{"k8s.io/kube-scheduler", "internal/extender", "the scheduler's types stop at the package that speaks its dialect"},
	{"k8s.io/client-go", "internal/kube", "the API server is one package's business, and the typed clients cost 18 MB: the agent must not come to need them by accident"},
	{"html/template", "", "it calls methods by name, so that the linker keeps all of them: 5 MB of the agent"},
	{"text/template", "", "it calls methods by name, so that the linker keeps all of them: 5 MB of the agent"},
}

// pureAllowed is what floors 0 and 1 may import from outside, by package.
var pureAllowed = map[string][]string{
	"pkg/cdi":         {"tags.cncf.io/container-device-interface/specs-go"},
	"internal/config": {"go.yaml.in/yaml/v4"},
	"internal/export": {"go.yaml.in/yaml/v4"},
}

// impure is what a pure package would need for a file system, a network or a
// process, and for asking the time. Types of package time are fine.
var (
	impureImports = []string{"os", "net", "syscall", "plugin"}
	impureTime    = []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}
)

func TestFloors(t *testing.T) {
	for _, v := range inspect(os.DirFS(".")) {
		t.Error(v)
	}
}

// TestPurePackagesStayPure looks at everything that floors 0 and 1 bring along,
// not only at what they import themselves.
func TestPurePackagesStayPure(t *testing.T) {
	args := []string{"list", "-deps", "-json=ImportPath,Standard"}
	for _, r := range packages {
		if (r.floor == 0 || r.floor == 1) && hasGo(r.path) {
			args = append(args, "./"+r.path)
		}
	}
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: %v", strings.Join(args, " "), err)
	}
	seen := 0
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; seen++ {
		var p struct {
			ImportPath string
			Standard   bool
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		own, isOwn := strings.CutPrefix(p.ImportPath, module+"/")
		switch {
		case p.Standard && slices.Contains([]string{"net", "net/http", "os/exec"}, p.ImportPath):
			t.Errorf("floors 0 and 1 bring along %s: a pure package that can reach the network or start a process is not pure", p.ImportPath)
		case p.Standard:
		case isOwn:
			if r, ok := entryOf(own); !ok || r.floor < 0 || r.floor > 1 {
				t.Errorf("floors 0 and 1 bring along %s: imports go downward only", own)
			}
		default:
			allowed := false
			for _, list := range pureAllowed { // with the packages that a library has below it
				allowed = allowed || slices.ContainsFunc(list, func(l string) bool { return under(p.ImportPath, l) })
			}
			if !allowed {
				t.Errorf("floors 0 and 1 bring along %s: the pure core is to need the standard library, and of the rest only what pureAllowed names", p.ImportPath)
			}
		}
	}
	if seen < 20 {
		t.Errorf("go list named %d packages only: this test looks at nothing", seen)
	}
}

func hasGo(dir string) bool {
	files, _ := fs.Glob(os.DirFS("."), path.Join(dir, "*.go"))
	return len(files) > 0
}

// inspect returns what is wrong with the program, in the order of the paths.
func inspect(tree fs.FS) []string {
	h := &inspector{docs: make(map[string]int)}
	if err := fs.WalkDir(tree, ".", func(p string, d fs.DirEntry, err error) error {
		switch base := path.Base(p); {
		case errors.Is(err, fs.ErrNotExist):
			return nil // a file of another process came and went
		case err != nil:
			return err
		case d.IsDir() && p != "." && (base[0] == '.' || base[0] == '_' || base == "testdata" || base == "vendor" || base == "node_modules" || p == "bin"):
			return fs.SkipDir
		case d.IsDir() || base[0] == '.' || base[0] == '_':
			return nil
		}
		switch path.Ext(p) {
		case ".go", ".c", ".h":
		default:
			return nil
		}
		src, err := fs.ReadFile(tree, p)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
		first, _, _ := strings.Cut(string(src), "\n")
		if first != spdx && (path.Ext(p) == ".go" || first != spdxC) {
			h.add(p, "the first line is not %q: each source file names its licence", spdx)
		}
		if path.Ext(p) == ".go" {
			h.file(p, src)
		}
		return nil
	}); err != nil {
		h.add(".", "%v", err)
	}
	for dir, length := range h.docs {
		if documented(dir) && length < shortestDoc {
			h.add(dir, "doc.go has a package comment of %d characters: a newcomer learns the package from it (the model, why, an example, what it refuses to know), which takes at least %d", length, shortestDoc)
		}
	}
	slices.Sort(h.found)
	return slices.Compact(h.found)
}

// documented reports whether a package is one that people come to read.
func documented(dir string) bool {
	top, _, _ := strings.Cut(dir, "/")
	return slices.Contains([]string{"cmd", "pkg", "internal", "tests"}, top)
}

type inspector struct {
	found []string
	// docs has the length of each package's comment in its doc.go.
	docs map[string]int
}

func (h *inspector) add(where, format string, args ...any) {
	h.found = append(h.found, where+": "+fmt.Sprintf(format, args...))
}

func (h *inspector) file(p string, src []byte) {
	f, err := parser.ParseFile(token.NewFileSet(), p, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		h.add(p, "%v", err)
		return
	}
	dir, isTest := path.Dir(p), strings.HasSuffix(p, "_test.go")
	h.docs[dir] += 0
	if path.Base(p) == "doc.go" && f.Doc != nil {
		h.docs[dir] = len(strings.TrimSpace(f.Doc.Text()))
	}
	if dir == "." && isTest {
		return
	}
	r, ok := entryOf(dir)
	if !ok {
		h.add(dir, "which floor is it on? Give the package an entry in deps_test.go")
		return
	}
	if r.floor == outside || isTest {
		return // they may look at everything
	}
	names := make(map[string]string)
	for _, spec := range f.Imports {
		target, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			h.add(p, "%v", err)
			continue
		}
		name := path.Base(target)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		names[name] = target
		h.imports(p, dir, r, target)
	}
	h.calls(p, dir, r, f, names)
}

// imports judges one import of a file of the product.
func (h *inspector) imports(p, dir string, r entry, target string) {
	for _, d := range doors {
		if under(target, d.prefix) && !under(dir, d.owner) {
			h.add(p, "imports %s, which %s alone may: %s", target, cmp.Or(d.owner, "a test"), d.reason)
		}
	}
	own, isOwn := strings.CutPrefix(target, module+"/")
	if !isOwn {
		if r.floor > 1 {
			return
		}
		for _, bad := range impureImports {
			if under(target, bad) {
				h.add(p, "imports %s: floors 0 and 1 compute from their arguments, which is what makes them testable without a machine; no file system but fs.FS, no network, no process", target)
			}
		}
		if first, _, _ := strings.Cut(target, "/"); strings.Contains(first, ".") && !slices.Contains(pureAllowed[r.path], target) {
			h.add(p, "imports %s: floors 0 and 1 know the standard library, and pureAllowed's exceptions", target)
		}
		return
	}
	to, ok := entryOf(own)
	switch {
	case !ok: // reported where it lies, if it exists
	case to.floor == outside:
		h.add(p, "imports %s: the product holds no fake and knows no test", own)
	case to.floor > r.floor:
		h.add(p, "imports %s, from floor %d to floor %d: imports go downward only, so that a package can be understood without the ones above it", own, r.floor, to.floor)
	case to.floor == r.floor && r.floor > 1 && to.path != r.path && !slices.Contains(tools, to.path) && !under(r.path, to.path):
		h.add(p, "imports its sibling %s: a package of floor %d knows one outside system; where two must meet, the floor above passes plain values between them", own, r.floor)
	case r.half == plugin && lent[to.path] != "":
	case to.half != both && to.half != r.half:
		h.add(p, "imports %s, from the half %q to the half %q: the agent, the placer and the plugin are programs of their own, and what is of one is no concern of the others; what both need is a package of both, with its reason in shared", own, r.half, to.half)
	}
}

// calls looks for what a file may not do with packages that it may import.
func (h *inspector) calls(p, dir string, r entry, f *ast.File, names map[string]string) {
	if _, dot := names["."]; dot {
		h.add(p, "has a dot import, behind which no call can be seen")
	}
	ast.Inspect(f, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		x, ok := sel.X.(*ast.Ident)
		if !ok {
			return true
		}
		switch pkg, name := names[x.Name], sel.Sel.Name; {
		case pkg == "time" && r.floor <= 1 && slices.Contains(impureTime, name):
			h.add(p, "uses time.%s: floors 0 and 1 have no clock, what time it is is an argument", name)
		case (pkg == "os" && name == "Exit" || pkg == "log" && strings.HasPrefix(name, "Fatal")) && !slices.Contains(mains, dir):
			h.add(p, "uses %s.%s: only a program's main package ends the process, everyone else returns an error", pkg, name)
		}
		return true
	})
}

// entryOf returns the entry of a package: the one with just that path before one
// that takes in all below a path.
func entryOf(dir string) (entry, bool) {
	for _, r := range packages {
		if r.path == dir {
			return r, true
		}
	}
	for _, r := range packages {
		if above, ok := strings.CutSuffix(r.path, "/..."); ok && strings.HasPrefix(dir, above+"/") {
			return r, true
		}
	}
	return entry{}, false
}

// under reports whether an import path is prefix or below it.
func under(target, prefix string) bool {
	return target == prefix || strings.HasPrefix(target, prefix+"/")
}

// TestRulesBite breaks each rule once, so that a rule that no longer looks is
// seen; and once nothing, so that a false alarm is.
func TestRulesBite(t *testing.T) {
	const doc = spdx + "\n\n// Package x is described at such a length that a newcomer can learn from it what the\n" +
		"// model is, why it is like that, how it is used and what it refuses to know, which\n" +
		"// takes two hundred characters at the very least, as this one shows.\npackage x\n"
	source := func(imports, body string) string {
		s := spdx + "\n\npackage x\n\n"
		for imp := range strings.FieldsSeq(imports) {
			s += "import " + strconv.Quote(imp) + "\n"
		}
		return s + "\n" + body
	}
	for _, tc := range []struct {
		name, file, src string
		want            string // part of the one violation; empty for none
	}{
		{"in order", "internal/config/x.go", source("strings io/fs time go.yaml.in/yaml/v4 "+module+"/pkg/mig "+module+"/pkg/gpu", "var d = time.Second"), ""},
		{"a test may do all of it", "internal/config/x_test.go", source("os time github.com/NVIDIA/go-nvml/pkg/nvml "+module+"/tests/emulator", "var t = time.Now()\nfunc f() { os.Exit(1) }"), ""},
		{"tests may know the product and all doors", "tests/e2e/x.go", source("os k8s.io/client-go/dynamic "+module+"/internal/agent", "func f() { os.Exit(1) }"), ""},
		{"manifests have tests and no essay", "deployments/x_test.go", source(module+"/internal/config", ""), ""},
		{"main may exit", "cmd/gpu-agent/x.go", source("os "+module+"/internal/agent", "func f() { os.Exit(1) }"), ""},
		{"the agent's program knows the placer", "cmd/gpu-agent/x.go", source(module+"/internal/fleet", ""), `from the half "agent" to the half "placer"`},
		{"the placer's program knows the agent", "cmd/gpu-placer/x.go", source(module+"/internal/agent", ""), `from the half "placer" to the half "agent"`},
		{"a door in its package", "pkg/gpu/nvml/x.go", source("github.com/NVIDIA/go-nvml/pkg/nvml", ""), ""},
		{"the packages of the cap know each other", "pkg/memcap/lib/x.go", source(module+"/pkg/memcap/files "+module+"/pkg/memcap", ""), ""},
		{"upward", "internal/plan/x.go", source(module+"/internal/agent", ""), "imports go downward only"},
		{"upward by a name that looks below", "pkg/cdi/x.go", source(module+"/pkg/cdi/dir", ""), "imports go downward only"},
		{"a sibling", "pkg/plugin/x.go", source(module+"/internal/kube", ""), "its sibling internal/kube"},
		{"a half of a door and its common part", "internal/kube/agentkube/x.go", source("k8s.io/client-go/dynamic "+module+"/internal/kube", ""), ""},
		{"the common part of a door and a half", "internal/kube/x.go", source(module+"/internal/kube/agentkube", ""), "its sibling internal/kube/agentkube"},
		{"the other half of a door", "internal/obs/placerobs/x.go", source(module+"/internal/obs/agentobs", ""), "its sibling internal/obs/agentobs"},
		{"the placer knows the agent", "internal/fleet/x.go", source(module+"/internal/ledger", ""), `from the half "placer" to the half "agent"`},
		{"the plugin knows the agent", "internal/diagnosis/x.go", source(module+"/internal/plan", ""), `from the half "plugin" to the half "agent"`},
		{"the plugin knows what it is lent", "internal/kubectlgpu/x.go", source(module+"/internal/config", ""), ""},
		{"the placer knows what the plugin is lent", "internal/fleet/x.go", source(module+"/internal/config", ""), `from the half "placer" to the half "agent"`},
		{"the placer knows the plugin", "internal/fleet/x.go", source(module+"/internal/diagnosis", ""), `from the half "placer" to the half "plugin"`},
		{"the plugin knows what is shared", "internal/diagnosis/x.go", source(module+"/internal/gpunode", ""), ""},
		{"the agent knows the placer", "internal/agent/x.go", source(module+"/internal/placer", ""), `from the half "agent" to the half "placer"`},
		{"what is shared knows a half", "internal/gpunode/x.go", source(module+"/internal/ledger", ""), `from the half "both" to the half "agent"`},
		{"what is shared", "internal/fleet/x.go", source(module+"/internal/gpunode "+module+"/pkg/gpu", ""), ""},
		{"a tool", "internal/state/x.go", source(module+"/internal/atomicfile", ""), ""},
		{"a tool that uses what it serves", "internal/atomicfile/x.go", source(module+"/internal/state", ""), "its sibling internal/state"},
		{"a tool of a floor with no outside world", "internal/plan/x.go", source(module+"/internal/atomicfile", ""), "imports go downward only"},
		{"go-nvml", "internal/agent/x.go", source("github.com/NVIDIA/go-nvml/pkg/nvml", ""), "which pkg/gpu/nvml alone may"},
		{"nvcdi", "pkg/cdi/dir/x.go", source("github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi", ""), "which pkg/gpu/nvml alone may"},
		{"the device-plugin API", "internal/agent/x.go", source("k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1", ""), "which pkg/plugin alone may"},
		{"the PodResources API", "pkg/plugin/x.go", source("k8s.io/kubelet/pkg/apis/podresources/v1", ""), "which internal/node alone may"},
		{"client-go", "cmd/gpu-agent/x.go", source("k8s.io/client-go/rest", ""), "which internal/kube alone may"},
		{"a template", "internal/status/x.go", source("html/template", ""), "which a test alone may"},
		{"a template of texts", "cmd/gpu-agent/x.go", source("text/template", ""), "the linker keeps all of them"},
		{"a template of a test", "tests/liqo/x.go", source("text/template", ""), ""},
		{"a file system", "pkg/mig/x.go", source("os", ""), "no file system but fs.FS"},
		{"a process", "pkg/mig/x.go", source("os/exec", ""), "no process"},
		{"a network", "pkg/gpu/x.go", source("net/http", ""), "no network"},
		{"a library", "pkg/timeslice/x.go", source("github.com/google/uuid", ""), "know the standard library"},
		{"another entry's library", "pkg/mig/x.go", source("go.yaml.in/yaml/v4", ""), "know the standard library"},
		{"a clock", "internal/plan/x.go", source("time", "var t = time.Now()"), "uses time.Now: floors 0 and 1 have no clock"},
		{"a clock by another name", "pkg/memcap/x.go", spdx + "\n\npackage x\n\nimport clock \"time\"\n\nvar f = clock.Sleep\n", "uses time.Sleep"},
		{"a clock by no name", "pkg/memcap/x.go", spdx + "\n\npackage x\n\nimport . \"time\"\n\nvar f = Sleep\n", "dot import"},
		{"the product knows a test", "internal/agent/x.go", source(module+"/tests/emulator", ""), "knows no test"},
		{"an exit", "internal/agent/x.go", source("os", "func f() { os.Exit(1) }"), "main package ends the process"},
		{"a fatal log", "internal/obs/x.go", source("log", "func f() { log.Fatalf(\"\") }"), "main package ends the process"},
		{"no entry", "pkg/extra/x.go", source("", ""), "which floor is it on?"},
		{"no entry at the top", "x.go", source("", ""), "which floor is it on?"},
		{"a second program", "cmd/other/x.go", source("", ""), "which floor is it on?"},
		{"no licence", "pkg/gpu/x.go", "package x\n", "names its licence"},
		{"a licence in C", "tests/emulator/lib/nvml.c", spdxC + "\nint x;\n", ""},
		{"no licence in C", "tests/emulator/lib/nvml.c", "int x;\n", "names its licence"},
		{"not Go", "pkg/gpu/x.go", spdx + "\n\npackage\n", "expected 'IDENT'"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tree := fstest.MapFS{tc.file: {Data: []byte(tc.src)}}
			if path.Ext(tc.file) == ".go" && documented(path.Dir(tc.file)) {
				tree[path.Join(path.Dir(tc.file), "doc.go")] = &fstest.MapFile{Data: []byte(doc)}
			}
			found := inspect(tree)
			if tc.want == "" {
				if len(found) > 0 {
					t.Errorf("found %q, want nothing", found)
				}
				return
			}
			// A package without an entry is reported for each of its files.
			if len(found) != 1 || !strings.Contains(found[0], tc.want) {
				t.Errorf("found %q, want one with %q", found, tc.want)
			}
		})
	}
	for name, src := range map[string]string{
		"no doc.go":                             "",
		"a doc.go of a label":                   spdx + "\n\n// Package x does things.\npackage x\n",
		"a comment that is none of the package": strings.Replace(doc, "\npackage", "\n\npackage", 1),
	} {
		tree := fstest.MapFS{"pkg/mig/x.go": {Data: []byte(source("", ""))}}
		if src != "" {
			tree["pkg/mig/doc.go"] = &fstest.MapFile{Data: []byte(src)}
		}
		if found := inspect(tree); len(found) != 1 || !strings.Contains(found[0], "a newcomer learns the package from it") {
			t.Errorf("%s: found %q", name, found)
		}
	}
}

// TestSharedIsShared holds that what is of both halves comes with packages of each, and has its
// reason: otherwise the list would grow, and nobody would see why.
func TestSharedIsShared(t *testing.T) {
	brought := map[half]map[string]bool{}
	for _, of := range []half{agent, placer} {
		args := []string{"list", "-deps", "-f", "{{.ImportPath}}"}
		for _, r := range packages {
			if r.half == of && hasGo(r.path) {
				args = append(args, "./"+r.path)
			}
		}
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go %s: %v", strings.Join(args, " "), err)
		}
		brought[of] = map[string]bool{}
		for p := range strings.FieldsSeq(string(out)) {
			if own, ok := strings.CutPrefix(p, module+"/"); ok {
				brought[of][own] = true
			}
		}
	}
	for _, v := range unshared(packages, shared, brought) {
		t.Error(v)
	}
	// The rule bites.
	table := []entry{{"internal/a", 0, both, ""}, {"internal/b", 0, both, ""}, {"internal/c", 0, both, ""}, {"internal/d", 0, agent, ""}}
	why := map[string]string{"internal/a": "x", "internal/b": "x", "internal/d": "x"}
	have := map[half]map[string]bool{agent: {"internal/a": true, "internal/b": true, "internal/c": true}, placer: {"internal/a": true, "internal/c": true}}
	if found := unshared(table, why, have); len(found) != 3 || !strings.Contains(found[0], "internal/b") || !strings.Contains(found[1], "internal/c") || !strings.Contains(found[2], "internal/d") {
		t.Errorf("of a package that the placer has no more, one without a reason and one that is not of both it finds %q", found)
	}
}

// unshared is what is wrong with the list of packages of both halves, where each half brings
// packages along.
func unshared(table []entry, why map[string]string, brought map[half]map[string]bool) (found []string) {
	of := map[string]half{}
	for _, r := range table {
		of[r.path] = r.half
		if r.half != both {
			continue
		}
		for _, h := range []half{agent, placer} {
			if !brought[h][r.path] {
				found = append(found, fmt.Sprintf("%s is of both halves, and no package of the half %q brings it along: it is of the other one alone", r.path, h))
			}
		}
		if why[r.path] == "" {
			found = append(found, r.path+" is of both halves without a reason in shared")
		}
	}
	for _, p := range slices.Sorted(maps.Keys(why)) {
		if of[p] != both {
			found = append(found, p+" has a reason in shared and is not of both halves")
		}
	}
	return found
}

// TestLentIsLent holds that what the plugin is lent is the agent's, pure, and imported by the plugin.
func TestLentIsLent(t *testing.T) {
	imported := map[string]bool{}
	for _, r := range packages {
		if r.half != plugin {
			continue
		}
		out, err := exec.CommandContext(t.Context(), "go", "list", "-f", `{{join .Imports "\n"}}`, "./"+r.path).Output()
		if err != nil {
			t.Fatalf("go list ./%s: %v", r.path, err)
		}
		for p := range strings.FieldsSeq(string(out)) {
			imported[strings.TrimPrefix(p, module+"/")] = true
		}
	}
	for p, why := range lent {
		if r, ok := entryOf(p); !ok || r.half != agent || r.floor > 1 || why == "" || !imported[p] {
			t.Errorf("%s is lent to the plugin, and is not the agent's, not pure, without a reason, or not used", p)
		}
	}
}

// ofDaemons is what the program of the MPS daemons may bring along beside Go's own library: packages of
// the product, and modules.
var ofDaemons = struct{ own, modules []string }{
	own: []string{"cmd/gpu-agent-mps", "internal/atomicfile", "internal/brief", "internal/command", "internal/mps", "internal/mps/cuinit",
		"internal/socket", "pkg/gpu"},
	modules: []string{"github.com/fsnotify/fsnotify", "github.com/spf13/cobra", "github.com/spf13/pflag", "golang.org/x/sys"},
}

// TestDaemonsProgramStaysSmall holds what the program of the MPS daemons is linked with. Two of its processes
// are on each node all the time, and the agent's code for Kubernetes and NVML is 30 MB of a process.
func TestDaemonsProgramStaysSmall(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/gpu-agent-mps").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	brought := strings.Fields(string(out))
	for _, v := range tooMuch(brought) {
		t.Error(v)
	}
	if !slices.Contains(brought, module+"/internal/mps") {
		t.Errorf("go list named %d packages, and not internal/mps: this test looks at nothing", len(brought))
	}
	// The rule bites.
	for _, p := range []string{module + "/pkg/gpu/nvml", "google.golang.org/grpc", "k8s.io/client-go/rest", "net/http", "crypto/tls", "github.com/spf13/viper"} {
		if found := tooMuch([]string{"os", "net", "golang.org/x/sys/unix", p, module + "/pkg/gpu"}); len(found) != 1 || !strings.HasPrefix(found[0], p+": ") {
			t.Errorf("of %s it finds %q", p, found)
		}
	}
}

// tooMuch returns what the program of the MPS daemons may not bring along.
func tooMuch(brought []string) (found []string) {
	for _, p := range brought {
		own, isOwn := strings.CutPrefix(p, module+"/")
		first, _, _ := strings.Cut(p, "/")
		switch {
		case isOwn && slices.Contains(ofDaemons.own, own):
		case !isOwn && slices.ContainsFunc(ofDaemons.modules, func(m string) bool { return under(p, m) }):
		case !isOwn && (first == "vendor" || !strings.Contains(first, ".")) && p != "net/http" && p != "crypto/tls":
		default:
			found = append(found, p+": the program of the MPS daemons brings it along, and an idle supervisor is to have 15 MB at most")
		}
	}
	return found
}

// TestEntriesAreInOrder keeps the table readable: from the top floor down.
func TestEntriesAreInOrder(t *testing.T) {
	if !slices.IsSortedFunc(packages, func(a, b entry) int { return cmp.Compare(b.floor, a.floor) }) {
		t.Error("the packages are not listed from the top floor down")
	}
	for i, r := range packages {
		if slices.ContainsFunc(packages[:i], func(o entry) bool { return o.path == r.path }) {
			t.Errorf("%s has two entries", r.path)
		}
	}
}

// TestToolsAreModulesOfTheirOwn holds the product's go.mod free of what only checks sources:
// such a program would decide the versions that the product is built with. The one tool is
// part of the product.
func TestToolsAreModulesOfTheirOwn(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var mod struct {
		Tool    []struct{ Path string }
		Require []struct{ Path string }
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}
	const hook = "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook"
	if len(mod.Tool) != 1 || mod.Tool[0].Path != hook {
		t.Errorf("the tools of go.mod are %v; want %s alone. Programs that check sources stand in tests/tools", mod.Tool, hook)
	}
	for _, r := range mod.Require {
		if r.Path == "honnef.co/go/tools" || r.Path == "golang.org/x/tools" || r.Path == "golang.org/x/vuln" {
			t.Errorf("go.mod requires %s, which checks sources; put it into tests/tools", r.Path)
		}
	}
}
