// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"flag"
	"time"
)

// What the kubelet is set to where nobody sets anything, and so on most users'
// nodes (k8s.io/kubernetes, pkg/kubelet/apis/config/v1beta1/defaults.go).
const (
	usersUpdate = 10 * time.Second
	usersReport = 5 * time.Minute
)

var prompt = flag.Bool("prompt", false, "leave the kubelet as one that looks at its node every second, to compare figures")

// usersStatus gives the kubelet the users' settings for the rest of the test. The
// node of all tests has a kubelet that looks at its node every second, since most
// tests merely wait for what it offers. A figure that depends on when the scheduler
// hears of a change would be too good on such a node: pods that are refused, the
// time until an edit is in allocatable. What prints or asserts one calls this.
func (b *bench) usersStatus() {
	b.Helper()
	if *prompt {
		b.Log("the kubelet looks at its node every second: the figures are no user's")
		return
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := node.PromptStatus(ctx); err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	b.must(node.UsersStatus(b.ctx))
	b.kubeletLooks(usersUpdate, usersReport)
}

// looks is what to say beside a figure that depends on usersStatus in a test that
// mostly waits: without -long it is spared that, and says so.
func (b *bench) looks() string {
	b.Helper()
	if *long {
		b.usersStatus()
		return "the kubelet looks at its node every ten seconds, as users' do"
	}
	return "the kubelet looks at its node every second; users' do every ten"
}

// kubeletLooks checks how often the kubelet looks at its node, by its own word.
func (b *bench) kubeletLooks(update, report time.Duration) {
	b.Helper()
	s, err := node.KubeletSettings(b.ctx)
	b.must(err)
	if s.NodeStatusUpdate != update || s.NodeStatusReport != report {
		b.Fatalf("the kubelet looks at its node every %v and reports every %v, want %v and %v", s.NodeStatusUpdate, s.NodeStatusReport, update, report)
	}
}
