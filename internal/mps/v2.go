// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// v2 is the protocol of drivers up to R610, which later ones speak if not told otherwise: a line
// for each command, and answers for people. What 535, 550 and 555 answer is in testdata.
type v2 struct {
	program   program
	driver    Driver
	multiUser bool // always, but for the tests with drivers that lack it
	// patience bounds one question, with all its tries.
	patience time.Duration
}

// Arguments and variables of the control program.
const (
	foreground      = "-f"
	multiUserOption = "-multiuser-server"
	pipeVariable    = "CUDA_MPS_PIPE_DIRECTORY"
	logVariable     = "CUDA_MPS_LOG_DIRECTORY"
	devicesVariable = "CUDA_VISIBLE_DEVICES"
)

// daemon's arguments and variables are what a successor knows a daemon by. After a change of them
// the daemons of an earlier release are foreign.
func (v v2) daemon(f files, u gpu.UUID) *exec.Cmd {
	cmd := exec.Command(v.program.path, foreground)
	if v.multiUser {
		cmd.Args = append(cmd.Args, multiUserOption)
	}
	// Nothing else: a variable for a percentage or a limit would be another source of both.
	cmd.Env = append(v.environment(f), logVariable+"="+f.logs(), devicesVariable+"="+string(u))
	cmd.Dir = "/"
	return cmd
}

// environment is what both daemons and control programs get.
func (v v2) environment(f files) []string {
	env := []string{"PATH=" + strings.Join(v.driver.Programs, ":"), pipeVariable + "=" + f.control()}
	if len(v.driver.Libraries) > 0 {
		env = append(env, "LD_LIBRARY_PATH="+f.libraries())
	}
	return env
}

func (v v2) ours(f files, u gpu.UUID, pid int) error {
	args, err := words(pid, "cmdline")
	if err != nil {
		return err
	}
	if !slices.Contains(args, foreground) || slices.Contains(args, multiUserOption) != v.multiUser {
		return fmt.Errorf("its arguments are %.200q", args)
	}
	env, err := words(pid, "environ")
	if err != nil {
		return err
	}
	want := v.daemon(f, u).Env
	for _, variable := range []string{pipeVariable, devicesVariable} {
		is := func(s string) bool { return strings.HasPrefix(s, variable+"=") }
		i, j := slices.IndexFunc(env, is), slices.IndexFunc(want, is)
		if i < 0 || env[i] != want[j] {
			return fmt.Errorf("its environment does not have %s", want[j])
		}
	}
	for _, s := range env {
		if strings.HasPrefix(s, "CUDA_MPS_") && !slices.Contains(want, s) {
			return fmt.Errorf("its environment has %.200q", s)
		}
	}
	return nil
}

// refusal knows how a program that lacks the option ends: 535 and 550 take themselves for a
// program that speaks to a daemon, and 555 prints its help for an option that it does not know.
func (v v2) refusal(printed string) Code {
	if v.multiUser && (strings.Contains(printed, "Cannot find MPS control daemon process") ||
		strings.Contains(printed, "CUDA MPS Control for")) {
		return NoMultiUser
	}
	return NotStarted
}

// Bounds of what a daemon can list. A GPU has at most 60 clients, in R615.
const (
	mostServers = 16
	mostClients = 512
)

func (v v2) look(ctx context.Context, f files) (sight, error) {
	said, err := v.ask(ctx, f, "get_default_active_thread_percentage", "get_server_list")
	if err != nil {
		return sight{}, err
	}
	var s sight
	if s.percent, err = percentage(said[0]); err != nil {
		return sight{}, unreadable(said[0], err)
	}
	pids, err := numbers(said[1], mostServers)
	if err != nil {
		return sight{}, unreadable(said[1], err)
	}
	if len(pids) == 0 {
		return s, nil
	}
	var commands []string
	for _, pid := range pids {
		commands = append(commands, fmt.Sprintf("get_active_thread_percentage %d", pid),
			fmt.Sprintf("get_client_list %d", pid), fmt.Sprintf("get_server_status %d", pid))
	}
	if said, err = v.ask(ctx, f, commands...); err != nil {
		return sight{}, err
	}
	for i, pid := range pids {
		answers := said[3*i : 3*i+3]
		if slices.ContainsFunc(answers, func(a []string) bool { return notFound(a, pid) }) {
			continue // it has ended since it was listed
		}
		server, err := read(pid, answers)
		if err != nil {
			return sight{}, err
		}
		s.servers = append(s.servers, server)
	}
	return s, nil
}

