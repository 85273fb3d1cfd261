// SPDX-License-Identifier: Apache-2.0

package extender

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// authority makes certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t}
	a.cert, a.key = a.make("authority", a.key)
	return a
}

// make signs with the authority's key, or with its own where there is none.
func (a *authority) make(name string, by *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IsCA:        by == nil, BasicConstraintsValid: true}
	parent := a.cert
	if by == nil {
		parent, by = template, key
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert, key
}

// pair is a certificate and its key.
func (a *authority) pair(name string) (cert, key []byte) {
	c, k := a.make(name, a.key)
	raw, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

func (f Files) put(t *testing.T, a *authority) {
	t.Helper()
	cert, key := a.pair("door")
	for path, text := range map[string][]byte{f.Cert: cert, f.Key: key, f.ClientCA: a.pem()} {
		// As a Secret's volume does: a file is replaced, not written.
		if err := os.WriteFile(path+".new", text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
}

// Only who has a certificate of the clients' authority is answered, and both sides'
// certificates can be replaced while the door is open. Files that make no sense change
// nothing.
func TestDoorWithTLS(t *testing.T) {
	dir := t.TempDir()
	files := Files{Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key"), ClientCA: filepath.Join(dir, "ca")}
	if _, err := files.Config(slog.New(slog.DiscardHandler), func(time.Time) {}); err == nil {
		t.Fatal("no files are no error")
	}
	first, second := newAuthority(t), newAuthority(t)
	files.put(t, first)
	var said bytes.Buffer
	config, err := files.Config(slog.New(slog.NewTextHandler(&said, nil)), func(time.Time) {})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	server := Server(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "in") }))
	server.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	ask := func(trusts, shows *authority) error {
		config := &tls.Config{RootCAs: x509.NewCertPool()}
		config.RootCAs.AppendCertsFromPEM(trusts.pem())
		if shows != nil {
			pair, err := tls.X509KeyPair(shows.pair("scheduler"))
			if err != nil {
				t.Fatal(err)
			}
			// Also to a server that does not ask for one of this authority.
			config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				return &pair, nil
			}
		}
		client := http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true},
			Timeout: 20 * time.Second}
		response, err := client.Get("https://" + listener.Addr().String())
		if err == nil {
			response.Body.Close()
		}
		return err
	}
	refused := func(what string, err error, part string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %v, want a refusal with %q", what, err, part)
		}
	}
	taken := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	taken("a client of the authority", ask(first, first))
	refused("a client without a certificate", ask(first, nil), "certificate required")
	refused("a client of another authority", ask(first, second), "unknown certificate authority")
	plain, err := http.Get("http://" + listener.Addr().String())
	if err == nil {
		plain.Body.Close()
	}
	if err == nil && plain.StatusCode != http.StatusBadRequest {
		t.Errorf("plain HTTP: %s", plain.Status)
	}

	files.put(t, second)
	taken("a client of the new authority", ask(second, second))
	refused("one that trusts the old certificate", ask(first, second), "unknown authority")
	refused("a client of the old authority", ask(second, first), "unknown certificate authority")

	if err := os.WriteFile(files.Cert, []byte("half a certif"), 0o600); err != nil {
		t.Fatal(err)
	}
	taken("the certificate before", ask(second, second))
	taken("once more", ask(second, second))
	if n := strings.Count(said.String(), "level=ERROR"); n != 1 {
		t.Errorf("%d errors in the log:\n%s", n, said.String())
	}
	files.put(t, first)
	taken("a good one again", ask(first, first))

	if err := os.WriteFile(files.ClientCA, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := files.Config(slog.New(slog.DiscardHandler), func(time.Time) {}); err == nil ||
		!strings.Contains(err.Error(), "no certificate in") {
		t.Errorf("an empty file of authorities: %v", err)
	}
}

