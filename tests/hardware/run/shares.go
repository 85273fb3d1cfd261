// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"

	"example.com/gpu-agent/tests/hardware/ask"
)

// smCount is CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
const smCount = 16

// mostAsked is how many clients a question tries at most. R615's documents have 60.
const mostAsked = 70

// attribute is a device's attribute as a program sees it. It begins CUDA, and makes no context.
func attribute(t *talker, n int) (int, error) {
	r, err := t.do(fmt.Sprintf("attribute %d", n))
	return int(r.number(0)), err
}

// alone is how many multiprocessors a program has without MPS.
func (d *mpsDaemon) alone(ctx context.Context, c *card) (int, error) {
	t, err := d.k.talk(ctx, d.room, "alone", c, withoutMPS(d.room))
	if err != nil {
		return 0, err
	}
	defer t.end()
	return attribute(t, smCount)
}

// shares are about what the library in a container, the supervisor of daemons and the watchdog take
// for granted of a client's share.
func (k *kit) shares() []ask.Question {
	ring := []string{"pkg/memcap/lib/c/mps.c", "tests/emulator/mps.go"}
	return []ask.Question{
		{
			Name: "mps-attribute", Asks: "Does a client learn how many multiprocessors it has by the attribute, before it has a context?", Limit: 40 * time.Second, Code: ring,
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				all, err := d.alone(ctx, c)
				if err != nil {
					return ask.Answer{}, err
				}
				t, err := d.k.talk(ctx, d.room, "client", c, append(d.dirs, ofPercent(25))...)
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				before, err := attribute(t, smCount)
				if err == nil {
					_, err = t.do("context")
				}
				if err != nil {
					return ask.Answer{}, err
				}
				after, err := attribute(t, smCount)
				return ask.Tell(before*2 < all, "at 25 %% of %d: %d before the context, %d in it", all, before, after), err
			}),
		},
		{
			Name: "mps-late-variable", Asks: "Does a percentage count that a client sets after cuInit, and before its context?", Limit: 40 * time.Second, Code: ring,
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				t, err := d.k.talk(ctx, d.room, "client", c, append(d.dirs, ofPercent(100))...)
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				before, err := attribute(t, smCount)
				if err == nil {
					_, err = t.all("env 0 "+ofPercent(25), "context")
				}
				if err != nil {
					return ask.Answer{}, err
				}
				after, err := attribute(t, smCount)
				return ask.Tell(after*2 < before, "%d after cuInit at 100 %%, %d in a context made at 25 %%", before, after), err
			}),
		},
		{
			Name: "mps-raised", Asks: "Does a client's own variable give it more than the daemon's default?", Limit: 40 * time.Second, Code: ring,
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				all, err := d.alone(ctx, c)
				if err == nil {
					_, err = d.tell(ctx, "set_default_active_thread_percentage 25")
				}
				if err != nil {
					return ask.Answer{}, err
				}
				t, err := d.client(ctx, "client", c, ofPercent(100))
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				has, err := attribute(t, smCount)
				return ask.Tell(has*2 > all, "%d of %d, with 100 %% in its variable and a default of 25 %%", has, all), err
			}),
		},
		{
			Name: "mps-changed", Asks: "Does a server's new percentage reach a context that exists?", Limit: 40 * time.Second, Code: append(ring, "internal/mps"),
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				t, err := d.client(ctx, "client", c)
				if err != nil {
					return ask.Answer{}, err
				}
				defer t.end()
				before, err := attribute(t, smCount)
				if err != nil {
					return ask.Answer{}, err
				}
				servers, err := d.tell(ctx, "get_server_list")
				if err == nil {
					_, err = d.tell(ctx, "set_active_thread_percentage "+strings.TrimSpace(servers)+" 25")
				}
				if err != nil {
					return ask.Answer{}, err
				}
				after, err := attribute(t, smCount)
				if err != nil {
					return ask.Answer{}, err
				}
				next, err := d.client(ctx, "next", c)
				if err != nil {
					return ask.Answer{}, err
				}
				defer next.end()
				has, err := attribute(next, smCount)
				return ask.Tell(after < before, "%d before and %d after the change to 25 %%; the next client has %d", before, after, has), err
			}),
		},
		{
			Name: "mps-clients", Asks: "How many clients does a server take?", Limit: 60 * time.Second, Least: 20 * time.Second, Code: []string{"pkg/compute", "tests/emulator/mps.go"},
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				for n := range mostAsked {
					t, err := d.k.talk(ctx, d.room, fmt.Sprintf("client %d", n+1), c, d.dirs...)
					if err != nil {
						return ask.Answer{}, err
					}
					defer t.end()
					if is, err := attribute(t, mpsEnabled); err != nil || is != 1 {
						return ask.Count(float64(n), "clients", "the next one: %v, MPS_ENABLED %d", err, is), nil
					}
				}
				return ask.Count(mostAsked, "clients", "no more were tried"), nil
			}),
		},
		{
			Name: "mps-server-before", Asks: "In multi-user mode, does a daemon start a server that no client has asked for?", Limit: 40 * time.Second, Code: []string{"internal/mps"},
			Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
				if _, err := d.tell(ctx, "start_server -uid 0"); err != nil {
					return ask.Answer{}, err
				}
				for range 50 {
					said, err := d.tell(ctx, "get_server_list")
					if err != nil {
						return ask.Answer{}, err
					}
					if pid, err := strconv.Atoi(strings.TrimSpace(said)); err == nil {
						status, err := d.tell(ctx, fmt.Sprintf("get_server_status %d", pid))
						return ask.Tell(true, "it is %s", status), err
					}
					time.Sleep(200 * time.Millisecond)
				}
				return ask.Tell(false, "it lists no server"), nil
			}, "-multiuser-server"),
		},
	}
}

// endServers ends what a killed daemon has left.
func endServers(pids string) {
	for _, word := range strings.Fields(pids) {
		if pid, err := strconv.Atoi(word); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// daemonKilled is about clients whose control daemon is gone.
func (k *kit) daemonKilled() ask.Question {
	return ask.Question{
		Name: "mps-daemon-killed", Asks: "Do clients go on when their control daemon is killed?", Limit: 40 * time.Second,
		NotEmulated: "whether its servers live on is a switch", Code: []string{"internal/mps"},
		Ask: k.withMPS(func(ctx context.Context, d *mpsDaemon, c *card) (ask.Answer, error) {
			t, err := d.client(ctx, "client", c)
			if err != nil {
				return ask.Answer{}, err
			}
			defer t.end()
			servers, err := d.tell(ctx, "get_server_list")
			if err != nil {
				return ask.Answer{}, err
			}
			if err := d.process.Kill(); err != nil {
				return ask.Answer{}, err
			}
			defer endServers(servers)
			time.Sleep(time.Second)
			if _, err := t.all("take 64", "run"); err != nil {
				return ask.Tell(false, "%v", err), nil
			}
			return ask.Tell(true, "it has memory and runs kernels a second later"), nil
		}),
	}
}
