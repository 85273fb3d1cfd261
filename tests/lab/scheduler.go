// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"
)

// SetScheduler starts the scheduler anew with further flags. restore starts it as it was.
func (n *Node) SetScheduler(ctx context.Context, flags ...string) (restore func(context.Context) error, err error) {
	p, _, err := n.ServerProcess(ctx, Scheduler)
	if err != nil {
		return nil, fmt.Errorf("set the scheduler: %w", err)
	}
	line, err := os.ReadFile(n.File(fmt.Sprintf("/proc/%d/cmdline", p.PID)))
	if err != nil {
		return nil, fmt.Errorf("set the scheduler: %w", err)
	}
	command := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	start := func(ctx context.Context, command ...string) error {
		if err := n.Stop(ctx, Scheduler); err != nil {
			return fmt.Errorf("set the scheduler: %w", err)
		}
		if err := n.Start(ctx, Scheduler, command...); err != nil {
			return fmt.Errorf("set the scheduler: %w", err)
		}
		return nil
	}
	restore = func(ctx context.Context) error { return start(ctx, command...) }
	return restore, start(ctx, append(command[:len(command):len(command)], flags...)...)
}

// SchedulerConfig writes the configuration that users are given for the placer, with the
// address of StartPlacer's and the node's credentials, and returns the node's path of it.
func (n *Node) SchedulerConfig() (path string, err error) {
	shipped, err := os.ReadFile(filepath.Join(n.kit.Root, "deployments", "placer", "scheduler-config.yaml"))
	if err != nil {
		return "", fmt.Errorf("configure the scheduler: %w", err)
	}
	var config object
	if err := yaml.Unmarshal(shipped, &config); err != nil {
		return "", fmt.Errorf("configure the scheduler: %w", err)
	}
	extenders, _ := config["extenders"].([]any)
	if len(extenders) != 1 {
		return "", fmt.Errorf("configure the scheduler: the shipped file has %d extenders, want 1", len(extenders))
	}
	extender := extenders[0].(object)
	extender["urlPrefix"] = "http://" + PlacerDoor
	delete(extender, "enableHTTPS")
	delete(extender, "tlsConfig")
	config["clientConnection"] = object{"kubeconfig": "/etc/kubernetes/admin.conf"}
	config["leaderElection"] = object{"leaderElect": false}
	data, err := json.Marshal(config)
	if err != nil {
		return "", fmt.Errorf("configure the scheduler: %w", err)
	}
	const file = "/etc/kubernetes/scheduler.yaml"
	return file, os.WriteFile(n.File(file), data, 0o600)
}

// SchedulerVerbose is the flag that has the scheduler log what [Node.SchedulerLog] reads.
const SchedulerVerbose = "-v=4"

// SchedulerLog is what the scheduler has logged with SchedulerVerbose.
type SchedulerLog struct {
	// Nodes are when it took in a change of a Node.
	Nodes []time.Time
	// Unguarded is how often an extender has failed and was passed over.
	Unguarded int
}

// SchedulerLog reads what the node's schedulers have logged since the node was started.
func (n *Node) SchedulerLog() (SchedulerLog, error) {
	data, err := os.ReadFile(filepath.Join(n.kit.Cache, "run", n.Name, "logs", Scheduler+".log"))
	if err != nil {
		return SchedulerLog{}, fmt.Errorf("read the scheduler's log: %w", err)
	}
	var out SchedulerLog
	for line := range bytes.Lines(data) {
		switch {
		case bytes.Contains(line, []byte(`] "Update event for node"`)):
			at, err := klogTime(line)
			if err != nil {
				return SchedulerLog{}, fmt.Errorf("read the scheduler's log: %w", err)
			}
			out.Nodes = append(out.Nodes, at)
		case bytes.Contains(line, []byte(`] "Skipping extender as it returned error`)):
			out.Unguarded++
		}
	}
	return out, nil
}

// klogTime is the time of a line such as `I1123 13:31:15.123456   42 file.go:1] …`, which
// says no year.
func klogTime(line []byte) (time.Time, error) {
	const header = "I1123 13:31:15.123456"
	if len(line) < len(header) {
		return time.Time{}, fmt.Errorf("the line %q has no time", line)
	}
	at, err := time.ParseInLocation("0102 15:04:05.000000", string(line[1:len(header)]), time.Local)
	if err != nil {
		return time.Time{}, err
	}
	return at.AddDate(time.Now().Year(), 0, 0), nil
}

// Placer is `gpu-placer run` as a process of the node.
type Placer struct{ node *Node }

const (
	placerProcess = "gpu-placer"
	placerPage    = "127.0.0.1:9501"
	// PlacerDoor is where schedulers of the node ask it.
	PlacerDoor = "127.0.0.1:9890"
)

// StartPlacer starts the placer with an administrator's rights and with more arguments, and waits until it answers. It has
// the extender's door where no argument names doors, and any client may ask.
func (n *Node) StartPlacer(ctx context.Context, args ...string) (*Placer, error) {
	err := n.Start(ctx, placerProcess, append([]string{n.kit.Bin("gpu-placer"), "run", "--kubeconfig", "/etc/kubernetes/admin.conf",
		"--domain", Domain, "--lease", "", "--insecure-door", "--listen", PlacerDoor, "--http", placerPage, "--doors=extender"}, args...)...)
	if err != nil {
		return nil, fmt.Errorf("start the placer: %w", err)
	}
	p := &Placer{n}
	return p, Await(ctx, time.Minute, "the placer to be ready", func(ctx context.Context) error {
		_, err := p.page(ctx, "readyz")
		return err
	})
}

// Stop ends it.
func (p *Placer) Stop(ctx context.Context) error { return p.node.Stop(ctx, placerProcess) }

func (p *Placer) page(ctx context.Context, page string) ([]byte, error) {
	process, _, err := p.node.ServerProcess(ctx, placerProcess)
	if err != nil {
		return nil, fmt.Errorf("ask the placer: %w", err)
	}
	code, body, err := p.node.Get(ctx, process, "http://"+placerPage+"/"+page)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%d: %.300s", code, body)
	}
	if err != nil {
		return nil, fmt.Errorf("ask the placer: %w", err)
	}
	return body, nil
}
