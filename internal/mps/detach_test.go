// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// slowDaemon takes its time for each answer, as one on a busy node, and lists a client until the look after it was
// told.
type slowDaemon struct {
	control // nil: nothing else is asked
	servers []Server
	going   []int
	looks   int
	deafTo  int   // is not answered for
	stays   []int // are listed for ever
}

func (d *slowDaemon) look(context.Context, files) (sight, error) {
	time.Sleep(20 * time.Millisecond)
	d.looks++
	s := sight{percent: 26}
	for i := range d.servers {
		s.servers = append(s.servers, Server{PID: d.servers[i].PID, Clients: slices.Clone(d.servers[i].Clients)})
		d.servers[i].Clients = slices.DeleteFunc(d.servers[i].Clients, func(c int) bool { return slices.Contains(d.going, c) })
	}
	return s, nil
}

func (d *slowDaemon) terminate(_ context.Context, _ files, server, client int) error {
	time.Sleep(20 * time.Millisecond)
	if i := slices.IndexFunc(d.servers, func(s Server) bool { return s.PID == server }); i < 0 || !slices.Contains(d.servers[i].Clients, client) {
		return errors.New("the server has no such client")
	}
	if client == d.deafTo {
		return &Problem{Silent, "the daemon has not answered in time"}
	}
	if !slices.Contains(d.stays, client) {
		d.going = append(d.going, client)
	}
	return nil
}

// TestDetachOfAll: 60 clients, the most that a GPU has, are detached before the two seconds are over that a pod has
// after them. The daemon is told of all of them before it is asked who is left.
func TestDetachOfAll(t *testing.T) {
	t.Parallel()
	self, err := processOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var clients []int
	for i := range 60 {
		clients = append(clients, 1000+i)
	}
	count := func(all []Detached) map[Outcome]int {
		n := map[Outcome]int{}
		for i, d := range all {
			n[d.Outcome]++
			if d.Client != clients[i] {
				t.Errorf("client %d is answered for %d", d.Client, clients[i])
			}
		}
		return n
	}
	detach := func(t *testing.T, d *slowDaemon) (*keeper, []Detached) {
		t.Helper()
		d.servers = []Server{{PID: 1, Clients: slices.Clone(clients[:30])}, {PID: 2, Clients: slices.Clone(clients[30:59])}}
		k := &keeper{gpu: gpuA, control: d, process: self, files: files{t.TempDir()}, patience: deadline,
			log: slog.New(slog.DiscardHandler), turn: make(chan struct{}, 1)}
		return k, k.detach(t.Context(), clients)
	}
	t.Run("answers", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			began, d := time.Now(), &slowDaemon{}
			k, all := detach(t, d)
			if n := count(all); n[Gone] != 59 || n[NoClient] != 1 || all[59].Outcome != NoClient || k.snapshot().Detached != 59 {
				t.Errorf("%v, %+v", n, k.snapshot())
			}
			if took := time.Since(began); took >= 2*time.Second || d.looks != 3 {
				t.Errorf("%d looks, after %v", d.looks, took)
			}
		})
	})
	t.Run("some stay", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			_, all := detach(t, &slowDaemon{stays: clients[5:7]})
			if n := count(all); n[Gone] != 57 || n[Listed] != 2 || all[5].Outcome != Listed || all[6].Outcome != Listed {
				t.Errorf("%v", n)
			}
		})
	})
	t.Run("no answer for one", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			k, all := detach(t, &slowDaemon{deafTo: clients[40]})
			if n := count(all); n[Gone] != 40 || n[Unanswered] != 20 || k.snapshot().TimedOut != 20 {
				t.Errorf("%v, %+v", n, k.snapshot())
			}
		})
	})
}
