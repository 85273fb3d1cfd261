// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/nfd"
)

// NFD is Node Feature Discovery's judgement of features files.
type NFD struct{ Program string }

// Features are the labels that it would set, and those that it refuses with the
// reason.
type Features struct{ Labels, Refused map[string]string }

// Judge has it read the features files in dir.
func (n NFD) Judge(ctx context.Context, dir string) (Features, error) {
	var f Features
	said, err := NodeFeatureDiscovery.become(ctx, []string{featuresRole + "=" + dir}, n.Program)
	if err != nil {
		return f, fmt.Errorf("%w\n%s", err, said)
	}
	said = strings.TrimSpace(said)
	last := said[strings.LastIndexByte(said, '\n')+1:] // it logs before
	if err := json.Unmarshal([]byte(last), &f); err != nil {
		return f, fmt.Errorf("%s said %q: %w", NodeFeatureDiscovery.Name, said, err)
	}
	return f, nil
}

// layFeatures shows a directory where Node Feature Discovery looks, in the calling
// process's mount namespace. /etc is not the machine's there, which may have no
// place for it.
func layFeatures(dir string) error {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", dir, err)
	}
	defer unix.Close(fd)
	if err := unix.Mount("peers", "/etc", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount over /etc: %w", err)
	}
	if err := os.MkdirAll(filepath.Clean(nfd.Dir), 0o755); err != nil {
		return err
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", fd), nfd.Dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount over %s: %w", nfd.Dir, err)
	}
	return nil
}
