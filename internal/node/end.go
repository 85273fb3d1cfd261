// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"example.com/gpu-agent/pkg/gpu"
)

// How End ended a container.
const (
	EndedByCgroup     = "cgroup.kill"
	EndedByContainerd = "containerd"
	EndedByCRI        = "cri"
)

// The part of the CRI and of containerd's services/tasks/v1/tasks.proto that
// ending a container needs. The generated package of the latter would cost half
// a megabyte of the program and of memory, for one message; tests hold this
// against it.
const (
	methodStop = "/runtime.v1.RuntimeService/StopContainer"
	methodKill = "/containerd.services.tasks.v1.Tasks/Kill"

	stopContainerID = 1 // of StopContainerRequest; its timeout is 0, at once, where it is left out

	// Fields of KillRequest.
	killContainerID, killSignal, killAll = 1, 3, 4

	// containerdNamespace is where containerd's CRI keeps the kubelet's
	// containers, and namespaceHeader how a request says so.
	containerdNamespace = "k8s.io"
	namespaceHeader     = "containerd-namespace"
	containerdName      = "containerd"
)

// End ends all processes of a container at once, and of no other: by cgroup.kill
// (Linux 5.14, the unified hierarchy), else by containerd's task service, which
// signals every process of the container, else by the CRI. It returns which of
// these it was. The kubelet then sees an ended container and does as its pod's
// restart policy says.
//
// End does not wait for the processes to be gone. Where there is no such
// container any more, the error answers to gpu.ErrNotFound. Only Owner.ID is
// needed; without a cgroup's path the runtime is asked.
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
	name, err := r.name(ctx)
	if err != nil {
		return "", fmt.Errorf("end container %s: %w", o.ID, errors.Join(append(reasons, r.wrap("ask for the runtime's name", err))...))
	}
	if name == containerdName {
		if err := r.kill(ctx, o.ID); err == nil {
			return EndedByContainerd, nil
		} else if reasons = append(reasons, fmt.Errorf("kill its task at %s: %w", r.Endpoint(), err)); gone(err) {
			return "", r.gone(o.ID)
		}
	}
	if err := r.stop(ctx, o.ID); err == nil {
		return EndedByCRI, nil
	} else if reasons = append(reasons, r.wrap("stop it", err)); gone(err) {
		return "", r.gone(o.ID)
	}
	return "", fmt.Errorf("end container %s: %w", o.ID, errors.Join(reasons...))
}

func gone(err error) bool { return status.Code(err) == codes.NotFound }

func (r *Runtime) gone(id string) error {
	return &failure{is: gpu.ErrNotFound, text: fmt.Sprintf("end container %s: the runtime at %s has none of that ID, or it has ended", id, r.Endpoint())}
}

// killCgroup writes to the cgroup.kill of a container's own cgroup, below the
// place where the host's unified hierarchy is seen. An error that answers to
// gpu.ErrInvalid says that the path is not that container's.
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

// unified opens the unified hierarchy at root, or at the place below it where a
// node with both versions has it, and says where that is.
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
			err = cmp.Or(err, errors.New("that is no cgroup v2 hierarchy"))
		}
		first = cmp.Or(first, err)
	}
	return -1, "", first
}

// name returns what the runtime calls itself.
func (r *Runtime) name(ctx context.Context) (name string, err error) {
	err = r.line.ask(ctx, func(conn *grpc.ClientConn) (err error) {
		name, _, err = version(ctx, conn)
		return err
	})
	return name, err
}

// kill signals all processes of a container by containerd's tasks service, on the
// socket of its CRI.
func (r *Runtime) kill(ctx context.Context, id string) error {
	request := protowire.AppendTag(nil, killContainerID, protowire.BytesType)
	request = protowire.AppendString(request, id)
	request = protowire.AppendTag(request, killSignal, protowire.VarintType)
	request = protowire.AppendVarint(request, uint64(unix.SIGKILL))
	request = protowire.AppendTag(request, killAll, protowire.VarintType)
	request = protowire.AppendVarint(request, 1)
	return r.tell(metadata.AppendToOutgoingContext(ctx, namespaceHeader, containerdNamespace), methodKill, request)
}

// stop stops a container with no time to end by itself.
func (r *Runtime) stop(ctx context.Context, id string) error {
	request := protowire.AppendTag(nil, stopContainerID, protowire.BytesType)
	return r.tell(ctx, methodStop, protowire.AppendString(request, id))
}

// tell makes a request whose answer says nothing.
func (r *Runtime) tell(ctx context.Context, method string, request []byte) error {
	return r.line.ask(ctx, func(conn *grpc.ClientConn) error {
		return conn.Invoke(ctx, method, request, func([]byte) error { return nil }, grpc.ForceCodecV2(wire{}))
	})
}

// peerPatience bounds the wait for a runtime to take a connection.
const peerPatience = 2 * time.Second

// peer returns the process behind the runtime's socket, 0 where it is in a PID
// namespace that is not below this one.
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
	// A runtime that hangs accepts nobody, and its queue may be full.
	patience := unix.NsecToTimeval(peerPatience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &patience); err != nil {
		return 0, socket, fmt.Errorf("bound the wait for %s: %w", socket, err)
	}
	for {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return 0, socket, fmt.Errorf("connect to %s: %w", socket, err)
	}
	credentials, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, socket, fmt.Errorf("ask who listens at %s: %w", socket, err)
	}
	return int(credentials.Pid), socket, nil
}
