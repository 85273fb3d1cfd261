// SPDX-License-Identifier: Apache-2.0

package extender

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Files are the paths of the PEM files for TLS. If ClientCA is not empty, clients need a certificate of one
// of its authorities.
type Files struct {
	Cert, Key, ClientCA string
}

// Config reads the files and returns an error if it cannot. Its result reads them again at the first connection after
// one of them has changed. If they are invalid then, for example while they are being replaced, it keeps what it read
// last and logs the error once.
func (f Files) Config(log *slog.Logger) (*tls.Config, error) {
	r := &reader{files: f, log: log}
	stamps := f.stamps()
	config, err := f.read()
	if err != nil {
		return nil, err
	}
	r.config, r.stamps = config, stamps
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return r.newest(), nil },
	}, nil
}

// stamp changes when a file is written; zero if there is no file.
type stamp struct {
	size int64
	at   time.Time
}

func (f Files) stamps() (out [3]stamp) {
	for i, name := range []string{f.Cert, f.Key, f.ClientCA} {
		if info, err := os.Stat(name); err == nil {
			out[i] = stamp{info.Size(), info.ModTime()}
		}
	}
	return out
}

func (f Files) read() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("read the certificate %s with the key %s: %w", f.Cert, f.Key, err)
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"},
	}
	if f.ClientCA == "" {
		return config, nil
	}
	pem, err := os.ReadFile(f.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("read the authorities of clients: %w", err)
	}
	config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
	if !config.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("read the authorities of clients: there is no certificate in %s", f.ClientCA)
	}
	return config, nil
}

// reader keeps the last valid content of the files.
type reader struct {
	files Files
	log   *slog.Logger

	mu     sync.Mutex // guards what follows
	config *tls.Config
	stamps [3]stamp
}

// newest returns the last valid content. It reads the files again if they have changed.
func (r *reader) newest() *tls.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	stamps := r.files.stamps()
	if stamps == r.stamps {
		return r.config
	}
	r.stamps = stamps
	config, err := r.files.read()
	if err != nil {
		r.log.Error("the files for TLS are invalid; keeping those that were read before", "err", err)
		return r.config
	}
	r.config = config
	r.log.Info("read new certificates", "cert", r.files.Cert)
	return config
}
