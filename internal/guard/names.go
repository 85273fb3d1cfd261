// SPDX-License-Identifier: Apache-2.0

package guard

import "example.com/gpu-agent/pkg/memcap/lib"

// names keeps the names by which usage pages know processes. A name does not change while its
// process lives, so the guard looks it up once.
type names struct {
	proc Proc
	by   map[int]named // by PID
}

type named struct {
	start uint64
	lib.Process
}

// mostNames is how many names are kept at most; a node has some hundred processes on its GPUs.
const mostNames = 4096

// of returns the name of the process that has a PID and began at a tick. It returns Proc.Inside's
// errors.
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

// figures returns the driver's figure for each process that counts on an allocation's page. It
// returns nil if it cannot name one of them.
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
		out[name] += p.Bytes // the driver lists a process once for each instance
	}
	return out
}
