// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/hardware/ask"
)

// noMPS is why the emulated driver has no answers to these.
const noMPS = "its MPS has no shared memory, no kernels and no partitions"

// mpsEnabled is CU_DEVICE_ATTRIBUTE_MPS_ENABLED.
const mpsEnabled = 133

// mpsDaemon is a control daemon of MPS in directories of its own. It sets nothing on the card,
// and ends with the question.
type mpsDaemon struct {
	k       *kit
	room    *ask.Room
	program string
	dirs    []string // of the environment
	process *os.Process
}

// mps starts one. It stays our child, so that it goes with us.
func (k *kit) mps(ctx context.Context, room *ask.Room, c *card, flags ...string) (*mpsDaemon, error) {
	const control = "nvidia-cuda-mps-control"
	program := filepath.Join(k.root, "usr/bin", control)
	if !exists(program) {
		var err error
		if program, err = exec.LookPath(control); err != nil {
			return nil, fmt.Errorf("this machine has no %s", control)
		}
	}
	pipes, logs := filepath.Join(room.Dir, "pipes"), filepath.Join(room.Dir, "logs")
	if err := errors.Join(os.Mkdir(pipes, 0o755), os.Mkdir(logs, 0o755)); err != nil {
		return nil, err
	}
	d := &mpsDaemon{k: k, room: room, program: program, dirs: []string{"CUDA_MPS_PIPE_DIRECTORY=" + pipes, "CUDA_MPS_LOG_DIRECTORY=" + logs}}
	cmd := exec.CommandContext(ctx, program, append([]string{"-f"}, flags...)...)
	cmd.Env = append(append(os.Environ(), d.dirs...), "CUDA_VISIBLE_DEVICES="+c.uuid)
	said := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = said, said
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the daemon of MPS: %w", err)
	}
	d.process = cmd.Process
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for !exists(filepath.Join(pipes, "control")) {
		select {
		case err := <-ended:
			return nil, fmt.Errorf("the daemon of MPS ends with %v: %s", err, strings.TrimSpace(said.String()))
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	room.Note(strings.Join(append([]string{control, "-f"}, flags...), " "), 0, nil)
	return d, nil
}

// tell gives the daemon a command. It always exits with 0: what it says is all there is.
func (d *mpsDaemon) tell(ctx context.Context, command string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.program)
	cmd.Env = append(os.Environ(), d.dirs...)
	cmd.Stdin = strings.NewReader(command + "\n")
	out, err := cmd.CombinedOutput()
	said := strings.TrimSpace(string(out))
	code := 0
	if err != nil {
		code = -1
	}
	d.room.Note("mps: "+command, code, said)
	if err != nil {
		return "", fmt.Errorf("tell the daemon of MPS to %s: %w: %s", command, err, said)
	}
	return said, nil
}

// ofPercent is in the environment of a client that has so many per cent of the multiprocessors.
func ofPercent(n int) string { return fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", n) }

// client starts a program that has the card's primary context by MPS.
func (d *mpsDaemon) client(ctx context.Context, name string, c *card, env ...string) (*talker, error) {
	t, err := d.k.talk(ctx, d.room, name, c, append(env, d.dirs...)...)
	if err != nil {
		return nil, err
	}
	if _, err = t.do("context"); err == nil {
		err = d.serves(ctx, t)
	}
	if err != nil {
		t.end()
		return nil, err
	}
	return t, nil
}

// serves is nil where a program is a client. MPS fails open: who does not reach the daemon runs
// without it, and says nothing.
func (d *mpsDaemon) serves(ctx context.Context, t *talker) error {
	servers, err := d.tell(ctx, "get_server_list")
	if err != nil {
		return err
	}
	for _, server := range strings.Fields(servers) {
		clients, err := d.tell(ctx, "get_client_list "+server)
		if err != nil {
			return err
		}
		if slices.Contains(strings.Fields(clients), strconv.Itoa(t.pid)) {
			return nil
		}
	}
	return fmt.Errorf("%s runs without MPS: the servers %q do not have it", t.name, servers)
}

// withMPS has a question asked beside a daemon.
func (k *kit) withMPS(f func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error), flags ...string) func(context.Context, *ask.Room) ask.Answer {
	return k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
		d, err := k.mps(ctx, room, c, flags...)
		if err != nil {
			return ask.Answer{}, err
		}
		defer d.quit(ctx)
		return f(ctx, d, c)
	})
}