// read reads the answers about one server.
func read(pid int, answers [][]string) (Server, error) {
	s := Server{PID: pid}
	var err error
	if s.Status, err = status(answers[2]); err != nil {
		return s, unreadable(answers[2], err)
	}
	if s.Clients, err = numbers(answers[1], mostClients); err != nil {
		return s, unreadable(answers[1], err)
	}
	if (s.Status == Initializing || s.Status == "") && len(answers[0]) == 0 {
		s.Status = Initializing // "Server 4 is <busy>", the daemon says in its log alone
		return s, nil
	}
	if s.Percent, err = percentage(answers[0]); err != nil {
		return s, unreadable(answers[0], err)
	}
	return s, nil
}

func (v v2) setDefault(ctx context.Context, f files, percent int) error {
	_, err := v.ask(ctx, f, fmt.Sprintf("set_default_active_thread_percentage %d", percent))
	return err
}

// startServer starts one for root: a server in multi-user mode is root's. The daemon answers
// nothing, whether or not that server will live.
func (v v2) startServer(ctx context.Context, f files) error {
	said, err := v.ask(ctx, f, "start_server -uid 0")
	if err == nil && len(said[0]) > 0 {
		err = &Problem{NoServer, fmt.Sprintf("start an MPS server: the daemon says %.200q", said[0])}
	}
	return err
}

func (v v2) setServer(ctx context.Context, f files, server, percent int) error {
	_, err := v.ask(ctx, f, fmt.Sprintf("set_active_thread_percentage %d %d", server, percent))
	return err
}

// terminate takes any answer: the caller reads the list of clients again.
func (v v2) terminate(ctx context.Context, f files, server, client int) error {
	_, err := v.ask(ctx, f, fmt.Sprintf("terminate_client %d %d", server, client))
	return err
}

// quit has no answer: the daemon closes the connection.
func (v v2) quit(ctx context.Context, f files, force time.Duration) error {
	_, err := v.run(ctx, f, fmt.Sprintf("quit -t %d\n", max(1, int(force.Seconds()))))
	return err
}

func unreadable(said []string, err error) error {
	return &Problem{Unreadable, fmt.Sprintf("read the daemon's answer %.200q: %v", said, err)}
}

// notFound reports whether an answer is that a server does not exist.
func notFound(said []string, server int) bool {
	return len(said) == 1 && said[0] == fmt.Sprintf("Server %d not found", server)
}

// percentage reads an active thread percentage, "25.0".
func percentage(said []string) (float64, error) {
	if len(said) != 1 {
		return 0, fmt.Errorf("%d lines: want one, a percentage", len(said))
	}
	p, err := strconv.ParseFloat(said[0], 64)
	if err != nil || !(p > 0 && p <= 100) { // NaN is neither
		return 0, fmt.Errorf("want a percentage above 0 and up to 100")
	}
	return p, nil
}

// numbers reads PIDs, one a line, and returns them in ascending order.
func numbers(said []string, most int) ([]int, error) {
	if len(said) > most {
		return nil, fmt.Errorf("%d PIDs: want at most %d", len(said), most)
	}
	var pids []int
	for _, line := range said {
		pid, err := strconv.Atoi(line)
		if err != nil || pid < 1 || pid > mostPID {
			return nil, fmt.Errorf("%.40q is no PID", line)
		}
		pids = append(pids, pid)
	}
	slices.Sort(pids)
	if len(slices.Compact(slices.Clone(pids))) != len(pids) {
		return nil, fmt.Errorf("a PID is there twice")
	}
	return pids, nil
}

// status reads a server's status; it is empty if the daemon does not know the command.
func status(said []string) (Status, error) {
	if len(said) != 1 {
		return "", fmt.Errorf("%d lines: want one, a status", len(said))
	}
	switch s := Status(said[0]); s {
	case Initializing, Active, Fault:
		return s, nil
	}
	if strings.HasPrefix(said[0], `Unknown command "get_server_status`) {
		return "", nil
	}
	return "", fmt.Errorf("want %s, %s or %s", Initializing, Active, Fault)
}
