// SPDX-License-Identifier: Apache-2.0

package dir

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/atomicfile"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// mode is the mode of an allocation's file. Runtimes may run as another user, and the file has no
// secrets.
const mode = 0o644

// most is the largest size of a file that is read, in bytes. With thousands of units a file has
// some hundred thousand.
const most = 16 << 20

// Dir is the part of a CDI directory that belongs to one domain. Its methods are safe for several
// goroutines.
type Dir struct {
	path   string
	domain string

	// mu keeps writers of one file apart. The files need no guard, since a rename replaces them at
	// once.
	mu sync.Mutex
	// left has the temporary files that failed writes could not remove, by name; guarded by mu.
	left []string
}

// Open creates the directory if it is missing (mode 0755), and returns it. It removes temporary
// files that a killed predecessor of the same domain left in it. The path must be absolute.
func Open(path, domain string) (*Dir, error) {
	if err := gpu.ValidateDomain(domain); err != nil {
		return nil, fmt.Errorf("open CDI directory %s: %w", path, err)
	}
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("open CDI directory %q: the path must be absolute: %w", path, gpu.ErrInvalid)
	}
	d := &Dir{path: filepath.Clean(path), domain: domain}
	root, err := d.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	names, err := d.names(root)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if !d.ownTemporary(name) {
			continue
		}
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove left-over %s: %w; remove it by hand", d.file(name), err)
		}
	}
	return d, nil
}

// Write writes spec into the allocation's file. It does not touch a file that has the same content.
// An invalid spec is refused before anything is visible, with an error that wraps gpu.ErrInvalid.
func (d *Dir) Write(key string, spec *specs.Spec) error {
	name, err := d.name(key)
	if err != nil {
		return err
	}
	if err := check(spec); err != nil {
		return fmt.Errorf("write %s: a runtime would refuse it: %w: %w", d.file(name), gpu.ErrInvalid, err)
	}
	data, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", d.file(name), err)
	}
	data = append(data, '\n')

	d.mu.Lock()
	defer d.mu.Unlock()
	root, err := d.open()
	if err != nil {
		return err
	}
	defer root.Close()
	if hasContent(root, name, data) {
		return nil
	}
	temp := temporary(name)
	if err := atomicfile.Write(root, name, temp, mode, atomicfile.Flushed, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	}); err != nil {
		if _, gone := root.Lstat(temp); gone == nil {
			d.left = append(d.left, temp)
		}
		return fmt.Errorf("write %s: %w; check free space, permissions, and what else has that name", d.file(name), err)
	}
	return nil
}

// check refuses exactly what a runtime would refuse in a file. It does what ReadSpec does after it
// has parsed the file. Parsing takes longer than everything else that a container's start waits for
// here.
func check(spec *specs.Spec) error {
	if err := specs.ValidateVersion(spec); err != nil {
		return err
	}
	vendor, class := parser.ParseQualifier(spec.Kind)
	if err := parser.ValidateVendorName(vendor); err != nil {
		return err
	}
	if err := parser.ValidateClassName(class); err != nil {
		return err
	}
	if err := (&cdilib.ContainerEdits{ContainerEdits: &spec.ContainerEdits}).Validate(); err != nil {
		return err
	}
	seen := map[string]bool{}
	for i := range spec.Devices {
		d := &spec.Devices[i]
		if err := parser.ValidateDeviceName(d.Name); err != nil {
			return err
		}
		e := &d.ContainerEdits
		edits := len(e.Env) + len(e.DeviceNodes) + len(e.NetDevices) + len(e.Hooks) + len(e.Mounts) +
			len(e.AdditionalGIDs)
		if edits == 0 && e.IntelRdt == nil {
			return fmt.Errorf("device %q has no edits", d.Name)
		}
		if err := (&cdilib.ContainerEdits{ContainerEdits: &d.ContainerEdits}).Validate(); err != nil {
			return fmt.Errorf("device %q: %w", d.Name, err)
		}
		if seen[d.Name] {
			return fmt.Errorf("there are two devices %q", d.Name)
		}
		seen[d.Name] = true
	}
	if len(seen) == 0 {
		return errors.New("there are no devices")
	}
	return nil
}

// Remove removes the allocation's file. If there is none, it returns nil.
func (d *Dir) Remove(key string) error {
	name, err := d.name(key)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	root, err := d.open()
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Remove(name); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("remove %s: %w; remove it by hand, or its allocation's container could start",
			d.file(name), err)
	}
	if err := atomicfile.FlushDir(root); err != nil {
		return fmt.Errorf("remove %s: %w", d.file(name), err)
	}
	return nil
}