// quit ends the daemon, as far as it lets itself be told. What it leaves is ended behind it.
func (d *mpsDaemon) quit(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
	defer cancel()
	_, _ = d.tell(ctx, "quit -t 5")
}

// withoutMPS is in the environment of a program that is to have none, whatever the machine
// runs.
func withoutMPS(room *ask.Room) string {
	return "CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(room.Dir, "none")
}

// parallel are about MPS where nothing goes wrong.
func (k *kit) parallel() []ask.Question {
	list := []ask.Question{
		{
			Name: "mps-starts", Asks: "Does MPS start as root, in directories of its own, with no setting of the card?", Limit: 40 * time.Second,
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				began := time.Now()
				t, err := d.client(ctx, "client", c)
				if err != nil {
					return ask.Tell(false, "a client of it: %v", err), nil
				}
				defer t.end()
				took := time.Since(began)
				if _, err := t.do("run"); err != nil {
					return ask.Tell(false, "a client of it: %v", err), nil
				}
				return ask.Tell(true, "the first client had its context after %.1f s", took.Seconds()), nil
			}),
		},
		{
			Name: "mps-enabled", Asks: "Does MPS_ENABLED tell a program truly whether its contexts are MPS's?", Limit: 40 * time.Second,
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				var says [2]float64
				for i, env := range [][]string{d.dirs, {withoutMPS(d.room)}} {
					t, err := d.k.talk(ctx, d.room, "program", c, env...)
					if err != nil {
						return ask.Answer{}, err
					}
					r, err := t.all("context", fmt.Sprintf("attribute %d", mpsEnabled))
					t.end()
					if err != nil {
						return ask.Answer{}, err
					}
					says[i] = r.number(0)
				}
				return ask.Tell(says == [2]float64{1, 0}, "%.0f with a daemon, %.0f without one", says[0], says[1]), nil
			}),
		},
		{
			Name: "mps-listed", Asks: "Does NVML list a client of MPS among the compute processes, by its own PID and with its memory?", Limit: 40 * time.Second,
			Code: []string{"internal/guard"},
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				t, err := d.client(ctx, "client", c)
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				if _, err := t.do("take 256"); err != nil {
					return ask.Answer{}, err
				}
				has, err := t.has(ctx, c)
				if err != nil {
					return ask.Answer{}, err
				}
				mps, ret := c.GetMPSComputeRunningProcesses()
				d.room.Note("nvmlDeviceGetMPSComputeRunningProcesses_v3", int(ret), mps)
				return ask.Tell(has >= 256, "it has 256 MiB and NVML says %.0f of its PID; the list of MPS clients: %s, %d of them", has, nvml.ErrorString(ret), len(mps)), nil
			}),
		},
		{
			Name: "mps-idle-server", Asks: "How much of the card's memory does a server of MPS keep when no client is left?", Limit: 40 * time.Second, Within: 0.25,
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				had := func() (float64, error) { return used(d.room, c) }
				before, err := settled(ctx, had)
				if err != nil {
					return ask.Answer{}, err
				}
				t, err := d.client(ctx, "client", c)
				if err != nil {
					return ask.Answer{}, err
				}
				_, err = t.do("run")
				t.end()
				if err != nil {
					return ask.Answer{}, err
				}
				after, err := settled(ctx, had)
				if err != nil {
					return ask.Answer{}, err
				}
				return ask.Count(after-before, "MiB", "by what the card has used"), nil
			}),
		},
		{
			Name: "mps-without-shm", Asks: "Does a client of MPS run without /dev/shm?", Limit: 40 * time.Second, NotEmulated: noMPS,
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				t, err := d.k.talkBehind(ctx, d.room, []string{filepath.Join(d.k.dir, "run"), withoutShm}, "client", c, d.dirs...)
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				if _, err := t.all("context", "run"); err != nil {
					return ask.Tell(false, "%v", err), nil
				}
				if err := d.serves(ctx, t); err != nil {
					return ask.Tell(false, "%v", err), nil
				}
				return ask.Tell(true, "it ran as a client"), nil
			}),
		},
	}
	list = append(list, k.shares()...)
	for _, percent := range []int{25, 50, 100} {
		list = append(list, ask.Question{
			Name: fmt.Sprintf("mps-sms-%d", percent), Asks: fmt.Sprintf("On how many multiprocessors do the blocks of a client of %d %% run?", percent),
			Limit: 30 * time.Second, NotEmulated: noMPS, Within: -1,
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				t, err := d.client(ctx, "client", c, ofPercent(percent))
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				all, err := t.do("attribute 16")
				if err != nil {
					return ask.Answer{}, err
				}
				r, err := t.do("sms")
				if err != nil {
					return ask.Answer{}, err
				}
				return ask.Count(r.number(0), "multiprocessors", "by what 4,096 blocks said; the attribute says %.0f", all.number(0)), nil
			}),
		})
	}
	for _, way := range []struct {
		name, asks string
		percent    int // 0: without MPS
	}{
		{"two-by-slices", "How much do two programs get done side by side by time slices, of what one does alone?", 0},
		{"two-by-halves", "How much do two programs get done side by side in halves of MPS, of what one does alone?", 50},
		{"two-at-once", "How much do two programs get done side by side in MPS without ceilings, of what one does alone?", 100},
	} {
		q := ask.Question{Name: way.name, Asks: way.asks, Limit: 60 * time.Second, Least: 15 * time.Second, NotEmulated: "its kernels take the time that their names say", Within: 0.2}
		if way.percent == 0 {
			q.Ask = k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
				return k.sideBySide(ctx, room, c, k.apart(ctx, room, c))
			})
		} else {
			q.Ask = k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				return k.sideBySide(ctx, d.room, c, func(name string) (*talker, error) { return d.client(ctx, name, c, ofPercent(way.percent)) })
			})
		}
		list = append(list, q)
	}
	list = append(list, ask.Question{
		Name: "utilisation", Asks: "Does NVML tell which of two programs keeps the card busy?", Limit: 40 * time.Second, NotEmulated: "its programs keep nothing busy", Code: []string{"pkg/gpu/nvml/utilization.go", "internal/usage"},
		Ask: k.on(k.utilisation),
	})
	return append(list, ask.Question{
		Name: "two-by-partitions", Asks: "How much do two programs get done side by side in partitions of MPS, of what one does alone?", Limit: 60 * time.Second, Least: 15 * time.Second, NotEmulated: noMPS, Within: 0.2,
		Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
			parts, err := d.halves(ctx, c)
			if err != nil {
				return ask.Answer{}, err
			}
			if _, err := d.tell(ctx, "lspart"); err != nil {
				return ask.Answer{}, err
			}
			next := 0
			return k.sideBySide(ctx, d.room, c, func(name string) (*talker, error) {
				part := parts[next]
				next++
				return d.client(ctx, name, c, "CUDA_MPS_SM_PARTITION="+part)
			})
		}, "-S"),
	})
}

