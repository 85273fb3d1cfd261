// SPDX-License-Identifier: Apache-2.0

package fakes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	api "k8s.io/kubelet/pkg/apis/dra/v1"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/dra"
)

const claimDriver = "gpus.example.com"

// driverOf notes what it is asked, and answers a device for each claim.
type driverOf struct {
	asked chan string
	fails error
}

func (d *driverOf) Prepare(_ context.Context, c dra.Claim) ([]dra.Device, error) {
	d.asked <- "prepare " + c.Name
	return []dra.Device{{Requests: []string{"r"}, Pool: "pool", Name: "device", CDI: []string{"example.com/gpu=" + c.UID}}}, d.fails
}

func (d *driverOf) Unprepare(_ context.Context, c dra.Claim) error {
	d.asked <- "unprepare " + c.Name
	return d.fails
}

func (d *driverOf) Health() ([]dra.Health, <-chan struct{}) {
	return []dra.Health{{Pool: "pool", Name: "device", Healthy: true}}, nil
}

// A kubelet registers a driver that comes, calls it once for a claim however many pods have
// that, and knows after its own end what it has written down, though not that it is prepared.
func TestClaims(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	k, err := StartKubelet(KubeletOptions{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { k.Stop() }()
	a, b, claim := Pod{UID: "a"}, Pod{UID: "b"}, &api.Claim{Namespace: "ns", Name: "c", Uid: "u"}
	if _, err := k.Prepare(ctx, a, claimDriver, claim); !errors.Is(err, ErrRefused) {
		t.Errorf("without a driver: %v", err)
	}
	d := &driverOf{asked: make(chan string, 9)}
	s, err := dra.New(dra.Options{Name: claimDriver, Driver: d, Dir: filepath.Join(dir, registryDir), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	run, end := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.Run(run) }()

	say := func(devices map[string][]*api.Device, err error) string {
		var calls []string
		for len(d.asked) > 0 {
			calls = append(calls, <-d.asked)
		}
		var account []string
		state, rerr := node.ReadDRAState(dir)
		for _, c := range state.Claims {
			account = append(account, fmt.Sprint(c.Name, c.PodUIDs, len(c.Devices[claimDriver])))
		}
		if mine := k.Claims(claimDriver); len(mine) != len(account) {
			t.Errorf("it says %v, and has written %q", mine, account)
		}
		return fmt.Sprint(len(devices["u"]), " devices, ", err != nil, rerr != nil, " ", strings.Join(calls, ","), " ", account)
	}
	await := func() {
		t.Helper()
		if _, err := k.AwaitDriver(ctx, claimDriver); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	await()
	got = append(got, say(k.Prepare(ctx, a, claimDriver, claim)), say(k.Prepare(ctx, b, claimDriver, claim)))
	k.Kill()
	if err := k.Start(); err != nil {
		t.Fatal(err)
	}
	await()
	got = append(got, say(k.Prepare(ctx, b, claimDriver, claim)), say(nil, k.Unprepare(ctx, a, claimDriver, claim)))
	d.fails = errors.New("not now")
	got = append(got, say(nil, k.Unprepare(ctx, b, claimDriver, claim)))
	d.fails = nil
	got = append(got, say(nil, k.Unprepare(ctx, b, claimDriver, claim)), say(nil, k.Unprepare(ctx, b, claimDriver, claim)))
	d.fails = errors.New("never")
	got = append(got, say(k.Prepare(ctx, a, claimDriver, claim)))
	want := []string{
		"1 devices, false false prepare c [c[a] 1]",
		"1 devices, false false  [c[a b] 1]",
		"2 devices, false false prepare c [c[a b] 2]",
		"0 devices, false false  [c[b] 2]",
		"0 devices, true false unprepare c [c[] 2]",
		"0 devices, false false unprepare c []",
		"0 devices, false false  []",
		"0 devices, true false prepare c [c[a] 0]",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	k.Stop()
	if err := k.LoseClaims(); err != nil {
		t.Fatal(err)
	}
	if err := k.Start(); err != nil {
		t.Fatal(err)
	}
	if all := k.Claims(claimDriver); len(all) > 0 {
		t.Errorf("after its account was lost it knows %v", all)
	}
}
