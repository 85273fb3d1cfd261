// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// The agent's port is open to every pod: what they can read there, and what they
// can do to the agent.
func TestPort(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, mixed, mixedOffers)
	tenant := b.pod("tenant", lab.Memory, 24)
	b.must(tenant.Running(b.ctx))
	process, err := tenant.Process(b.ctx, "")
	b.must(err)
	kubelet := lab.Process{PID: 1} // it calls from the node's own network
	url := "http://" + agent.Address()

	b.sub("what is read", func(b *bench) {
		for who, p := range map[string]lab.Process{"a pod": process, "the node": kubelet} {
			for page, want := range map[string]int{
				"/statusz": http.StatusForbidden, "/statusz?format=html": http.StatusForbidden,
				"/metrics": http.StatusOK, "/healthz": http.StatusOK, "/readyz": http.StatusOK,
			} {
				code, body, err := node.Get(b.ctx, p, url+page)
				b.must(err)
				if code != want {
					b.Errorf("%s reads %s: %d, want %d: %.200s", who, page, code, want, body)
				}
				if strings.Contains(string(body), "tenant") != (page == "/metrics") {
					b.Errorf("%s reads of the tenant at %s: %.200s", who, page, body)
				}
			}
		}
		if _, err := agent.HTTP(b.ctx, "statusz"); err == nil || !strings.Contains(err.Error(), "port-forward") {
			b.Errorf("through the API server: %v, want a refusal that says how", err)
		}
		out, err := agent.Command(b.ctx, "status")
		b.must(err)
		if !strings.Contains(string(out), "work/tenant/main") {
			b.Errorf("gpu-agent status does not name the tenant:\n%s", out)
		}
	})

	// 12,850 idle ones took the pod's memory, and the kernel ended the agent.
	b.sub("a crowd of connections", func(b *bench) {
		const crowd = 12850
		before, err := agent.Process()
		b.must(err)
		var held []net.Conn
		b.Cleanup(func() {
			for _, c := range held {
				c.Close()
			}
		})
		for i := range crowd {
			// Some come from where the kubelet comes from.
			p := process
			if i%10 == 0 {
				p = kubelet
			}
			c, err := node.Dial(b.ctx, p, agent.Address())
			b.must(err)
			held = append(held, c)
		}
		// Three failed probes in a row, 5 s apart, would make the pod unready.
		b.must(lab.Holds(b.ctx, 16*time.Second, "while others hold connections", func(ctx context.Context) error {
			now, err := agent.Process()
			if err != nil {
				return err
			}
			if now != before {
				return fmt.Errorf("the agent is process %v, it was %v", now, before)
			}
			if code, body, err := node.Get(ctx, kubelet, url+"/readyz"); err != nil || code != http.StatusOK {
				return fmt.Errorf("the kubelet's probe: %d, %v: %.200s", code, err, body)
			}
			_, err = agent.Status(ctx)
			return err
		}))
		b.must(agent.Ready(b.ctx))
		metrics, err := agent.Metrics(b.ctx)
		b.must(err)
		resident := metrics["process_resident_memory_bytes"] / (1 << 20)
		b.Logf("the agent has %.0f MiB with %d connections", resident, crowd)
		if resident == 0 || resident > 100 {
			b.Errorf("the agent has %.0f MiB, want at most 100", resident)
		}
	})
}
