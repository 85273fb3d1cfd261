// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/loopback"
)

// What a request's body may be.
const (
	JSON      = "application/json"
	Merge     = "application/merge-patch+json"
	Strategic = "application/strategic-merge-patch+json"
	Apply     = "application/apply-patch+yaml"
)

// Server is the API server. Its requests may be made by several goroutines.
type Server struct {
	// URL is where it serves, and Token is root's.
	URL, Token string
	// SchedulerAs is what the user of SchedulerAsking is in a kubeconfig, beside root, such as whom it
	// impersonates. A nil map leaves the scheduler root.
	SchedulerAs map[string]any
	client      *http.Client
	// authority is the path of the certificate whose clients are believed, without its ending;
	// Controllers sign with its key.
	authority string
}

// Program finds what the test node's builder put into the cache.
func Program(t testing.TB, name string) string {
	t.Helper()
	cache := os.Getenv("GPU_TESTS_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(user, "gpu-agent")
	}
	path := filepath.Join(cache, "bin", name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("there is no %s in the cache yet: the stage \"node\", or one after it, builds it", name)
	}
	return path
}

// lessGarbage has an API server look for garbage less often, as in the test node: that costs it much
// of its processor time.
const lessGarbage = "GOGC=400"

// Background runs a program until the test ends. It dies with this process,
// too, so that a test that is killed leaves nothing.
func Background(t testing.TB, path string, args ...string) (pid int) {
	t.Helper()
	return background(t, nil, path, args...)
}

// background is Background with an environment besides.
func background(t testing.TB, env []string, path string, args ...string) (pid int) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := StartTied(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		log.Close()
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("%s said last:\n%s", filepath.Base(path), text[max(0, len(text)-4000):])
		}
	})
	return cmd.Process.Pid
}

// freePorts are n ports of loopback that nobody had a moment ago.
func freePorts(t testing.TB, n int) []int {
	t.Helper()
	ports, err := loopback.FreePorts(n)
	if err != nil {
		t.Fatal(err)
	}
	return ports
}

// Start starts etcd and an API server over it, with arguments besides, and returns when that is
// ready.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	etcd, server := Program(t, "etcd"), Program(t, "kube-apiserver")
	dir, ports := t.TempDir(), freePorts(t, 3)
	url := func(scheme string, i int) string { return fmt.Sprintf("%s://127.0.0.1:%d", scheme, ports[i]) }
	background(t, []string{lessGarbage}, etcd, "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", url("http", 0), "--advertise-client-urls", url("http", 0),
		"--listen-peer-urls", url("http", 1), "--initial-advertise-peer-urls", url("http", 1),
		"--initial-cluster", "default="+url("http", 1))

	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	put := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	accounts := put("accounts.key", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	certificate, signs, err := authority()
	if err != nil {
		t.Fatal(err)
	}
	put("clients.key", signs)
	s := Attach(t, url("https", 2), rand.Text())
	s.authority = strings.TrimSuffix(put("clients.crt", certificate), ".crt")
	background(t, []string{lessGarbage}, server, append([]string{"--etcd-servers", url("http", 0), "--cert-dir", filepath.Join(dir, "certs"),
		"--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", fmt.Sprint(ports[2]), "--authorization-mode", "RBAC", "--allow-privileged",
		"--client-ca-file", s.authority + ".crt", "--token-auth-file", put("tokens", []byte(s.Token+`,root,0,"system:masters"`+"\n")),
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", accounts,
		"--service-account-signing-key-file", accounts, "--service-cluster-ip-range", "10.96.0.0/24",
		"--endpoint-reconciler-type", "none"}, args...)...)
	s.Await(t, "the API server is ready", func() error { return s.Do(t, nil, http.MethodGet, "/readyz", "", nil, nil) })
	return s
}

// Attach returns a server that runs already, on loopback, of which somebody else is in charge.
func Attach(t testing.TB, url, token string) *Server {
	s := &Server{URL: url, Token: token, client: &http.Client{
		Timeout: 20 * time.Second,
		// Whoever started it knows where it is.
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
	}}
	t.Cleanup(s.client.CloseIdleConnections)
	return s
}

// authority makes a certificate that signs others, and its key.
func authority() (certificate, key []byte, err error) {
	signs, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "plane"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(2, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, signs.Public(), signs)
	if err != nil {
		return nil, nil, err
	}
	private, err := x509.MarshalECPrivateKey(signs)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}), err
}

