// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

const usage = `cluster builds, starts and stops a one-node Kubernetes in namespaces of its own.

usage: cluster COMMAND [FLAGS] [ARGUMENTS]      (flags come before arguments; what follows -- is passed on untouched)

  build                              fetch and build every part that the cache lacks
  up      [--name N] [--join NODE] [--label k=v,...] [--bind DIR]... [--max-pods COUNT] [--with-parent] [--timeout D]
          [--kubernetes VERSION] [--runtime PART]
                                     start a node; returns when it is Ready
                                       --join NODE     no control plane: it is of the cluster of NODE, which runs, and ends with it
                                       --bind DIR      the host's directory DIR is also there inside, writable, at the same path
                                       --with-parent   the node ends when the calling process ends, however it ends
  down    [--name N]                 end everything, then prove that nothing is left; nothing to end is no error
  list                               the nodes there are, one a line: name, state, PID of its first process
  exec    [--name N] [--env K=V]... -- COMMAND...
                                     run COMMAND inside the node's namespaces; its exit status is passed on
  kubectl [--name N] -- ARGUMENTS... kubectl as administrator, on the files of the caller
  start   [--name N] [--restart] [--env K=V]... PROCESS [-- COMMAND...]
                                     a further process inside the node, logging to logs/PROCESS.log; without COMMAND,
                                     one that was stopped is started again; --restart starts it whenever it ends
  stop    [--name N] PROCESS         SIGTERM (SIGKILL after 20 s), and it stays down
  kill    [--name N] PROCESS         SIGKILL, and it stays down
  restart [--name N] PROCESS         stop, then start
  pid     [--name N] PROCESS         print its PID in the node (0: not running) and how often it was started
  ps      [--name N]                 all processes with their states
  logs    [--name N] PROCESS         print its log
  cpusets [--name N] keep|drop       whether containers get the CPU sets that the kubelet asks for; drop is for a kubelet
                                     that is shown CPUs which this machine has not
  leaves  [--name N] make|none       whether containers get a cgroup in the unified hierarchy, on a machine where runc makes none
                                     because it has cgroups of both versions
  load    [--name N] FILE.tar...     import image archives into containerd
  image   --out FILE.tar --name REFERENCE ...
                                     assemble an image from files ('cluster image -h' tells how)
  registry [--listen ADDRESS]        serve an empty registry of images and charts, without TLS and in memory; for start
  path    [--name N] WHAT            print the path of: run, kubeconfig, logs, bin, images

PROCESS is one of etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd, kubelet, or a name given to start.
N is "demo" unless given; it names the Kubernetes Node too. Everything is kept below $GPU_TESTS_CACHE, which defaults to
${XDG_CACHE_HOME:-$HOME/.cache}/gpu-agent.
`

// exitStatus carries the exit status of a command that ran for the user; it is
// passed on without a message, as the command has said what it had to say.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

func main() {
	var err error
	switch {
	case os.Args[0] == execHelper:
		err = execHelperMain(os.Args[1:])
	case os.Args[0] == runtimeLink:
		err = runtimeMain(os.Args[1:])
	case os.Args[0] == crioRunc:
		err = crioRuncMain(os.Args[1:])
	default:
		err = run(os.Args[1:])
	}
	os.Exit(report(err))
}

// report prints an error, if there is one to print, and returns the exit status
// that stands for it.
func report(err error) int {
	var status exitStatus
	switch {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return int(status)
	case errors.Is(err, exec.ErrNotFound):
		fmt.Fprintf(os.Stderr, "cluster: %v\n", err)
		return 127 // as a shell says it
	}
	fmt.Fprintf(os.Stderr, "cluster: %v\n", err)
	return 1
}

func run(args []string) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return exitStatus(2)
	}
	command, args := args[0], args[1:]
	switch command {
	case "help", "-h", "--help":
		fmt.Print(usage)
		return nil
	case keeperCommand:
		return keeperMain(args)
	case initCommand:
		return initMain(args)
	}
	commands := map[string]func(context.Context, Layout, []string) error{
		"build": buildCommand, "up": upCommand, "down": downCommand, "list": listCommand,
		"exec": execCommand, "kubectl": kubectlCommand,
		"start": startCommand, "stop": processCommand("stop"), "kill": processCommand("kill"), "restart": processCommand("restart"),
		"cpusets": cpusetsCommand, "leaves": leavesCommand, "pid": pidCommand, "ps": psCommand, "logs": logsCommand,
		"load": loadCommand, "image": imageCommand, "registry": registryCommand, "path": pathCommand,
	}
	f, ok := commands[command]
	if !ok {
		return fmt.Errorf("no command %q; 'cluster help' lists them", command)
	}
	layout, err := findLayout()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return f(ctx, layout, args)
}

// nodeFlags is the flag set every command that speaks of one node shares.
func nodeFlags(command, arguments string) (*flagSet, *string) {
	fs := newFlagSet(command, arguments)
	return fs, fs.String("name", "demo", "name of the node")
}

