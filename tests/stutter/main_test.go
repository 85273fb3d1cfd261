// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestStutter: the program has less time than it thinks, and ends as it ends alone.
// That nothing is left of it the kernel says, who removes no group with a process.
func TestStutter(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: only make soak stutters")
	}
	if os.Geteuid() != 0 {
		t.Skip("skipped: freezing a control group needs root")
	}
	if _, err := mountPoint(); err != nil {
		t.Skipf("skipped: %v", err)
	}
	dir := t.TempDir()
	// Looks at the clock in short naps, and says what the longest one was.
	const program = `
sleep 1000 &
longest=0 last=$(date +%s%N) end=$((last + 8000000000))
while [ "$last" -lt "$end" ]; do
	sleep 0.005
	now=$(date +%s%N)
	[ $((now - last)) -gt $longest ] && longest=$((now - last))
	last=$now
done
echo $longest > "$0/longest"
exit 3`
	err := stutter(context.Background(), rand.New(rand.NewPCG(1, 0)), []string{"sh", "-c", program, dir})
	if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 3 {
		t.Errorf("it ended with %v, want status 3", err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "longest"))
	if err != nil {
		t.Fatal(err)
	}
	longest, err := time.ParseDuration(strings.TrimSpace(string(b)) + "ns")
	if err != nil {
		t.Fatal(err)
	}
	if longest < leastStop {
		t.Errorf("it was never held up for more than %v", longest)
	}
}
