// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the agent on a real Kubernetes node: a kubelet, containerd
// and an API server, the agent as its own DaemonSet, pods that ask for GPUs.
// Only the NVIDIA driver is emulated, at its interface.
//
// One node serves all tests, as a node takes longer to start than a test to
// run. It is started when the first test wants it and ends with the test
// program, however that ends; then nothing of it may be left on the machine.
// Each test begins on a node where nobody has asked for a GPU yet (see
// lab.Agent.Reset) with partitions of its own, so order does not count.
//
//	go test ./tests/e2e -run TestRefusal -v
//
// builds what is missing in the cache, which takes minutes the first time.
// With -built everything is taken to be built. The tests are skipped, with the
// reason, where a node cannot run, and by -short without -built.
//
// There are three forms. With -short, as make test has it, there is one test for each thing that
// only a real kubelet, containerd, scheduler and API server show together:
//
//	TestAgentRestart                  containers run on, and nothing is given out twice, when agent and kubelet start anew
//	TestCaps                          a program in a container is held to its memory, beside a whole GPU too, and the next one begins from zero
//	TestAllocations                   the next holder waits for a container that outlives its pod
//	TestEverythingRestartsWithoutAPI  they do so without an API server, too, and an init container runs on
//	TestFaults                        a GPU that is lost leaves the offer, and its pod's status says so
//	TestGPUNode                       the node's object is there, and is the Node's
//	TestHeldIDAfterPartitionChange    a new kubelet admits pods again whose GPUs are to be something else
//	TestInitAndAppContainers          an init container and its app containers have one GPU
//	TestMIGLive                       geometries change beside pods that run and come
//	TestMIGOnDemand                   pods of mixed profiles come and go, each on an instance of its own
//	TestOthersGoAndComeBack           containers run on while containerd is away
//	TestPark                          a program is parked while a guaranteed pod has its room, and goes on with its contents
//	TestRefusal                       the user reads why
//	TestResourceClaims                the scheduler places claims, and the kubelet has them prepared and given back
//	TestTopology                      GPUs and CPUs of one NUMA node
//	TestWatchdog                      a container over its cap is ended, and no other
//	TestWithdrawalDuringAllocate      the kubelet lives while devices leave its lists
//
// What the agent decides by itself the tests of its packages show, and not these. Without -short, as
// make test-all has it, they go on to what else needs the node. -long has the full counts.
//
// The tests of MIG swap the node's GPUs for others, whose mode takes a reset to
// change and whose operations take the time that hardware's do, and give the
// usual ones back. What is true of instances is what the emulated hardware says
// stands, by numbers that no two creations share; what the kubelet was told is a
// recording of the streams.
//
// The tests of topology swap the whole machine: its PCI bus, NVLinks and NUMA nodes,
// with more CPUs than there are. For one of them the kubelet is started anew as one
// that aligns CPUs and devices (see lab.Node.Align); what it gave to whom is its own
// word, and where the hardware has it is the emulated hardware's.
//
// Where memory counts, programs inside containers take it until they are refused
// (see lab.Probe), and the driver's own figure is what they are held to.
//
// Most tests wait for what the node offers, and its kubelet looks at the node every
// second for them. A figure that depends on when the scheduler hears of a change, such
// as how many pods are refused, is taken with the settings of users' kubelets, which
// look every ten seconds (see bench.usersStatus): all of TestMIGOnDemand and TestWindow, and in the
// long form the restarts and the reboot.
// TestPodStatusStorm counts what the kubelet writes into the pods' status.
//
// What the agent writes down of who had what is read from the journal on the node, by the names
// of fields that users are promised.
//
// Alerts are those of the shipped rules, in Debian's Prometheus, which scrapes the node's agent and
// placer as the PodMonitors say: TestAlerts causes each of them on the node, faster by one number, and
// the long form of TestWalk has them at their own pace beside it.
//
// Bad days are drilled in drill_test.go: the API server is away, busy, slow and restored, the kubelet stands still and
// its certificate expires, and a GPU dies with twenty tenants. What was seen is in docs/runbooks.md. Troubles last for
// seconds, and with -long for as long as they are feared, in a stage of their own.
//
// What a container has is always looked at from its inside: its device nodes,
// and what the loader finds under the name libcuda.so.1.
package e2e
