// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The processes that make a node, in the order of their start. etcd, containerd
// and the API server start at once; the others when the API server answers.
const (
	procEtcd       = "etcd"
	procContainerd = "containerd"
	procAPI        = "kube-apiserver"
	procKubelet    = "kubelet"
	procScheduler  = "kube-scheduler"
	procController = "kube-controller-manager"
)

const containerdSocket = "/run/containerd/containerd.sock"

// nodeProcesses returns the command lines of a node. Paths are the node's own.
func nodeProcesses(spec Spec) []Process {
	const etc = "/etc/kubernetes/"
	commands := [][]string{
		{procEtcd, "--name=" + spec.Name, "--data-dir=/var/lib/etcd/data", "--unsafe-no-fsync", "--logger=zap",
			"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
			"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
			"--initial-cluster=" + spec.Name + "=http://127.0.0.1:2380"},
		{procContainerd, "--config=/etc/containerd/config.toml"},
		{procAPI, "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", "--secure-port=443",
			"--advertise-address=" + spec.nodeIP(), "--service-cluster-ip-range=" + serviceCIDR,
			"--tls-cert-file=" + etc + "apiserver.crt", "--tls-private-key-file=" + etc + "apiserver.key",
			"--token-auth-file=" + etc + "tokens.csv", "--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + etc + "serviceaccount.key",
			"--service-account-signing-key-file=" + etc + "serviceaccount.key",
			"--kubelet-preferred-address-types=InternalIP", "--allow-privileged=true"},
		{procKubelet, "--config=" + etc + "kubelet.yaml", "--config-dir=" + etc + "kubelet.d", "--kubeconfig=" + etc + "kubelet.conf",
			"--hostname-override=" + spec.Name, "--node-ip=" + spec.nodeIP(), "--node-labels=" + spec.Labels},
		{procController, "--kubeconfig=" + etc + "admin.conf", "--leader-elect=false", "--bind-address=127.0.0.1",
			"--root-ca-file=" + etc + "ca.crt", "--service-account-private-key-file=" + etc + "serviceaccount.key"},
		{procScheduler, "--kubeconfig=" + etc + "admin.conf", "--leader-elect=false", "--bind-address=127.0.0.1"},
	}
	var out []Process
	for _, c := range commands {
		out = append(out, Process{Name: c[0], Command: c})
	}
	return out
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

// writeConfig writes every file that the node's processes read, and the
// administrator's kubeconfig for the host except for its port.
func writeConfig(n Node, l Layout, spec Spec) (adminToken string, ca []byte, err error) {
	adminToken, kubeletToken := newToken(), newToken()
	files, err := makeKeys(spec)
	if err != nil {
		return "", nil, err
	}
	ca = files["ca.crt"]
	server := "https://" + spec.nodeIP()
	files["tokens.csv"] = []byte(fmt.Sprintf("%s,admin,admin,system:masters\n%s,system:node:%s,kubelet,system:nodes\n",
		adminToken, kubeletToken, spec.Name))
	files["admin.conf"] = kubeconfig(spec.Name, server, ca, adminToken)
	files["kubelet.conf"] = kubeconfig(spec.Name, server, ca, kubeletToken)
	files["kubelet.yaml"] = []byte(kubeletConfig(spec))
	snapshotter := "overlayfs"
	var st unix.Statfs_t
	if unix.Statfs(n.dir, &st) == nil && st.Type == unix.OVERLAYFS_SUPER_MAGIC {
		snapshotter = "native" // an overlay cannot hold another one's upper layer
	}
	all := map[string][]byte{
		"containerd/config.toml":     []byte(containerdConfig(l, snapshotter)),
		"cni/net.d/10-node.conflist": []byte(cniConfig(spec)),
	}
	for name, content := range files {
		all["kubernetes/"+name] = content
	}
	for name, content := range all {
		file := n.path("etc", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return "", nil, err
		}
		if err := os.WriteFile(file, content, 0o600); err != nil {
			return "", nil, err
		}
	}
	for _, name := range []string{"manifests", "kubelet.d"} {
		if err := os.MkdirAll(n.path("etc", "kubernetes", name), 0o755); err != nil {
			return "", nil, err
		}
	}
	if spec.PromptStatus {
		if err := os.WriteFile(n.path("etc", promptFile), []byte(promptStatus), 0o600); err != nil {
			return "", nil, err
		}
	}
	return adminToken, ca, nil
}

func newToken() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return hex.EncodeToString(b[:])
}

// makeKeys returns a certificate authority of the node's own, the API server's
// certificate from it, and the key that signs service accounts' tokens.
func makeKeys(spec Spec) (map[string][]byte, error) {
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make keys: %w", err)
	}
	template := func(serial int64, name string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
			KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
		}
	}
	ca := template(1, "node "+spec.Name)
	ca.IsCA, ca.KeyUsage = true, ca.KeyUsage|x509.KeyUsageCertSign
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, caKey.Public(), caKey)
	if err != nil {
		return nil, fmt.Errorf("make the authority's certificate: %w", err)
	}
	serverKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make keys: %w", err)
	}
	server := template(2, "kube-apiserver")
	server.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	server.DNSNames = []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	server.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(spec.nodeIP()), net.ParseIP(serviceIP)}
	serverDER, err := x509.CreateCertificate(rand.Reader, server, ca, serverKey.Public(), caKey)
	if err != nil {
		return nil, fmt.Errorf("make the API server's certificate: %w", err)
	}
	serverKeyDER, err := x509.MarshalPKCS8PrivateKey(serverKey)
	if err != nil {
		return nil, fmt.Errorf("encode the API server's key: %w", err)
	}
	accounts, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("make keys: %w", err)
	}
	block := func(kind string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}) }
	return map[string][]byte{
		"ca.crt":             block("CERTIFICATE", caDER),
		"apiserver.crt":      block("CERTIFICATE", serverDER),
		"apiserver.key":      block("PRIVATE KEY", serverKeyDER),
		"serviceaccount.key": block("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(accounts)),
	}, nil
}

func kubeconfig(name, server string, ca []byte, token string) []byte {
	return []byte(fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: %[1]s
  cluster: {server: "%[2]s", certificate-authority-data: %[3]s}
users:
- name: %[1]s
  user: {token: "%[4]s"}
contexts:
- name: %[1]s
  context: {cluster: %[1]s, user: %[1]s}
current-context: %[1]s
`, name, server, base64.StdEncoding.EncodeToString(ca), token))
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
`, spec.cgroup(), containerdSocket, spec.nodeIP(), spec.MaxPods)
}

func containerdConfig(l Layout, snapshotter string) string {
	return fmt.Sprintf(`version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = %[1]q

[plugins."io.containerd.cri.v1.images"]
  snapshotter = %[2]q
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %[3]q

[plugins."io.containerd.cri.v1.runtime"]
  # Lowering a score takes CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = [%[4]q]
  conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = %[5]q
  SystemdCgroup = false
`, containerdSocket, snapshotter, pauseImage, l.path("debian", "usr", "lib", "cni"), runtimeLink)
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
