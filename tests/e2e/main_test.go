// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

var built = flag.Bool("built", false, "everything that the node needs stands in the cache already")

// The node's driver: see DESIGN.md on units. 81,559 MiB less the driver's own
// are 79 whole units of 1 GiB.
const (
	model = "H100-80GB"
	gpus  = 8
	units = 79
)

// nodeName is the node's: two may run at the same time.
var nodeName string

// versions are what the node is of.
var versions lab.NodeOptions

func init() {
	flag.StringVar(&nodeName, "node", "e2e", "what the node is called")
	flag.StringVar(&versions.Kubernetes, "kubernetes", "", "another version of Kubernetes, such as 1.34, than the usual one")
	flag.StringVar(&versions.Runtime, "runtime", "", "another container runtime, such as containerd-1.7, than the usual one")
}

// The one node of all tests; set by start, once.
var (
	kit    *lab.Kit
	node   *lab.Node
	driver *lab.Driver
	agent  *lab.Agent
)

var start = sync.OnceValue(func() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	var err error
	if kit, err = lab.NewKit(os.Stderr); err != nil {
		return err
	}
	steps := kit.Steps(versions.Parts()...)
	if *built {
		steps = nil
	}
	steps = append(steps,
		lab.Step{Name: "a node", Run: func(ctx context.Context) (err error) {
			// Most tests merely wait for what the node offers; see usersStatus for those
			// whose figures depend on it.
			if node, err = kit.Up(ctx, lab.NodeOptions{Name: nodeName, WithParent: true, PromptStatus: true,
				Kubernetes: versions.Kubernetes, Runtime: versions.Runtime}); err != nil {
				return err
			}
			if found, err := cgroups(); err != nil || len(found) == 0 {
				return fmt.Errorf("no cgroup is named like this node's, so none would be missed at its end: %w", err)
			}
			return errors.Join(node.Load(ctx, kit.AgentArchive()), node.Namespace(ctx, lab.PodNamespace))
		}},
		lab.Step{Name: "the driver", Run: func(ctx context.Context) (err error) {
			driver, err = node.LayDriver(ctx, lab.DriverOptions{Root: "/", Model: model, Count: gpus})
			return err
		}},
		lab.Step{Name: "the agent", Run: func(ctx context.Context) (err error) {
			agent, err = deploy(ctx, lab.DeployOptions{Partitions: allShared})
			return err
		}})
	for _, s := range steps {
		began := time.Now()
		if err := s.Run(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		fmt.Fprintf(os.Stderr, "e2e: %5.1f s  %s\n", time.Since(began).Seconds(), s.Name)
	}
	return nil
})

// deploy deploys the agent as all tests want it: a GPU need not be without
// complaint for a minute before it is offered again.
func deploy(ctx context.Context, o lab.DeployOptions) (*lab.Agent, error) {
	env := map[string]string{"GPU_AGENT_HEALTH_HOLD": "2s", "GPU_AGENT_HEALTH_PROBE": "500ms"}
	maps.Copy(env, o.Env)
	o.Env = env
	return node.Deploy(ctx, o)
}

func TestMain(m *testing.M) {
	flag.Parse()
	status := m.Run()
	if kit != nil {
		if err := end(); err != nil {
			fmt.Fprintln(os.Stderr, "e2e: end the node:", err)
			status = 1
		}
	}
	os.Exit(status)
}

// end ends the node and looks, by other means than those that ended it, for
// what it left behind.
func end() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	err := kit.Down(ctx, nodeName)
	left, lookErr := leftovers(filepath.Join(kit.Cache, "run", nodeName))
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("left behind: %s", strings.Join(left, "; ")))
	}
	return errors.Join(err, lookErr)
}

// leftovers finds processes and mounts that name a directory, and the node's
// cgroups.
func leftovers(dir string) (left []string, err error) {
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, p := range processes {
		// A process may end while it is looked at.
		command, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		if text := strings.ReplaceAll(string(command), "\x00", " "); strings.Contains(text, dir) {
			left = append(left, fmt.Sprintf("process %s: %s", filepath.Base(p), text))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return left, err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir) {
			left = append(left, "mount "+strings.TrimSpace(line))
		}
	}
	found, err := cgroups()
	return append(left, found...), err
}

// cgroups finds the node's in every hierarchy. A node of the same name in
// another cache has others.
func cgroups() (found []string, err error) {
	name := fmt.Sprintf("gpu-agent-%s-%08x", nodeName, crc32.ChecksumIEEE([]byte(kit.Cache)))
	err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // gone since its parent was read
		}
		if err == nil && d.IsDir() && d.Name() == name {
			found = append(found, "cgroup "+path)
			return fs.SkipDir
		}
		return err
	})
	return found, err
}
