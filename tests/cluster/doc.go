// SPDX-License-Identifier: Apache-2.0

// Cluster builds, starts and stops a one-node Kubernetes for the tests and the
// demo: a real etcd, API server, controller manager, scheduler, kubelet,
// containerd and runc, on a machine that has none of them installed and that is
// to look the same afterwards. 'cluster help' lists its commands.
//
// # What a node is
//
// Three processes deep:
//
//	cluster up        writes the configuration, starts what follows, waits for Ready
//	keeper            stays on the host: makes the cgroups, starts the first process,
//	                  and removes the cgroups when it, or the caller, has ended
//	first process     PID 1 of new mount, network, PID, IPC and UTS namespaces: puts the
//	                  root and the network together, starts the others, reaps them
//
// Everything else descends from that first process, shims and containers too.
// The kernel ends all of a PID namespace with its PID 1, and a mount or network
// namespace with its last process, so there is one thing to end and hardly
// anything to clean: `down` ends the keeper, the keeper ends PID 1, and the
// cgroups are emptied and removed. It then looks for what it should not find (a
// process in one of the node's namespaces, a mount, a cgroup, an interface) and
// says so. A node ends the same way when PID 1 is killed, when the keeper is
// killed (PID 1 gets a signal at its parent's death; the empty cgroups are left
// to the next down or up of that name), and, with --with-parent, when the
// process that called up has ended, however it did.
//
// # What it sees
//
// Its root is an overlay over the host's, with the upper layer in memory: the
// host's programs and libraries are there, and what is written stays inside.
// /proc, /sys, /dev, /run, /tmp, /var/log and the state directories of
// Kubernetes, containerd, CNI and CDI are its own. The cache and the directories
// given by --bind are the host's, at the same paths; containerd keeps its layers
// in the cache, as an overlay cannot lie on an overlay. The kubelet sets some
// kernel settings of the whole machine when it starts: it finds plain files in
// their place that hold what it wants. Anything may be mounted over /proc/driver,
// /proc/modules or /sys/bus/pci/devices by `cluster exec -- mount --bind`.
//
// Both ends of its veth pair are inside, so it reaches nothing and the host's
// network does not change. The host reaches the API server all the same: the
// keeper opens a port on the host's loopback and hands the listening socket to
// PID 1, which joins each connection to the API server. The address of the
// Service "kubernetes" lies on the node's loopback and the API server listens on
// port 443, so that pods reach it by the usual variables though there is no
// kube-proxy; other Services have no working address, and there is no DNS. Pods
// are on a bridge; they and the node reach one another.
//
// # A cluster of two nodes
//
// `cluster up --join NODE` starts a node without a control plane that is of the cluster of
// NODE, in namespaces of its own like any other. A veth pair leads from its network
// namespace into that of NODE, which is its gateway: to the API server, also at the
// Service's address, and to the pods of NODE and of others that have joined it. NODE has a
// route to its pods in turn, and reaches its kubelet for logs and exec. Its kubelet shows
// the API server a certificate of NODE's authority. It ends with NODE, however that does,
// or by `down`; the Node object stays in the cluster, as that of any machine that went
// away, and comes back to life when the name joins again.
//
// # What it is built from
//
// kubernetes, etcd and containerd below this directory are modules of their own,
// which keeps their requirements out of the product's go.mod. Debian's runc,
// CNI plugins, busybox and libseccomp are downloaded and unpacked, not installed.
// All goes to the cache, each part with a stamp of what it was made from: go.mod,
// go.sum, sources, flags and the Go release. Cold, on 2 cores, that takes about
// nine minutes, of which Kubernetes takes more than five; a node is Ready some
// five seconds after its start. What only some tests run on a node is built where it
// is asked for: `cluster build --with kueue`, or `--with liqo`. So is Helm, which needs no node.
//
// Other versions of Kubernetes, containerd 1.7 and CRI-O are built likewise, and chosen when a
// node starts: `cluster up --kubernetes 1.34 --runtime containerd-1.7`.
//
// No registry is involved: `cluster image` assembles images from files of this
// machine, the product's own too, and `cluster load` imports them. A node starts
// with localhost/busybox:test, localhost/glibc:test (busybox, the C library,
// ldconfig, getent, and dlopen-check, which prints which file a library's name
// leads to) and localhost/pause:test. Pods need imagePullPolicy: Never.
//
// What ends by itself once the node is up is started again, as systemd and static pods
// do on users' nodes; `cluster ps` says what had ended.
//
// Its kubelet has Kubernetes' own settings wherever the machine allows it: what is
// measured on this node is what users have. One of them is for tests to change, by
// --prompt-status: how often the kubelet looks at its node and the scheduler hears of
// what has changed.
//
// # An example
//
//	cluster build
//	cluster up --name demo --bind $PWD --label example.com/gpu=true
//	cluster start --name demo --restart driver -- $PWD/bin/driver-daemon
//	cluster kubectl --name demo -- apply -k deployments/base
//	cluster kill --name demo kubelet && cluster start --name demo kubelet
//	cluster up --name demo-2 --join demo --label example.com/gpu.site=cloud
//	cluster down --name demo
//
// # What it refuses to know
//
// GPUs, the agent, and what a test wants: it is a machine with Kubernetes on it.
// It has no kube-proxy, no name server and no way out.
package main
