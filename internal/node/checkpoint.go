// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"example.com/gpu-agent/pkg/gpu"
)

// maxCheckpoint is the largest checkpoint that is read, in bytes. The kubelet writes each device's
// ID once for the list and once for its holder: 100,000 devices with IDs of 45 bytes take 10 MB.
const maxCheckpoint = 16 << 20

// Entry is the devices of one resource that the kubelet has given to one container.
type Entry struct {
	// PodUID is the pod's UID in the API or, for a static pod, the UID that the kubelet made. The
	// runtime's labels have the same UID.
	PodUID string
	// Container may be an init container, also one that has ended.
	Container string
	Resource  string
	// IDs is sorted and without repetition.
	IDs []string
}

// Stamp identifies one writing of a file. The zero Stamp means that there is no file.
type Stamp struct {
	Dev, Inode uint64
	// MTime is the time of the last writing, in nanoseconds since 1970.
	MTime int64
	// Size is in bytes.
	Size int64
}

// Checkpoint is the record of the kubelet's device manager. The kubelet writes it after every
// Allocate and for every list that a plugin sends, but not when a pod ends.
type Checkpoint struct {
	// Entries has every plugin's devices, sorted by pod, container, resource and IDs.
	Entries []Entry
	// Registered is the devices that the last list of each resource's plugin called healthy. It is
	// nil if that part of the file cannot be understood.
	Registered map[string]Registered
	// Stamp is that of the very file that was read.
	Stamp Stamp
}

// Registered identifies a set of device IDs without keeping them: there may be tens of thousands.
type Registered struct {
	N int
	// Sum is the sum of the IDs' hashes, which does not depend on their order: the kubelet writes
	// them in any order.
	Sum uint64
}

func (r *Registered) UnmarshalJSON(data []byte) error {
	var ids []string
	if err := json.Unmarshal(data, &ids); err != nil {
		return err
	}
	*r = Registered{N: len(ids)}
	for _, id := range ids {
		h := fnv.New64a()
		io.WriteString(h, id)
		r.Sum += h.Sum64()
	}
	return nil
}

func checkpointPath(kubeletDir string) string {
	return filepath.Join(kubeletDir, "device-plugins", "kubelet_internal_checkpoint")
}

// ReadCheckpoint reads the record of the kubelet with this directory. The kubelet may change the
// format at any time. So ReadCheckpoint ignores what it does not need, the checksum included. But
// an entry that it cannot understand may be a holder, so it returns an error for the whole file.
// The kubelet renames a whole file into place. If another program writes the file in place, as a
// restore from a backup does, ReadCheckpoint fails until the file is whole.
//
// The error wraps gpu.ErrNotFound if there is no file; that is so until a kubelet first allocates a
// device or registers a plugin. It wraps gpu.ErrInvalid if the file is no checkpoint or not a whole
// one.
func ReadCheckpoint(kubeletDir string) (Checkpoint, error) {
	path := checkpointPath(kubeletDir)
	data, stamp, err := readRegular(path, maxCheckpoint)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Checkpoint{}, &failure{gpu.ErrNotFound, "read the kubelet's checkpoint", err}
	case err != nil:
		return Checkpoint{}, fmt.Errorf("read the kubelet's checkpoint: %w", err)
	}
	cp, err := decodeCheckpoint(data)
	if err == nil && int64(len(data)) != stamp.Size {
		err = errors.New("it changed while it was read")
	}
	if err != nil {
		return Checkpoint{}, &failure{gpu.ErrInvalid, "understand the kubelet's checkpoint " + path, err}
	}
	cp.Stamp = stamp
	return cp, nil
}

// CheckpointStamp returns the stamp of the checkpoint; zero if there is none. It changes each time
// that the kubelet writes the checkpoint.
func CheckpointStamp(kubeletDir string) Stamp {
	info, err := os.Stat(checkpointPath(kubeletDir))
	if err != nil {
		return Stamp{}
	}
	return stampOf(info)
}

