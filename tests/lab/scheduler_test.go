// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestSchedulerLog(t *testing.T) {
	n := &Node{Name: "n", kit: &Kit{Cache: t.TempDir()}}
	dir := filepath.Join(n.kit.Cache, "run", "n", "logs")
	log := `I1123 13:42:17.105932      54 eventhandlers.go:101] "Add event for node" node="n"
I1123 13:42:18.000007      54 eventhandlers.go:140] "Update event for node" node="n"
I1123 13:42:18.500000      54 schedule_one.go:842] "Skipping extender as it returned error and has ignorable flag set" extender="x" err="timeout"
I1123 13:42:19.250000      54 eventhandlers.go:140] "Update event for node" node="n"
`
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "kube-scheduler.log"), []byte(log), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := n.SchedulerLog()
	if err != nil {
		t.Fatal(err)
	}
	at := func(second, nanosecond int) time.Time {
		return time.Date(time.Now().Year(), 11, 23, 13, 42, second, nanosecond, time.Local)
	}
	if len(got.Nodes) != 2 || !got.Nodes[0].Equal(at(18, 7000)) || !got.Nodes[1].Equal(at(19, 250e6)) || got.Unguarded != 1 {
		t.Errorf("it reads %v", got)
	}
}

func TestNodeWriter(t *testing.T) {
	was := NodeWord{Allocatable: map[string]int{"a/x": 3}, heartbeat: time.Unix(10, 0)}
	for _, c := range []struct {
		name string
		now  NodeWord
		want NodeWriter
	}{
		{"its heartbeat", NodeWord{Allocatable: map[string]int{"a/x": 2}, heartbeat: time.Unix(20, 0)}, ByTheKubelet},
		{"a count that fell", NodeWord{Allocatable: map[string]int{"a/x": 2}, heartbeat: time.Unix(10, 0)}, ByLowering},
		{"a count that is gone", NodeWord{Allocatable: map[string]int{}, heartbeat: time.Unix(10, 0)}, ByLowering},
		{"neither", NodeWord{Allocatable: map[string]int{"a/x": 3}, heartbeat: time.Unix(10, 0)}, ByOthers},
	} {
		if got := c.now.writer(&was); got != c.want {
			t.Errorf("%s: it was written by %s, want %s", c.name, got, c.want)
		}
	}
}
