// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// settleWait is how long the machine's list of GPUs must stay unchanged before it
// counts: while a driver loads, it makes one device node after the other.
const settleWait = 200 * time.Millisecond

// devDir and procDir are where the kernel shows GPUs without its driver's
// library being asked. Nodes of the first are made and removed by tools and may
// outlive a GPU; the second is the driver's own.
func (o Options) devDir() string  { return filepath.Join(o.DevRoot, "dev") }
func (o Options) procDir() string { return filepath.Join(o.ProcRoot, "driver/nvidia/gpus") }

// presence tells from the kernel, not from the driver's library, which GPUs are there.
type presence struct{ *session }

// hardware is what GPUs the kernel shows, in a form that can be compared.
func (p *presence) hardware() string {
	return strings.Join(append(gpuNodes(p.opts.devDir()), names(p.opts.procDir())...), " ")
}

// names lists a directory; one that cannot be read is empty.
func names(dir string) []string {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	list, _ := f.Readdirnames(-1) // what could be read
	slices.Sort(list)
	return list
}

func gpuNodes(dir string) []string {
	return slices.DeleteFunc(names(dir), func(name string) bool { return !isGPUNode(name) })
}

// isGPUNode says whether a device node's name is nvidia<N>, a GPU's.
func isGPUNode(name string) bool {
	minor, ok := strings.CutPrefix(name, "nvidia")
	return ok && minor != "" && strings.Trim(minor, "0123456789") == ""
}

// present says whether the kernel still shows a GPU that the driver's library
// does not list.
func (p *presence) present(dev gpu.Device) bool {
	if listed := names(p.opts.procDir()); len(listed) > 0 {
		// The kernel's addresses have domains of four digits, the library's of eight.
		return slices.ContainsFunc(listed, func(name string) bool {
			return strings.HasSuffix(dev.PCI, strings.ToLower(name))
		})
	}
	_, err := os.Lstat(filepath.Join(p.opts.devDir(), fmt.Sprintf("nvidia%d", dev.Minor)))
	return err == nil
}

// follow sends which GPUs the kernel shows, each time that they change; last is what it
// showed before. The receiver may take its time: only the latest value is kept. The
// channel is closed after ctx ends.
func (p *presence) follow(ctx context.Context, last string) <-chan string {
	changes := make(chan string, 1)
	go func() {
		defer close(changes)
		nodes := watchNodes(p.opts.devDir())
		defer func() { nodes.close() }()
		look := time.NewTicker(p.opts.Look)
		defer look.Stop()
		// A change between the last look and the watch's beginning.
		settled := time.NewTimer(0)
		defer settled.Stop()
		listed := p.glance(nodes)
		for {
			select {
			case <-ctx.Done():
				return
			case _, alive := <-nodes.changed:
				if !alive {
					nodes.close()
					nodes = nodeWatch{} // looked at by the tick from now on
				}
				settled.Reset(settleWait)
			case <-look.C:
				if nodes.file == nil {
					if nodes = watchNodes(p.opts.devDir()); nodes.file != nil {
						settled.Reset(settleWait) // what changed before the watch
					}
				}
				if now := p.glance(nodes); now != listed {
					listed = now
					settled.Reset(settleWait)
				}
			case <-settled.C:
				now := p.hardware()
				if now == last {
					break
				}
				last = now
				select { // drop an older one that was not received
				case <-changes:
				default:
				}
				changes <- now
			}
		}
	}()
	return changes
}

// glance is the part of the hardware whose changes nothing reports, so that it must be
// polled.
func (p *presence) glance(nodes nodeWatch) string {
	if nodes.file == nil {
		return p.hardware()
	}
	return strings.Join(names(p.opts.procDir()), " ")
}

// nodeWatch watches a directory of device nodes for GPUs' nodes.
type nodeWatch struct {
	file *os.File // nil where there is no watch
	// changed gets a value when nodes come or go, and is closed when the watch
	// ends. Nil where there is no watch.
	changed <-chan struct{}
}

// nodeEvents are the events asked for. No more than these: a write to any
// device of the directory, such as /dev/null, would be an event too, and wake
// the agent thousands of times a second. (So fsnotify, which asks for those, is
// not for this.)
const nodeEvents = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// watchNodes watches a directory. The result is the zero nodeWatch if the kernel has no
// watch left, or there is no such directory.
func watchNodes(dir string) nodeWatch {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nodeWatch{}
	}
	file := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, dir, nodeEvents); err != nil {
		_ = file.Close()
		return nodeWatch{}
	}
	changed := make(chan struct{}, 1)
	go func() {
		defer close(changed)
		buffer := make([]byte, 16<<10)
		for {
			n, err := file.Read(buffer)
			if err != nil {
				return
			}
			gpus, over := nodeChanges(buffer[:n])
			if gpus {
				select {
				case changed <- struct{}{}:
				default:
				}
			}
			if over {
				return
			}
		}
	}()
	return nodeWatch{file, changed}
}

func (w nodeWatch) close() {
	if w.file != nil {
		_ = w.file.Close() // ends the reader too
	}
}

// nodeChanges reads events as the kernel wrote them: whether a GPU's node is
// among them, or some were lost, and whether the directory is gone.
func nodeChanges(events []byte) (gpus, over bool) {
	for len(events) >= unix.SizeofInotifyEvent {
		mask := binary.NativeEndian.Uint32(events[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(events[12:]))
		if end > len(events) {
			break
		}
		name, _, _ := bytes.Cut(events[unix.SizeofInotifyEvent:end], []byte{0})
		gpus = gpus || isGPUNode(string(name)) || mask&unix.IN_Q_OVERFLOW != 0
		over = over || mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_IGNORED|unix.IN_UNMOUNT) != 0
		events = events[end:]
	}
	return gpus, over
}
