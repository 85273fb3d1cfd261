// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/lab"
)

const (
	miB = 1 << 20
	giB = 1 << 30
	// chunk is what tests fill a cap with: what is left of it afterwards is less.
	chunk = 16 * miB
	// late is what is held back for code that the probe's context may yet load, and never does.
	late = lib.DefaultCode
	// estimate is what a context counts until the agent has seen one: without its
	// figures this much less can be allocated.
	estimate = lib.DefaultContext + late
)

// oneOfEach has units on GPU 0, so that those who ask for some are neighbours,
// replicas on 1 and 2, and whole GPUs for five pods at a time.
const oneOfEach = `version: v1
partitions:
  default:
    - devices: [0]
      mode: shared
    - devices: [1, 2]
      mode: shared
      replicas: 2
    - devices: [3, 4, 5, 6, 7]
      mode: whole
`

var oneOfEachOffers = map[string]int{lab.Memory: units, lab.Replicas: 4, lab.GPU: 5}

// container has the probe.
func (b *bench) container(name string, resources map[string]int) lab.Container {
	b.Helper()
	mount, err := lab.ProbeMount(b.ctx)
	b.must(err)
	return lab.Container{Name: name, Resources: resources, Mounts: []lab.Mount{mount}}
}

// tenant runs a pod of one container that has units of GPU memory and the probe.
func (b *bench) tenant(name string, memory int) *lab.RunningPod {
	b.Helper()
	pod := b.create(lab.Pod{Name: name, Containers: []lab.Container{b.container("main", map[string]int{lab.Memory: memory})}})
	b.must(pod.Running(b.ctx))
	return pod
}

// probe starts the probe in a container.
func (b *bench) probe(pod *lab.RunningPod, container string, env []string, args ...string) *lab.Probe {
	b.Helper()
	k, err := pod.Probe(b.ctx, container, env, args...)
	b.must(err)
	b.Cleanup(func() { _ = k.Close() }) // by then its container may have been ended
	return k
}

func (b *bench) ask(k *lab.Probe, format string, args ...any) lab.Answer {
	b.Helper()
	a, err := k.Ask(format, args...)
	b.must(err)
	return a
}

// take is so many allocations of a size, all of which succeed.
func (b *bench) take(k *lab.Probe, size uint64, count int) {
	b.Helper()
	if a := b.ask(k, "take cuMemAlloc_v2 %d %d", size, count); a.Result() != lab.Success {
		b.Fatalf("of %d allocations of %d MiB: %s", count, size/miB, a)
	}
}

// fill takes pieces until CUDA says out of memory, and returns how many it got.
func (b *bench) fill(k *lab.Probe, size uint64) (pieces uint64) {
	b.Helper()
	a := b.ask(k, "take cuMemAlloc_v2 %d 100000", size)
	if a.Result() != lab.OutOfMemory {
		b.Fatalf("allocations of %d MiB without end: %s, want to be refused by %s, CUDA_ERROR_OUT_OF_MEMORY", size/miB, a, lab.OutOfMemory)
	}
	return a.Bytes("count")
}

// used is what a container has on a GPU, by the driver's word.
func (b *bench) used(pod *lab.RunningPod, container string, index int) uint64 {
	b.Helper()
	all, err := pod.Processes(b.ctx, container, "")
	b.must(err)
	if len(all) == 0 {
		b.Fatalf("container %s of %s has no process", container, pod)
	}
	used, err := driver.Used(b.ctx, index, all...)
	b.must(err)
	return used
}

