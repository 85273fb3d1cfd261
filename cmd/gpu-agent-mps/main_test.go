// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"flag"
	"io"
	"os"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/command/commandtest"
)

var update = flag.Bool("update", false, "write the reference anew")

// within runs a command line in this process, which says everything to one writer.
func within(ctx context.Context, out io.Writer, args []string) error {
	root := newRoot()
	root.SetOut(out)
	root.SetErr(out)
	return command.New(root, prefix).Execute(ctx, args, os.Environ())
}

// Wrong usage is one line, which says what to write instead.
func TestWrongUsage(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"", "gpu-agent-mps: a command is missing, one of "},
		{"mps", `gpu-agent-mps: there is no command "mps": the commands are `},
		{"run now", `gpu-agent-mps run: unexpected argument "now"`},
		{"run -driver-root /", "gpu-agent-mps run: -driver-root: write --driver-root"},
		{"supervise --log-level loud", "gpu-agent-mps supervise: --log-level "},
		{"probe --state-dir /", "gpu-agent-mps probe: "},
	} {
		var out bytes.Buffer
		err := within(t.Context(), &out, strings.Fields(test.args))
		if command.ExitOf(err) != command.Usage || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "\n") || out.Len() > 0 {
			t.Errorf("%q: exit code %d, %v, and it prints %q; want %q", test.args, command.ExitOf(err), err, &out, test.want)
		}
	}
}

// All that runs in the pod has the pod's variables. The probe minds those of no other command, and does mind
// one that is misspelt.
func TestPodsVariables(t *testing.T) {
	t.Setenv("GPU_AGENT_DRIVER_ROOT", "/host")
	t.Setenv("GPU_AGENT_SERVICE_HOST", "10.96.0.20")
	if err := within(t.Context(), io.Discard, []string{"version"}); err != nil {
		t.Error(err)
	}
	t.Setenv("GPU_AGENT_DRIVER_ROOTS", "/host")
	if err := within(t.Context(), io.Discard, []string{"version"}); command.ExitOf(err) != command.Usage || !strings.Contains(err.Error(), "write GPU_AGENT_DRIVER_ROOT") {
		t.Errorf("a misspelt variable: %v", err)
	}
}

// Each command has its help with an example, and a name means one thing.
func TestCommandLine(t *testing.T) {
	for _, flaw := range command.New(newRoot(), prefix).Flaws() {
		t.Error(flaw)
	}
}

func TestReference(t *testing.T) {
	commandtest.Reference(t, *update, map[string]string{name: command.New(newRoot(), prefix).Reference()})
}
