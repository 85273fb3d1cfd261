// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// mostWatching is what the watchdog may take of a processor, in percent.
const mostWatching = 1.0

// watching measures the watchdog: an agent that looks after containers with a
// GPU process each beside one that has the same allocations and does not look.
func (b *bench) watching(ctx context.Context) error {
	return all(ctx, usual, func(rs []*running) error {
		watch, off := rs[0], rs[1]
		if err := b.watchedFor(ctx, rs, "idle"); err != nil {
			return err
		}
		var users timers
		for i := range b.watched {
			user, close, err := b.inhabit(ctx, watch)
			if err != nil {
				return fmt.Errorf("container %d: %w", i, err)
			}
			defer close()
			users = append(users, user)
			if _, _, err := b.holding(ctx, off, watchedUnits); err != nil {
				return err
			}
		}
		if err := b.allSeen(ctx, "http://127.0.0.1"+watchHTTP+"/statusz"); err != nil {
			return watch.proc.explain(err)
		}
		what := fmt.Sprintf("processes=%d", b.watched)
		if err := b.watchedFor(ctx, rs, what, target{mostWatching, "1 % of a processor"}); err != nil {
			return err
		}
		const tenth, pause = 10, 50 * time.Millisecond
		for i := 0; i < len(users); i += tenth {
			// They are ended before they are done.
			if err := users[i].tell(fmt.Sprintf("pulse %d %d %d", 4<<20, 1_000_000, pause.Milliseconds())); err != nil {
				return err
			}
		}
		return b.watchedFor(ctx, rs, what+"/busy=10%")
	}, b.watch, b.unwatched)
}

// watchedFor measures for a window what the watchdog takes.
func (b *bench) watchedFor(ctx context.Context, rs []*running, what string, want ...target) error {
	// What a change leaves to be done does not count.
	if err := sleep(ctx, min(b.window, 3*time.Second)); err != nil {
		return err
	}
	spent, err := b.spent(ctx, rs)
	if err != nil {
		return err
	}
	percent := func(ms float64) float64 { return 100 * ms / 1000 / b.window.Seconds() }
	b.figure("watchdog_cpu/"+what, percent(spent[rs[0].name]-spent[rs[1].name]), "%", want...)
	for _, r := range rs {
		b.figure("watchdog_cpu/"+what+"/"+r.name, percent(spent[r.name]), "%")
		m, err := r.proc.memory()
		if err != nil {
			return err
		}
		b.figure("watchdog_resident/"+what+"/"+r.name, mb(m.resident), "MB")
	}
	return nil
}

// watchedUnits is what each of the watched containers holds: thirteen of them
// fill a GPU.
const watchedUnits = 6

// inhabit starts a container with an allocation and a process in it that uses the GPU.
func (b *bench) inhabit(ctx context.Context, r *running) (user *timer, close func(), err error) {
	p, edits, err := b.holding(ctx, r, watchedUnits)
	if err != nil {
		return nil, nil, err
	}
	edits, image := b.laid(edits)
	c, err := (&capsule.Machine{Driver: b.driver.root}).Open(ctx, edits, image)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			_ = c.Close()
		}
	}()
	t, err := startTimer(c)
	if err != nil {
		return nil, nil, err
	}
	pid := c.HostPID(t.proc.PID)
	if pid == 0 {
		t.close()
		return nil, nil, fmt.Errorf("process %d of the container is not to be found", t.proc.PID)
	}
	// The kernel's word for its cgroup, in this mount namespace alone, which goes
	// with the process.
	cgroup := filepath.Join(b.work, "cgroup-"+p.Pod.Name)
	err = os.WriteFile(cgroup, fmt.Appendf(nil, "0::/kubepods/burstable/pod%s/%s\n", p.Pod.Name, containerID(p)), 0o444)
	if err == nil {
		err = unix.Mount(cgroup, "/proc/"+strconv.Itoa(pid)+"/cgroup", "", unix.MS_BIND, "")
	}
	if err == nil {
		err = timers{t}.ready("begin")
	}
	if err == nil {
		err = timers{t}.ready(fmt.Sprintf("live 8 %d", 4<<20))
	}
	if err != nil {
		t.close()
		return nil, nil, err
	}
	return t, func() {
		t.close()
		_ = c.Close() // it is killed
	}, nil
}

// allSeen waits until the watchdog sees what each container has, and by whose
// count.
func (b *bench) allSeen(ctx context.Context, url string) error {
	var wrong error
	err := await(ctx, "the watchdog to see all containers", func() (bool, error) {
		resp, err := http.Get(url)
		if err != nil {
			return false, err
		}
		defer resp.Body.Close()
		var st status.Status
		if err := json.NewDecoder(resp.Body).Decode(&st); err != nil {
			return false, err
		}
		seen := 0
		for _, c := range st.Containers {
			if c.UsedMiB != nil && *c.UsedMiB > 0 && c.Processes == 1 && c.Guarantee == "api" {
				seen++
			}
		}
		if st.Watchdog.Kills > 0 || st.Watchdog.Intruders > 0 {
			wrong = fmt.Errorf("the watchdog has ended %d containers and found %d intruders, and there were none to find", st.Watchdog.Kills, st.Watchdog.Intruders)
			return true, nil
		}
		return seen == b.watched, fmt.Errorf("it sees %d of %d; it is %s (%s)", seen, b.watched, st.Watchdog.State, st.Watchdog.Reason)
	})
	return cmp.Or(err, wrong)
}