// full checks that a container that was refused has its cap, and no byte more, but
// for less than one piece, and what is held back for one process. The library waits for the
// agent's look before it refuses, but not for ever: on a machine that is too busy it refuses by its
// estimates, so with some left the probe, if there is one, asks again.
func (b *bench) full(k *lab.Probe, pod *lab.RunningPod, container string, index int, limit, size uint64) {
	b.Helper()
	used := b.used(pod, container, index)
	for again := 0; k != nil && used+size+late <= limit && again < 5; again++ {
		b.Logf("%s %s was refused with %d MiB left", pod, container, (limit-late-used)/miB)
		b.fill(k, size)
		used = b.used(pod, container, index)
	}
	b.Logf("%s %s has %.1f MiB of %.1f on GPU %d", pod, container, float64(used)/miB, float64(limit)/miB, index)
	if used > limit || used+size+late <= limit {
		b.Errorf("%s %s was refused with %d bytes of GPU %d in use, want more than %d and at most %d", pod, container, used, index, limit-late-size, limit)
	}
}

// memory waits until the agent's status has a container's memory on a GPU as
// check wants it, and returns it.
func (b *bench) memory(pod *lab.RunningPod, container string, index int, what string, check func(lab.ContainerStatus) error) (found lab.ContainerStatus) {
	b.Helper()
	b.must(agent.AwaitStatus(b.ctx, waitLong, fmt.Sprintf("%s of %s: %s", container, pod, what), func(s lab.Status) error {
		for _, c := range s.Containers {
			if c.Pod == pod.Name && c.Container == container && c.Index == index {
				found = c
				if err := check(c); err != nil {
					return fmt.Errorf("%w: %s", err, c)
				}
				return nil
			}
		}
		return fmt.Errorf("it does not list it: %v", s.Containers)
	}))
	return found
}

// A container that was granted 4 GiB gets 4 GiB: allocations beyond fail the way
// CUDA says, its tools see 4 GiB, and so do people, by the agent.
func TestCaps(t *testing.T) {
	b := begin(t, oneOfEach, oneOfEachOffers)

	b.sub("until it is refused", func(b *bench) {
		const limit = 4 * giB
		pod := b.tenant("four", 4)
		b.views(pod, "main", nil, map[string]uint64{driver.GPUs[0].UUID: limit})
		out, err := pod.Exec(b.ctx, "", "nvidia-smi")
		b.must(err)
		if !strings.Contains(string(out), "4096MiB") || strings.Contains(string(out), fmt.Sprintf("%dMiB", driver.GPUs[0].MemoryMiB)) {
			b.Errorf("nvidia-smi inside says, want 4096MiB:\n%s", out)
		}

		k := b.probe(pod, "", nil)
		got := b.fill(k, chunk)
		b.full(k, pod, "main", 0, limit, chunk)
		b.Logf("%d MiB could be allocated", got*chunk/miB)
		if a := b.ask(k, "info"); a.Result() != lab.Success || a.Bytes("total") != limit || a.Bytes("device-total") != limit || a.Bytes("free") >= chunk {
			b.Errorf("when it is full cuMemGetInfo says %s, want a total of %d and less free than %d", a, uint64(limit), chunk)
		}
		for id := range 10 {
			if a := b.ask(k, "give %d", id); a.Result() != lab.Success {
				b.Errorf("freed: %s", a)
			}
		}
		if a := b.ask(k, "info"); a.Bytes("free") < 10*chunk || a.Bytes("free") >= 11*chunk {
			b.Errorf("with ten pieces freed: %s, want %d free", a, 10*chunk)
		}
		if again := b.fill(k, chunk); again == 0 || again > 10 {
			b.Errorf("with ten pieces freed, %d could be taken, want 10", again)
		}
		b.full(k, pod, "main", 0, limit, chunk)

		m := b.memory(pod, "main", 0, "that it is full", func(c lab.ContainerStatus) error {
			if c.CapMiB == nil || c.UsedMiB == nil || *c.CapMiB != limit/miB || *c.UsedMiB <= (limit-late-chunk)/miB || *c.UsedMiB > limit/miB ||
				c.PeakMiB != *c.UsedMiB || c.Guarantee != "api" || c.Refusals < 2 || c.Processes != 1 {
				return errors.New("want a full cap of 4 GiB, held by the api, 2 refusals, 1 process")
			}
			return nil
		})
		metrics, err := agent.Metrics(b.ctx)
		b.must(err)
		labels := fmt.Sprintf(`container="main",gpu=%q,namespace=%q,pod=%q`, driver.GPUs[0].UUID, lab.PodNamespace, pod.Name)
		guarantee := fmt.Sprintf(`container="main",gpu=%q,guarantee="api",namespace=%q,pod=%q`, driver.GPUs[0].UUID, lab.PodNamespace, pod.Name)
		used, peak := metrics[`gpu_agent_container_memory_used_bytes{`+labels+`}`], metrics[`gpu_agent_container_memory_peak_bytes{`+labels+`}`]
		if metrics[`gpu_agent_container_memory_cap_bytes{`+guarantee+`}`] != limit || used <= limit-late-chunk || used > limit || peak != used ||
			metrics[`gpu_agent_container_memory_refusals_total{`+labels+`}`] != float64(m.Refusals) || metrics["gpu_agent_watchdog_up"] != 1 {
			b.Errorf("the metrics do not say what the status does, %s: %v", m, ours(metrics))
		}
		screen, err := agent.Command(b.ctx, "status")
		b.must(err)
		b.Logf("gpu-agent status:\n%s", screen)
	})

	b.rest("replicas of two GPUs", func(b *bench) {
		const size = giB
		pod := b.create(lab.Pod{Name: "replicas", Containers: []lab.Container{b.container("main", map[string]int{lab.Replicas: 2})}})
		b.must(pod.Running(b.ctx))
		limits := map[string]uint64{}
		for _, g := range driver.GPUs[1:3] {
			limits[g.UUID] = uint64((g.MemoryMiB-g.ReservedMiB)/2) * miB
		}
		b.views(pod, "main", nil, limits)
		probes := map[string]*lab.Probe{}
		for _, g := range driver.GPUs[1:3] {
			probes[g.UUID] = b.probe(pod, "", []string{"CUDA_VISIBLE_DEVICES=" + g.UUID})
			b.fill(probes[g.UUID], size)
		}
		for _, g := range driver.GPUs[1:3] {
			b.full(probes[g.UUID], pod, "main", g.Index, limits[g.UUID], size)
		}
	})

	b.must(node.DeletePods(b.ctx))
	b.rest("beside a neighbour's modules", besideModules)
	b.must(node.DeletePods(b.ctx))
	b.sub("a whole GPU and a share", wholeAndShare)
	b.must(node.DeletePods(b.ctx))
	b.sub("images and volumes stay as they are", imagesStay)
	b.must(node.DeletePods(b.ctx))
	b.sub("from zero", fromZero)
}