// TestDoorExpires lets the door's certificate grow old. The log says once that the end is near and once that it has
// come, and the end is told each time that files were read. New files are taken at the next connection, by a door that
// has not started anew.
func TestDoorExpires(t *testing.T) {
	dir := t.TempDir()
	files := Files{Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key"), ClientCA: filepath.Join(dir, "ca")}
	const month = 30 * 24 * time.Hour
	first := newAuthority(t)
	files.put(t, first)
	var said bytes.Buffer
	var told []time.Time
	clock := first.cert.NotAfter.Add(-2 * month)
	config, err := files.config(slog.New(slog.NewTextHandler(&said, nil)),
		func(until time.Time) { told = append(told, until) }, func() time.Time { return clock })
	if err != nil {
		t.Fatal(err)
	}
	meets := func(what string, warnings, errors int) {
		t.Helper()
		for range 3 {
			if _, err := config.GetConfigForClient(nil); err != nil {
				t.Fatal(err)
			}
		}
		warned, failed := strings.Count(said.String(), "level=WARN"), strings.Count(said.String(), "level=ERROR")
		if warned != warnings || failed != errors {
			t.Errorf("%s: %d warnings and %d errors, want %d and %d:\n%s", what, warned, failed, warnings, errors, &said)
		}
	}
	meets("two months before", 0, 0)
	clock = clock.Add(month + time.Hour)
	meets("less than a month before", 1, 0)
	clock = clock.Add(month)
	meets("after its end", 1, 1)
	if !strings.Contains(said.String(), "gpu-placer certificates") {
		t.Errorf("the log does not say what to do:\n%s", &said)
	}
	second := newAuthority(t)
	files.put(t, second)
	clock = time.Now().Add(-2 * month)
	meets("new files", 1, 1)
	want := []time.Time{first.cert.NotAfter, second.cert.NotAfter}
	if len(told) != 2 || told[0].Sub(want[0]).Abs() > time.Minute || told[1].Sub(want[1]).Abs() > time.Minute {
		t.Errorf("the ends that were told are %v, want %v", told, want)
	}
}

// Who has closed the connection is known at once.
func TestClientHasLeft(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	meet := func() (client *net.TCPConn, ctx context.Context) {
		t.Helper()
		conn, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		here, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { here.Close() })
		return conn.(*net.TCPConn), Server(nil).ConnContext(context.Background(), here)
	}
	until := func(what string, ctx context.Context) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !left(ctx); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s is not noticed", what)
			}
		}
	}
	quiet, ctx := meet()
	if left(ctx) || left(context.Background()) {
		t.Error("a client that waits has left")
	}
	if _, err := io.WriteString(quiet, "x"); err != nil || left(ctx) {
		t.Errorf("a client that sends has left: %v", err)
	}
	closed, ctx := meet()
	closed.Close()
	until("an end", ctx)
	reset, ctx := meet()
	reset.SetLinger(0)
	reset.Close()
	until("a reset", ctx)
}

// TestCertificates: the scheduler's lets in, the door's own and nobody's do not.
func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	files, err := Certificates([]string{"placer.test", "127.0.0.1"}, time.Now().Add(-time.Minute),
		time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	config, err := Files{Cert: in(CertFile), Key: in(KeyFile),
		ClientCA: in(CAFile)}.Config(slog.New(slog.DiscardHandler), func(time.Time) {})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(New(&shelf{room: map[string]bool{"a": true}}, Options{}))
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	srv.TLS = config
	srv.StartTLS()
	t.Cleanup(srv.Close)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(files[CAFile])
	for _, c := range []struct {
		cert, key, name string
		in              bool
	}{
		{SchedulerCertFile, SchedulerKeyFile, "placer.test", true},
		{SchedulerCertFile, SchedulerKeyFile, "127.0.0.1", true},
		{SchedulerCertFile, SchedulerKeyFile, "another.test", false},
		{CertFile, KeyFile, "placer.test", false},
		{"", "", "placer.test", false},
	} {
		to := &tls.Config{RootCAs: roots, ServerName: c.name}
		if c.cert != "" {
			pair, err := tls.X509KeyPair(files[c.cert], files[c.key])
			if err != nil {
				t.Fatal(err)
			}
			to.Certificates = []tls.Certificate{pair}
		}
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: to}}
		res, err := client.Post(srv.URL+"/filter", "application/json", strings.NewReader(filterArgs(t, "p", "a")))
		if err == nil {
			res.Body.Close()
		}
		if (err == nil && res.StatusCode == http.StatusOK) != c.in {
			t.Errorf("with %q to %s: %v", c.cert, c.name, err)
		}
	}
	if _, err := Certificates(nil, time.Now(), time.Now()); err == nil {
		t.Error("a door without a name has a certificate")
	}
}
