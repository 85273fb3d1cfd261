// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// Hold is what the program hold is told of an allocation.
type Hold struct {
	// Key is the allocation's.
	Key string
	// Limits are the caps of its GPUs, in bytes. GPUs without a cap are left out.
	Limits map[gpu.UUID]uint64
	// Open lets the container start if the driver cannot limit it.
	Open bool
}

// holdPatience is how many seconds the runtime waits for the program, which itself gives up after
// ten.
const holdPatience = 20

// HoldHook returns the CDI hook that has the driver limit an allocation's container before its first
// instruction (c/hold.c).
func (k Kit) HoldHook(h Hold) specs.Hook {
	policy := "closed"
	if h.Open {
		policy = "open"
	}
	outcomes := filepath.Join(filepath.Dir(filepath.Dir(k.Hold)), outcomesName)
	args := []string{policy, outcomes, h.Key, k.Driver}
	for _, u := range slices.Sorted(maps.Keys(h.Limits)) {
		args = append(args, string(u)+"="+strconv.FormatUint(h.Limits[u], 10))
	}
	hook := specs.Hook{HookName: "createRuntime", Path: k.Hold, Args: append([]string{holdName}, args...),
		Timeout: new(holdPatience)}
	if k.Loader != "" {
		hook.Path = k.Loader
		hook.Args = slices.Concat([]string{filepath.Base(k.Loader), "--library-path", k.LoaderDirs, k.Hold}, args)
	}
	return hook
}

// platform is how glibc's loader and the directories of its libraries are called.
type platform struct{ loader, triple string }

var platforms = map[string]platform{
	"amd64": {"/lib64/ld-linux-x86-64.so.2", "x86_64-linux-gnu"},
	"arm64": {"/lib/ld-linux-aarch64.so.1", "aarch64-linux-gnu"},
}

// fitHold completes a kit's paths for the hook. driver is the host's path of the driver's
// libnvidia-ml.so. If the host has no glibc, the one that is installed beside the driver starts the
// program, as in the image of a driver container. If there is none either, the kit has no Hold then.
func (f *Files) fitHold(k *Kit, driver string) {
	if k.Hold == "" {
		return
	}
	k.Driver = driver
	p := platforms[runtime.GOARCH]
	if _, err := os.Stat(f.seen(p.loader)); err == nil {
		return
	}
	root := driverRoot(driver)
	if root != "/" {
		// Absolute links end in the driver's root, not in the host's.
		seen := f.seen(root)
		if at, err := securejoin.SecureJoin(seen, p.loader); err == nil {
			if _, err := os.Stat(at); err == nil {
				k.Loader = root + strings.TrimPrefix(at, seen)
				dirs := []string{filepath.Dir(driver)}
				for _, dir := range []string{"/usr/lib/" + p.triple, "/lib/" + p.triple, "/usr/lib64", "/lib64"} {
					dirs = append(dirs, root+dir)
				}
				k.LoaderDirs = strings.Join(dirs, ":")
				return
			}
		}
	}
	k.Hold = ""
	k.NoHold = fmt.Sprintf("neither the host nor the driver's root %s has %s, which starts the hook", root, p.loader)
}

// driverRoot returns the root directory that a library's path lies below.
func driverRoot(library string) string {
	for _, dir := range []string{"/usr/lib", "/lib"} {
		if root, _, ok := strings.Cut(library, dir); ok && root != "" {
			return root
		} else if ok {
			return "/"
		}
	}
	return "/"
}
