// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TestBuildHideShowsWholeFilesAlone: other programs may compile this package while hide is built, and embed all that
// is in the folder.
func TestBuildHideShowsWholeFilesAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir() + "/built"
	if err := unix.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_MOVE|unix.IN_DELETE); err != nil {
		t.Fatal(err)
	}
	if err := BuildHide(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 64<<10)
	n, err := unix.Read(fd, buffer)
	if err != nil {
		t.Fatal(err)
	}
	var seen []string
	for events := buffer[:n]; len(events) >= unix.SizeofInotifyEvent; {
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(events[12:]))
		name, _, _ := bytes.Cut(events[unix.SizeofInotifyEvent:end], []byte{0})
		seen, events = append(seen, string(name)), events[end:]
	}
	if want := []string{hideName + packedSuffix}; !slices.Equal(seen, want) {
		t.Errorf("the folder has shown %q, want %q alone", seen, want)
	}
}