// imagesStay: driver libraries that an image or a volume brings are hidden from a container with
// a cap, wherever they are, and from no other. Where there are none, nothing is made: neither a
// directory in a volume or an image, nor a container that does not start.
func imagesStay(b *bench) {
	const dir = "/var/lib/toolkits"
	_, err := node.Exec(b.ctx, "sh", "-c", "cd "+dir+" 2>/dev/null || mkdir -p "+dir+" && cd "+dir+" && mkdir -p read write bring/compat bring-12/compat && : >bring/compat/libcuda.so.1 && : >bring-12/compat/libcuda.so.1")
	b.must(err)
	pods := map[string]*lab.RunningPod{}
	for name, c := range map[string]struct {
		mount     lab.Mount
		resources map[string]int
	}{
		"nothing":   {resources: map[string]int{lab.Memory: 1}},
		"read-only": {lab.Mount{Host: dir + "/read", Path: "/usr/local/cuda", ReadOnly: true}, map[string]int{lab.Memory: 1}},
		"writable":  {lab.Mount{Host: dir + "/write", Path: "/usr/local/cuda"}, map[string]int{lab.Memory: 1}},
		"bring":     {lab.Mount{Host: dir + "/bring", Path: "/usr/local/cuda", ReadOnly: true}, map[string]int{lab.Memory: 1}},
		"version":   {lab.Mount{Host: dir + "/bring-12", Path: "/usr/local/cuda-12.4"}, map[string]int{lab.Memory: 1, lab.Replicas: 1}},
		"whole":     {lab.Mount{Host: dir + "/bring", Path: "/usr/local/cuda"}, map[string]int{lab.GPU: 1}},
	} {
		main := lab.Container{Resources: c.resources}
		if c.mount.Host != "" {
			main.Mounts = []lab.Mount{c.mount}
		}
		pods[name] = b.create(lab.Pod{Name: "image-" + name, Containers: []lab.Container{main}})
	}
	for name, want := range map[string]string{
		"nothing": "", "read-only": "/usr/local/cuda\n", "writable": "/usr/local/cuda\n",
		"bring": "/usr/local/cuda\n/usr/local/cuda/compat\n", "version": "/usr/local/cuda-12.4\n/usr/local/cuda-12.4/compat\n",
		"whole": "/usr/local/cuda\n/usr/local/cuda/compat\n/usr/local/cuda/compat/libcuda.so.1\n",
	} {
		b.must(pods[name].Running(b.ctx))
		if out, err := pods[name].Exec(b.ctx, "", "sh", "-c", "find /usr/local/cuda* 2>/dev/null | sort"); err != nil || string(out) != want {
			b.Errorf("%s has %q, %v, want %q", name, out, err, want)
		}
	}
	if out, err := node.Exec(b.ctx, "sh", "-c", "cd "+dir+" && find * | LC_ALL=C sort"); err != nil || string(out) != "bring\nbring-12\nbring-12/compat\nbring-12/compat/libcuda.so.1\nbring/compat\nbring/compat/libcuda.so.1\nread\nwrite\n" {
		b.Errorf("the volumes have %q, %v", out, err)
	}
}

