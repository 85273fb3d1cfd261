// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// memoryFlag is an amount of memory, written "1GiB", "512MiB", or a number of
// MiB.
type memoryFlag gpu.MiB

// partitionFlags are the flags that the meaning of a partition depends on.
type partitionFlags struct {
	unit memoryFlag
	api  command.Choice
}

func (f *partitionFlags) register(fs *pflag.FlagSet) {
	f.unit.register(fs)
	devicePlugin, dra := string(ledger.DevicePlugin), string(ledger.DRA)
	f.api = command.Choice{Value: devicePlugin, Of: []string{devicePlugin, dra}}
	fs.Var(&f.api, "api", "the api of GPUs whose entry names none: device-plugin or dra")
}

func (f *partitionFlags) node() config.Node {
	return config.Node{Unit: gpu.MiB(f.unit), API: ledger.FrontEnd(f.api.Value)}
}

// register adds --memory-unit.
func (m *memoryFlag) register(fs *pflag.FlagSet) {
	*m = 1024
	fs.Var(m, "memory-unit",
		"`size` of one gpu-mem unit, the same on all nodes of a cluster; a node has at most 30,000 devices, "+
			"units and replicas of all its GPUs together, and a GPU in use keeps its unit until it is free")
}

// Type returns the value's name in help.
func (m *memoryFlag) Type() string { return "size" }

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

// outputFlag adds --output with its formats. The first one is the default.
func outputFlag(fs *pflag.FlagSet, formats ...string) *command.Choice {
	c := &command.Choice{Value: formats[0], Of: formats}
	fs.VarP(c, "output", "o",
		"what to print: text for people, json and csv for programs, or partition, which is a partition file alone")
	return c
}
