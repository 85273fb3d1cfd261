// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// stage is one line of the table at the end.
type stage struct {
	name string
	what string
	// after names the stages whose results this one uses.
	after []string
	// behind names the stages that have to be over, whatever became of them.
	behind []string
	lane   lane
	// set is the smallest that the stage is in.
	set set
	// fuller says that its commands look at more in a larger set.
	fuller bool
	// reads are files and directories that the commands use and do not name.
	reads []string
	// again says that there is a real node, a browser or Kueue in it, of which this project
	// has not made the timing: a test that fails is run once more, alone.
	again bool
	// lacks says what this machine lacks for the stage to make sense, "" if
	// nothing; the stage is skipped with these words.
	lacks func() string
	// commands run one after the other; the first that fails ends the stage.
	commands []command
}

// lane is a number of stages of which one runs at a time, as long as no other lane has
// nothing left to do.
type lane string

// set is how much is looked at. A larger set has all stages of the smaller ones.
type set int

const (
	// quick is what every change must pass.
	quick set = iota
	// whole is all that is known, once.
	whole
	// long has the long counts, and fuzzing.
	long
)

// form is a command of `go test` as a set asks for it: in the short form, as it is, or in the
// long form.
func (s set) form(c command) command {
	switch s {
	case quick:
		c.args = append(slices.Clip(c.args), "-short")
	case long:
		c.args = append(slices.Clip(c.args), "-long")
	}
	return c
}

// Lanes run at the same time. What runs beside has a lower priority; it may not need the
// machine to itself, nor look at what others leave on it.
const (
	first  lane = ""
	second lane = "second"
	beside lane = "beside"
)

// command is a program, or a function of this one.
type command struct {
	args []string
	// in is a directory below the checkout.
	in  string
	env []string
	// test: the program prints what `go test -json` prints.
	test bool
	// quiet: the program has nothing to say, and output is failure.
	quiet bool
	// call, if set, is run instead of a program; it prints to w.
	call func(w io.Writer) error
}

func run(args ...string) command { return command{args: args} }

// The stage lint vets more than go test does.
func test(in string, args ...string) command {
	return command{in: in, test: true, args: append([]string{"go", "test", "-json", "-vet=off"}, args...)}
}

// hasty has a program look for garbage less often: the race detector makes that a sixth of what
// tests take of the processors.
func hasty(c command) command {
	c.env = append(c.env, "GOGC=400")
	return c
}

func stuttering(c command) command {
	c.args = append([]string{"go", "run", "./tests/stutter"}, c.args...)
	return c
}

