// SPDX-License-Identifier: Apache-2.0

package guard

import "example.com/gpu-agent/pkg/memcap/lib"

// names are those by which usage pages know processes. A process keeps its name, so each is
// asked for once.
type names struct {
	proc Proc
	by   map[int]named // by PID
}

type named struct {
	start uint64
	lib.Process
}

// mostNames bounds the names that are kept; a node has some hundred processes on its GPUs.
const mostNames = 4096

// of returns the name of a process that began at that tick. The errors are Proc.Inside's.
func (n *names) of(pid int, start uint64) (lib.Process, error) {
	if is, known := n.by[pid]; known && is.start == start {
		return is.Process, nil
	}
	namespace, inner, err := n.proc.Inside(pid)
	if err != nil {
		return lib.Process{}, err
	}
	if n.by == nil || len(n.by) >= mostNames {
		n.by = map[int]named{}
	}
	n.by[pid] = named{start, lib.Process{Namespace: namespace, PID: inner}}
	return n.by[pid].Process, nil
}

// figures are the driver's for each process that counts on an allocation's page; nil where one
// of them cannot be named.
func (n *names) figures(sc *scene, allocation string) map[lib.Process]uint64 {
	out := map[lib.Process]uint64{}
	for i := range sc.sample.Processes {
		p := &sc.sample.Processes[i]
		if p.Container == "" || sc.homes[p.Container] != allocation {
			continue
		}
		name, err := n.of(p.PID, p.Start)
		if err != nil {
			return nil
		}
		out[name] += p.Bytes // a process is listed once for each instance
	}
	return out
}