// Kubeconfig writes a file by which a program is root at the server, and returns its
// path. user has what else it is, such as whom it impersonates.
func (s *Server) Kubeconfig(t testing.TB, user map[string]any) string {
	t.Helper()
	type fields = map[string]any
	who := fields{"token": s.Token}
	for key, value := range user {
		who[key] = value
	}
	text, err := json.Marshal(fields{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": []fields{{"name": "c", "context": fields{"cluster": "c", "user": "u"}}},
		"clusters": []fields{{"name": "c", "cluster": fields{"server": s.URL, "insecure-skip-tls-verify": true}}},
		"users":    []fields{{"name": "u", "user": who}}})
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Remote is the text of a kubeconfig by which a program of another cluster is root at the server. It
// has the server's certificate, as programs want it that believe no other. The server is one of Start.
func (s *Server) Remote(t testing.TB) []byte {
	t.Helper()
	certificate, err := os.ReadFile(filepath.Join(filepath.Dir(s.authority), "certs", "apiserver.crt"))
	if err != nil {
		t.Fatal(err)
	}
	type fields = map[string]any
	text, err := json.Marshal(fields{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": []fields{{"name": "c", "context": fields{"cluster": "c", "user": "u"}}},
		"clusters": []fields{{"name": "c", "cluster": fields{"server": s.URL, "certificate-authority-data": certificate}}},
		"users":    []fields{{"name": "u", "user": fields{"token": s.Token}}}})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// Scheduler starts the scheduler, with so many requests a second to the API server; 0
// leaves it at its default.
func (s *Server) Scheduler(t testing.TB, perSecond int) {
	t.Helper()
	kubeconfig := s.Kubeconfig(t, nil)
	args := []string{"--authentication-kubeconfig", kubeconfig, "--authorization-kubeconfig", kubeconfig, "--secure-port", "0"}
	if perSecond == 0 {
		args = append(args, "--kubeconfig", kubeconfig, "--leader-elect=false")
	} else {
		config := filepath.Join(t.TempDir(), "scheduler.yaml")
		text := fmt.Sprintf("apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nleaderElection: {leaderElect: false}\n"+
			"clientConnection: {kubeconfig: %q, qps: %d, burst: %[2]d}\n", kubeconfig, perSecond)
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", config)
	}
	Background(t, Program(t, "kube-scheduler"), args...)
}

// Controllers starts the controllers of these names.
func (s *Server) Controllers(t testing.TB, names string) {
	t.Helper()
	kubeconfig := s.Kubeconfig(t, nil)
	Background(t, Program(t, "kube-controller-manager"), "--kubeconfig", kubeconfig, "--authentication-kubeconfig", kubeconfig, "--authorization-kubeconfig", kubeconfig,
		"--cluster-signing-cert-file", s.authority+".crt", "--cluster-signing-key-file", s.authority+".key",
		"--leader-elect=false", "--secure-port", "0", "--kube-api-qps", "500", "--kube-api-burst", "500", "--controllers", names)
}

// Await polls until the server has made something so.
func (s *Server) Await(t testing.TB, what string, try func() error) {
	t.Helper()
	deadline := time.Now().Add(4 * time.Minute) // a busy machine starts one within two
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("never: %s: %v", what, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// Watch calls see with each event of a watch, in root's name, until ctx ends or the
// server ends the watch. path has a query, which says what is watched.
func (s *Server) Watch(ctx context.Context, path string, see func(event []byte)) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+path+"&watch=1", nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+s.Token)
	patient := http.Client{Transport: s.client.Transport}
	response, err := patient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("watch %s: %s", path, response.Status)
	}
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		see(lines.Bytes())
	}
	return lines.Err()
}

// Do makes one request in somebody's name, root's if as is nil; a refusal is an
// error with the server's words.
func (s *Server) Do(t testing.TB, as http.Header, method, path, kind string, body, into any) error {
	answer, err := s.send(t, as, method, path, kind, body)
	if err == nil && into != nil {
		err = json.Unmarshal(answer, into)
	}
	return err
}

// Text is what the server says at a path that has no objects, such as /metrics.
func (s *Server) Text(t testing.TB, path string) (string, error) {
	answer, err := s.send(t, nil, http.MethodGet, path, "", nil)
	return string(answer), err
}

// Event is what has become of an object.
type Event struct {
	// Type is ADDED, MODIFIED or DELETED.
	Type   string
	Object json.RawMessage
}

// Since returns what the server tells in the next second of the objects at path since a
// version.
func (s *Server) Since(t testing.TB, path, version string) (events []Event, err error) {
	answer, err := s.send(t, nil, http.MethodGet, path+"?watch=1&timeoutSeconds=1&resourceVersion="+version, "", nil)
	for told := json.NewDecoder(bytes.NewReader(answer)); err == nil; {
		var e Event
		if err = told.Decode(&e); err == nil && e.Type == "ERROR" {
			err = fmt.Errorf("watch %s since %s: %s", path, version, e.Object)
		} else if err == nil {
			events = append(events, e)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return events, err
}

func (s *Server) send(t testing.TB, as http.Header, method, path, kind string, body any) ([]byte, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	for key, values := range as {
		request.Header[key] = values
	}
	if request.Header.Get("Authorization") == "" {
		request.Header.Set("Authorization", "Bearer "+s.Token)
	}
	request.Header.Set("Content-Type", kind)
	response, err := s.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, response.Status, answer)
	}
	return answer, err
}
