// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// The file of the kubelet's claims, and its kind and version, since Kubernetes 1.34.
const (
	draFile    = "dra_manager_state"
	draKind    = "DRACheckpoint"
	draVersion = "checkpoint.dra.kubelet.k8s.io/v1"
)

// PreparedClaim is a ResourceClaim that the kubelet has had prepared, or is having prepared, and
// that it has not had unprepared.
type PreparedClaim struct {
	Namespace, Name, UID string
	// PodUIDs are the pods of this node that use the claim, sorted.
	PodUIDs []string
	// Devices are the drivers' answers, by driver, in the order of the answers. Every driver with a
	// device of the claim has a key; its value is nil until the driver has answered. If a kubelet
	// prepared the claim again after a restart, devices are in it twice.
	Devices map[string][]PreparedDevice
}

// PreparedDevice is a device of a claim, as its driver named it.
type PreparedDevice struct {
	Requests     []string
	Pool, Device string
	// Share identifies a share of a device; empty for a device that is not shared.
	Share string
	// CDI is the fully qualified names of its CDI devices.
	CDI []string
}

// DRAState is the kubelet's record of claims. The kubelet writes it before and after each call to a
// driver for a pod.
type DRAState struct {
	// Claims has the claims of every driver, sorted by namespace, name and UID.
	Claims []PreparedClaim
	// Stamp is that of the very file that was read.
	Stamp Stamp
}

// ReadDRAState reads the record of claims of the kubelet with this directory.
//
// The error wraps gpu.ErrNotFound if the directory has no such file; that is so until a kubelet
// with DRA first starts. It wraps gpu.ErrInvalid if the file is incomplete, has another format, or
// is no such record. It wraps neither if the directory itself cannot be seen, since then it is
// unknown what the kubelet has prepared.
func ReadDRAState(kubeletDir string) (DRAState, error) {
	path := filepath.Join(kubeletDir, draFile)
	data, stamp, err := readRegular(path, maxCheckpoint)
	if errors.Is(err, fs.ErrNotExist) {
		if _, unseen := os.Stat(kubeletDir); unseen != nil {
			return DRAState{}, fmt.Errorf("read the kubelet's account of claims: its directory is not visible; "+
				"mount it, or the host's root: %w", unseen)
		}
		return DRAState{}, &failure{gpu.ErrNotFound, "read the kubelet's account of claims", err}
	}
	if err != nil {
		return DRAState{}, fmt.Errorf("read the kubelet's account of claims: %w", err)
	}
	claims, err := decodeDRAState(data)
	if err == nil && int64(len(data)) != stamp.Size {
		err = errors.New("it changed while it was read")
	}
	if err != nil {
		return DRAState{}, &failure{gpu.ErrInvalid, "understand the kubelet's account of claims " + path, err}
	}
	return DRAState{Claims: claims, Stamp: stamp}, nil
}

// FollowDRAState calls changed whenever the record may have been written again, at once if inotify
// works, until ctx ends; it returns the error of ctx. The kubelet writes a pod into the record
// before it makes the pod's sandbox, also if it asks no driver for the pod.
func FollowDRAState(ctx context.Context, kubeletDir string, changed func()) error {
	return WatchFile(ctx, filepath.Join(kubeletDir, draFile), func([]byte, error) { changed() })
}

// decodeDRAState returns the claims of a record, sorted. A claim that it cannot understand may be
// held, so it returns an error for the whole record.
func decodeDRAState(data []byte) ([]PreparedClaim, error) {
	var file struct {
		Data     *string
		Checksum *uint32
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	if file.Data == nil || file.Checksum == nil {
		return nil, errors.New("no Data or no Checksum in it")
	}
	if is := crc32.ChecksumIEEE([]byte(*file.Data)); is != *file.Checksum {
		return nil, fmt.Errorf("field Data has the checksum %d and not %d", is, *file.Checksum)
	}
	var account struct {
		Kind, APIVersion string
		// Raw, so that an empty record (null) differs from one without this field.
		ClaimInfoStateList json.RawMessage
	}
	if err := json.Unmarshal([]byte(*file.Data), &account); err != nil {
		return nil, fmt.Errorf("field Data: %w", err)
	}
	if account.Kind != draKind || account.APIVersion != draVersion || account.ClaimInfoStateList == nil {
		return nil, fmt.Errorf("field Data is a %q of %q, want a %s of %s with its ClaimInfoStateList",
			account.Kind, account.APIVersion, draKind, draVersion)
	}
	var written []struct {
		ClaimUID, ClaimName, Namespace string
		PodUIDs                        map[string]struct{}
		DriverState                    map[string]struct {
			Devices []struct {
				PoolName, DeviceName, ShareID string
				RequestNames, CDIDeviceIDs    []string
			}
		}
	}
	if err := json.Unmarshal(account.ClaimInfoStateList, &written); err != nil {
		return nil, fmt.Errorf("ClaimInfoStateList: %w", err)
	}
	claims := make([]PreparedClaim, 0, len(written))
	for i, w := range written {
		if w.ClaimUID == "" || w.ClaimName == "" || w.Namespace == "" {
			return nil, fmt.Errorf("ClaimInfoStateList[%d] lacks the claim's UID, name or namespace", i)
		}
		c := PreparedClaim{
			Namespace: w.Namespace, Name: w.ClaimName, UID: w.ClaimUID,
			PodUIDs: slices.Sorted(maps.Keys(w.PodUIDs)), Devices: map[string][]PreparedDevice{},
		}
		for driver, state := range w.DriverState {
			c.Devices[driver] = nil
			for _, d := range state.Devices {
				c.Devices[driver] = append(c.Devices[driver], PreparedDevice{
					d.RequestNames, d.PoolName, d.DeviceName, d.ShareID, d.CDIDeviceIDs,
				})
			}
		}
		claims = append(claims, c)
	}
	slices.SortFunc(claims, func(a, b PreparedClaim) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	return claims, nil
}
