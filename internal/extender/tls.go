// SPDX-License-Identifier: Apache-2.0

package extender

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
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

// expiresSoon is how long before its end a certificate is called one that expires soon.
const expiresSoon = 30 * 24 * time.Hour

// Config reads the files and returns an error if it cannot. Its result reads them again at the first connection after
// one of them has changed. If they are invalid then, for example while they are being replaced, it keeps what it read
// last and logs the error once.
//
// Each time that the files were read, it calls read with the time at which the door stops working: the end of its
// certificate, or of the clients' last authority if that is earlier. It logs once, at a connection, that this is less
// than 30 days away, and once that it has passed.
func (f Files) Config(log *slog.Logger, read func(until time.Time)) (*tls.Config, error) {
	return f.config(log, read, time.Now)
}

// config is Config with a clock.
func (f Files) config(log *slog.Logger, read func(time.Time), now func() time.Time) (*tls.Config, error) {
	r := &reader{files: f, log: log, read: read, now: now}
	stamps := f.stamps()
	config, until, err := f.read()
	if err != nil {
		return nil, err
	}
	r.stamps = stamps
	r.take(config, until)
	r.warn()
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

// read returns what the files have, and the time at which that stops working.
func (f Files) read() (config *tls.Config, until time.Time, err error) {
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, until, fmt.Errorf("read the certificate %s with the key %s: %w", f.Cert, f.Key, err)
	}
	until = pair.Leaf.NotAfter
	config = &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"},
	}
	if f.ClientCA == "" {
		return config, until, nil
	}
	text, err := os.ReadFile(f.ClientCA)
	if err != nil {
		return nil, until, fmt.Errorf("read the authorities of clients: %w", err)
	}
	config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
	if !config.ClientCAs.AppendCertsFromPEM(text) {
		return nil, until, fmt.Errorf("read the authorities of clients: there is no certificate in %s", f.ClientCA)
	}
	if last := lastEnd(text); last.Before(until) {
		until = last
	}
	return config, until, nil
}

// lastEnd returns the end of the certificate that is valid for longest, of those in PEM.
func lastEnd(text []byte) (last time.Time) {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if c, err := x509.ParseCertificate(block.Bytes); err == nil && c.NotAfter.After(last) {
			last = c.NotAfter
		}
	}
	return last
}

// reader keeps the last valid content of the files.
type reader struct {
	files Files
	log   *slog.Logger
	read  func(until time.Time)
	now   func() time.Time

	mu     sync.Mutex // guards what follows
	config *tls.Config
	stamps [3]stamp
	// until is the time at which config stops working. soon and over are true once the log says that it is near, and
	// that it has passed.
	until      time.Time
	soon, over bool
}

// take keeps what was read. The mutex is held, or no other goroutine knows r.
func (r *reader) take(config *tls.Config, until time.Time) {
	r.config, r.until, r.soon, r.over = config, until, false, false
	r.read(until)
}

// warn logs that the files stop working soon, or do not work any more. The mutex is held, or no other goroutine knows r.
func (r *reader) warn() {
	left := r.until.Sub(r.now())
	const do = "make new ones with gpu-placer certificates"
	switch {
	case left <= 0 && !r.over:
		r.over = true
		r.log.Error("the door's certificate has expired: schedulers do without the placer; "+do, "since", r.until)
	case left > 0 && left < expiresSoon && !r.soon:
		r.soon = true
		r.log.Warn("the door's certificate expires soon; "+do, "at", r.until)
	}
}

// newest returns the last valid content. It reads the files again if they have changed.
func (r *reader) newest() *tls.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.warn()
	stamps := r.files.stamps()
	if stamps == r.stamps {
		return r.config
	}
	r.stamps = stamps
	config, until, err := r.files.read()
	if err != nil {
		r.log.Error("the files for TLS are invalid; keeping those that were read before", "err", err)
		return r.config
	}
	r.take(config, until)
	r.log.Info("read new certificates", "cert", r.files.Cert)
	return config
}
