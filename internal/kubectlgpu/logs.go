// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"

	"example.com/gpu-agent/internal/kube/pluginkube"
)

// agentContainer is the agent's container in its pod.
const agentContainer = "gpu-agent"

// WriteLog copies the log of a node's agent, a line at a time: a line may quote what a tenant has
// chosen.
func WriteLog(ctx context.Context, c *pluginkube.Client, node string, o pluginkube.LogOptions, out io.Writer) error {
	agent, err := c.AgentOn(ctx, node)
	if err != nil {
		return err
	}
	o.Container = agentContainer
	body, err := c.Log(ctx, agent.Namespace, agent.Name, o)
	if err != nil {
		return err
	}
	defer body.Close()
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if _, err := fmt.Fprintln(out, printable(lines.Text())); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("read the log of pod %s/%s: %w", agent.Namespace, agent.Name, err)
	}
	return nil
}