// utilisation has one of two programs work, and asks NVML for both.
func (k *kit) utilisation(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
	var two [2]*talker
	for i, name := range []string{"busy", "idle"} {
		t, err := k.apart(ctx, room, c)(name)
		if err != nil {
			return ask.Answer{}, err
		}
		defer t.end()
		if _, err := t.do("work 300"); err != nil {
			return ask.Answer{}, err
		}
		two[i] = t
	}
	const work = "work 4000"
	// What the start of both was goes out of the samples first.
	select {
	case <-ctx.Done():
		return ask.Answer{}, ctx.Err()
	case <-time.After(2 * time.Second):
	}
	since := uint64(time.Now().UnixMicro())
	if err := two[0].begin(work); err != nil {
		return ask.Answer{}, err
	}
	most := map[int]uint32{}
	supported := false
	for range 15 {
		time.Sleep(250 * time.Millisecond)
		list, ret := c.GetProcessUtilization(since)
		room.Note("nvmlDeviceGetProcessUtilization", int(ret), list)
		supported = supported || ret == nvml.SUCCESS
		for _, s := range list {
			most[int(s.Pid)] = max(most[int(s.Pid)], s.SmUtil)
		}
		rates, ret := c.GetUtilizationRates()
		room.Note("nvmlDeviceGetUtilizationRates", int(ret), rates)
	}
	if _, err := two[0].hear(work); err != nil {
		return ask.Answer{}, err
	}
	if !supported {
		return ask.CouldNotTell("the driver has no nvmlDeviceGetProcessUtilization for this card"), nil
	}
	busy, idle := most[two[0].pid], most[two[1].pid]
	return ask.Tell(busy > 50 && idle < 10, "at most %d %% of the busy one, %d %% of the idle one", busy, idle), nil
}

// mostChunks is more than any card has: a chunk is some multiprocessors, 8 on most cards.
const mostChunks = 48

