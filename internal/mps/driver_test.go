// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestLibraries: a daemon gets the driver's libraries, and no others that lie beside them: a C
// library of the host's does not go together with the linker of the agent's image.
func TestLibraries(t *testing.T) {
	t.Parallel()
	w := newWorld(t, emulated(t, "555.58.02"))
	without, with := t.TempDir(), t.TempDir()
	for _, name := range []string{"libcuda.so", "libcuda.so.1", "libcuda.so.555.58.02", "libnvidia-ml.so.1", "libc.so.6", "libm.so.6"} {
		if err := os.WriteFile(filepath.Join(with, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	opts := w.options()
	opts.Driver.Libraries = []string{without}
	_, stop := w.run(opts)
	if d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA); !errors.Is(d.Err(), NoProgram) || !strings.Contains(d.Err().Error(), without) {
		t.Errorf("no libraries: %v", d.Err())
	}
	stop()
	opts.Driver.Libraries = []string{without, with}
	w.run(opts)
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	if d.Err() != nil {
		t.Fatal(d.Err())
	}
	dir := w.files(gpuA).libraries()
	if got, want := list(t, dir), []string{"libcuda.so", "libcuda.so.1", "libcuda.so.555.58.02", "libnvidia-ml.so.1"}; !slices.Equal(got, want) {
		t.Errorf("the daemon has %v, want %v", got, want)
	}
	if env, err := words(d.PID, "environ"); err != nil || !slices.Contains(env, "LD_LIBRARY_PATH="+dir) {
		t.Errorf("its environment is %q, %v", env, err)
	}
}
