// SPDX-License-Identifier: Apache-2.0

package extender

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"time"
)

// Names of the files that Certificates makes.
const (
	CAFile            = "ca.crt"
	CertFile          = "tls.crt"
	KeyFile           = "tls.key"
	SchedulerCertFile = "scheduler.crt"
	SchedulerKeyFile  = "scheduler.key"
)

// Certificates makes an authority, a certificate for the placer and one for the scheduler, with their keys. It returns
// them as PEM by the names of files. names are the DNS names and IP addresses of the placer, at least one. The
// authority's key is not kept, so no other client can be given a certificate. To renew one, make all of them anew.
func Certificates(names []string, from, until time.Time) (map[string][]byte, error) {
	if len(names) == 0 {
		return nil, errors.New("make certificates: no name of the placer is given")
	}
	template := func(name string) *x509.Certificate {
		return &x509.Certificate{
			Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: until,
			KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
		}
	}
	authority := template("gpu-placer")
	authority.IsCA, authority.KeyUsage, authority.MaxPathLenZero = true, x509.KeyUsageCertSign, true
	door := template(names[0])
	door.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			door.IPAddresses = append(door.IPAddresses, ip)
		} else {
			door.DNSNames = append(door.DNSNames, name)
		}
	}
	scheduler := template("kube-scheduler")
	scheduler.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}

	out := map[string][]byte{}
	ca, key, err := sign(authority, authority, nil)
	if err != nil {
		return nil, err
	}
	out[CAFile] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca})
	for _, c := range []struct {
		of        *x509.Certificate
		cert, key string
	}{{door, CertFile, KeyFile}, {scheduler, SchedulerCertFile, SchedulerKeyFile}} {
		raw, own, err := sign(c.of, authority, key)
		if err != nil {
			return nil, err
		}
		private, err := x509.MarshalPKCS8PrivateKey(own)
		if err != nil {
			return nil, fmt.Errorf("make certificates: %w", err)
		}
		out[c.cert] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})
		out[c.key] = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})
	}
	return out, nil
}

// sign makes a key and its certificate. It signs with the authority's key, or with the new key if by is nil.
func sign(of, authority *x509.Certificate, by *ecdsa.PrivateKey) (raw []byte, key *ecdsa.PrivateKey, err error) {
	if key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, nil, fmt.Errorf("make a key: %w", err)
	}
	if by == nil {
		by = key
	}
	if of.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return nil, nil, fmt.Errorf("make a serial number: %w", err)
	}
	if raw, err = x509.CreateCertificate(rand.Reader, of, authority, &key.PublicKey, by); err != nil {
		return nil, nil, fmt.Errorf("make a certificate: %w", err)
	}
	return raw, key, nil
}
