// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
)

// showStatus is `gpu-agent status`: it asks the agent that runs on this node.
func showStatus(ctx context.Context, c console, args []string) error {
	fs := newFlags(c, "status", "", "Prints what the agent on this node offers and who holds it.")
	addr := fs.String("http", ":9500", "`address` that the agent serves on")
	format := choice{"text", []string{"text", "json"}}
	fs.Var(&format, "o", "output `format`: text or json")
	if err := parseFlags(fs, args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	s, err := agentobs.Fetch(ctx, *addr)
	if err != nil {
		return err
	}
	if format.value == "json" {
		return printJSON(c.out, s)
	}
	return status.WriteText(c.out, s, textOptions(c))
}

// textOptions suits the drawing to where it goes.
func textOptions(c console) status.TextOptions {
	o := status.TextOptions{Now: time.Now()}
	o.Width, _ = strconv.Atoi(os.Getenv("COLUMNS"))
	locale := os.Getenv("LC_ALL") + os.Getenv("LC_CTYPE") + os.Getenv("LANG")
	o.ASCII = locale != "" && !strings.Contains(strings.ToUpper(strings.ReplaceAll(locale, "-", "")), "UTF8")
	if f, ok := c.out.(*os.File); ok {
		// It answers for a terminal, and for nothing else.
		size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
		o.Color = err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
		if err == nil && o.Width == 0 {
			o.Width = int(size.Col)
		}
	}
	return o
}
