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

// settleWait is how long the list of GPUs must stay unchanged before it counts. A driver makes
// one device node after the other while it loads.
const settleWait = 200 * time.Millisecond

// devDir and procDir are the directories where the kernel shows GPUs, without a call of the
// library. Tools make and remove the nodes of the first, and these may outlive a GPU. The driver
// itself keeps the second.
func (o Options) devDir() string  { return filepath.Join(o.DevRoot, "dev") }
func (o Options) procDir() string { return filepath.Join(o.ProcRoot, "driver/nvidia/gpus") }

// presence reads from the kernel, not from the driver's library, which GPUs there are.
type presence struct{ *session }

// hardware returns the GPUs that the kernel shows, as a text for comparison.
func (p *presence) hardware() string {
	return strings.Join(append(gpuNodes(p.opts.devDir()), names(p.opts.procDir())...), " ")
}

// names lists a directory, sorted. It is empty if the directory cannot be read.
func names(dir string) []string {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	list, _ := f.Readdirnames(-1) // on error, the names so far
	slices.Sort(list)
	return list
}

func gpuNodes(dir string) []string {
	return slices.DeleteFunc(names(dir), func(name string) bool { return !isGPUNode(name) })
}

// isGPUNode reports whether a device node's name is a GPU's, nvidia<N>.
func isGPUNode(name string) bool {
	minor, ok := strings.CutPrefix(name, "nvidia")
	return ok && minor != "" && strings.Trim(minor, "0123456789") == ""
}

// present reports whether the kernel still shows a GPU that the driver's library does not list.
func (p *presence) present(dev gpu.Device) bool {
	if listed := names(p.opts.procDir()); len(listed) > 0 {
		// The kernel's PCI addresses have domains of four digits, the library's of eight.
		return slices.ContainsFunc(listed, func(name string) bool {
			return strings.HasSuffix(dev.PCI, strings.ToLower(name))
		})
	}
	_, err := os.Lstat(filepath.Join(p.opts.devDir(), fmt.Sprintf("nvidia%d", dev.Minor)))
	return err == nil
}

// follow sends the hardware each time that it changes; last is what it was before. Only the
// latest value is kept, so the receiver may be slow. The channel is closed after ctx ends.
func (p *presence) follow(ctx context.Context, last string) <-chan string {
	changes := make(chan string, 1)
	go func() {
		defer close(changes)
		nodes := watchNodes(p.opts.devDir())
		defer func() { nodes.close() }()
		look := time.NewTicker(p.opts.Look)
		defer look.Stop()
		// It may have changed since last, before the watch began.
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
					nodes = nodeWatch{} // from now on the ticker looks for changes
				}
				settled.Reset(settleWait)
			case <-look.C:
				if nodes.file == nil {
					if nodes = watchNodes(p.opts.devDir()); nodes.file != nil {
						settled.Reset(settleWait) // it may have changed before the watch
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
				select { // drop an older value that was not received
				case <-changes:
				default:
				}
				changes <- now
			}
		}
	}()
	return changes
}

// glance returns the part of the hardware whose changes the kernel does not report, so that it
// must be polled.
func (p *presence) glance(nodes nodeWatch) string {
	if nodes.file == nil {
		return p.hardware()
	}
	return strings.Join(names(p.opts.procDir()), " ")
}

// nodeWatch watches a directory for the device nodes of GPUs. The zero value watches nothing.
type nodeWatch struct {
	file *os.File // nil if there is no watch
	// changed gets a value when nodes come or go, and is closed when the watch ends. It is nil if
	// there is no watch.
	changed <-chan struct{}
}

// nodeEvents are the events that the watch asks for. With more, each write to a device in the
// directory, such as /dev/null, would wake the agent: thousands of times a second. fsnotify asks
// for those, so it is of no use here.
const nodeEvents = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// watchNodes watches a directory. It returns the zero nodeWatch if the kernel has no watch left,
// or the directory does not exist.
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
		_ = w.file.Close() // the reader ends too
	}
}

// nodeChanges parses inotify events. gpus is true if a GPU's node is among them, or if the kernel
// dropped some. over is true if the directory is gone.
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