// Written returns the time at which an allocation's file last got other content than before. The
// error wraps gpu.ErrNotFound if there is none.
func (d *Dir) Written(key string) (time.Time, error) {
	name, err := d.name(key)
	if err != nil {
		return time.Time{}, err
	}
	root, err := d.open()
	if err != nil {
		return time.Time{}, err
	}
	defer root.Close()
	info, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		err = gpu.ErrNotFound
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("look at %s: %w", d.file(name), err)
	}
	return info.ModTime(), nil
}

// Read returns the spec in the allocation's file. The error wraps gpu.ErrNotFound if there is no
// file, and gpu.ErrInvalid if it is not a regular file or not a CDI spec.
func (d *Dir) Read(key string) (*specs.Spec, error) {
	name, err := d.name(key)
	if err != nil {
		return nil, err
	}
	root, err := d.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	switch info, err := root.Lstat(name); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("read %s: %w", d.file(name), gpu.ErrNotFound)
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", d.file(name), err)
	case !info.Mode().IsRegular() || info.Size() > most:
		return nil, fmt.Errorf("read %s: it is not an allocation's file (%s, %d bytes): %w; remove it",
			d.file(name), info.Mode(), info.Size(), gpu.ErrInvalid)
	}
	data, err := root.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", d.file(name), err)
	}
	spec, err := cdilib.ParseSpec(data)
	if err != nil || spec == nil {
		return nil, fmt.Errorf("read %s: it is not a CDI spec: %w: %v; remove it", d.file(name), gpu.ErrInvalid, err)
	}
	return spec, nil
}

// List returns the keys of the allocations that have a file, sorted. Only regular files count: a
// link or a directory of such a name does not. List removes temporary files of failed writes, if the
// disk allows that by now.
func (d *Dir) List() ([]string, error) {
	root, err := d.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	d.clear(root)
	names, err := d.names(root)
	if err != nil {
		return nil, err
	}
	var keys []string
	for _, name := range names {
		if key, ok := cdi.ParseFileName(d.domain, name); ok {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys, nil
}

// clear removes what failed writes have left.
func (d *Dir) clear(root *os.Root) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.left = slices.DeleteFunc(d.left, func(name string) bool {
		err := root.Remove(name)
		return err == nil || errors.Is(err, fs.ErrNotExist)
	})
}

// open opens the directory for one operation. /var/run/cdi is on a tmpfs that others clean up. A
// handle to a directory that was removed and created again would write where no runtime looks.
func (d *Dir) open() (*os.Root, error) {
	if err := os.MkdirAll(d.path, 0o755); err != nil {
		return nil, fmt.Errorf("make CDI directory %s: %w; make it by hand or choose another with --cdi-dir",
			d.path, err)
	}
	root, err := os.OpenRoot(d.path)
	if err != nil {
		return nil, fmt.Errorf("open CDI directory %s: %w; it must be a directory that the agent may write to",
			d.path, err)
	}
	return root, nil
}

// names returns the names of the regular files in the directory.
func (d *Dir) names(root *os.Root) ([]string, error) {
	f, err := root.Open(".")
	if err != nil {
		return nil, fmt.Errorf("read CDI directory %s: %w", d.path, err)
	}
	defer f.Close()
	entries, err := f.ReadDir(-1)
	if err != nil {
		return nil, fmt.Errorf("read CDI directory %s: %w", d.path, err)
	}
	var names []string
	for _, e := range entries {
		if e.Type().IsRegular() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

func (d *Dir) name(key string) (string, error) {
	if !cdi.ValidKey(key) {
		return "", fmt.Errorf("allocation key %q in CDI directory %s: want what cdi.Key gives: %w",
			key, d.path, gpu.ErrInvalid)
	}
	return cdi.FileName(d.domain, key), nil
}

func (d *Dir) file(name string) string { return filepath.Join(d.path, name) }

// temporary returns a temporary name for a file: .<file>.<random>.tmp.
func temporary(file string) string { return "." + file + "." + rand.Text() + temporarySuffix }

const temporarySuffix = ".tmp"

func (d *Dir) ownTemporary(name string) bool {
	inner, ok := strings.CutSuffix(name, temporarySuffix)
	if !ok || !strings.HasPrefix(inner, ".") {
		return false
	}
	inner = inner[1:]
	dot := strings.LastIndexByte(inner, '.')
	if dot < 0 || inner[dot+1:] == "" {
		return false
	}
	_, ok = cdi.ParseFileName(d.domain, inner[:dot])
	return ok
}

// hasContent reports whether the file is regular, has the right mode, and has just this data.
func hasContent(root *os.Root, name string, data []byte) bool {
	info, err := root.Lstat(name)
	if err != nil || info.Mode() != mode || info.Size() != int64(len(data)) {
		return false
	}
	got, err := root.ReadFile(name)
	return err == nil && bytes.Equal(got, data)
}