func stampOf(info fs.FileInfo) Stamp {
	s := Stamp{MTime: info.ModTime().UnixNano(), Size: info.Size()}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		s.Dev, s.Inode = uint64(stat.Dev), stat.Ino
	}
	return s
}

// decodeCheckpoint returns a checkpoint without its stamp.
func decodeCheckpoint(data []byte) (Checkpoint, error) {
	var file struct {
		Data struct {
			// Raw, so that an empty record (null) differs from a file without this field.
			PodDeviceEntries  json.RawMessage
			RegisteredDevices json.RawMessage
		}
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return Checkpoint{}, err
	}
	if file.Data.PodDeviceEntries == nil {
		return Checkpoint{}, errors.New("no Data.PodDeviceEntries in it")
	}
	var written []struct {
		PodUID, ContainerName, ResourceName string
		DeviceIDs                           deviceIDs
	}
	if err := json.Unmarshal(file.Data.PodDeviceEntries, &written); err != nil {
		return Checkpoint{}, fmt.Errorf("Data.PodDeviceEntries: %w", err)
	}
	entries := make([]Entry, 0, len(written))
	for i, w := range written {
		if w.PodUID == "" || w.ContainerName == "" || w.ResourceName == "" || w.DeviceIDs == nil {
			return Checkpoint{}, fmt.Errorf("Data.PodDeviceEntries[%d] lacks its pod's UID, its container, "+
				"its resource or its devices", i)
		}
		entries = append(entries, Entry{w.PodUID, w.ContainerName, w.ResourceName, w.DeviceIDs})
	}
	slices.SortFunc(entries, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.PodUID, b.PodUID), cmp.Compare(a.Container, b.Container),
			cmp.Compare(a.Resource, b.Resource), slices.Compare(a.IDs, b.IDs))
	})
	registered := map[string]Registered{}
	if err := json.Unmarshal(file.Data.RegisteredDevices, &registered); err != nil {
		registered = nil // no error, since this part names no holder
	} else if registered == nil {
		registered = map[string]Registered{} // null: no plugin has sent a list
	}
	return Checkpoint{Entries: entries, Registered: registered}, nil
}

// deviceIDs decodes the devices of an entry: lists by NUMA node since Kubernetes 1.20, one list
// before. It is nil only if the field is missing.
type deviceIDs []string

func (d *deviceIDs) UnmarshalJSON(data []byte) error {
	ids := []string{}
	switch {
	case data[0] == '[':
		if err := json.Unmarshal(data, &ids); err != nil {
			return err
		}
	case !bytes.Equal(data, []byte("null")): // a nil map: no device
		// The keys are NUMA nodes, -1 for none. They are not needed.
		var nodes map[string][]string
		if err := json.Unmarshal(data, &nodes); err != nil {
			return err
		}
		for _, of := range nodes {
			ids = append(ids, of...)
		}
	}
	slices.Sort(ids)
	if len(ids) > 0 && ids[0] == "" {
		return errors.New("a device without an ID")
	}
	*d = slices.Compact(ids)
	return nil
}

// readRegular reads a regular file of at most limit bytes. It takes the stamp from the open file
// after reading.
func readRegular(path string, limit int64) ([]byte, Stamp, error) {
	// Without O_NONBLOCK, opening a FIFO would wait for a writer.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, Stamp{}, err // it names the operation and the path already
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, Stamp{}, err
	}
	if !info.Mode().IsRegular() {
		return nil, Stamp{}, &failure{is: gpu.ErrInvalid, text: path + " is not a regular file"}
	}
	var data bytes.Buffer
	if size := info.Size(); size > 0 && size < limit {
		data.Grow(int(size) + bytes.MinRead) // otherwise it grows by doubling
	}
	if _, err := data.ReadFrom(io.LimitReader(file, limit+1)); err != nil {
		return nil, Stamp{}, err
	}
	if int64(data.Len()) > limit {
		return nil, Stamp{}, &failure{is: gpu.ErrInvalid, text: fmt.Sprintf("%s is larger than %d bytes", path, limit)}
	}
	if info, err = file.Stat(); err != nil {
		return nil, Stamp{}, err
	}
	return data.Bytes(), stampOf(info), nil
}