// halves makes two partitions, of half the chunks each, and returns their names.
func (d *mpsDaemon) halves(ctx context.Context, c *card) (parts [2]string, err error) {
	all := 0
	for n := mostChunks; n > 0 && all == 0; n-- {
		name, err := d.partition(ctx, c, n)
		if err != nil {
			return parts, err
		}
		if name == "" {
			continue
		}
		all = n
		if _, err := d.tell(ctx, "sm_partition rm "+name); err != nil {
			return parts, err
		}
	}
	for i := range parts {
		if parts[i], err = d.partition(ctx, c, max(all/2, 1)); err != nil {
			return parts, err
		}
		if parts[i] == "" {
			return parts, fmt.Errorf("of %d chunks MPS makes no partition %d of %d", all, i+1, max(all/2, 1))
		}
	}
	return parts, nil
}

// partition makes one and returns its name, "" where the daemon makes none.
func (d *mpsDaemon) partition(ctx context.Context, c *card, chunks int) (string, error) {
	said, err := d.tell(ctx, fmt.Sprintf("sm_partition add %s %d", c.uuid, chunks))
	if err != nil {
		return "", err
	}
	_, rest, _ := strings.Cut(said, "Partition ")
	name, _, created := strings.Cut(rest, " created")
	if !created {
		return "", nil
	}
	return name, nil
}

// starter starts a program that has the card's primary context.
type starter func(name string) (*talker, error)

// apart starts programs without MPS.
func (k *kit) apart(ctx context.Context, room *ask.Room, c *card) starter {
	return func(name string) (*talker, error) {
		t, err := k.talk(ctx, room, name, c, withoutMPS(room))
		if err != nil {
			return nil, err
		}
		if _, err := t.do("context"); err != nil {
			t.end()
			return nil, err
		}
		return t, nil
	}
}

// sideBySide has one program work alone, and then two.
func (k *kit) sideBySide(ctx context.Context, room *ask.Room, c *card, start starter) (ask.Answer, error) {
	const work = "work 3000"
	var two [2]*talker
	for i := range two {
		t, err := start(fmt.Sprintf("program %d", i+1))
		if err != nil {
			return ask.Answer{}, err
		}
		defer t.end()
		if _, err := t.do("work 300"); err != nil { // the first loads the code
			return ask.Answer{}, err
		}
		two[i] = t
	}
	// Alone is without a ceiling and without MPS.
	one, err := k.apart(ctx, room, c)("alone")
	if err != nil {
		return ask.Answer{}, err
	}
	alone, err := one.all("work 300", work)
	one.end()
	if err != nil {
		return ask.Answer{}, err
	}
	for _, t := range two {
		if err := t.begin(work); err != nil {
			return ask.Answer{}, err
		}
	}
	var r [2]result
	for i, t := range two {
		if r[i], err = t.hear(work); err != nil {
			return ask.Answer{}, err
		}
		if r[i].code != 0 {
			return ask.CouldNotTell("CUDA error %d in %v", r[i].code, r[i].words), nil
		}
	}
	if alone.number(0) == 0 {
		return ask.CouldNotTell("one alone did nothing"), nil
	}
	return ask.Count(100*(r[0].number(0)+r[1].number(0))/alone.number(0), "%",
		"alone %.0f kernels in 3 s, p50 %.0f us, p99 %.0f; two: %.0f (p50 %.0f, p99 %.0f) and %.0f (p50 %.0f, p99 %.0f)",
		alone.number(0), alone.number(1), alone.number(2), r[0].number(0), r[0].number(1), r[0].number(2), r[1].number(0), r[1].number(1), r[1].number(2)), nil
}

// --- faults ------------------------------------------------------------------

// harm is what one of two programs on a card meets.
type harm struct {
	name, what string
	do         func(ctx context.Context, d *mpsDaemon, victim *talker) error // d is nil without MPS
	mpsOnly    bool
}

