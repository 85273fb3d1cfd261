// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// What an earlier owner has left on a GPU is there on a node: in the status, a metric, an Event and the
// command for operators, with its code; it is gone everywhere when it was put right. A finding that does not
// matter for the layout takes nothing off the offer.
func TestWhatIsFound(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, oneShared, oneSharedOffers)
	const code = "AccountingOn"
	metric := fmt.Sprintf(`gpu_agent_left_behind{code=%q,gpu=%q,matters="false"}`, code, driver.GPUs[0].UUID)
	// says reports whether a command of the agent's names the finding.
	says := func(args ...string) bool {
		b.Helper()
		out, err := agent.Command(b.ctx, args...)
		b.must(err)
		return strings.Contains(string(out), code)
	}
	// The agent reads this when it starts, and every few minutes.
	look := func(there bool) {
		b.Helper()
		b.must(agent.Kill(b.ctx))
		b.must(lab.Await(b.ctx, time.Minute, fmt.Sprintf("the finding to be there: %v", there), func(ctx context.Context) error {
			m, err := agent.Metrics(ctx)
			if _, is := m[metric]; err == nil && is != there {
				err = fmt.Errorf("the metrics have %v", ours(m))
			}
			return err
		}))
		if is := says("status"); is != there {
			b.Errorf("gpu-agent status names it: %v", is)
		}
		if is := says("check", "--node"); is != there {
			b.Errorf("gpu-agent check --node names it: %v", is)
		}
		b.offers(oneSharedOffers)
		b.state("applied")
	}
	look(false)
	b.must(driver.Setup(b.ctx, 0, `{"accounting": true}`))
	b.Cleanup(func() { _ = driver.Setup(context.Background(), 0, `{"accounting": false}`) })
	look(true)
	b.must(node.AwaitEvent(b.ctx, "Node", "default", node.Name, "tells it", func(e lab.Event) bool {
		return e.Reason == code && strings.Contains(e.Message, "nvidia-smi -i 0 -am 0")
	}))
	b.must(driver.Setup(b.ctx, 0, `{"accounting": false}`))
	look(false)
}
