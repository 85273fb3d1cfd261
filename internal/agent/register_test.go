// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/plugin"
)

// fare says how a resource fares at the kubelet from now on.
func (b *bench) fare(s plugin.Status) {
	b.with(func() { b.fares = []plugin.Status{s} })
	b.LookAtPlugins()
	synctest.Wait()
}

// eventsWith counts the Events that have a word.
func (b *bench) eventsWith(word string) (n int) {
	b.with(func() {
		for _, e := range b.events {
			if strings.Contains(e, word) {
				n++
			}
		}
	})
	return n
}

// wantRegistered checks the node's state, and what status says of the one resource.
func (b *bench) wantRegistered(state string, registered bool, words string) {
	b.t.Helper()
	b.wantState(state)
	r := b.Status().Resources
	if len(r) != 1 || r[0].Registered != registered || !strings.Contains(r[0].Error, words) || (words == "") != (r[0].Error == "") || registered != (r[0].Since == nil) {
		b.t.Errorf("status %+v, want registered %v, %q", r, registered, words)
	}
	if m := b.message(); state == "failed" && !strings.Contains(m, memResource+" is not registered with the kubelet: ") || !strings.Contains(m, words) {
		b.t.Errorf("the node says %q", m)
	}
}

// TestRegistrationTroubleIsTold: of a registration that the kubelet refused, of a list
// that could not be sent, and of a kubelet that did not know what it was told, only the
// log spoke.
func TestRegistrationTroubleIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		well := plugin.Status{Resource: memResource, Registered: true, Devices: 8, Bytes: 400}
		ill := func(why string) plugin.Status {
			return plugin.Status{Resource: memResource, Since: time.Now(), Devices: 8, Bytes: 400, Err: errors.New(why)}
		}
		b.fare(well)
		b.wantRegistered("applied", true, "")
		for _, why := range []string{"register with the kubelet at /k.sock: not in the mood", "a list of 100000 devices takes 5 MB"} {
			b.fare(ill(why))
			time.Sleep(silentFor / 2)
			b.wantRegistered("applied", false, "") // a kubelet that starts again is no news
			b.fare(well)
			b.wantRegistered("applied", true, "")
			b.fare(ill(why))
			events := b.eventsWith("GPUPartitionFailed")
			time.Sleep(silentFor + holdersEvery) // nobody wakes the loop for it
			b.wantRegistered("failed", false, why)
			time.Sleep(10 * time.Minute)
			if n := b.eventsWith("GPUPartitionFailed") - events; n != 1 {
				t.Errorf("%d Events of one trouble", n)
			}
			b.fare(well)
			b.wantRegistered("applied", true, "")
		}

		// The stream of lists is open, and the kubelet names no device.
		b.with(func() { b.forgetful = true })
		b.LookAtCheckpoint()
		time.Sleep(othersSoon)
		b.wantRegistered("applied", true, "")
		b.with(func() {
			if len(b.suspected) == 0 || b.suspected[0] != memResource {
				t.Errorf("the kubelet lists none of our devices, and suspected are %v", b.suspected)
			}
		})
		time.Sleep(silentFor + holdersEvery)
		b.wantRegistered("failed", false, "names none of the devices")
		b.with(func() { b.forgetful = false })
		time.Sleep(holdersEvery)
		b.wantRegistered("applied", true, "")
		if s := b.Status().Resources; len(s) != 1 || s[0] != (status.Resource{Name: memResource, Devices: 8, Registered: true, Free: 8, Largest: 4}) {
			t.Errorf("status %+v", s)
		}
	})
}
