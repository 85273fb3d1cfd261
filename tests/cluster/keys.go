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
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// admin is how administrators get at an API server.
type admin struct {
	token string
	ca    []byte // the server's authority, in PEM
}

// keys are what makes an API server know those that it belongs with: its authority, from
// which its own certificate and those of kubelets are, and the administrator's token. A
// node with a control plane has its own; one that joins it reads them from its files.
type keys struct {
	admin
	authority *x509.Certificate
	key       *ecdsa.PrivateKey
}

const (
	authorityFile = "ca.crt"
	authorityKey  = "ca.key"
	tokensFile    = "tokens.csv"
)

func newKeys(spec Spec) (keys, error) {
	var token [16]byte
	_, _ = rand.Read(token[:]) // never fails, by its documentation
	k := keys{authority: certificate("node " + spec.Name)}
	k.token = hex.EncodeToString(token[:])
	k.authority.IsCA, k.authority.KeyUsage = true, k.authority.KeyUsage|x509.KeyUsageCertSign
	var err error
	if k.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return keys{}, fmt.Errorf("make keys: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, k.authority, k.authority, k.key.Public(), k.key)
	if err != nil {
		return keys{}, fmt.Errorf("make the authority's certificate: %w", err)
	}
	k.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return k, nil
}

// loadKeys reads those of a node that runs.
func loadKeys(n Node) (keys, error) {
	read := func(name string) ([]byte, error) {
		return os.ReadFile(n.path("etc", "kubernetes", name))
	}
	ca, err1 := read(authorityFile)
	key, err2 := read(authorityKey)
	tokens, err3 := read(tokensFile)
	if err := errors.Join(err1, err2, err3); err != nil {
		return keys{}, fmt.Errorf("read the keys of node %s: %w", n.name, err)
	}
	k := keys{admin: admin{ca: ca}}
	k.token, _, _ = strings.Cut(string(tokens), ",")
	block, _ := pem.Decode(ca)
	keyBlock, _ := pem.Decode(key)
	if block == nil || keyBlock == nil {
		return keys{}, fmt.Errorf("read the keys of node %s: its authority is not in PEM", n.name)
	}
	var err error
	if k.authority, err = x509.ParseCertificate(block.Bytes); err != nil {
		return keys{}, fmt.Errorf("read the keys of node %s: %w", n.name, err)
	}
	if k.key, err = x509.ParseECPrivateKey(keyBlock.Bytes); err != nil {
		return keys{}, fmt.Errorf("read the keys of node %s: %w", n.name, err)
	}
	return k, nil
}

// files are those of a node's /etc/kubernetes that carry keys, by name.
func (k keys) files(spec Spec) (map[string][]byte, error) {
	kubelet := certificate("system:node:" + spec.Name)
	kubelet.Subject.Organization = []string{"system:nodes"}
	kubelet.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	cert, key, err := k.issue(kubelet)
	if err != nil {
		return nil, err
	}
	server := "https://" + spec.apiIP()
	files := map[string][]byte{
		authorityFile: k.ca,
		"admin.conf":  kubeconfig(spec.Name, server, k.ca, k.user()),
		"kubelet.conf": kubeconfig(spec.Name, server, k.ca, fmt.Sprintf("client-certificate-data: %s, client-key-data: %s",
			base64.StdEncoding.EncodeToString(cert), base64.StdEncoding.EncodeToString(key))),
	}
	if spec.Join != nil {
		return files, nil
	}
	api := certificate("kube-apiserver")
	api.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	api.DNSNames = []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	api.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(spec.nodeIP()), net.ParseIP(serviceIP)}
	if files["apiserver.crt"], files["apiserver.key"], err = k.issue(api); err != nil {
		return nil, err
	}
	accounts, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("make keys: %w", err)
	}
	files["serviceaccount.key"] = pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(accounts)})
	files[tokensFile] = fmt.Appendf(nil, "%s,admin,admin,system:masters\n", k.token)
	if files[authorityKey], err = encodeKey(k.key); err != nil {
		return nil, err
	}
	return files, nil
}

// certificate is one to be signed, good for a year.
func certificate(name string) *x509.Certificate {
	return &x509.Certificate{
		Subject:   pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
	}
}

// issue signs a certificate for a new key, and returns both in PEM.
func (k keys) issue(template *x509.Certificate) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make keys: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, k.authority, private.Public(), k.key)
	if err != nil {
		return nil, nil, fmt.Errorf("make the certificate of %s: %w", template.Subject.CommonName, err)
	}
	key, err = encodeKey(private)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key, err
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

// user is the administrator in a kubeconfig.
func (a admin) user() string { return fmt.Sprintf("token: %q", a.token) }

// writeKubeconfig writes the administrator's, for the host.
func (n Node) writeKubeconfig(server string, a admin) error {
	return os.WriteFile(n.path("kubeconfig"), kubeconfig(n.name, server, a.ca, a.user()), 0o600)
}

func kubeconfig(name, server string, ca []byte, user string) []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters:
- name: %[1]s
  cluster: {server: "%[2]s", certificate-authority-data: %[3]s}
users:
- name: %[1]s
  user: {%[4]s}
contexts:
- name: %[1]s
  context: {cluster: %[1]s, user: %[1]s}
current-context: %[1]s
`, name, server, base64.StdEncoding.EncodeToString(ca), user)
}
