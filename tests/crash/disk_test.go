// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

// disk is what an agent's directories lie on. It fails for a while, once fail was called: the
// agent's changes are not made, and its calls return an error. The zero disk never fails.
type disk struct {
	mu    sync.Mutex
	errno syscall.Errno // guarded by mu; 0: it has not failed yet. EMFILE: the agent can open no files
	until time.Time     // guarded by mu
	calls int           // guarded by mu; that failed
	dirty bool          // guarded by mu; removals have failed too, in this outage or an earlier one
}

// outage is how long a disk fails. It is longer than the agent's first pauses between two tries.
const outage = 1500 * time.Millisecond

// fail has the disk fail from now on.
func (d *disk) fail(errno syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.errno, d.until, d.calls = errno, time.Now().Add(outage), 0
	d.dirty = d.dirty || errno == syscall.EIO
}

// heal has the disk be as it was. It returns the error that calls have got, 0 if none has.
func (d *disk) heal() (errno syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.calls > 0 {
		errno = d.errno
	}
	d.errno, d.until, d.calls = 0, time.Time{}, 0
	return errno
}

// log returns the logs of all processes of the agent.
func (n *node) log() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all strings.Builder
	for i := 1; i <= n.starts; i++ {
		text, err := os.ReadFile(n.logFile(i))
		if err != nil {
			n.wrong = append(n.wrong, err.Error())
		}
		all.Write(text)
	}
	return all.String()
}

// refuses returns the error of a change; 0 if it is made. A full disk refuses what takes room.
func (d *disk) refuses(c change) syscall.Errno {
	if d == nil {
		return 0
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.errno == 0 || time.Now().After(d.until) || slices.Contains([]string{"mount", "umount2"}, c.call) {
		return 0
	}
	if d.errno == syscall.EMFILE {
		if strings.HasPrefix(c.call, "open") {
			d.calls++ // the kernel refuses it
		}
		return 0
	}
	if d.errno == syscall.ENOSPC && slices.Contains(frees, c.call) {
		return 0
	}
	d.calls++
	return d.errno
}

// frees are the calls that take no room on a disk.
var frees = []string{"unlink", "unlinkat", "rmdir", "truncate", "ftruncate", "chmod", "fchmod", "fchmodat", "rename", "renameat", "renameat2", "fsync", "fdatasync"}

// explains reports whether an error tells its reader that the disk has failed.
func (d *disk) explains(err error) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls > 0 && strings.Contains(err.Error(), d.errno.Error())
}

// left reports whether a file of the state directory may be what a write has left that failed, since
// the disk did not remove it either. The next write of the same file replaces it, so there is never
// more than one of each.
func (d *disk) left(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dirty && slices.Contains([]string{".allocations.journal.tmp", ".state.json.tmp", "hooks/.installed.tmp"}, name)
}

// excuses reports whether an agent ended in order, as it may if its disk fails: its pod is started
// again, and its log has the reason.
func (d *disk) excuses(p *tracee) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls > 0 && p.status.Exited() && p.status.ExitStatus() == 1
}

// TestDiskFailsAtEachChange does each operation of TestKilledAtEachChange again and again. At the
// first change, then at the second, and so on, the disk begins to fail, for so long as an outage:
// it is full, or it returns input/output errors. Nothing that runs may notice, what is refused
// meanwhile is refused with the reason, and afterwards the node is as its surroundings say.
func TestDiskFailsAtEachChange(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("skipped: with -short no disk fails")
	}
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EIO} {
		nodes := newPool(lendable, freshNode(m))
		for _, make := range operations() {
			killAtEach(t, func() operation {
				op := make()
				op.name = unix.ErrnoName(errno) + ": " + op.name
				op.strike = func(n *node) { n.disk.fail(errno) }
				return op
			}, nodes)
		}
	}
}

// A disk that fails refuses changes with its error until it is healed, and a full one does not
// refuse what frees room.
func TestDisk(t *testing.T) {
	var d disk
	write, remove := change{"write", "/a"}, change{"unlinkat", "/a"}
	if d.refuses(write) != 0 || (*disk)(nil).refuses(write) != 0 {
		t.Error("a disk that works refuses a write")
	}
	d.fail(syscall.ENOSPC)
	if d.refuses(write) != syscall.ENOSPC || d.refuses(remove) != 0 {
		t.Error("a full disk accepts a write, or refuses a removal")
	}
	if err := fmt.Errorf("save: %w", syscall.ENOSPC); !d.explains(err) || d.explains(syscall.EIO) {
		t.Error("the wrong error explains a failure of the disk")
	}
	d.fail(syscall.EIO)
	if d.refuses(write) != syscall.EIO || d.refuses(remove) != syscall.EIO {
		t.Error("a disk with errors accepts something")
	}
	if d.heal() != syscall.EIO || d.refuses(write) != 0 || d.heal() != 0 {
		t.Error("a disk that was healed refuses a write")
	}
}