// ours are the metrics about caps.
func ours(all map[string]float64) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for _, part := range []string{"container_memory", "_cap_", "watchdog", "unallocated"} {
			if strings.Contains(name, part) && !strings.Contains(name, "_bucket") {
				out = append(out, fmt.Sprintf("%s %g", name, all[name]))
				break
			}
		}
	}
	return out
}

// views checks what CUDA and NVML say in a container of the GPUs, by UUID: that
// they are there and no others, and the size of each. Where want is what no
// container can have, the whole card, NVML counts the driver's own part too.
func (b *bench) views(pod *lab.RunningPod, container string, env []string, want map[string]uint64) {
	b.Helper()
	k := b.probe(pod, container, env)
	cuda, err := k.List("cuda")
	b.must(err)
	nvml, err := k.List("nvml")
	b.must(err)
	if err := viewed(cuda, nvml, want); err != nil {
		b.Errorf("%s %s: %v", pod, container, err)
	}
}

func viewed(cuda, nvml []lab.Answer, want map[string]uint64) error {
	var errs []error
	seen := map[string]bool{}
	for _, a := range slices.Concat(cuda, nvml) {
		u := a.Values["uuid"]
		switch a.Verb {
		case "device":
			seen[u] = true
			if size := want[u]; a.Bytes("total") != size || a.Bytes("device-total") != size {
				errs = append(errs, fmt.Errorf("CUDA says %s, want totals of %d", a, size))
			}
		case "nvml-device":
			size := want[u]
			for _, g := range driver.GPUs {
				if g.UUID == u && size == uint64(g.MemoryMiB-g.ReservedMiB)*miB {
					size = uint64(g.MemoryMiB) * miB
				}
			}
			if a.Bytes("total") != size || a.Bytes("total2") != size {
				errs = append(errs, fmt.Errorf("NVML says %s, want totals of %d", a, size))
			}
		case "cuda", "nvml":
			if a.Result() != lab.Success || a.Bytes("count") != uint64(len(want)) {
				errs = append(errs, fmt.Errorf("%s, want %d GPUs", a, len(want)))
			}
		default:
			errs = append(errs, fmt.Errorf("the probe says %s", a))
		}
	}
	if len(seen) != len(want) {
		errs = append(errs, fmt.Errorf("CUDA has shown the GPUs %v, want those of %v", slices.Sorted(maps.Keys(seen)), want))
	}
	return errors.Join(errs...)
}