// stages are those of a set, in the order in which each lane runs its own: what is
// quick to find wrong comes first. Those of the nodes mostly wait.
func stages(cache string, packages []goPackage, files []string, of set) ([]stage, error) {
	bin := func(name string) string { return filepath.Join(cache, "bin", name) }
	staticcheck := func(in string) command { return command{in: in, args: []string{bin("staticcheck"), "./..."}} }
	var concurrent, alone []string
	for _, p := range packages {
		if p.concurrent {
			concurrent = append(concurrent, p.path)
		} else {
			alone = append(alone, p.path)
		}
	}
	// Guards against a test that hangs, not against a slow machine.
	const limit, longLimit = "-timeout=20m", "-timeout=150m"
	pieces, err := testsIn(files, "tests/e2e/", "account", "alerts", "allocations", "caps", "demand", "dra", "dra_life", "dra_move", "dynamic", "guard", "mig", "mig_more", "topology", "walk")
	if err != nil {
		return nil, err
	}
	drills, err := testsIn(files, "tests/e2e/", "drill")
	if err != nil {
		return nil, err
	}
	elsewhere := pieces // tests of tests/e2e that other stages have
	if of == long {
		elsewhere += "|" + drills
	}
	formed := func(in, path string, args ...string) command {
		return of.form(test(in, append([]string{"-count=1", longLimit, path}, args...)...))
	}
	crowds := test(".", "-count=1", longLimit, "./tests/crowd")
	if of > quick { // a fleet is measured
		crowds.args = append(crowds.args, "./tests/fleet")
	}
	unitLimit := limit
	if of > quick { // internal/agent alone takes a quarter of an hour beside the other lanes
		unitLimit = longLimit
	}
	nodeTests := test("tests/cluster", "-count=1", limit, "./...")
	if of == quick {
		nodeTests = of.form(nodeTests)
	}
	row := func(versions ...string) command {
		return test(".", append([]string{"-count=1", limit, "./tests/e2e", "-built", "-run=^(TestLimitBeforeTheFirstInstruction|TestVersions)$", "-node=matrix"}, versions...)...)
	}
	all := []stage{
		{
			name: "host", what: "what this machine has", commands: []command{{call: checkHost}},
		},
		{
			name: "lint", what: "gofmt, go vet, staticcheck, closed sets", after: []string{"host"}, lane: beside,
			commands: []command{
				{args: append([]string{"gofmt", "-l", "--"}, files...), quiet: true},
				run("go", "vet", "./..."),
				{in: "tests/cluster", args: []string{"go", "vet", "./..."}},
				{in: "tests/monitoring", args: []string{"go", "vet", "./..."}},
				{in: "tests/tools", args: []string{"go", "build", "-o", bin("staticcheck"), "honnef.co/go/tools/cmd/staticcheck"}},
				staticcheck("."),
				{in: "tests/tools", args: []string{"go", "build", "-o", bin("closed"), "./closed"}},
				run("go", "vet", "-vettool="+bin("closed"), "./cmd/...", "./internal/...", "./pkg/..."),
				{in: "deployments/image", args: []string{"go", "vet", "./..."}},
				staticcheck("deployments/image"),
				staticcheck("tests/cluster"),
				staticcheck("tests/monitoring"),
			},
		},
		{
			name: "unit", what: "tests that need no node, with the race detector where there is anything to race", after: []string{"host"}, lane: beside, fuller: true,
			commands: unit(of, concurrent, alone, unitLimit),
		},
		{
			name: "emulator", what: "the emulated driver's libraries and daemon", after: []string{"host"},
			commands: []command{
				{args: []string{"go", "build", "-o", bin("gpu-emulator"), "./tests/emulator/cmd/gpu-emulator"}, env: []string{"CGO_ENABLED=0"}},
				run(bin("gpu-emulator"), "build"),
			},
		},
		{
			name: "image", what: "the container images of agent and placer", after: []string{"host"}, reads: []string{"Makefile", "LICENSE", "cmd/gpu-agent", "cmd/gpu-agent-mps", "cmd/gpu-placer", "deployments/image", "pkg/memcap/lib/build"},
			commands: []command{run("make", "--no-print-directory", "image", "CACHE="+cache)},
		},
		{
			name: "node", what: "Kubernetes, etcd, containerd for the test node", after: []string{"host"}, reads: []string{"tests/cluster"},
			commands: []command{
				{in: "tests/cluster", args: []string{"go", "build", "-o", bin("cluster"), "."}},
				run(bin("cluster"), "build"),
			},
		},
		{
			name: "helm", what: "the program helm", after: []string{"node"}, lane: beside, set: whole,
			commands: []command{run(bin("cluster"), "build", "--with", "helm")},
		},
		{
			name: "kueue", what: "the managers of Kueue, KubeRay and JobSet", after: []string{"node"}, lane: beside, set: whole,
			commands: []command{run(bin("cluster"), "build", "--with", "kueue", "--with", "kuberay", "--with", "jobset")},
		},
		{
			name: "release", what: "images and releases: reproducible, whole, published whole, and what is in them is named", after: []string{"image", "helm"}, lane: beside, set: whole, reads: []string{"deployments", "docs"},
			commands: []command{formed("deployments/image", "."), run(bin("image"), "behind", "--cache", filepath.Join(cache, "images", "debian"))},
		},
		{
			// A node that leaves something behind fails its own stage; how it does when its parts are
			// killed matters when it changes.
			name: "node tests", what: "the test node itself: up, down, nothing left behind", after: []string{"node"}, fuller: true, again: true, lacks: root,
			commands: []command{nodeTests},
		},
		{
			name: "e2e", what: "pods on the real node", after: []string{"emulator", "image", "node"}, behind: []string{"node tests"}, fuller: true, again: true, lacks: root,
			commands: []command{formed(".", "./tests/e2e", "-built", "-skip="+elsewhere)},
		},
		{
			// The tests of the node look at all that is on the machine.
			name: "pieces", what: "pods on a second real node: MIG, claims and caps", after: []string{"emulator", "image", "node"}, behind: []string{"node tests"}, lane: second, fuller: true, again: true, lacks: root,
			commands: []command{formed(".", "./tests/e2e", "-built", "-run="+pieces, "-node=pieces")},
		},
		{
			// Three nodes at a time are more than two cores carry: what waits for a minute on the one would
			// wait for longer. It mostly waits, so it comes where there is much else to do beside it.
			name: "burst", what: "jobs on two real nodes, on-prem and a cloud, by the real Kueue", after: []string{"emulator", "image", "kueue"}, behind: []string{"node tests", "e2e", "pieces"}, set: whole, again: true, lacks: root,
			commands: []command{formed(".", "./tests/burst", "-built")},
		},
		{
			name: "deployments", what: "the manifests, as kubectl puts them together, at the real API server", after: []string{"node"}, fuller: true,
			commands: []command{hasty(formed(".", "./deployments", "-skip=^TestChart")), test("tests/monitoring", "-count=1", limit, "./...")},
		},
		{
			name: "drivers", what: "memory caps in front of real drivers' libraries, and MPS's real control daemons, as Debian has them", after: []string{"host"}, lane: beside, set: whole,
			commands: []command{
				test(".", "-count=1", limit, "./tests/drivers"),
				test(".", "-count=1", limit, "./internal/mps", "-run=^TestReal", "-real"),
			},
		},
		{
			// It takes the image's packages, and the API server.
			name: "arm64", what: "the agent, its libraries and its packages' tests on an emulated arm64, with pages of 64 KiB", after: []string{"image", "node"}, lane: beside, set: whole,
			commands: []command{formed(".", "./tests/arm64")},
		},
		{
			name: "peers", what: "rivals' programs on the emulated driver, and what their files mean", after: []string{"emulator"}, lane: beside, set: whole, reads: []string{"tests/peers"}, lacks: root,
			commands: []command{formed(".", "./tests/peers")},
		},
		{
			name: "foreign", what: "the emulated driver on a machine with a real one", after: []string{"emulator"}, lane: beside, set: whole, lacks: root,
			commands: []command{test(".", "-count=1", limit, "./tests/foreign", "-peers")},
		},
		{
			name: "crowd", what: "crowds of pods and fleets of hollow nodes, by the real scheduler", after: []string{"emulator", "image", "node"}, lane: second, fuller: true, lacks: root,
			commands: []command{hasty(of.form(crowds))},
		},
		{
			// Not beside: who waits for a reading, or for others of its container, waits for so long and no longer.
			name: "caps", what: "memory caps: every call by every door, scenarios, programs as users have them, and kills", after: []string{"emulator"}, lane: second, lacks: root,
			commands: []command{test(".", "-count=1", limit, "./tests/memcap/capsule", "./tests/memcap/probe", "./tests/memcap/programs"), formed(".", "./tests/memcap")},
		},
		{
			name: "crash", what: "the agent killed at every change of its files", after: []string{"emulator", "image", "node"}, lane: second, fuller: true, lacks: root,
			commands: []command{formed(".", "./tests/crash", "-built")},
		},
		{
			name: "upgrade", what: "a release on a real node: installed by Helm, upgraded and rolled back under load, uninstalled; installed from a registry; and the commands that README and docs show", after: []string{"emulator", "image", "node", "helm"}, behind: []string{"node tests"}, lane: second, set: whole, again: true, reads: []string{"README.md", "docs", "deployments", "Makefile"}, lacks: root,
			commands: []command{test(".", "-count=1", limit, "./tests/release", "-built")},
		},
		{
			name: "queues", what: "Jobs and frameworks through the real Kueue to hollow nodes, on-prem and in a cloud", after: []string{"emulator", "image", "kueue"}, lane: second, set: whole, again: true, lacks: root,
			commands: []command{formed(".", "./tests/queues")},
		},
		{
			name: "demo", what: "the demo, each step of which it checks itself", after: []string{"emulator", "image", "node"}, behind: []string{"node tests"}, lane: second, set: whole, again: true, reads: []string{"README.md", "tests/demo"}, lacks: root,
			// A demo that fails leaves its node, to be looked at.
			commands: []command{run("sh", "-c", "go run ./tests/demo up; status=$?; go run ./tests/demo down && exit $status")},
		},
		{
			name: "why", what: "kubectl gpu on a real node: the cause of staged troubles in its first line, and each command", after: []string{"emulator", "image", "kueue"}, behind: []string{"node tests"}, lane: second, set: whole, again: true, reads: []string{"docs", "deployments"}, lacks: root,
			commands: []command{run("make", "--no-print-directory", "-s", "plugin", "CACHE="+cache), test(".", "-count=1", limit, "./tests/why", "-built")},
		},
		{
			name: "stories", what: "what users of the field have, by the files and the commands of docs/story-*.md, on real nodes", after: []string{"emulator", "image", "kueue"}, behind: []string{"node tests"}, lane: second, set: whole, again: true, reads: []string{"docs", "deployments"}, lacks: root,
			commands: []command{test(".", "-count=1", limit, "./tests/stories", "-built")},
		},
		{
			name: "bench", what: "agent and peer do what the benchmark asks, with tiny counts", after: []string{"emulator", "image", "node"}, lane: beside, set: whole, lacks: root,
			commands: []command{run("go", "run", "./tests/peers/bench", "-smoke")},
		},
		{
			name: "chart", what: "the chart, as Helm puts it together, beside kustomize's manifests", after: []string{"helm"}, lane: beside, set: whole,
			commands: []command{test(".", "-count=1", limit, "./deployments", "-run=^TestChart")},
		},
		{
			name: "page", what: "the status page in a browser, its picture too", after: []string{"host"}, lane: beside, set: whole, again: true,
			commands: []command{test(".", "-count=1", limit, "./tests/page")},
		},
		{
			name: "hardware", what: "conformance on this machine's GPU", after: []string{"host"}, lane: beside, lacks: card,
			commands: []command{test(".", "-count=1", limit, "./tests/hardware", "-hardware", "-run=^TestHardware$")},
		},
		// Three clusters with Liqo take a minute or two to come up beside the other lanes: too long for
		// every change.
		{
			name: "liqo", what: "Liqo's controllers, webhooks and virtual kubelet", after: []string{"node"}, lane: beside, set: long,
			commands: []command{run(bin("cluster"), "build", "--with", "liqo")},
		},
		{
			// With -long a real node is among them, see pieces.
			name: "lending", what: "GPUs lent to other clusters through the real Liqo", after: []string{"emulator", "image", "liqo"}, behind: []string{"node tests"}, lane: second, set: long, again: true, lacks: root,
			commands: []command{formed(".", "./tests/liqo")},
		},
		{
			name: "versions", what: "Kubernetes 1.34 and 1.37, containerd 1.7 and CRI-O for the test node", after: []string{"node"}, lane: beside, set: long,
			commands: []command{run(bin("cluster"), "build", "--with", "kubernetes-1.34", "--with", "kubernetes-1.37", "--with", "containerd-1.7", "--with", "crio-1.34")},
		},
		{
			// The usual versions are the row of the stage e2e.
			name: "matrix", what: "the short form of e2e on nodes of other versions", after: []string{"emulator", "image", "versions"}, behind: []string{"node tests"}, lane: second, set: long, again: true, lacks: root,
			commands: []command{row("-kubernetes=1.34"), row("-kubernetes=1.37"), row("-runtime=containerd-1.7"), row("-kubernetes=1.34", "-runtime=crio-1.34")},
		},
		{
			// Troubles of minutes, which make test-all has for seconds in the stage e2e.
			name: "drills", what: "bad days on the real node, each as long as it is feared", after: []string{"emulator", "image", "node"}, behind: []string{"node tests"}, lane: second, set: long, again: true, lacks: root,
			commands: []command{formed(".", "./tests/e2e", "-built", "-run="+drills, "-node=drill")},
		},
		{
			name: "overlay", what: "an emulated driver on a node without GPUs: the agent beside it, then NVIDIA's plugin", after: []string{"emulator", "image", "node"}, behind: []string{"node tests"}, lane: second, set: long, again: true, lacks: root,
			commands: []command{formed(".", "./tests/emulator/deploy", "-run=^TestOverlay$", "-built")},
		},
		{
			name: "storm", what: "100,000 random steps of a node in memory, with MIG and without, and a million looks of the watchdog, with the race detector; crowds of pods in virtual time; a year of the usage journal, and kills in 100 histories of it", after: []string{"unit"}, set: long,
			commands: []command{
				test(".", "-race", "-count=1", longLimit, "./internal/agent", "-run=^TestStorm", "-storm.steps=100000"),
				test(".", "-race", "-count=1", longLimit, "./pkg/memcap", "-run=^TestTruth$", "-judge.rounds=1000000"),
				test(".", "-count=1", longLimit, "./internal/advise", "./internal/fleet", "./internal/meter", "./internal/placer", "./internal/usage/...", "-long"),
			},
		},
		{
			name: "stutter", what: "caps, and what needs no node, while the machine stops now and then", after: []string{"unit", "emulator"}, set: long, lacks: root,
			commands: []command{
				stuttering(test(".", "-count=1", longLimit, "./tests/memcap")),
				stuttering(test(".", append([]string{"-race", "-count=1", longLimit}, slices.Concat(concurrent, alone)...)...)),
			},
		},
		{
			name: "planner", what: "every transition between MIG geometries with random pins, against brute force, and 100,000 claims of each model by the scheduler's allocator", after: []string{"unit"}, set: long,
			commands: []command{
				test(".", "-count=1", longLimit, "./pkg/mig", "-long"),
				test(".", "-count=1", longLimit, "./internal/dra", "-run=^TestSchedulerPlacesWhatTheCardAllows$", "-scheduler.steps=100000"),
			},
		},
		{
			name: "kills", what: "the library of caps killed after every instruction", after: []string{"unit"}, set: long,
			commands: []command{test(".", "-count=1", longLimit, "./pkg/memcap/lib", "-long")},
		},
		{
			name: "mutants", what: "defects of this project's history, put back one at a time: the tests find them", after: []string{"emulator", "image", "node"}, behind: []string{"node tests"}, set: long, lacks: root,
			commands: []command{run("go", "run", "./tests/mutants", "run")},
		},
	}
	if of == long {
		fuzz, err := fuzzing(files)
		if err != nil {
			return nil, err
		}
		all = append(all, stage{name: "fuzz", what: "the invariants of each fuzz test, ten minutes each", after: []string{"unit"}, set: long, commands: fuzz})
	}
	return slices.DeleteFunc(all, func(s stage) bool { return s.set > of }), nil
}

