// SPDX-License-Identifier: Apache-2.0

package cleanup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/deviceplugin"
	frontend "example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/cdi/dir"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/pkg/plugin"
)

// retry is how often Wait tries again.
const retry = 5 * time.Second

// Node has the places on a node that agents write to, and the runtime that knows the holders of
// devices.
type Node struct {
	// KubeletDir is the kubelet's directory, CDIDir that of the runtime's CDI files, StateDir the
	// agent's state directory, and NFDDir that of the features files.
	KubeletDir, CDIDir, StateDir, NFDDir string
	// Domain is the domain of the CDI files, and ResourceDomain that of the resources.
	Domain, ResourceDomain string
	// Runtime is the container runtime, which the caller closes.
	Runtime *node.Runtime
	// MPS ends the daemons of MPS that are left, and sets the compute mode of these GPUs to DEFAULT: of
	// those that the last agent had laid out for MPS. Nil leaves both.
	MPS func(ctx context.Context, gpus []gpu.UUID) error
	// Object removes what the agent wrote to its Node object. Nil without an API server.
	Object func(context.Context) error
}

// Wait calls Run again and again until it succeeds. If ctx ends first, it returns Run's last error.
// It calls said with each error whose text differs from the last one's.
func (n *Node) Wait(ctx context.Context, said func(error)) error {
	last := ""
	for {
		err := n.Run(ctx)
		if err == nil {
			return nil
		}
		if err.Error() != last {
			last = err.Error()
			said(err)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retry):
		}
	}
}

// named is how many holders the error of Run names.
const named = 20

// ErrHeld is the error of Run while pods hold devices of the agent.
var ErrHeld = errors.New("these pods still hold devices")

// Run removes everything. It fails while pods hold devices or an agent runs. It may be called
// again.
func (n *Node) Run(ctx context.Context) error {
	names := deviceplugin.ResourceNames(n.ResourceDomain)
	holders, err := n.holders(ctx, names)
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	if len(holders) > 0 {
		return fmt.Errorf("clean up: %w: %s; delete them first", ErrHeld,
			brief.Cut(brief.List(holders, named), brief.Text))
	}
	if err := n.endMPS(ctx); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	// Before the rest, since it fails while an agent runs.
	if err := state.Remove(n.StateDir); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	// An agent leaves its file systems mounted while its containers run on, and these have kept
	// their directories. A process that may not unmount leaves them empty until the next boot.
	var errs []error
	if err := lib.Unmount(n.StateDir); err == nil {
		errs = append(errs, state.Remove(n.StateDir))
	} else if !errors.Is(err, unix.EBUSY) {
		errs = append(errs, err)
	}
	files, err := dir.Open(n.CDIDir, n.Domain)
	if err == nil {
		var keys []string
		if keys, err = files.List(); err == nil {
			for _, key := range keys {
				errs = append(errs, files.Remove(key))
			}
		}
	}
	sockets := filepath.Join(n.KubeletDir, "device-plugins")
	unfixed := func(r string) bool { return names.Ours(r) && !slices.Contains(names.Fixed(), r) }
	resources := append(names.Fixed(), plugin.Left(sockets, unfixed)...)
	errs = append(errs, err, plugin.RemoveSockets(sockets, resources), nfd.Remove(n.NFDDir),
		dra.RemoveSocket(filepath.Join(n.KubeletDir, "plugins_registry"), frontend.DriverName(n.Domain)))
	if n.Object != nil {
		errs = append(errs, n.Object(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return nil
}

// endMPS ends the daemons of MPS and frees their GPUs, while no agent runs.
func (n *Node) endMPS(ctx context.Context) error {
	if _, err := os.Stat(n.StateDir); n.MPS == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	store, err := state.Open(n.StateDir, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer store.Close()
	var gpus []gpu.UUID
	for _, l := range store.Document().Layouts {
		if l.Compute.MPS && l.Until.IsZero() {
			gpus = append(gpus, l.GPU)
		}
	}
	return n.MPS(ctx, gpus)
}

// holders returns the pods that have devices, according to the kubelet and the runtime.
func (n *Node) holders(ctx context.Context, names *deviceplugin.Names) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	kubelet := node.NewPodResources(n.KubeletDir)
	defer kubelet.Close()
	l, err := kubelet.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, h := range l.Holdings {
		if names.Ours(h.Resource) {
			out = append(out, fmt.Sprintf("%s/%s (%s)", h.Namespace, h.Pod, h.Resource))
		}
	}
	containers, err := n.Runtime.Containers(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range containers {
		for name, record := range c.Annotations {
			key, _ := strings.CutPrefix(name, cdi.AnnotationName(n.Domain, ""))
			out = append(out, fmt.Sprintf("%s/%s (%s)", c.Namespace, c.Pod, device(names, key, record)))
		}
		if len(cdi.Keys(n.Domain, nil, c.CDI)) > len(c.Annotations) {
			out = append(out, fmt.Sprintf("%s/%s (a ResourceClaim)", c.Namespace, c.Pod))
		}
	}
	// Neither has a pod whose init container has not been created yet.
	pods, err := n.Runtime.Pods(ctx)
	if err != nil {
		return nil, err
	}
	checkpoint, err := kubelet.Checkpoint()
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return nil, err
	}
	for _, e := range checkpoint.Entries {
		if p, alive := pods[e.PodUID]; alive && names.Ours(e.Resource) {
			out = append(out, fmt.Sprintf("%s/%s (%s)", p.Namespace, p.Name, e.Resource))
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// device returns what a container has, by one of its annotations: the name of the resource, or of
// the allocation if its record tells no resource of the agent's. key and record may be anything,
// since other clients of the runtime can write annotations too.
func device(names *deviceplugin.Names, key, record string) string {
	r, err := ledger.ReadRecord(record)
	switch {
	case err == nil && names.Ours(r.Resource):
		return r.Resource // a short name: all others are not the agent's
	case cdi.ValidKey(key):
		return "allocation " + key
	}
	return "an allocation"
}
