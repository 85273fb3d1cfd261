// SPDX-License-Identifier: Apache-2.0

package nfd

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/atomicfile"
)

// Dir is the directory where Node Feature Discovery reads feature files by default.
const Dir = "/etc/kubernetes/node-feature-discovery/features.d"

// file is the name of the agent's file, and temporary its name while it is written. The worker
// ignores files whose name begins with a dot.
const (
	file      = "gpu-agent"
	temporary = ".gpu-agent.tmp"
)

// maxSize is the largest file that Node Feature Discovery reads, in bytes.
const maxSize = 64 << 10

// Features are the labels for the file.
type Features struct {
	// Labels are the agent's own.
	Labels map[string]string
	// Guests are labels of other domains. Write leaves out a guest that another file in the
	// directory names, or that another program has set on the Node.
	Guests map[string]string
	// Node has the labels of the Node; nil if they are not known.
	Node map[string]string
	// Keep is true if it is not known what the labels should be. Then the lines of the file that
	// Labels and Guests do not name stay.
	Keep bool
}

// Write writes the labels of f to the agent's file in dir, whole or not at all: a reader sees the
// old file or the new one. It does not touch a file that has these labels already. It fails if dir
// does not exist: then Node Feature Discovery is missing, which reads the file.
func Write(dir string, f Features) error {
	path := filepath.Join(dir, file)
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the features file: %w", err)
	}
	before := parse(old)
	others, err := named(dir)
	if err != nil {
		return err
	}
	want := map[string]string{}
	if f.Keep {
		maps.Copy(want, before)
	}
	for key, value := range f.Guests {
		_, mine := before[key]
		_, there := f.Node[key]
		if others[key] || there && !mine {
			delete(want, key)
			continue
		}
		want[key] = value
	}
	maps.Copy(want, f.Labels)
	text, err := render(want)
	if err != nil {
		return err
	}
	if old != nil && bytes.Equal(old, text) {
		return nil
	}
	if err := replace(dir, text); err != nil {
		return fmt.Errorf("write the features file: %w", err)
	}
	return nil
}

// Remove removes the agent's file, and the rest of an interrupted write. A missing file is not an
// error.
func Remove(dir string) error {
	for _, name := range []string{file, temporary} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the features file: %w", err)
		}
	}
	return nil
}

// render returns the file's text: a line for each label, in the order of the keys. It fails if a
// label is not allowed in such a file, or if the text is too long.
func render(labels map[string]string) ([]byte, error) {
	var b bytes.Buffer
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		value := labels[key]
		if strings.TrimSpace(key+"="+value) != key+"="+value || key == "" || strings.ContainsAny(key+value, "=#\r\n") {
			return nil, fmt.Errorf("label %q with value %q is not allowed in a features file", key, value)
		}
		fmt.Fprintf(&b, "%s=%s\n", key, value)
	}
	if b.Len() > maxSize {
		return nil, fmt.Errorf("the labels take %d bytes, and a features file has %d at most", b.Len(), maxSize)
	}
	return b.Bytes(), nil
}

// parse reads labels as Node Feature Discovery does.
func parse(text []byte) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			value = "true"
		}
		out[key] = value
	}
	return out
}

// named returns the keys in the files of other programs in the directory.
func named(dir string) (map[string]bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("look for features files (is Node Feature Discovery there?): %w", err)
	}
	out := map[string]bool{}
	for _, e := range entries {
		if e.Name() == file || e.Name()[0] == '.' {
			continue
		}
		path := filepath.Join(dir, e.Name())
		if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() || info.Size() > maxSize {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has gone, or cannot be read
		}
		for key := range parse(text) {
			out[key] = true
		}
	}
	return out, nil
}

func replace(dir string, text []byte) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return atomicfile.Write(root, file, temporary, 0o644, atomicfile.Flushed, func(f *os.File) error {
		_, err := f.Write(text)
		return err
	})
}
