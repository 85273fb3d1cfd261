// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/status"
)

// pod returns what holds the pod up.
func (f *Facts) pod() (out []Finding) {
	p := f.Pod
	if p.Phase == "Succeeded" {
		return []Finding{{Code: Over, Cause: "the pod has succeeded"}}
	}
	asks := f.asks(p)
	out = append(out, f.offences(p)...)
	if p.Phase == "Failed" {
		out = append(out, f.refused(p, asks)...)
	}
	out = append(out, f.faulty(p)...)
	for i := range p.Containers {
		out = append(out, f.container(p, &p.Containers[i])...)
	}
	if p.Phase == "Pending" || p.Phase == "Failed" {
		out = append(out, f.told()...)
	}
	if p.Node != "" && p.Phase == "Pending" {
		out = append(out, f.there(p)...)
	}
	if p.Node == "" && p.Phase != "Failed" {
		out = append(out, f.unplaced(p, asks)...)
	}
	if len(out) > 0 {
		return out
	}
	switch {
	case p.Deleting:
		return []Finding{{Code: Over, Cause: "the pod is being deleted"}}
	case len(asks) == 0 && len(p.Claims) == 0:
		return []Finding{find(NoGPU, "the pod asks for no GPU: no container has a resource of GPUs in its limits")}
	case p.Phase == "Failed":
		return []Finding{find(Crash, "the pod has failed: %s", cmp.Or(p.Message, p.Reason, "it does not say why"))}
	case p.Phase == "Running":
		return []Finding{{Code: Fine, Cause: "the pod runs on " + p.Node + ", and nothing is known to be wrong"}}
	}
	return nil
}

// offences returns what the watchdog has done about the pod.
func (f *Facts) offences(p *Pod) (out []Finding) {
	for _, of := range []struct {
		reason status.Reason
		code   Code
	}{{status.CapEvicted, OverCap}, {status.CapExceeded, OverCap}, {status.Intruder, Intruder}} {
		e := f.newest(string(of.reason))
		if e == nil {
			continue
		}
		n := ""
		if e.Count > 1 {
			n = fmt.Sprintf(" (%d times)", e.Count)
		}
		out = append(out, find(of.code, "%s%s", e.Message, n))
	}
	return out
}

// told returns what the agent has said about the pod by Events: that a claim can never be prepared, or
// that a MIG instance could not be made.
func (f *Facts) told() (out []Finding) {
	for _, of := range []struct {
		reason status.Reason
		code   Code
	}{{status.ClaimRefused, Refused}, {status.ClaimUnsupported, Refused}, {status.ClaimOutdated, Refused},
		{status.ClaimEnded, Refused}, {status.GPUInstanceFailed, UnhealthyGPU}} {
		if e := f.newest(string(of.reason)); e != nil {
			out = append(out, find(of.code, "%s", e.Message).on(f.Pod.Node))
		}
	}
	return out
}

// refused returns why the kubelet refused a pod that has failed before it began.
func (f *Facts) refused(p *Pod, asks []ask) []Finding {
	if p.Reason != "UnexpectedAdmissionError" && !strings.HasPrefix(p.Reason, "OutOf") {
		return nil
	}
	said := agentSays(p.Message)
	for _, v := range f.views() {
		if gone := f.agentGone(&v); gone != nil && v.name == p.Node {
			return []Finding{*gone, find(Refused, "the kubelet of %s refused the pod: %s", p.Node, said)}
		}
	}
	where := "the kubelet of " + cmp.Or(p.Node, "its node") + " refused the pod: "
	code, next := Refused, ""
	switch {
	case strings.Contains(said, "no GPU of this node has more than"), strings.Contains(said, "and this node shares"):
		code, next = TooMuch, advice(said)
	case strings.Contains(said, "a request lives on one GPU"), strings.Contains(said, "each is of a different GPU"):
		code, next = Fragmented, advice(said)
	case strings.Contains(said, "none is free"), strings.Contains(said, "requested number of devices unavailable"),
		strings.HasPrefix(p.Reason, "OutOf"):
		code = Full
	case strings.Contains(said, "another program"), strings.Contains(said, "of another device plugin"):
		code = OtherOwner
	case strings.Contains(said, "is leaving: "), strings.Contains(said, "no longer offered by this node"),
		strings.Contains(said, "the node's partition has changed"):
		code = NotOffered
	case strings.Contains(said, "cannot allocate unhealthy devices"), strings.Contains(said, "was withdrawn: "):
		code = Refused
		if found := f.sick(p, asks); found != nil {
			return []Finding{*found, find(Refused, "%s%s", where, said)}
		}
	}
	out := find(code, "%s%s", where, said).on(p.Node)
	if next != "" {
		out.Next = next
	}
	return []Finding{out}
}