// unit are the commands of the tests that need no node. The race detector leaves sweeps out.
func unit(of set, concurrent, alone []string, limit string) []command {
	form := []string{limit}
	if of == quick {
		form = append(form, "-short")
	}
	with := func(args ...string) command { return hasty(test(".", append(slices.Clone(form), args...)...)) }
	return []command{
		with(append([]string{"-race", "-skip=" + sweepTests}, concurrent...)...),
		with(alone...),
		with("-run="+sweepTests, "./internal/agent"),
	}
}

// fuzzing runs each fuzz test; `make test` runs their seeds alone.
func fuzzing(files []string) ([]command, error) {
	var all []command
	for _, f := range files {
		if !strings.HasSuffix(f, "_test.go") {
			continue
		}
		src, err := os.ReadFile(f)
		if err != nil {
			return nil, fmt.Errorf("find the fuzz tests: %w", err)
		}
		for _, m := range fuzzTest.FindAllSubmatch(src, -1) {
			// Minimising a large seed would take all the time there is.
			all = append(all, command{in: filepath.Dir(f),
				args: []string{"go", "test", "-run=^$", "-fuzz=^" + string(m[1]) + "$", "-fuzztime=10m", "-fuzzminimizetime=10x"}})
		}
	}
	return all, nil
}

