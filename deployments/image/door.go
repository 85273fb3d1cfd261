// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strings"
	"time"
	"unicode"

	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
	"oras.land/oras-go/v2/registry/remote/errcode"
	"oras.land/oras-go/v2/registry/remote/retry"
)

// silence is how long a registry may be silent after it has a whole request.
const silence = 2 * time.Minute

// newClient is a client that tries again what a registry may well do at the next try.
func newClient() *http.Client {
	base := http.DefaultTransport.(*http.Transport).Clone()
	base.ResponseHeaderTimeout = silence
	return &http.Client{Transport: retry.NewTransport(base)}
}

// door is the way to registries, with the credentials that `docker login` has left. It knows which
// of them it has shown, and takes them out of errors.
type door struct {
	client *auth.Client
	// file is Docker's config file, which need not be there.
	file string
	// known are the registries that there are credentials of, among those that have asked for one.
	known map[string]bool
	// secrets are the credentials that were shown.
	secrets []string
}

// openDoor fails if Docker's config file cannot be read. That there is none is no error.
func openDoor(client *http.Client) (*door, error) {
	store, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the credentials that docker login has left: %w", err)
	}
	d := &door{file: store.ConfigPath(), known: map[string]bool{}}
	find := credentials.Credential(store)
	show := func(ctx context.Context, host string) (auth.Credential, error) {
		c, err := find(ctx, host)
		d.known[host] = c != auth.EmptyCredential
		for _, secret := range []string{c.Password, c.RefreshToken, c.AccessToken} {
			if secret != "" {
				d.secrets = append(d.secrets, secret, base64.StdEncoding.EncodeToString([]byte(c.Username+":"+secret)))
			}
		}
		return c, err
	}
	d.client = &auth.Client{Client: client, Cache: auth.NewCache(), Credential: show}
	d.client.SetUserAgent("gpu-agent-publish")
	return d, nil
}

// repository is the one of a name, such as registry.example.com/team/gpu-agent. A registry on the
// loopback is spoken to in plain HTTP, as Docker and containerd do; every other has to have TLS.
func (d *door) repository(name string) (*remote.Repository, error) {
	if strings.Contains(name, "@") {
		return nil, errors.New("the repository's name has an @: it is to be without a digest, and credentials are " +
			"taken from " + d.file + " alone, where `docker login` writes them")
	}
	repository, err := remote.NewRepository(name)
	if err == nil && repository.Reference.Reference != "" {
		err = errors.New("it has a tag, and the version is the tag")
	}
	if err != nil {
		return nil, fmt.Errorf("the repository %q is not of the form HOST/PATH: %w", name, err)
	}
	repository.Client = d.client
	repository.PlainHTTP = onLoopback(repository.Reference.Registry)
	return repository, nil
}

// onLoopback returns true if a registry, a host with or without a port, is on this machine.
func onLoopback(registry string) bool {
	host := registry
	if h, _, err := net.SplitHostPort(registry); err == nil {
		host = h
	}
	address, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && address.IsLoopback()
}

// advise adds to an error what to do about it, if the registry has refused the credentials.
func (d *door) advise(err error, of *remote.Repository) error {
	var answer *errcode.ErrorResponse
	refused := errors.Is(err, auth.ErrBasicCredentialNotFound)
	if errors.As(err, &answer) {
		refused = answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden
	}
	if !refused {
		return err
	}
	registry, host := of.Reference.Registry, of.Reference.Host()
	if !d.known[host] {
		return fmt.Errorf("%w; %s has no credentials for it: `docker login %s` writes them", err, d.file, registry)
	}
	return fmt.Errorf("%w; the registry does not let the user push that %s has credentials of: "+
		"`docker login %s` writes others", err, d.file, registry)
}

// query is what follows the path of a URL: registries and clouds put signatures there.
var query = regexp.MustCompile(`(https?://[^\s"?]*)\?[^\s"]*`)

// discreet takes out of an error's text the credentials that were shown, the queries of URLs, and what
// would move a terminal's cursor: registries answer in words of their own.
func (d *door) discreet(err error) error {
	text := query.ReplaceAllString(err.Error(), "$1")
	for _, secret := range d.secrets {
		text = strings.ReplaceAll(text, secret, "[secret]")
	}
	text = strings.Map(func(r rune) rune {
		if r != '\n' && !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	return discreetError{text, err}
}

// discreetError has the text of another error without its secrets.
type discreetError struct {
	text string
	err  error
}

func (e discreetError) Error() string { return e.text }
func (e discreetError) Unwrap() error { return e.err }
