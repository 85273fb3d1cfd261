// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"example.com/gpu-agent/pkg/memcap/lib"
)

func main() {
	out := "pkg/memcap/lib/built"
	if len(os.Args) > 1 {
		out = os.Args[1]
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := lib.Build(ctx, out)
	if err == nil {
		err = lib.BuildHide(ctx, out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
