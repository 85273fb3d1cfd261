// SPDX-License-Identifier: Apache-2.0

// Package mps keeps MPS control daemons, one for each GPU. MPS is NVIDIA's means to give programs
// shares of a GPU's multiprocessors: a client of MPS has at most the active thread percentage of
// its server. MPS fails open. A program that does not reach its daemon runs without a share, and
// the control program ignores bad values and exits with 0. So this package reads back every value
// that it sets, and counts an answer that it cannot read as a failure.
//
// # Who does what
//
//	agent ──socket──▶ Supervisor ──runs──▶ control program ──socket──▶ daemon ──▶ server ──▶ clients
//	                      ▲                                              ▲
//	                      └───────────────── Init ───────────────────────┘  parent of both
//
// [Init] is the first process of its pod and does nothing that can fail. It starts the supervisor,
// starts it again when it ends, and reaps processes. Daemons are Init's children, too. So the end
// of a supervisor, also by kill -9, ends no daemon and no client.
//
// The [Supervisor] has a keeper for each GPU. A keeper makes rounds, twice a second and when the
// agent asks. A round finds the daemon or starts it, asks it what is, and sets what is different.
// Another daemon that hangs does not delay it. The supervisor writes down what the agent wants
// before it acts, so that its successor goes on by itself.
//
// The agent asks through a [Client]. It gives all that shall be, and the answer is what is:
//
//	c := mps.NewClient("/var/lib/gpu-agent")
//	state, err := c.Sync(ctx, []mps.Want{{GPU: "GPU-8f5e…", Percent: 26}})
//	for _, d := range state.Daemons {
//		if errors.Is(d.Err(), mps.NoMultiUser) { … }
//	}
//
// # The walk of one percentage
//
// Want.Percent is 26. The supervisor checks its bounds, writes want.json, and wakes the keeper. The
// keeper starts the driver's nvidia-cuda-mps-control -f -multiuser-server with the GPU's UUID as
// the only visible device. When the daemon listens, the keeper tells it
// "set_default_active_thread_percentage 26" and then "get_default_active_thread_percentage". Only
// if the second answer is 26.0 does it link the daemon's socket into the directory that containers
// get. So no server exists before the percentage is in force. When the agent has set the compute mode
// it says so with Want.Serve, and the keeper starts the server ("start_server -uid 0") and keeps one:
// without a server the first process that comes would have the card. A server that ends soon, as one
// does without a card, is started again after a pause, which the agent learns. If the agent wants
// another value later, the keeper sets it for the next server and for the one that runs; contexts
// that exist keep theirs. Each round reads both values again. Daemon.Percent and Server.Percent are always
// what was read, never what was set.
//
// # Files
//
// Below <state directory>/mps, root's:
//
//	want.json                what the agent has said last
//	lock                     held by the running supervisor
//	<UUID>/control/          the daemon's own directory; mode 0700, no container gets it
//	<UUID>/pipe/             hard links of control/control and control/log, for containers
//	<UUID>/pipe/beat         when the daemon has last answered; see beat.go
//	<UUID>/lib/              links to the driver's libraries, if they are not where the linker looks
//	<UUID>/output, logs/     what the daemon prints; truncated when it becomes large
//
// A container with control/control_privileged and a root of its own could change the percentages
// and end the daemon. That is why containers get a directory of links. With control/control alone,
// daemons refuse the default percentage and quit to everybody.
//
// # Finding a daemon
//
// The kernel tells which process listens at a socket (SO_PEERCRED). A daemon makes the socket for
// control programs before the one for clients, so one that listens at control/control can be asked.
// A keeper adopts the process if its arguments, its directory and GPU in the environment, and its
// program are right, and if it still has the same start time afterwards. PID and start time
// identify it from then on. A socket without a listener is stale and is removed. Before a start the
// keeper looks through /proc for processes of its own mount namespace with this directory. It waits
// for a daemon that has not listened yet. It reports servers of a dead daemon ([Orphans]) and
// starts none beside them, until the agent has seen by the driver's lists that they have no clients
// (Want.EndOrphans).
//
// # What it takes from a control program
//
// Text with bounds. After each command the keeper sends an unknown one with a random name; the
// daemon's refusal of that name is the end of the answer. So no answer, an empty answer and half
// an answer are different. A daemon serves one control program at a time, so that program's run
// has a deadline, and dies with the supervisor.
//
// # Probes
//
// A server may say that it is active and serve nobody: cuInit then does not return. What a container
// says of that is not believed. So [Supervisor.Probe] starts a short-lived program that calls cuInit
// with the directory that containers get, and has five seconds. It is no part of a round.
//
// # Limits
//
// Without a socket in PipeDir a program runs, without MPS. So a directory that is not open holds no
// program back: the caller refuses containers while there is a Problem, or Answered is old. The
// library in a container reads beat, and refuses CUDA while it is old.
//
// A driver whose daemon has no multi-user mode is refused ([NoMultiUser]): 550 and older. The
// supervisor must be in the host's PID namespace, or no PID means anything. Root in a container may
// tell its daemon to detach other clients, and to change a server's percentage until the next round
// sets it back. It may keep the daemon's one place for a control program; then Answered grows old.
//
// The package does not know partitions, containers or memory limits, sets no compute mode, and never
// uses MPS's memory limits. It ends a daemon that hangs only if that has no server and is to be
// replaced.
//
// # MPS v3
//
// control.go has the interface that a second back end would satisfy. With v3 (R615, R620) a daemon
// has servers and namespaces by name, from a TOML file at its start. That file would take the place
// of the settings, and the control program's exit code and subcommands that of the marks. A
// namespace does not inherit its server's limits, so a percentage would be set and read in
// both. A server for a UUID that does not exist is reported as made and vanishes: reading back
// would have to list the servers. R620 routes clients by cgroup, which would replace pipe/.
package mps