func execCommand(ctx context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("exec", "-- COMMAND...")
	var env list
	fs.Var(&env, "env", "set K=V for the command; repeatable")
	rest, err := fs.parse(args, 1, -1)
	if err != nil {
		return err
	}
	n, err := l.running(*name)
	if err != nil {
		return err
	}
	cmd := n.command(ctx, l, rest...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = withEnv(cmd.Env, env...)
	return statusOf(n.enter(cmd))
}

// statusOf turns the failure of a command that did run into its exit status, as
// a shell counts it: 128 and the signal for one that was ended by a signal.
func statusOf(err error) error {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return exitStatus(128 + int(ws.Signal()))
	}
	return exitStatus(exit.ExitCode())
}

func kubectlCommand(_ context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("kubectl", "-- ARGUMENTS...")
	rest, err := fs.parse(args, 0, -1)
	if err != nil {
		return err
	}
	n, err := l.running(*name)
	if err != nil {
		return err
	}
	env := withEnv(os.Environ(), n.kubectlEnv()...)
	spec, err := n.spec()
	if err != nil {
		return err
	}
	program := l.path("bin", spec.Kubernetes, "kubectl")
	if err := syscall.Exec(program, append([]string{"kubectl"}, rest...), env); err != nil {
		return fmt.Errorf("run %s: %w", program, err)
	}
	return nil
}

func startCommand(_ context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("start", "PROCESS [-- COMMAND...]")
	restart := fs.Bool("restart", false, "start it again whenever it ends by itself")
	var env list
	fs.Var(&env, "env", "set K=V for the command; repeatable")
	rest, err := fs.parse(args, 1, -1)
	if err != nil {
		return err
	}
	n, err := l.running(*name)
	if err != nil {
		return err
	}
	proc, command := rest[0], rest[1:]
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	req := request{Op: "start", Process: Process{Name: proc, Command: command, Env: env, Restart: *restart}}
	_, err = n.ask(req)
	return err
}

func processCommand(op string) func(context.Context, Layout, []string) error {
	return func(_ context.Context, l Layout, args []string) error {
		fs, name := nodeFlags(op, "PROCESS")
		rest, err := fs.parse(args, 1, 1)
		if err != nil {
			return err
		}
		n, err := l.running(*name)
		if err != nil {
			return err
		}
		_, err = n.ask(request{Op: op, Process: Process{Name: rest[0]}})
		return err
	}
}

func pidCommand(_ context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("pid", "PROCESS")
	rest, err := fs.parse(args, 1, 1)
	if err != nil {
		return err
	}
	n, err := l.running(*name)
	if err != nil {
		return err
	}
	state, err := n.process(rest[0])
	if err != nil {
		return err
	}
	fmt.Println(state.PID, state.Starts)
	return nil
}

func psCommand(_ context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("ps", "")
	if _, err := fs.parse(args, 0, 0); err != nil {
		return err
	}
	n, err := l.running(*name)
	if err != nil {
		return err
	}
	states, err := n.ask(request{Op: "ps"})
	if err != nil {
		return err
	}
	fmt.Printf("%-26s %6s %6s  %s\n", "PROCESS", "PID", "STARTS", "STATE")
	for _, s := range states {
		fmt.Printf("%-26s %6d %6d  %s\n", s.Name, s.PID, s.Starts, s.State)
	}
	return nil
}

func logsCommand(_ context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("logs", "PROCESS")
	rest, err := fs.parse(args, 1, 1)
	if err != nil {
		return err
	}
	f, err := os.Open(l.node(*name).log(rest[0]))
	if err != nil {
		return fmt.Errorf("open the log of %s: %w", rest[0], err)
	}
	defer f.Close()
	_, err = io.Copy(os.Stdout, f)
	return err
}

func loadCommand(ctx context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("load", "FILE.tar...")
	rest, err := fs.parse(args, 1, -1)
	if err != nil {
		return err
	}
	n, err := l.running(*name)
	if err != nil {
		return err
	}
	for _, file := range rest {
		if err := n.load(ctx, l, file); err != nil {
			return err
		}
	}
	return nil
}

func listCommand(_ context.Context, l Layout, args []string) error {
	if _, err := newFlagSet("list", "").parse(args, 0, 0); err != nil {
		return err
	}
	nodes, err := l.nodes()
	if err != nil {
		return err
	}
	for _, n := range nodes {
		state, pid := "ended", 0
		if s, err := n.state(); err == nil && s.alive() {
			state, pid = "running", s.Init.PID
		}
		fmt.Printf("%s\t%s\t%d\n", n.name, state, pid)
	}
	return nil
}

func pathCommand(_ context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("path", "WHAT")
	rest, err := fs.parse(args, 1, 1)
	if err != nil {
		return err
	}
	n := l.node(*name)
	paths := map[string]string{
		"run": n.dir, "kubeconfig": n.path("kubeconfig"), "logs": n.path("logs"),
		"bin": l.path("bin"), "images": l.path("images"),
	}
	p, ok := paths[rest[0]]
	if !ok {
		return fmt.Errorf("no path %q; there are run, kubeconfig, logs, bin, images", rest[0])
	}
	fmt.Println(p)
	return nil
}
