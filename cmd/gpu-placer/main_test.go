// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/command/commandtest"
)

var update = flag.Bool("update", false, "write the reference anew")

// execute runs a command line.
func execute(t *testing.T, args ...string) (said string, failure error) {
	t.Helper()
	var out bytes.Buffer
	failure = within(t.Context(), &out, args)
	return out.String(), failure
}

// within runs a command line in this process, which says everything to one writer.
func within(ctx context.Context, out io.Writer, args []string) error {
	root := newRoot()
	root.SetOut(out)
	root.SetErr(out)
	return command.New(root, prefix).Execute(ctx, args, os.Environ())
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Wrong usage is one line, which says what to write instead.
func TestWrongUsage(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"", "gpu-placer: a command is missing, one of certificates, "},
		{"--doors kueue", "gpu-placer: there is no "},
		{"run --doors extender,barn", `gpu-placer run: --doors "extender,barn": there is no "barn": want some of extender, kueue, liqo`},
		{"run --lease x", "gpu-placer run: --lease: "},
		{"run --domain Example_com", "gpu-placer run: --domain: "},
		{"run -lease a/b", "gpu-placer run: -lease: write --lease"},
		{"run --tls-cert-file x", "gpu-placer run: --tls-cert-file and --tls-key-file go together"},
		{"run --client-ca-file x", "gpu-placer run: --client-ca-file needs --tls-cert-file: without TLS, clients show no cert"},
		{"run --tls-cert-file x --tls-key-file x", "gpu-placer run: the door extender needs --client-ca-file"},
		{"run", "gpu-placer run: the door extender needs --client-ca-file"},
		{"certificates --days 0", "gpu-placer certificates: --days 0: at least 1"},
	} {
		said, err := execute(t, strings.Fields(test.args)...)
		if command.ExitOf(err) != command.Usage || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "\n") || said != "" {
			t.Errorf("%q: exit code %d, %v, and it prints %q; want %q", test.args, command.ExitOf(err), err, said, test.want)
		}
	}
}

// A Service gpu-placer gives its pods variables that begin as the flags' do. The program does
// not mind those, and does mind one that is misspelt.
func TestServicesVariables(t *testing.T) {
	for _, entry := range []string{
		"GPU_PLACER_SERVICE_HOST=10.96.0.20", "GPU_PLACER_SERVICE_PORT=9890", "GPU_PLACER_SERVICE_PORT_EXTENDER=9890", "GPU_PLACER_PORT=tcp://10.96.0.20:9890",
		"GPU_PLACER_PORT_9890_TCP=tcp://10.96.0.20:9890", "GPU_PLACER_PORT_9890_TCP_PROTO=tcp", "GPU_PLACER_PORT_9890_TCP_PORT=9890", "GPU_PLACER_PORT_9890_TCP_ADDR=10.96.0.20",
	} {
		name, value, _ := strings.Cut(entry, "=")
		t.Setenv(name, value)
	}
	if _, err := execute(t, "version"); err != nil {
		t.Errorf("with a Service's variables: %v", err)
	}
	t.Setenv("GPU_PLACER_DOOR", "kueue")
	if _, err := execute(t, "version"); command.ExitOf(err) != command.Usage || !strings.Contains(err.Error(), "GPU_PLACER_DOOR: write GPU_PLACER_DOORS") {
		t.Errorf("a misspelt variable: %v", err)
	}
}

// Every command is described with an example, and a name means one thing.
func TestCommands(t *testing.T) {
	for _, flaw := range command.New(newRoot(), prefix).Flaws() {
		t.Error(flaw)
	}
	for _, path := range []string{"", "run", "certificates", "completion", "version"} {
		asked, err := execute(t, append(strings.Fields(path), "--help")...)
		shown, failed := execute(t, append([]string{"help"}, strings.Fields(path)...)...)
		if err != nil || failed != nil || asked != shown || !strings.Contains(asked, "\nFlags:\n") || !strings.Contains(asked, "Usage:\n  gpu-placer "+path) {
			t.Errorf("the help of %q: %v, %v\n%s", path, err, failed, asked)
		}
	}
	out, err := execute(t, cobra.ShellCompNoDescRequestCmd, "run", "--doors", "extender,")
	got, want := strings.Fields(out), []string{"extender,kueue", "extender,liqo"}
	if err != nil || len(got) < 2 || !slices.Equal(got[:2], want) {
		t.Errorf("--doors is completed with %q, want %q: %v", got, want, err)
	}
}

// The reference is what the commands say.
func TestReference(t *testing.T) {
	commandtest.Reference(t, *update, map[string]string{"gpu-placer": command.New(newRoot(), prefix).Reference()})
}
