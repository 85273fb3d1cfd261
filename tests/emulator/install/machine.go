// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

// Machine says where a driver was laid, so that its files can follow the world.
type Machine struct {
	// Driver is the driver root, empty where only files of the kernel follow;
	// Dev is the folder of its device nodes.
	Driver string `json:"driver"`
	Dev    string `json:"dev"`
	// Kernel is the folder whose proc and sys are what Kernel wrote, / where
	// Mount laid them; empty is none.
	Kernel string `json:"kernel,omitempty"`
}

// record stands beside the socket, where the daemon finds it.
const record = "run/nvidia-persistenced/gpu-emulator.json"

// Save leaves word of the machine at the driver root.
func (m Machine) Save() error {
	data, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("record the install: %w", err)
	}
	return write(m.Driver, map[string]string{record: string(data) + "\n"})
}

// Follow is Sync of the machine that Save left word of at a driver root. Where
// there is none, nothing follows.
func Follow(driver string, w *emulator.World) error {
	if driver == "" {
		return nil
	}
	m, err := Find(driver)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.Sync(w)
}

// Find reads what Save left at a driver root; os.ErrNotExist where nothing was
// installed.
func Find(driver string) (Machine, error) {
	data, err := os.ReadFile(filepath.Join(driver, record))
	if err != nil {
		return Machine{}, fmt.Errorf("find the installed driver: %w", err)
	}
	var m Machine
	if err := json.Unmarshal(data, &m); err != nil {
		return Machine{}, fmt.Errorf("find the installed driver: read %s: %w", filepath.Join(driver, record), err)
	}
	return m, nil
}

// Root is the driver root that a daemon's socket stands in, empty where it
// stands somewhere else.
func Root(socket string) string {
	root, ok := strings.CutSuffix(filepath.Clean(socket), "/"+Socket)
	switch {
	case !ok:
		return ""
	case root == "":
		return "/"
	}
	return root
}

// Sync makes libraries, kernel files and device nodes those of the world as it
// is now. What is right already stays untouched. It refuses, with ErrHost, to
// change the machine that the tests run on.
func (m Machine) Sync(w *emulator.World) error {
	if err := m.guard(); err != nil {
		return err
	}
	if m.Driver != "" {
		if err := upgrade(m.Driver, w.DriverVersion()); err != nil {
			return err
		}
	}
	// A program that a new device node wakes looks at /proc next: nodes come
	// last.
	if m.Kernel != "" {
		devices, err := os.ReadFile(filepath.Join(m.Kernel, "proc/devices"))
		if err != nil {
			return fmt.Errorf("read device numbers: %w", err)
		}
		laid := func(name string) bool { return takes(filepath.Join(m.Kernel, name)) }
		if m.Kernel == "/" {
			laid = mounted
		}
		if err := kernel(m.Kernel, string(devices), w.State(), laid); err != nil {
			return err
		}
	}
	return Nodes(m.Dev, w)
}

func (m Machine) guard() error {
	if m.Driver == "/" || m.Kernel == "/" || filepath.Clean(m.Dev) == "/dev" {
		if err := Guard(); err != nil {
			return fmt.Errorf("follow the world: %w", err)
		}
	}
	return nil
}

// mounted says whether a file at / is on what Mount laid there, and not one of
// the running kernel.
func mounted(name string) bool {
	for _, at := range mounts {
		if name == at || strings.HasPrefix(name, at+"/") {
			var st unix.Statfs_t
			return unix.Statfs(at, &st) == nil && st.Type == unix.TMPFS_MAGIC
		}
	}
	return false
}

// removeAll removes what is there of some files and folders.
func removeAll(paths ...string) error {
	var errs []error
	for _, path := range paths {
		// The foot of a mount cannot be removed; what is in it is.
		if err := os.RemoveAll(path); err != nil && !errors.Is(err, unix.EBUSY) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