// advice returns what a refusal of the agent says to do, which is its last part.
func advice(said string) string {
	i := strings.LastIndex(said, "; ask for ")
	if i < 0 {
		return ""
	}
	return said[i+len("; "):] + "; create the pod anew then"
}

// sick returns the fault on the pod's node that explains why devices of its resources are
// unhealthy; nil if none is known.
func (f *Facts) sick(p *Pod, asks []ask) *Finding {
	for _, v := range f.views() {
		s := v.status()
		if v.name != p.Node || s == nil {
			continue
		}
		for i := range s.GPUs {
			g := &s.GPUs[i]
			if gpunode.Is(g.Conditions, gpunode.Available) && gpunode.Is(g.Conditions, gpunode.Healthy) {
				continue
			}
			found := withdrawn(v.name, g)
			if !gpunode.Is(g.Conditions, gpunode.Healthy) {
				found = unhealthy(v.name, g)
			}
			if len(asks) == 0 || slices.ContainsFunc(asks, func(a ask) bool {
				return offering(g, a.resource) || g.Resource == "" && g.MIG == nil
			}) {
				return &found
			}
		}
	}
	return nil
}

// agentSays returns the part of a message of the kubelet that the device plugin has written, or all
// of it. The kubelet puts gRPC's words around it.
func agentSays(message string) string {
	if i := strings.LastIndex(message, " desc = "); i >= 0 {
		message = message[i+len(" desc = "):]
	}
	message = strings.TrimSuffix(message, ", which is unexpected")
	message = strings.TrimPrefix(message, "Pod was rejected: ")
	return strings.Replace(message, "the allocation is not ready: ", "", 1)
}

// faulty returns the faults of the GPUs that the pod has.
func (f *Facts) faulty(p *Pod) (out []Finding) {
	if p.Node == "" {
		return nil
	}
	var has []string // GPUs that its containers have
	for i := range p.Containers {
		for _, id := range p.Containers[i].Devices {
			gpu, _, _ := strings.Cut(id, "::")
			has = append(has, gpu)
		}
	}
	known := false
	for _, v := range f.views() {
		s := v.status()
		if v.name != p.Node || s == nil {
			continue
		}
		known = true
		for i := range s.GPUs {
			g := &s.GPUs[i]
			holds := slices.Contains(has, g.UUID) || slices.ContainsFunc(g.Holders, func(h gpunode.Holder) bool {
				return h.Namespace == p.Namespace && h.Pod == p.Name
			})
			e := f.newest(string(status.GPUUnhealthy))
			named := e != nil && strings.Contains(e.Message, g.UUID)
			if (holds || named) && !gpunode.Is(g.Conditions, gpunode.Healthy) {
				out = append(out, unhealthy(v.name, g))
			}
		}
	}
	// The Event is all that an author without the role sees.
	if e := f.newest(string(status.GPUUnhealthy)); e != nil && len(out) == 0 && !known {
		out = append(out, find(UnhealthyGPU, "%s, on %s", e.Message, p.Node).on(p.Node))
	}
	return out
}

