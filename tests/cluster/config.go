// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// The processes that make a node. etcd, the container runtime and the API server start at
// once; the others when the API server and the runtime answer.
const (
	procEtcd       = "etcd"
	procContainerd = "containerd"
	procCRIO       = "crio"
	procAPI        = "kube-apiserver"
	procKubelet    = "kubelet"
	procScheduler  = "kube-scheduler"
	procController = "kube-controller-manager"
)

// nodeProcesses returns the command lines of a node; one that has joined another has no
// control plane. Paths are the node's own.
func nodeProcesses(spec Spec) []Process {
	const etc = "/etc/kubernetes/"
	commands := [][]string{
		spec.runtime().command,
		{procKubelet, "--config=" + etc + "kubelet.yaml", "--config-dir=" + etc + "kubelet.d", "--kubeconfig=" + etc + "kubelet.conf",
			"--hostname-override=" + spec.Name, "--node-ip=" + spec.nodeIP(), "--node-labels=" + spec.Labels},
	}
	var out []Process
	for _, c := range commands {
		out = append(out, Process{Name: c[0], Command: c})
	}
	if spec.Join == nil {
		for _, c := range controlPlane(spec) {
			out = append(out, Process{Name: c[0], Command: c, Env: []string{lessGarbage}})
		}
	}
	return out
}

// lessGarbage has a control plane look for garbage when its memory has grown to five times
// what it needs, not twice: that costs it much of its processor time, and its memory is small.
const lessGarbage = "GOGC=400"

func controlPlane(spec Spec) [][]string {
	const etc = "/etc/kubernetes/"
	return [][]string{
		{procEtcd, "--name=" + spec.Name, "--data-dir=/var/lib/etcd/data", "--unsafe-no-fsync", "--logger=zap",
			"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
			"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
			"--initial-cluster=" + spec.Name + "=http://127.0.0.1:2380"},
		{procAPI, "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", "--secure-port=443",
			"--advertise-address=" + spec.nodeIP(), "--service-cluster-ip-range=" + serviceCIDR,
			"--tls-cert-file=" + etc + "apiserver.crt", "--tls-private-key-file=" + etc + "apiserver.key",
			"--client-ca-file=" + etc + "ca.crt", "--token-auth-file=" + etc + "tokens.csv", "--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + etc + "serviceaccount.key",
			"--service-account-signing-key-file=" + etc + "serviceaccount.key",
			"--kubelet-preferred-address-types=InternalIP", "--allow-privileged=true"},
		{procController, "--kubeconfig=" + etc + "admin.conf", "--leader-elect=false", "--bind-address=127.0.0.1",
			"--root-ca-file=" + etc + "ca.crt", "--service-account-private-key-file=" + etc + "serviceaccount.key",
			// As kubeadm has it: the API server's authority signs its clients.
			"--cluster-signing-cert-file=" + etc + authorityFile, "--cluster-signing-key-file=" + etc + authorityKey},
		{procScheduler, "--kubeconfig=" + etc + "admin.conf", "--leader-elect=false", "--bind-address=127.0.0.1"},
	}
}

// promptStatus is what a kubelet reads beside its configuration, from promptFile,
// where spec.PromptStatus says so. One without it has Kubernetes' defaults, as
// users' kubelets have: it looks at its node every ten seconds, and writes what it
// finds when that has changed, and at least every five minutes.
const (
	promptFile   = "kubernetes/kubelet.d/10-prompt-status.conf"
	promptStatus = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
nodeStatusUpdateFrequency: 1s
nodeStatusReportFrequency: 1m
`
)

// writeConfig writes every file that the node's processes read, and returns how
// administrators get at the API server.
func writeConfig(n Node, l Layout, spec Spec) (admin, error) {
	keys, err := newKeys(spec)
	if spec.Join != nil {
		keys, err = loadKeys(l.node(spec.Join.Name))
	}
	if err != nil {
		return admin{}, err
	}
	files, err := keys.files(spec)
	if err != nil {
		return admin{}, err
	}
	files["kubelet.yaml"] = []byte(kubeletConfig(spec))
	var st unix.Statfs_t
	// An overlay cannot hold another one's upper layer.
	overlays := unix.Statfs(n.dir, &st) != nil || st.Type != unix.OVERLAYFS_SUPER_MAGIC
	all := map[string][]byte{"cni/net.d/10-node.conflist": []byte(cniConfig(spec))}
	for name, content := range spec.runtime().config(l, overlays) {
		all[name] = []byte(content)
	}
	for name, content := range files {
		all["kubernetes/"+name] = content
	}
	for name, content := range all {
		file := n.path("etc", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return admin{}, err
		}
		if err := os.WriteFile(file, content, 0o600); err != nil {
			return admin{}, err
		}
	}
	for _, name := range []string{"manifests", "kubelet.d"} {
		if err := os.MkdirAll(n.path("etc", "kubernetes", name), 0o755); err != nil {
			return admin{}, err
		}
	}
	if spec.PromptStatus {
		if err := os.WriteFile(n.path("etc", promptFile), []byte(promptStatus), 0o600); err != nil {
			return admin{}, err
		}
	}
	return keys.admin, nil
}

func kubeletConfig(spec Spec) string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
# The kubelet's own port is reached inside the node's network namespace only.
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: %s
failCgroupV1: false
failSwapOn: false
# Lowering one's own score takes CAP_SYS_RESOURCE.
oomScoreAdj: 0
containerRuntimeEndpoint: unix://%s
podLogsDir: /var/log/pods
staticPodPath: /etc/kubernetes/manifests
fileCheckFrequency: 1s
# No name server: nothing listens there, so a lookup fails at once.
clusterDNS: ["%s"]
clusterDomain: cluster.local
resolvConf: ""
maxPods: %d
# The disk is the host's: how full it is must not end a test's pods.
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi, nodefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.available: "0%%", imagefs.inodesFree: "0%%"}
eventRecordQPS: 0
`, spec.cgroup(), spec.runtime().socket, spec.nodeIP(), spec.MaxPods)
}

func cniConfig(spec Spec) string {
	return strings.TrimLeft(fmt.Sprintf(`
{
  "cniVersion": "1.0.0",
  "name": "node",
  "plugins": [{
    "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
    "ipam": {
      "type": "host-local",
      "ranges": [[{"subnet": %q, "gateway": %q}]],
      "routes": [{"dst": "0.0.0.0/0"}]
    }
  }]
}
`, spec.podCIDR(), spec.podGateway()), "\n")
}