// What a tenant loads into its contexts is not expected of its neighbour's: a
// container of 1 GiB that starts beside one with 700 MiB of modules has room for
// its second process.
func besideModules(b *bench) {
	read := func(pod *lab.RunningPod, from, to int) {
		b.Helper()
		b.memory(pod, "main", 0, "that it was read", func(c lab.ContainerStatus) error {
			if c.UsedMiB == nil || *c.UsedMiB < from || *c.UsedMiB > to {
				return fmt.Errorf("want %d to %d MiB", from, to)
			}
			return nil
		})
	}
	heavy := b.tenant("modules", 2)
	k := b.probe(heavy, "main", nil)
	if a := b.ask(k, "take cuModuleLoadData %d 1", 700*miB); a.Result() != lab.Success {
		b.Fatalf("a module of 700 MiB: %s", a)
	}
	read(heavy, 1000, 2048)
	b.take(k, miB, 1) // what it has now has been read once more
	read(heavy, 1002, 2048)

	light := b.tenant("light", 1)
	b.take(b.probe(light, "main", nil), chunk, 1)
	read(light, 300, 400)
	b.take(b.probe(light, "main", nil), chunk, 1)
}

// A container that holds a whole GPU and a share of another has two allocations. The
// runtime applies them in an order that is chance, and so is whose file stands
// where both want one. So it must be right in each of 50 starts, ten in the short
// form: those of five pods at a time, whose init containers see what their app
// container sees. CUDA is told to count the GPUs in either order, by turns.
func wholeAndShare(b *bench) {
	const pods, limit = 5, 4 * giB
	starts := 10
	if testing.Short() {
		starts = 2
	}
	script := func(i int) string {
		order := "0,1"
		if i%2 == 1 {
			order = "1,0"
		}
		return `export CUDA_VISIBLE_DEVICES=` + order + `
printf 'cuda\nnvml\n' | ` + lab.ProbeProgram + ` && for i in 0 1; do
  printf 'take cuMemAlloc_v2 268435456 40\n' | ` + lab.ProbeProgram + ` -device $i
done && echo told
`
	}
	began := time.Now()
	var all []*lab.RunningPod
	for n := range pods {
		p := lab.Pod{Name: fmt.Sprintf("both-%d", n)}
		for i := range starts {
			c := b.container(fmt.Sprintf("start-%d", i), map[string]int{lab.GPU: 1, lab.Memory: limit / giB})
			c.Then = script(i)
			if i == starts-1 {
				c.Then += lab.Wait
				p.Containers = []lab.Container{c}
			} else {
				p.Init = append(p.Init, c)
			}
		}
		all = append(all, b.create(p))
	}
	right := 0
	for n, pod := range all {
		for i := range starts {
			name := fmt.Sprintf("start-%d", i)
			var log string
			b.must(lab.Await(b.ctx, 3*time.Minute, fmt.Sprintf("what %s of %s sees", name, pod), func(ctx context.Context) (err error) {
				if log, err = pod.Log(ctx, name); err != nil {
					return err
				}
				if !strings.HasSuffix(log, "told\n") {
					return fmt.Errorf("its log is %q", log)
				}
				return nil
			}))
			if err := bothRight(log, limit); err != nil {
				b.Errorf("start %d of pod %d: %v\n%s", i, n, err, log)
			} else {
				right++
			}
		}
	}
	b.Logf("%d starts of %d had the right cap on each GPU; they took %.0f s", right, pods*starts, time.Since(began).Seconds())
}