// container returns what a container waits for, or how it ended.
func (f *Facts) container(p *Pod, c *Container) (out []Finding) {
	switch c.Waiting {
	case "", "ContainerCreating", "PodInitializing":
	case "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull":
		return []Finding{find(ImagePull, "the image of container %s cannot be pulled: %s", c.Name,
			cmp.Or(c.WaitingMessage, c.Waiting))}
	case "CrashLoopBackOff":
	default:
		return []Finding{f.waits(p, c, c.WaitingMessage)}
	}
	if c.Waiting == "ContainerCreating" || c.Waiting == "PodInitializing" {
		// The kubelet tries for a while before it says so in the status.
		for _, reason := range []string{"Failed", "FailedCreatePodSandBox"} {
			if e := f.newest(reason); e != nil && ours(e.Message) {
				return []Finding{f.waits(p, c, e.Message)}
			}
		}
		return nil
	}
	if c.Ended == nil || c.Running && c.Restarts == 0 || c.Ended.Exit == 0 && c.Ended.Reason == "Completed" {
		return nil
	}
	return f.crashed(p, c)
}

// ours reports whether a message of the kubelet or the runtime is about devices.
func ours(message string) bool {
	return strings.Contains(message, "device plugin") || strings.Contains(message, "CDI device")
}

// waits returns what a container waits for by a message of the kubelet.
func (f *Facts) waits(p *Pod, c *Container, message string) Finding {
	said := agentSays(strings.TrimPrefix(message, "Error: "))
	code := NotReady
	switch {
	case strings.Contains(said, "previous holder still ending"), strings.Contains(said, "waits for the end of"),
		strings.Contains(said, "has given its devices to another pod too"):
		code = HolderEnding
	case strings.Contains(said, "is not in MIG mode"), strings.Contains(said, "changes its MIG mode"),
		strings.Contains(said, "a reset or a reboot is due"):
		code = MIGOff
	case strings.Contains(said, "another program gives"):
		code = OtherOwner
	case strings.Contains(said, "executable file not found"), strings.Contains(said, "no such file or directory") &&
		strings.Contains(said, "exec"):
		return lacks(c, said)
	case strings.Contains(said, "unresolvable CDI device"), strings.Contains(said, "code = Unavailable"),
		strings.Contains(said, "connection refused"):
		for _, v := range f.views() {
			if gone := f.agentGone(&v); gone != nil && v.name == p.Node {
				return *gone
			}
		}
	}
	if code == NotReady {
		if found := f.sick(p, f.asks(p)); found != nil && strings.Contains(said, "GPU-") {
			ends := func(r rune) bool { return strings.ContainsRune("() ,:;", r) }
			for _, word := range strings.FieldsFunc(said, ends) {
				if strings.HasPrefix(word, "GPU-") && strings.Contains(found.Cause, word) {
					return *found
				}
			}
		}
	}
	return find(code, "container %s waits: %s", c.Name, said).on(p.Node)
}

// there returns what is wrong on the node of a pod that has not begun.
func (f *Facts) there(p *Pod) (out []Finding) {
	for _, v := range f.views() {
		if v.name != p.Node {
			continue
		}
		if gone := f.agentGone(&v); gone != nil {
			out = append(out, *gone)
		}
		if v.node != nil && v.node.NotReady != "" {
			out = append(out, find(NodeNotReady, "the kubelet of %s is not ready: %s", v.name, v.node.NotReady).
				on(v.name))
		}
	}
	return out
}

