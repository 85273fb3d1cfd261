// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// parse reads flags, which may be anywhere among the arguments, and takes from the
// environment what the command line does not set. It returns the other
// arguments.
func parse(fs *flag.FlagSet, args []string) ([]string, error) {
	var rest []string
	for {
		if fs.Parse(args) != nil {
			return nil, errUsage // the flag set has said why
		}
		if fs.NArg() == 0 {
			break
		}
		rest, args = append(rest, fs.Arg(0)), fs.Args()[1:]
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	var err error
	fs.VisitAll(func(f *flag.Flag) {
		v, ok := os.LookupEnv(envName(f.Name))
		if given[f.Name] || !ok || err != nil {
			return
		}
		if e := f.Value.Set(v); e != nil {
			err = fmt.Errorf("environment variable %s: value %q: %w", envName(f.Name), v, e)
		}
	})
	return rest, err
}

// parseFlags is parse for a command without other arguments.
func parseFlags(fs *flag.FlagSet, args []string) error {
	rest, err := parse(fs, args)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%s: unexpected argument %q", fs.Name(), rest[0])
	}
	return err
}

// envName is the environment variable of a flag.
func envName(flagName string) string {
	return "GPU_AGENT_" + strings.ToUpper(strings.ReplaceAll(flagName, "-", "_"))
}

// memoryFlag is an amount of memory, written "1GiB", "512MiB", or a number of
// MiB.
type memoryFlag gpu.MiB

// partitionFlags are those by which partitions mean something on a node.
type partitionFlags struct {
	unit memoryFlag
	api  choice
}

func (f *partitionFlags) register(fs *flag.FlagSet) {
	f.unit = 1024
	fs.Var(&f.unit, "memory-unit", "`size` of one gpu-mem unit; the same on all nodes of a cluster")
	f.api = choice{string(ledger.DevicePlugin), []string{string(ledger.DevicePlugin), string(ledger.DRA)}}
	fs.Var(&f.api, "api", "through what a GPU is offered whose entry does not name an api: device-plugin or dra")
}

func (f *partitionFlags) node() config.Node {
	return config.Node{Unit: gpu.MiB(f.unit), API: ledger.FrontEnd(f.api.value)}
}

func (m *memoryFlag) String() string {
	if *m%1024 == 0 {
		return strconv.FormatUint(uint64(*m/1024), 10) + "GiB"
	}
	return strconv.FormatUint(uint64(*m), 10) + "MiB"
}

func (m *memoryFlag) Set(s string) error {
	number, factor := s, uint64(1)
	for _, u := range []struct {
		suffix string
		mib    uint64
	}{{"GiB", 1024}, {"Gi", 1024}, {"MiB", 1}, {"Mi", 1}} {
		if n, ok := strings.CutSuffix(s, u.suffix); ok {
			number, factor = n, u.mib
			break
		}
	}
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil || n == 0 {
		return errors.New("want an amount of memory such as 1GiB or 512MiB")
	}
	*m = memoryFlag(n * factor)
	return nil
}

// choice is a flag with few values.
type choice struct {
	value   string
	choices []string
}

func (c *choice) String() string { return c.value }

func (c *choice) Set(s string) error {
	if !slices.Contains(c.choices, s) {
		return fmt.Errorf("want one of %s", strings.Join(c.choices, ", "))
	}
	c.value = s
	return nil
}

// list is a flag with several values, of few.
type list struct {
	values, choices []string
}

func (l *list) String() string { return strings.Join(l.values, ",") }

func (l *list) has(word string) bool { return slices.Contains(l.values, word) }

func (l *list) Set(s string) error {
	l.values = nil
	for word := range strings.SplitSeq(s, ",") {
		if word = strings.TrimSpace(word); !slices.Contains(l.choices, word) {
			return fmt.Errorf("there is no %q: want some of %s", word, strings.Join(l.choices, ", "))
		}
		l.values = append(l.values, word)
	}
	return nil
}

// logFlags are how a program that runs on tells what it does.
type logFlags struct {
	format, level choice
}

func (f *logFlags) register(fs *flag.FlagSet) {
	f.format = choice{"text", []string{"text", "json"}}
	fs.Var(&f.format, "log-format", "text or json")
	f.level = choice{"info", []string{"debug", "info", "warn", "error"}}
	fs.Var(&f.level, "log-level", "debug, info, warn or error")
}

func (f *logFlags) logger(c console) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(f.level.value)) // one of four known words
	opts := &slog.HandlerOptions{Level: level}
	if f.format.value == "json" {
		return slog.New(slog.NewJSONHandler(c.err, opts))
	}
	return slog.New(slog.NewTextHandler(c.err, opts))
}
