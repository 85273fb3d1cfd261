// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"time"
)

// The kubelet reads what ends in .conf here, in the order of the names, beside its
// configuration.
const (
	settingsDir = "/etc/kubernetes/kubelet.d/"
	// promptFile is there on a node with NodeOptions.PromptStatus.
	promptFile = settingsDir + "10-prompt-status.conf"
	asideFile  = promptFile + ".aside"
	ownFile    = settingsDir + "50-lab.conf"
)

// KubeletSettings are what a kubelet runs with.
type KubeletSettings struct {
	// NodeStatusUpdate is how often it looks at its node, and writes what has
	// changed; NodeStatusReport is how often it writes in any case.
	NodeStatusUpdate, NodeStatusReport time.Duration
	// FeatureGates are those that its configuration names.
	FeatureGates map[string]bool
}

// KubeletSettings asks the kubelet what it runs with, whatever its files say.
func (n *Node) KubeletSettings(ctx context.Context) (KubeletSettings, error) {
	var o struct {
		KubeletConfig struct {
			NodeStatusUpdateFrequency, NodeStatusReportFrequency string
			FeatureGates                                         map[string]bool
		}
	}
	if err := n.api.get(ctx, n.path()+"/proxy/configz", &o); err != nil {
		return KubeletSettings{}, fmt.Errorf("ask the kubelet for its settings: %w", err)
	}
	c := o.KubeletConfig
	update, err := time.ParseDuration(c.NodeStatusUpdateFrequency)
	report, err2 := time.ParseDuration(c.NodeStatusReportFrequency)
	if err := errors.Join(err, err2); err != nil {
		return KubeletSettings{}, fmt.Errorf("read the kubelet's settings: %w", err)
	}
	return KubeletSettings{NodeStatusUpdate: update, NodeStatusReport: report, FeatureGates: c.FeatureGates}, nil
}

// SetKubelet starts the kubelet anew with settings beside its configuration, as
// lines of a KubeletConfiguration; "" takes those of an earlier call away.
func (n *Node) SetKubelet(ctx context.Context, settings string) error {
	return n.changeKubelet(ctx, func() error {
		if settings == "" {
			return removeAll(n.File(ownFile))
		}
		const kind = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
		return os.WriteFile(n.File(ownFile), []byte(kind+settings), 0o600)
	})
}

// UsersStatus starts the kubelet anew as one that looks at its node as often as
// users' kubelets do, on a node that was started with PromptStatus.
func (n *Node) UsersStatus(ctx context.Context) error {
	return n.changeKubelet(ctx, func() error { return os.Rename(n.File(promptFile), n.File(asideFile)) })
}

// PromptStatus is the opposite of UsersStatus. That it was never called is no
// error.
func (n *Node) PromptStatus(ctx context.Context) error {
	if _, err := os.Stat(n.File(promptFile)); err == nil {
		return nil
	}
	return n.changeKubelet(ctx, func() error { return os.Rename(n.File(asideFile), n.File(promptFile)) })
}

// CertifyKubelet starts the kubelet anew with another client certificate, which is good for so long from now on.
func (n *Node) CertifyKubelet(ctx context.Context, lasts time.Duration) error {
	const dir = "/etc/kubernetes/"
	authority, err := tls.LoadX509KeyPair(n.File(dir+"ca.crt"), n.File(dir+"ca.key"))
	if err != nil {
		return fmt.Errorf("read the authority of kubelets: %w", err)
	}
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make the kubelet's key: %w", err)
	}
	raw, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		Subject:   pkix.Name{CommonName: "system:node:" + n.Name, Organization: []string{"system:nodes"}},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lasts),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, authority.Leaf, own.Public(), authority.PrivateKey)
	if err != nil {
		return fmt.Errorf("sign the kubelet's certificate: %w", err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		return fmt.Errorf("encode the kubelet's key: %w", err)
	}
	encoded := func(kind string, data []byte) string {
		return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data}))
	}
	file := n.File(dir + "kubelet.conf")
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read how the kubelet reaches the API server: %w", err)
	}
	data := regexp.MustCompile(`client-certificate-data: [^,]+, client-key-data: [^}]+`)
	if !data.Match(text) {
		return errors.New("the kubelet's kubeconfig has no certificate where it is looked for")
	}
	text = data.ReplaceAll(text, []byte("client-certificate-data: "+encoded("CERTIFICATE", raw)+
		", client-key-data: "+encoded("PRIVATE KEY", private)))
	return n.changeKubelet(ctx, func() error { return os.WriteFile(file, text, 0o600) })
}

// changeKubelet starts the kubelet anew, and calls change while there is none.
func (n *Node) changeKubelet(ctx context.Context, change func() error) error {
	return n.restartKubelet(ctx, func(ctx context.Context, process string) error {
		if err := n.Stop(ctx, process); err != nil {
			return err
		}
		// A kubelet refuses to start upon the state of one with another policy, or
		// on another machine.
		err := removeAll(n.File("/var/lib/kubelet/cpu_manager_state"), n.File("/var/lib/kubelet/memory_manager_state"))
		if err := errors.Join(err, change()); err != nil {
			return fmt.Errorf("set the kubelet: %w", err)
		}
		return nil
	})
}

// removeAll removes files. That one is not there is no error.
func removeAll(files ...string) error {
	var errs []error
	for _, file := range files {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