var fuzzTest = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)

// testsIn is an expression for the tests in some of a package's files, each named without
// what all of them end with.
func testsIn(files []string, dir string, names ...string) (string, error) {
	var all []string
	for _, name := range names {
		path := dir + name + "_test.go"
		if !slices.Contains(files, path) {
			return "", fmt.Errorf("find the tests of a stage: there is no %s", path)
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("find the tests of a stage: %w", err)
		}
		for _, m := range oneTest.FindAllSubmatch(src, -1) {
			all = append(all, string(m[1]))
		}
	}
	return "^(" + strings.Join(all, "|") + ")$", nil
}

var oneTest = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)

// goFiles are the checkout's, in lexical order. Builds of other stages, in
// directories with a dot, come and go while they are looked for.
func goFiles() (files []string, err error) {
	err = filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case path != "." && strings.HasPrefix(d.Name(), "."):
			if d.IsDir() {
				return fs.SkipDir
			}
		case !d.IsDir() && filepath.Ext(path) == ".go":
			files = append(files, path)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the checkout's files: %w", err)
	}
	return files, nil
}

// apart are the packages that have a stage of their own.
var apart = []string{"/deployments", "/tests/arm64", "/tests/burst", "/tests/crash", "/tests/crowd", "/tests/drivers", "/tests/e2e", "/tests/fleet", "/tests/foreign", "/tests/liqo", "/tests/memcap", "/tests/page", "/tests/peers", "/tests/queues", "/tests/release", "/tests/stories", "/tests/why"}

