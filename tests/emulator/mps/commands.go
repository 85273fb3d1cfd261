// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// command returns what the daemon prints for a command.
func (d *controlDaemon) command(command string, privileged bool, b Behaviour) string {
	f := strings.Fields(command)
	if len(f) == 0 {
		return "Unknown command \"\"\n"
	}
	deaf := slices.Contains(b.Deaf, f[0])
	number := func(i int) int {
		if i >= len(f) {
			return 0
		}
		n, _ := strconv.Atoi(f[i])
		return n
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	missing := fmt.Sprintf("Server %d not found\n", number(1))
	server := d.servers[number(1)]
	switch f[0] {
	case "get_server_list":
		return lines(slices.Sorted(maps.Keys(d.servers)))
	case "get_default_active_thread_percentage":
		return fmt.Sprintf("%.1f\n", d.percent)
	case "set_default_active_thread_percentage":
		if !privileged && version() >= "550" {
			return fmt.Sprintf("Insufficient privileges for UID %d. Control deamon settings can only be modified by the user started it or by the root user.\n", os.Getuid())
		}
		d.set(&d.percent, f, 1, deaf)
		return fmt.Sprintf("%.1f\n", d.percent)
	case "get_active_thread_percentage", "set_active_thread_percentage":
		if server == nil {
			return missing
		}
		if !server.isReady() {
			d.logf("Server %d is <busy>", number(1))
			return ""
		}
		if f[0][0] == 's' {
			d.set(&server.percent, f, 2, deaf)
			d.told(d.world.setPercent(server.known, server.percent))
		}
		return fmt.Sprintf("%.1f\n", server.percent)
	case "get_client_list":
		if server == nil {
			return missing
		}
		return lines(slices.Sorted(maps.Keys(server.clients)))
	case "get_server_status":
		switch {
		case version() < "550":
			return fmt.Sprintf("Unknown command %q\n", f[0])
		case len(f) < 2:
			return "A server PID is required\n"
		case server == nil:
			return missing
		case !server.isReady():
			return "INITIALIZING\n"
		case b.Status != "":
			return b.Status + "\n"
		}
		fault, err := d.world.inFault(server.known)
		d.told(err)
		if fault {
			return "FAULT\n"
		}
		return "ACTIVE\n"
	case "terminate_client":
		if server == nil {
			return missing + strings.TrimSuffix(missing, "\n") + "!\n1\n"
		}
		if c := server.clients[number(2)]; c != nil && !b.Sticky && !deaf {
			d.told(d.world.detach(server.known, number(2)))
			_ = c.Close()
			delete(server.clients, number(2))
		}
		return "0\n"
	case "shutdown_server":
		if server == nil {
			return missing
		}
		if len(server.clients) == 0 || slices.Contains(f, "-f") {
			_ = server.cmd.Process.Kill()
		}
		return ""
	case "start_server":
		if len(f) < 3 || f[1] != "-uid" {
			return "A user id (UID) is required to start a new server\n"
		}
		if _, err := strconv.ParseUint(f[2], 10, 32); err != nil {
			return "A user id (UID) is required to start a new server\n"
		}
		if _, err := d.serverLocked(); err != nil { // its end is not waited for
			d.logf("Failed to start server using uid %s, error: %v", f[2], err)
		}
		return ""
	case "quit":
		if !privileged {
			return "Not enough privilege to execute quit command\n"
		}
		if !deaf {
			d.quitLocked(len(f) > 1 && f[1] == "-t")
		}
		return ""
	}
	return fmt.Sprintf("Unknown command %q\n", f[0])
}

// isReady reports whether a server is past its start.
func (s *mpsServer) isReady() bool {
	select {
	case <-s.begun:
		return s.stands
	default:
		return false
	}
}

// told notes what the world refused.
func (d *controlDaemon) told(err error) {
	if err != nil {
		d.logf("%v", err)
	}
}

// set takes a percentage as NVIDIA's do: what is not one changes nothing.
func (d *controlDaemon) set(to *float64, f []string, at int, deaf bool) {
	p := 0.0
	if at < len(f) {
		_, _ = fmt.Sscanf(f[at], "%g", &p)
	}
	switch {
	case !(p > 0 && p <= 100):
		d.logf("Invalid percentage, expected between (0.0, 100.0]")
	case !deaf:
		*to = p
	}
}

// quitLocked ends the servers and the daemon. With clients it waits for them, or ends them by
// force. The daemon's status says whether a server had failed.
func (d *controlDaemon) quitLocked(force bool) {
	for !force && slices.ContainsFunc(slices.Collect(maps.Values(d.servers)), func(s *mpsServer) bool { return len(s.clients) > 0 }) {
		d.mu.Unlock()
		time.Sleep(10 * time.Millisecond)
		d.mu.Lock()
	}
	for pid := range d.servers {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	for _, name := range []string{"log", "nvidia-cuda-mps-control.pid"} { // the sockets stay
		_ = os.Remove(d.dir + "/" + name)
	}
	exit(d.failed)
}

func lines(pids []int) string {
	var b strings.Builder
	for _, pid := range pids {
		fmt.Fprintln(&b, pid)
	}
	return b.String()
}
