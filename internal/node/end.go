// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"example.com/gpu-agent/pkg/gpu"
)

// What End used to end a container.
const (
	EndedByCgroup     = "cgroup.kill"
	EndedByContainerd = "containerd"
	EndedByCRI        = "cri"
)

const (
	containerdName = "containerd"
	// containerdNamespace is where containerd's CRI keeps the kubelet's containers. A request names
	// it in namespaceHeader.
	containerdNamespace = "k8s.io"
	namespaceHeader     = "containerd-namespace"
)

// End ends all processes of a container at once, and none of another. It uses cgroup.kill (Linux
// 5.14, the unified hierarchy), else containerd's task service, which signals every process of the
// container, else the CRI. It returns which of these it used. The kubelet then sees an ended
// container and applies the pod's restart policy.
//
// End does not wait until the processes are gone. If there is no such container any longer, the
// error wraps gpu.ErrNotFound. Only Owner.ID is required; without a cgroup's path End asks the
// runtime.
func (r *Runtime) End(ctx context.Context, o Owner) (how string, err error) {
	if containerID(o.ID) != o.ID || o.ID == "" {
		return "", &failure{is: gpu.ErrInvalid, text: fmt.Sprintf("end container %q: that is no container's ID", o.ID)}
	}
	var reasons []error
	if o.V2 && o.Cgroup != "" && r.o.Cgroups != "" {
		if err := killCgroup(r.o.Cgroups, o); err == nil {
			return EndedByCgroup, nil
		} else if errors.Is(err, gpu.ErrInvalid) {
			return "", fmt.Errorf("end container %s: %w", o.ID, err)
		} else {
			reasons = append(reasons, err)
		}
	}
	version, err := ask(ctx, r, func(c cri.RuntimeServiceClient) (*cri.VersionResponse, error) {
		return c.Version(ctx, &cri.VersionRequest{})
	})
	if err != nil {
		return "", fmt.Errorf("end container %s: %w",
			o.ID, errors.Join(append(reasons, r.wrap("ask for the runtime's name", err))...))
	}
	if version.GetRuntimeName() == containerdName {
		if err := r.kill(ctx, o.ID); err == nil {
			return EndedByContainerd, nil
		} else if reasons = append(reasons, fmt.Errorf("kill its task at %s: %w", r.Endpoint(), err)); gone(err) {
			return "", r.gone(o.ID)
		}
	}
	// Without a timeout, the runtime kills the container at once.
	if _, err := ask(ctx, r, func(c cri.RuntimeServiceClient) (*cri.StopContainerResponse, error) {
		return c.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: o.ID})
	}); err == nil {
		return EndedByCRI, nil
	} else if reasons = append(reasons, r.wrap("stop it", err)); gone(err) {
		return "", r.gone(o.ID)
	}
	return "", fmt.Errorf("end container %s: %w", o.ID, errors.Join(reasons...))
}

func gone(err error) bool { return status.Code(err) == codes.NotFound }

func (r *Runtime) gone(id string) error {
	return &failure{is: gpu.ErrNotFound, text: fmt.Sprintf("end container %s: the runtime at %s has none of that ID, "+
		"or it has ended", id, r.Endpoint())}
}

// killCgroup writes to the cgroup.kill of a container's own cgroup. root is where this process sees
// the host's unified hierarchy. The error wraps gpu.ErrInvalid if the path is not that of the
// container.
func killCgroup(root string, o Owner) error {
	if err := ownCgroup(o); err != nil {
		return err
	}
	failed := func(err error) error {
		return fmt.Errorf("cgroup.kill of %s in %s: %w", o.Cgroup, root, err)
	}
	base, _, err := unified(root)
	if err != nil {
		return failed(err)
	}
	defer unix.Close(base)
	file, err := openBelow(base, o.Cgroup+"/cgroup.kill", unix.O_WRONLY)
	if err != nil {
		return failed(err)
	}
	defer unix.Close(file)
	if _, err := ignoringEINTR(func() (int, error) { return unix.Write(file, []byte("1")) }); err != nil {
		return failed(err)
	}
	return nil
}

// unified opens the unified hierarchy at root or, on a node with both versions, at unified below
// it. It returns the path of the hierarchy, too.
func unified(root string) (fd int, at string, err error) {
	var first error
	for _, place := range []string{root, path.Join(root, "unified")} {
		fd, err := unix.Open(place, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err == nil {
			var fs unix.Statfs_t
			if err = unix.Fstatfs(fd, &fs); err == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC {
				return fd, place, nil
			}
			unix.Close(fd)
			err = cmp.Or(err, errors.New("that is not a cgroup v2 hierarchy"))
		}
		first = cmp.Or(first, err)
	}
	return -1, "", first
}

// kill signals all processes of a container by containerd's tasks service, on the socket of its
// CRI.
func (r *Runtime) kill(ctx context.Context, id string) error {
	ctx = metadata.AppendToOutgoingContext(ctx, namespaceHeader, containerdNamespace)
	return r.client.ask(ctx, func(conn *grpc.ClientConn) error {
		_, err := tasks.NewTasksClient(conn).Kill(ctx, &tasks.KillRequest{
			ContainerID: id, Signal: uint32(unix.SIGKILL), All: true,
		})
		return err
	})
}

// peerPatience is how long peer waits for a runtime to accept a connection.
const peerPatience = 2 * time.Second

// peer returns the PID of the process behind the runtime's socket. It is 0 if that process is in a
// PID namespace that is not below this one.
func (r *Runtime) peer() (pid int, socket string, err error) {
	socket, err = r.socket()
	if err != nil {
		return 0, "", err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, socket, fmt.Errorf("make a socket: %w", err)
	}
	defer unix.Close(fd)
	// A runtime that hangs accepts no connection, and its queue may be full.
	patience := unix.NsecToTimeval(peerPatience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &patience); err != nil {
		return 0, socket, fmt.Errorf("limit the wait for %s: %w", socket, err)
	}
	connect := func() (int, error) { return 0, unix.Connect(fd, &unix.SockaddrUnix{Name: socket}) }
	if _, err := ignoringEINTR(connect); err != nil {
		return 0, socket, fmt.Errorf("connect to %s: %w", socket, err)
	}
	credentials, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, socket, fmt.Errorf("ask who listens at %s: %w", socket, err)
	}
	return int(credentials.Pid), socket, nil
}