// sweeps go through many machines, or all layouts of a card, with what other packages' tests
// look for races in.
var sweeps = []string{"/pkg/mig", "/tests/hardware"}

// sweepTests are tests of internal/agent that do arithmetic, or live through days of virtual
// time, in one goroutine at a time: the race detector makes them several times as
// long and has nothing to find in them that others do not show it.
const sweepTests = "^(TestNoStateKeepsTheLoopBusy|TestEditsInARowFitTheLists|TestHeldCutsFitTheLists|TestFileOfMistakes|TestGPUNodeSaysWhatFits|TestSuccessorRestoresTooMuch|TestGPUNodeWritesAnHour|TestForeseen|TestFaultWaitsForAReset)$"

// goPackage is one of the product's, by its import path.
type goPackage struct {
	path string
	// concurrent says that it starts goroutines or has locks: the race detector, under which
	// all takes several times as long, has nothing to find in the others.
	concurrent bool
}

// starts finds what makes a file one of a concurrent package.
var starts = regexp.MustCompile(`(?m)^\s*(?:defer )?go [\w.]+\(|\bgo func\(|\.Go\(|"sync"|"sync/atomic"`)

// unitPackages are the product's packages but those.
func unitPackages() ([]goPackage, error) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}}{{range .GoFiles}} {{$.Dir}}/{{.}}{{end}}{{range .CgoFiles}} {{$.Dir}}/{{.}}{{end}}`, "./...").Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return nil, fmt.Errorf("list packages: %w\n%s", err, exit.Stderr)
		}
		return nil, fmt.Errorf("list packages: %w", err)
	}
	var list []goPackage
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		p := goPackage{path: f[0]}
		is := func(list []string) bool {
			return slices.ContainsFunc(list, func(a string) bool { return strings.Contains(p.path+"/", a+"/") })
		}
		if is(apart) {
			continue
		}
		for _, file := range f[1:] {
			text, err := os.ReadFile(file)
			if err != nil {
				return nil, fmt.Errorf("list packages: %w", err)
			}
			p.concurrent = p.concurrent || starts.Match(text) && !is(sweeps)
		}
		list = append(list, p)
	}
	return list, nil
}

func root() string {
	if uid := os.Geteuid(); uid != 0 {
		return fmt.Sprintf("needs root, for namespaces, mounts and device nodes; this is user %d", uid)
	}
	return ""
}

func card() string {
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		return "no NVIDIA driver on this machine (/dev/nvidiactl); `make test-gpu` runs it where there is one"
	}
	return ""
}

// checkHost says in one sentence each what nothing can be built without.
func checkHost(w io.Writer) error {
	var errs []error
	for _, program := range []string{"go", "gcc", "make"} {
		if _, err := exec.LookPath(program); err != nil {
			errs = append(errs, fmt.Errorf("%s is not in PATH", program))
		}
	}
	if len(errs) == 0 {
		errs = append(errs, checkCompiler())
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	fmt.Fprintf(w, "%s, %d processors, user %d\n", runtime.Version(), runtime.NumCPU(), os.Geteuid())
	fmt.Fprintln(w, "nothing is installed on this machine: Go modules and Debian packages that the tests need go into the caches")
	if os.Geteuid() == 0 {
		fmt.Fprintln(w, roomToWatch(inotifyInstances))
	}
	return nil
}

// A kubelet takes six inotify instances, an agent three, and Linux gives a user 128. The
// nodes of all lanes together take more, and a kubelet that gets none ends.
const (
	inotifyInstances  = "/proc/sys/fs/inotify/max_user_instances"
	inotifyOfAllLanes = 1024
)

// roomToWatch raises the limit in a file to what all lanes need, and says what it did.
// It stays so until the machine starts anew: others may rely on it by then.
func roomToWatch(file string) string {
	text, err := os.ReadFile(file)
	var limit int
	if err == nil {
		limit, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if err == nil && limit < inotifyOfAllLanes {
		err = os.WriteFile(file, []byte(strconv.Itoa(inotifyOfAllLanes)+"\n"), 0o644)
	}
	switch {
	case err != nil:
		return fmt.Sprintf("cannot raise the limit of inotify instances to %d: %v; tests beside each other may fail with \"too many open files\"", inotifyOfAllLanes, err)
	case limit < inotifyOfAllLanes:
		return fmt.Sprintf("raised %s from %d to %d, until the next boot", file, limit, inotifyOfAllLanes)
	default:
		return fmt.Sprintf("%s is %d, which is enough", file, limit)
	}
}

// checkCompiler tries to link a program: gcc without the C library's headers
// is a common half.
func checkCompiler() error {
	dir, err := os.MkdirTemp("", "stages-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command("gcc", "-x", "c", "-", "-o", filepath.Join(dir, "a.out"))
	cmd.Stdin = strings.NewReader("#include <dlfcn.h>\n#include <linux/types.h>\nint main(void) { return dlopen(0, RTLD_NOW) == 0; }\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("gcc makes no program, Debian has what it lacks in the package libc6-dev: %w\n%s", err, out)
	}
	return nil
}