// unplaced returns why the pod has no node.
func (f *Facts) unplaced(p *Pod, asks []ask) (out []Finding) {
	if len(p.Gates) > 0 {
		if f.Workload != nil {
			return f.queued(f.Workload)
		}
		if slices.Contains(p.Gates, "kueue.x-k8s.io/admission") {
			return []Finding{find(Queued, "Kueue holds the pod by its scheduling gate, and its Workload was not seen")}
		}
		return []Finding{find(Gated, "the pod's scheduling gates hold it: %s", strings.Join(p.Gates, ", "))}
	}
	for _, a := range asks {
		out = append(out, f.place(p, a)...)
	}
	// What fits by itself is not the cause if something else does not.
	slices.SortStableFunc(out, func(a, b Finding) int {
		return cmp.Compare(btoi(a.Code == Unplaced), btoi(b.Code == Unplaced))
	})
	if len(out) == 0 && p.Unscheduled != "" {
		out = append(out, find(Unplaced, "the scheduler finds no node for it: %s", p.Unscheduled))
	}
	return out
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// walk returns what was looked at for a pod or a Job.
func (f *Facts) walk() (out []Step) {
	add := func(what string, says []string) {
		if len(says) > 0 {
			out = append(out, Step{what, says})
		}
	}
	if j := f.Job; j != nil {
		state := fmt.Sprintf("%d pods live, %d have failed", j.Active, j.Lost)
		if j.Suspended {
			state += "; it is suspended"
		}
		if j.Queue != "" {
			state += "; queue " + j.Queue
		}
		add("job", []string{state})
	}
	if w := f.Workload; w != nil {
		var says []string
		for _, c := range w.Conditions {
			says = append(says, fmt.Sprintf("%s is %t (%s) %s", c.Type, c.True, c.Reason, c.Message))
		}
		for _, c := range w.Checks {
			says = append(says, fmt.Sprintf("check %s is %s: %s", c.Name, c.State, c.Message))
		}
		add("workload "+w.Name, says)
	}
	p := f.Pod
	if p == nil {
		return out
	}
	state := []string{cmp.Or(p.Phase, "no phase")}
	if p.Node != "" {
		state[0] += " on " + p.Node
	}
	if p.Reason+p.Message != "" {
		state = append(state, strings.TrimSpace(p.Reason+" "+p.Message))
	}
	if p.Unscheduled != "" {
		state = append(state, "scheduler: "+p.Unscheduled)
	}
	add("pod "+p.Namespace+"/"+p.Name, state)
	var requests []string
	for i := range p.Containers {
		c := &p.Containers[i]
		for _, name := range slices.Sorted(maps.Keys(c.Requests)) {
			if f.ofGPUs(name) {
				requests = append(requests, fmt.Sprintf("%s: %d of %s", c.Name, c.Requests[name], name))
			}
		}
	}
	add("requests", requests)
	add("caps", f.caps(p))
	for i := range p.Containers {
		c := &p.Containers[i]
		var says []string
		switch {
		case c.Waiting != "":
			says = append(says, strings.TrimSpace("waits: "+c.Waiting+" "+c.WaitingMessage))
		case c.Running:
			says = append(says, "runs")
		}
		if c.Ended != nil {
			line := fmt.Sprintf("ended with %d: %s %s", c.Ended.Exit, c.Ended.Reason, c.Ended.Message)
			says = append(says, strings.TrimSpace(line))
		}
		if len(c.Devices) > 0 {
			gpus := strings.Join(gpusOf(c.Devices), ", ")
			says = append(says, fmt.Sprintf("has %d devices, of %s", len(c.Devices), gpus))
		}
		add("container "+c.Name, says)
	}
	if p.Node == "" {
		for _, v := range f.views() {
			var says []string
			for _, a := range f.asks(p) {
				says = append(says, f.judge(&v, a).Cause)
			}
			add(v.name, says)
		}
	} else {
		for _, found := range f.Troubles(p.Node) {
			add(p.Node, []string{found.Cause})
		}
	}
	add("Events", f.events())
	return out
}

// caps returns which memory the containers may use, and what holds them to it.
func (f *Facts) caps(p *Pod) (out []string) {
	for _, v := range f.views() {
		s := v.status()
		if v.name != p.Node || s == nil || p.Node == "" {
			continue
		}
		for i := range p.Containers {
			c := &p.Containers[i]
			for j := range s.GPUs {
				g := &s.GPUs[j]
				n := c.Requests[g.Resource]
				if g.Spot != nil && g.Spot.Resource != "" {
					n += c.Requests[g.Spot.Resource]
				}
				has := len(c.Devices) == 0 || slices.Contains(gpusOf(c.Devices), g.UUID)
				if n <= 0 || n > int64(g.Total) || !has || !g.Kind.Counted().Together() || s.MemoryUnitMiB == 0 {
					continue
				}
				out = append(out, fmt.Sprintf("%s: %d MiB (%d units of %d), held by %s", c.Name,
					n*int64(s.MemoryUnitMiB), n, s.MemoryUnitMiB, cmp.Or(g.Guarantee, "nothing")))
				break // each GPU of the node has the same unit
			}
		}
	}
	return out
}

// gpusOf returns the GPUs of devices, each once.
func gpusOf(devices []string) []string {
	var out []string
	for _, id := range devices {
		gpu, _, _ := strings.Cut(id, "::")
		out = append(out, gpu)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
