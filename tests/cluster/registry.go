// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

// registryCommand serves an empty registry of images and charts in plain HTTP until it is told to end. It
// keeps what is pushed in memory, and asks for no credentials.
func registryCommand(ctx context.Context, _ Layout, args []string) error {
	fs := newFlagSet("registry", "")
	address := fs.String("listen", "127.0.0.1:5000", "address to listen on; containerd needs no TLS for the loopback")
	if _, err := fs.parse(args, 0, 0); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *address)
	if err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	server := &http.Server{
		Handler:           registry.New(registry.Logger(log.New(os.Stderr, "", log.LstdFlags))),
		ReadHeaderTimeout: time.Minute,
	}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	fmt.Println("the registry listens on", l.Addr())
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("registry: %w", err)
	}
	return nil
}
