// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"context"
	"embed"
	"io/fs"
	"path"
	"path/filepath"

	"example.com/gpu-agent/tests/memcap/probe"
)

// Program is the file that a build makes: one for all programs.
const Program = "programs"

//go:embed c/*.c c/*.h
var sources embed.FS

// Cached builds the programs into the project's cache, unless they are there, and
// returns their folder.
func Cached(ctx context.Context) (string, error) {
	// The probe's files lie there under names of their own; main.c is ours.
	return probe.Keep(ctx, Program, build, probe.Sources, sources)
}

func build(ctx context.Context, src, dir string) error {
	args := []string{"-o", filepath.Join(dir, Program), "doors.c", "calls.c"}
	names, err := fs.Glob(sources, "c/*.c")
	if err != nil {
		return err
	}
	for _, name := range names {
		args = append(args, path.Base(name))
	}
	return probe.GCC(ctx, src, append(args, "-ldl")...)
}

// Names are the programs, in their own order.
var Names = []string{
	"pytorch-caching", "pytorch-expandable", "pytorch-async",
	"rmm-pool", "rmm-async", "jax", "nccl", "vllm",
}
