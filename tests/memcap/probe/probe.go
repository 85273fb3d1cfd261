// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"embed"
	"errors"
	"io/fs"
	"path/filepath"
)

// The files that a build makes.
const (
	Program = "probe"
	Linked  = "probe-linked" // the same, linked against libcuda.so.1
	Plugin  = "plugin.so"    // which -door plugin opens; beside the programs
)

//go:embed c/*.c c/*.h
var sources embed.FS

// Sources are the files of the probe, for programs that come to the library by
// the same doors.
var Sources fs.FS = sources

var (
	// Flags are those of every build.
	Flags   = []string{"-std=gnu17", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"}
	objects = []string{"main.c", "doors.c", "calls.c", "team.c", "views.c", "scenarios.c", "scenario_pools.c", "scenario_graphs.c", "scenario_refusals.c", "scenario_exports.c", "scenario_limits.c", "walk.c", "walk_things.c", "walk_order.c"}
)

// Cached builds the programs into the project's cache, unless they are there,
// and returns their folder.
func Cached(ctx context.Context) (string, error) {
	return Keep(ctx, "probe", Build, Sources)
}

// Build makes the programs in dir, which exists, from the files in src.
func Build(ctx context.Context, src, dir string) error {
	gcc := func(args ...string) error { return GCC(ctx, src, args...) }
	to := func(name string) string { return filepath.Join(dir, name) }
	const stub = "libcuda.so.1"
	return errors.Join(
		gcc("-shared", "-Wl,-soname,"+stub, "-o", stub, "stub.c"),
		gcc(append([]string{"-o", to(Program)}, append(objects[:len(objects):len(objects)], "-ldl")...)...),
		// By default some linkers leave out a library of which all names are weak.
		gcc(append([]string{"-Wl,--no-as-needed", "-o", to(Linked), "linked.c", stub}, append(objects[:len(objects):len(objects)], "-ldl")...)...),
		gcc("-shared", "-Wl,--no-as-needed", "-o", to(Plugin), "linked.c", stub),
	)
}

// Calls are the calls that the probe can make, in its own order. A name after a
// slash says how the call is used; see c/calls.c.
var Calls = []string{
	"cuMemAlloc_v2", "cuMemAlloc_v2/small", "cuMemAlloc", "cuMemAllocPitch_v2", "cuMemAllocPitch", "cuMemAllocManaged",
	"cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync/kept",
	"cuMemCreate", "cuMemCreate/mapped", "cuMemCreate/retained",
	"cuArrayCreate_v2", "cuArrayCreate", "cuArray3DCreate_v2", "cuArray3DCreate", "cuMipmappedArrayCreate",
	"cuGraphAddMemAllocNode", "cuMemAllocAsync/captured",
	"cuCtxCreate_v2", "cuModuleLoadData", "cuMemHostAlloc",
}

// Doors are the ways to the library that the probe knows; see c/doors.c.
// "linked" is Linked's alone.
var Doors = []string{
	"soname", "name", "path", "dlmopen", "deepbind", "plugin", "linked",
	"query", "query-thread", "query2", "query2-thread", "ptsz",
}
