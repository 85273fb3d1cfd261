// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
)

// retellEvery is how often it is looked for claims whose status says something else of their shares of the SMs
// than what is now. A share becomes held when its first process comes, and is not held any longer when its MPS
// daemon dies.
const retellEvery = 30 * time.Second

// reteller writes the status of claims anew when it has changed how strongly their shares are held.
type reteller struct {
	in *intake

	mu sync.Mutex
	// told has what the status of each claim says of its shares, by UID; guarded by mu.
	told map[string]string
}

// note remembers what a claim's status says of its shares now.
func (r *reteller) note(uid, held string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told[uid] = held
}

// run looks at the claims until ctx ends.
func (r *reteller) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retellEvery):
		}
		r.look()
	}
}

// look tells the claims anew whose shares are held in another way than their status says. A write that fails is
// tried again at the next look.
func (r *reteller) look() {
	of := map[string][]share{}
	held := r.in.o.Ledger.Allocations()
	for i := range held {
		a := &held[i]
		if a.Owner != ledger.DRA || a.Superseded || !a.IsOpen() || a.Grants[0].Compute.Ceiling == 0 {
			continue
		}
		if s, err := readShare(a.ID, a.Ref, a.Grants); err == nil {
			of[s.UID] = append(of[s.UID], s)
		}
	}
	r.mu.Lock()
	for uid := range r.told {
		if len(of[uid]) == 0 {
			delete(r.told, uid)
		}
	}
	var due [][]share
	for uid, shares := range of {
		if said, known := r.told[uid]; !known || said != r.in.held(shares) {
			due = append(due, shares)
		}
	}
	r.mu.Unlock()
	for _, shares := range due {
		s := &shares[0]
		r.in.tell(&agentkube.Claim{Namespace: s.Namespace, Name: s.Name, UID: s.UID}, shares)
	}
}

// held returns in words how strongly the shares of the SMs are held that these results have.
func (in *intake) held(shares []share) string {
	var words []string
	for i := range shares {
		if a, ok := in.stillHas(&shares[i]); ok && a.Grants[0].Compute.Ceiling > 0 {
			words = append(words, in.o.Held(a.ID, a.Grants[0].GPU).String())
		}
	}
	return strings.Join(words, "; ")
}