var harms = []harm{
	{name: "terminated", what: "is terminated by MPS's terminate_client while it is busy", mpsOnly: true, do: func(ctx context.Context, d *mpsDaemon, victim *talker) error {
		servers, err := d.tell(ctx, "get_server_list")
		if err != nil {
			return err
		}
		_, err = d.tell(ctx, fmt.Sprintf("terminate_client %s %d", strings.TrimSpace(servers), victim.pid))
		return err
	}},
	{name: "killed", what: "is killed while it is busy", do: func(_ context.Context, _ *mpsDaemon, victim *talker) error {
		return victim.kill()
	}},
	{name: "illegal", what: "writes to an illegal address", do: func(_ context.Context, _ *mpsDaemon, victim *talker) error {
		_, err := victim.do("wait")
		if err == nil {
			_, err = victim.do("illegal")
		}
		if err == nil {
			return errors.New("the illegal write was no error")
		}
		return nil
	}},
	{name: "trap", what: "has a kernel that traps", do: func(_ context.Context, _ *mpsDaemon, victim *talker) error {
		_, err := victim.do("wait")
		if err == nil {
			_, err = victim.do("trap")
		}
		if err == nil {
			return errors.New("the trap was no error")
		}
		return nil
	}},
}

// faults are about what one program's end does to its neighbour, by time slices and in MPS.
func (k *kit) faults() (list []ask.Question) {
	for _, h := range harms {
		for _, mps := range []bool{false, true} {
			if h.mpsOnly && !mps {
				continue
			}
			q := ask.Question{Name: "slices-" + h.name, Asks: "By time slices, does a program live on whose neighbour " + h.what + "?", Limit: 40 * time.Second,
				NotEmulated: "its kernels do nothing but take time"}
			if mps {
				q.Name, q.Asks = "mps-"+h.name, "In MPS, does a program live on whose neighbour "+h.what+"?"
				q.Ask = k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
					start := func(name string) (*talker, error) { return d.client(ctx, name, c) }
					return k.neighbour(ctx, d.room, c, start, func(victim *talker) error { return h.do(ctx, d, victim) })
				})
			} else {
				q.Ask = k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
					return k.neighbour(ctx, room, c, k.apart(ctx, room, c), func(victim *talker) error { return h.do(ctx, nil, victim) })
				})
			}
			list = append(list, q)
		}
	}
	return list
}

// neighbour has two programs busy, does one of them harm, and says whether the other goes on.
func (k *kit) neighbour(ctx context.Context, room *ask.Room, c *card, start starter, do func(victim *talker) error) (ask.Answer, error) {
	var two [2]*talker
	for i, name := range []string{"victim", "neighbour"} {
		t, err := start(name)
		if err != nil {
			return ask.Answer{}, err
		}
		defer t.end()
		if _, err := t.all("take 64", "fill 7", "run"); err != nil {
			return ask.Answer{}, err
		}
		two[i] = t
	}
	events := k.xids(ctx, room, c)
	if _, err := two[1].do("spin 2000"); err != nil {
		return ask.Answer{}, err
	}
	if _, err := two[0].do("spin 1000"); err != nil {
		return ask.Answer{}, err
	}
	if err := do(two[0]); err != nil {
		return ask.Answer{}, err
	}
	var last error
	for range 3 {
		if _, err := two[1].all("wait", "run", "check 7"); err != nil {
			last = err
			break
		}
	}
	fresh := "a new program runs"
	t, err := start("next")
	if err == nil {
		defer t.end()
		_, err = t.do("run")
	}
	if err != nil {
		fresh = fmt.Sprintf("a new program does not: %v", err)
	}
	heard := events()
	if last != nil {
		return ask.Tell(false, "%v; %s; Xids %v", last, fresh, heard), nil
	}
	return ask.Tell(true, "it goes on, with its memory; %s; Xids %v", fresh, heard), nil
}

// xids listens for the card's errors until it is asked for them.
func (k *kit) xids(ctx context.Context, room *ask.Room, c *card) func() []uint64 {
	nothing := func() []uint64 { return nil }
	lib, done, err := k.open()
	if err != nil {
		return nothing
	}
	set, ret := lib.EventSetCreate()
	room.Note("nvmlEventSetCreate", int(ret), nil)
	if ret != nvml.SUCCESS {
		done()
		return nothing
	}
	if ret := c.RegisterEvents(nvml.EventTypeXidCriticalError, set); ret != nvml.SUCCESS {
		room.Note("nvmlDeviceRegisterEvents", int(ret), nil)
		set.Free()
		done()
		return nothing
	}
	return func() (all []uint64) {
		for ctx.Err() == nil {
			data, ret := set.Wait(500)
			room.Note("nvmlEventSetWait_v2", int(ret), map[string]any{"type": data.EventType, "data": data.EventData, "gi": data.GpuInstanceId, "ci": data.ComputeInstanceId})
			if ret != nvml.SUCCESS {
				break
			}
			all = append(all, data.EventData)
		}
		set.Free()
		done()
		return all
	}
}