// bothRight checks what a container with a whole GPU and a share has printed.
func bothRight(log string, limit uint64) error {
	var cuda, nvml, took []lab.Answer
	for line := range strings.Lines(log) {
		switch a := lab.ParseAnswer(line); a.Verb {
		case "cuda", "device":
			if strings.Contains(line, "=") { // not a device node of those that containers list first
				cuda = append(cuda, a)
			}
		case "nvml", "nvml-device":
			nvml = append(nvml, a)
		case "took":
			took = append(took, a)
		}
	}
	want := map[string]uint64{driver.GPUs[0].UUID: limit}
	var share []bool // by CUDA's ordinal
	for _, a := range cuda {
		u := a.Values["uuid"]
		if u == "" {
			continue
		}
		share = append(share, u == driver.GPUs[0].UUID)
		for _, g := range driver.GPUs[3:] {
			if g.UUID == u {
				want[u] = uint64(g.MemoryMiB-g.ReservedMiB) * miB
			}
		}
	}
	errs := []error{viewed(cuda, nvml, want)}
	if len(took) != 2 || len(share) != 2 || share[0] == share[1] {
		return errors.Join(append(errs, errors.New("want a whole GPU and a share, and allocations on both"))...)
	}
	for i, a := range took {
		// 10 GiB are more than the share has, and less than the card.
		switch got := a.Bytes("count") * 256 * miB; {
		case share[i] && (a.Result() != lab.OutOfMemory || got > limit || got+estimate+256*miB < limit):
			errs = append(errs, fmt.Errorf("on the share: %s, want up to %d to be given", a, limit))
		case !share[i] && a.Result() != lab.Success:
			errs = append(errs, fmt.Errorf("on the whole GPU: %s, want that nothing is refused", a))
		}
	}
	return errors.Join(errs...)
}

// Every container starts from zero: what was not freed by one that has ended,
// however it ended, does not count for the next. The counters of processes that
// were killed do not, either.
func fromZero(b *bench) {
	const limit = 4 * giB
	const holds = "mkfifo /in\nsleep 1000000 >/in &\n" + lab.ProbeProgram + " </in >/out &\n" +
		"printf 'take cuMemAlloc_v2 16777216 100000\\n' >/in\nuntil grep -q took /out; do sleep 0.1; done\ncat /out\n"
	init, app := b.container("init", map[string]int{lab.Memory: 4}), b.container("main", map[string]int{lab.Memory: 4})
	init.Then = holds // it ends, and its probe is killed with all that it has
	app.Then = holds + lab.Wait
	pod := b.create(lab.Pod{Name: "zero", Init: []lab.Container{init}, Containers: []lab.Container{app}})
	b.must(pod.Running(b.ctx))
	granted := func(container string) uint64 {
		b.Helper()
		var a lab.Answer
		b.must(lab.Await(b.ctx, time.Minute, "the probe in "+container, func(ctx context.Context) error {
			log, err := pod.Log(ctx, container)
			if err != nil {
				return err
			}
			at := strings.LastIndex(log, "took ")
			if at < 0 {
				return fmt.Errorf("its log is %q", log)
			}
			a = lab.ParseAnswer(log[at:])
			return nil
		}))
		if got := a.Bytes("count") * chunk; a.Result() != lab.OutOfMemory || got+estimate+chunk < limit || got > limit {
			b.Errorf("%s of %s: %s, want some 4 GiB and then a refusal", container, pod, a)
		}
		return a.Bytes("count") * chunk / miB
	}
	b.Logf("the init container got %d MiB", granted("init"))
	b.Logf("the app container got %d MiB", granted("main"))
	b.must(pod.RestartContainer(b.ctx, ""))
	b.Logf("the app container that was started again got %d MiB", granted("main"))

	killed, err := pod.Processes(b.ctx, "", lab.ProbeProgram)
	b.must(err)
	if len(killed) != 1 {
		b.Fatalf("the container has the probes %v, want one", killed)
	}
	b.must(node.Signal(b.ctx, killed[0], "KILL"))
	_, _, err = node.End(b.ctx, time.Minute, killed[0])
	b.must(err)
	k := b.probe(pod, "", nil)
	b.Logf("after a kill -9 in the container another process got %d MiB", b.fill(k, chunk)*chunk/miB)
	b.full(k, pod, "main", 0, limit, chunk)
}
