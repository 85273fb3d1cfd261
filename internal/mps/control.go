// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"os/exec"
	"slices"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// control is one version of the control protocol. Its methods fail with a *Problem. They keep
// nothing and may run for several daemons at once, but only once at a time for each daemon.
type control interface {
	// daemon returns the command that becomes a GPU's daemon and stays in the foreground.
	daemon(f files, u gpu.UUID) *exec.Cmd
	// ours returns nil if a process has the arguments and the environment of that command, or in
	// what it differs.
	ours(f files, u gpu.UUID, pid int) error
	// refusal returns why a daemon that did not begin to listen has ended, by what it has printed.
	refusal(printed string) Code
	// look asks a daemon for all that is.
	look(ctx context.Context, f files) (sight, error)
	// setDefault sets the percentage of the daemon's next server. The caller reads it back.
	setDefault(ctx context.Context, f files, percent int) error
	// startServer has the daemon start a server. It returns before the server is ready.
	startServer(ctx context.Context, f files) error
	// setServer sets the percentage of a server for new contexts. The caller reads it back.
	setServer(ctx context.Context, f files, server, percent int) error
	// terminate ends all work of a client and detaches it from its server.
	terminate(ctx context.Context, f files, server, client int) error
	// quit has the daemon end its servers and itself. Servers with clients are ended by force
	// after some seconds. It returns before the daemon has ended.
	quit(ctx context.Context, f files, force time.Duration) error
}

// sight is what a daemon has answered.
type sight struct {
	percent float64
	servers []Server
}

// serverOf returns the index of the server that has a client; -1 if none has.
func (s *sight) serverOf(client int) int {
	return slices.IndexFunc(s.servers, func(s Server) bool { return slices.Contains(s.Clients, client) })
}
