// SPDX-License-Identifier: Apache-2.0

// Package crash kills the agent, as it is shipped, at every change that it makes
// to its directories and to the hardware, and holds what its successor makes of
// that against what the kubelet and the container runtime have.
//
// # The promise
//
// The agent may end at any moment: kill -9, a node without memory, an upgrade.
// What it has on disk is then between two states. Whatever that is, the next
// process must come to the truth, which others have: the kubelet, whose
// checkpoint and PodResources say who holds which device, the runtime, whose
// containers carry their allocations' keys, and the partition file. A running
// container must not notice.
//
// # How it is tested
//
// A program changes its files by system calls alone, so the moments that differ
// are those before each of them: opens that create or empty a file, writes,
// renames, unlinks, flushes, and their relatives (changing, in trace_test.go).
// An operation, such as a pod's start, is done once without a kill, which tells how
// many such calls below its CDI or state directory there are. Then the agent is killed at the
// entry of the first one, started again, and the
// node is compared with the truth; then at the second; and so on until the
// operation ends before the k-th call. A removal of what is not there changes nothing
// and does not count. Nothing is told to the agent and nothing
// is built into it: the program is the one that make build makes, run under
// ptrace with a seccomp filter, which stops it at these calls only. (Plain
// ptrace stops a program twice at each of its calls; for a Go program that is
// slow enough to change the order of what it does.) The kernel ends a tracee
// with its tracer, so no process is left behind however a test ends.
//
//	k  an Allocate and the start of its container
//	 1  write    state/allocations.journal
//	…
//	14  openat   cdi/.example.com-gpu-<key>.json.<random>.tmp
//	15  fchmod   the same
//	16  write    the same
//	17  fsync    the same
//	18  renameat cdi/example.com-gpu-<key>.json
//	19  fsync    cdi
//
// The order and the number may differ from one run to the next. An operation is
// tried on several nodes at once, which take the next k in turn, and lend on to the next
// operation.
//
// Around the agent are a kubelet's device manager, a container runtime's side
// of CRI, both over gRPC on unix sockets, and the emulated driver, with its
// libraries. The kubelet has the habits of the real one that matter here: a pod
// whose Allocate fails is lost and its controller makes another one;
// PreStartContainer is tried again; devices of ended pods become free when
// somebody asks, and the checkpoint is not written then. The runtime makes a
// container only if a CDI file defines its devices.
//
// Three things are the case during all operations, or made so by one, since the agent
// has given way to them once: in the checkpoint stands, for each GPU, an entry of a
// pod that another device plugin gave it to and that ended long ago; a container goes
// on after its pod was deleted by force, and the next pod is to get other devices, as
// there are some; the partition file asks for more devices than a node may have, and
// what was in force stays so.
//
// # What is asserted
//
// On the way, of every list that the agent sends: a device that somebody holds
// is in it, Healthy, and a device that was on offer a moment ago is in it. Of
// every call: an Allocate of devices that are listed Healthy is refused by
// nobody but a dead agent, and after a PreStartContainer that was answered the
// container can be made.
//
// At the end, and again after the agent has looked at everything once more: its
// allocations are the devices that the kubelet and the runtime hold, with their pods'
// names; there are CDI files for those and no others; a running container's file
// is the same to the byte; no temporary file is left; what is held or free is
// listed Healthy and what is withdrawn is not; the partition's state is right.
//
// # Claims
//
// Where a node's GPUs are offered through DRA there is a real API server besides
// (tests/plane), and the kubelet registers the driver, has claims prepared and
// unprepared, and keeps its account of them. The agent's way to the server leads through
// this program, and each request by which it changes a ResourceSlice or a claim is two
// more moments at which it is killed: before the request goes out, and when the server
// has done it and the agent has not heard so. They are counted with the changes of files:
//
//	52  fsync       cdi
//	53  patch       resourceclaims/<name>/status
//	54  done patch  resourceclaims/<name>/status
//
// A call that ended with the agent is made again, as the kubelet does, and has to succeed
// then. At the end the allocations are what the kubelet's account and the containers name,
// with CDI devices whose names follow from the claim and the request alone; the slices
// have each device of the layouts once, without a taint, or with one where a change waits;
// the instances under containers are those that were, and each claim's status says what it
// has.
//
// The same is done with the kubelet killed at these moments: it starts again at once,
// deletes the node's slices, and has what it does not know to be prepared prepared again.
// And the agent is started, and killed meanwhile, after a reboot (no containers, no
// instances, no CDI files, another boot), after its own files were lost, after the
// kubelet's account was, and after both were.
//
// # The Node
//
// On other nodes what counts is the Node and the GPUNode, at a real API server too, where the
// agent has the manifests' rights and is held to their policies: each request by which it
// changes one of them is two moments more. Such a node lives
// through what nodes meet: it boots and is registered with a taint, pods come and fill it
// and end, all its GPUs fail and recover, its driver is let go and comes back, its GPUs are
// cordoned and given back, its agent is updated, it is registered anew, and it is cleaned.
// After each of these, and each kill in it, the condition GPUReady, the startup taint, the
// annotation for Cluster Autoscaler and the cordon are what they should be; a watch records
// every version of the Node on the way. GPUReady is said to be True only while the kubelet
// has the devices; the taint goes only while GPUReady is True and the Node shows the devices,
// and does not come back; after the cleanup nothing is left of what agents write.
//
// # Changes of the hardware
//
// The agent changes the driver's state, too: it destroys and makes MIG instances
// and switches modes. There is no telling a driver to forget, so what counts is
// what stands after a change was cut. Each change of a list, such as an edit of two
// GPUs' geometries (eight destroyed and seven made, beside an instance that a pod is
// on and a GPU that waits for another pod), is made there and back, and at the k-th
// call of it one of three things happens: the call fails and does nothing; the
// agent is killed and the call does nothing; the agent is killed while the hardware
// is at it, and it does its work. Calls are counted by their names, for those that
// change something, and all together, readings too; the emulated driver is told at
// which k to do what, and kills nothing itself: this program does when it sees that
// the call has come. And the agent is killed at each change of its files meanwhile.
//
// When a call has failed, the agent says so, and at that moment, before it tries
// again, each GPU has the instances that it had, every one in its place, or those
// that it is to have. On demand, each instance that is gone has one in its place
// that a pod has. At the end, whatever happened, the GPUs are as the partition file
// wants them, or blocked; the instances that pods are on were never made anew, and
// each container has the device nodes of its instances and no others.
//
// # Files that were not written whole
//
// Besides, each file of the state directory is cut short, at a sample of its
// lengths or (-long) at all of them, as a file system may leave it after a loss
// of power, and the agent has to come to the same truth.
//
// # A third, and what has changed
//
// There are hundreds of points: changes at which a process is killed, calls of the driver,
// lengths of files. -short, as make test has it, does each operation once without a kill, so
// that a change of a new kind is noticed, and tries a third of the points. It is the same third in
// every run: a hash of the operation's name and of k says whether a point is in it. Where all
// changes of an operation are points, one of each kind is. Whether a point holds depends on the
// code that makes the change, so beyond the third every point is tried of the kinds of which that
// code has changed since the last run that tried everything:
//
//	kind                           is changed by
//	CDI files                      pkg/cdi, internal/atomicfile, internal/agent/gates.go, …
//	the journal of allocations     internal/state, internal/atomicfile, internal/agent/journal.go, …
//	ResourceSlices                 internal/dra, internal/kube/agentkube, internal/agent/claims.go
//	the hardware                   pkg/gpu/nvml, pkg/mig, internal/plan, internal/agent/work.go, …
//
// The table is in kinds_test.go, and a change of a file that is of no kind there fails. The file
// proved names the commit of that run. A package counts for the kinds that it writes, or decides
// the bytes or the order of; of internal/agent, which has others write everything, each file
// counts for what it calls. So after a change in, say, the ledger, or in how the agent makes its
// status, -short tries the third alone, and so it does after one of go.mod, of a doc.go or of the
// tests; the rest is for make test-all. Where git or that commit is not to be had, everything is
// tried. Each test says, with -v, what is tried and why.
//
// Of claims, Nodes and the hardware a run without -short or -long tries a sample, and "every
// point" is every one of the sample.
//
// A run that passes does not change the file by itself. Now and then, best before a release,
// somebody has a run renew it, in a checkout without changes, and commits it:
//
//	go test ./tests/crash -count=1 -timeout 30m -renew
//
// It does nothing but say why with -short or -run, where a test was skipped, and where
// something was edited meanwhile.
//
//	go test ./tests/crash                    the agent that make build makes; some minutes
//	go test ./tests/crash -short             a third of it, and what has changed
//	go test ./tests/crash -built             the agent that make image has left in the cache
//	go test ./tests/crash -v -agent PROGRAM  another one; -v prints the number of points and the seconds
//	go test ./tests/crash -run Rollback -before PROGRAM  back to an older agent, and forth, under load
//	go test ./tests/crash -run FirstRelease  the same from the agent of v0.1.0, where the clone has that tag
//	go test ./tests/crash -seed 7            other samples of the calls
//	go test ./tests/crash -long -timeout 4h  every call, every change around claims and Nodes, and every length
//
// # What it does not know
//
// No time is judged: how long the agent takes to come to the truth is measured
// elsewhere, and what is awaited here may take a minute and a half. Power is not
// cut: what the agent has not flushed survives a kill. System calls are read on
// linux/amd64 only; elsewhere, and where ptrace is not permitted, the tests are
// skipped.
package crash
